"""TrackerNames and numbers that trackers refuse: each costs itself at most, and no later row."""

import json
import sqlite3

import pytest

from hpclm import cli, config
from hpclm.documentation.topics import explained
from hpclm.sinks import figures
from hpclm.sinks.feed import Feed
from hpclm.sinks.names import TrackerNames, is_key, is_path
from tests.forks import hpclm
from tests.sinks.own import Choosy

TASKS = [
    "exact_match,strict-match",
    "exact_match,flexible-extract",
    "exact_match_stderr,strict-match",
    "acc",
    "acc_norm",
]
PARTS = [
    "c++",
    "c#",
    "a/b",
    "a//b",
    "a,b",
    "a_b",
    "a b",
    "法律",
    "x" * 300,
    "x" * 299 + "y",
    ".",
    "..",
    "../x",
    "/x",
    "x/",
    ":",
    "a=b",
]
ODD = ["", " ", "_step", "step", "metrics", "a\nb", "\ud800", "*", "%", "é", "e\u0301", "A_B", "a-0a1b2c", "name"]
NAMES = [*TASKS, *PARTS, *ODD, *(f"validation_loss/{part}" for part in PARTS), *(f"gsm8k/{name}" for name in TASKS)]


@pytest.mark.parametrize("accepted", [is_path, is_key], ids=["MLflow", "W&B"])
def test_every_name_has_one_that_is_accepted_and_no_two_share_one(accepted):
    names = TrackerNames(accepted)
    sent = {name: names(name) for name in NAMES}
    assert all(accepted(name) for name in sent.values())
    assert len(set(sent.values())) == len(set(NAMES))
    assert names.substitutes == {name: other for name, other in sent.items() if name != other}
    others = TrackerNames(accepted)  # a later attempt has the same
    assert {name: others(name) for name in reversed(NAMES)} == sent
    assert {names(other) for other in sent.values()}.isdisjoint({*sent.values()} - {*NAMES})
    assert (
        names("loss") == "loss"
        and names("gsm8k/acc") == "gsm8k/acc"
        and names("validation_loss/法律") == "validation_loss/法律"
    )


def test_only_finite_numbers_of_64_bits_are_sent():
    row = {
        "step": 1,
        "loss": 1.0,
        "huge": 10**400,
        "nan": float("nan"),
        "inf": -float("inf"),
        "count": 2**60,
        "flag": True,
    }
    assert figures(row) == {"loss": 1.0, "count": 2**60}
    assert figures({"step": 1, "tasks": {"t": {"a": float("inf"), "b": 1}}}) == {"t/b": 1}


def run_with(tmp_path, *rows):
    """A run whose metrics.jsonl has these rows."""
    (tmp_path / "config.yaml").write_text(explained(config.load("debug", ["log.project=proof"])))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_row_that_is_refused_is_tried_once_and_counted_and_no_other_error_loses_one(tmp_path, capsys):
    out = run_with(tmp_path, *({"step": step, "loss": 1.0} for step in range(1, 8)))
    said = []
    feed = Feed("tests.sinks.own:Choosy", out)
    for error in Choosy.failures:
        with pytest.raises(error):
            feed.send(said.append)
    assert said == [] and (feed.rows, feed.refused) == (0, 0)
    feed.send(said.append)
    assert said == [
        "refused 2 rows, omitted there (step 3: RefusedError: I do not like 3); 2 so far",
        "names that it refuses are replaced there: 'a,b' by 'a_b'",
    ]
    again = Feed("tests.sinks.own:Choosy", out)
    assert (again.rows, again.refused, again.substitutes) == (7, 2, {"a,b": "a_b"})
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "loss": 1.0}\n')
    again.send(said.append)
    assert len(said) == 2  # nothing is said twice
    sent = [json.loads(line) for line in (out / "written.jsonl").read_text().splitlines()]
    places = [(row["step"], row["before"]) for row in sent if "step" in row]
    assert places == [(1, 0), (2, 1), (4, 3), (6, 5), (7, 5), (8, 7)]  # those that are refused have places, too
    assert cli.main(["sync", str(out), "--sink", "tests.sinks.own:Choosy"]) == 0
    assert capsys.readouterr().out == (
        "tests.sinks.own:Choosy: 0 rows sent; it has everything but 2 refused rows up to step 8\n"
    )


@pytest.mark.parametrize(
    "sinks, code",
    [(["Written"], 0), (["Written", "Refuses"], 1), (["Refuses", "Nowhere"], 1), (["Nowhere", "Written"], 64)],
)
def test_a_sink_that_fails_is_how_the_verb_ends_and_hinders_no_other(sinks, code, tmp_path, capsys):
    out = run_with(tmp_path, {"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5})
    words = [word for sink in sinks for word in ("--sink", f"tests.sinks.own:{sink}")]
    assert cli.main(["sync", str(out), *words]) == code
    sent = "tests.sinks.own:Written: 2 rows sent; it has everything up to step 2\n"
    said = capsys.readouterr()
    assert sent * ("Written" in sinks) in said.out and said.err.count("error: ") == len({*sinks} - {"Written"})


def test_a_run_without_sinks_says_how_to_name_one(tmp_path, capsys):
    assert cli.main(["sync", str(run_with(tmp_path))]) == 64
    assert (
        capsys.readouterr().err == f"error: {tmp_path} has no log.sinks; name one: hpclm sync {tmp_path} --sink wandb\n"
    )


@pytest.mark.whole
@pytest.mark.parametrize("sink", ["mlflow", "wandb", "trackio"])
def test_a_tracker_gets_every_row_whatever_the_names_of_its_numbers(sink, tmp_path, monkeypatch):
    pytest.importorskip(sink)
    base = tmp_path / "base.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{base}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    names = [name for name in NAMES if name not in ("step", "\ud800")]
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, **dict.fromkeys(names, 0.5), "huge": 10**400}]
    rows += [
        {"step": 2, "tasks": {"gsm8k": dict.fromkeys(TASKS, 0.25), "法律": {"acc": 0.5}}},
        {"step": 3, "loss": 1.0},
    ]
    (tmp_path / "run").mkdir()
    out = run_with(tmp_path / "run", *rows)
    said = "".join(hpclm("sync", out, "--sink", sink, check=0).stdout for _ in range(2))
    assert f"{sink}: 4 rows sent; it has everything up to step 3" in said and said.count("are replaced there") == 1
    assert "'gsm8k/exact_match,strict-match' is " in said or sink != "mlflow"
    if sink == "mlflow":
        with sqlite3.connect(base) as opened:
            sent = opened.execute("select key, step from metrics").fetchall()
        opened.close()
        assert {("loss", 1), ("loss", 3), ("gsm8k/acc", 2), ("法律/acc", 2)} <= {*sent}
        assert len({key for key, step in sent if step == 2}) == len(
            {*names, *(f"gsm8k/{name}" for name in TASKS), "法律/acc"}
        )

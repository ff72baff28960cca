"""log.sinks: one run in each tracker over all attempts, whatever the tracker does."""

import json
import sqlite3
import struct
import sys
from pathlib import Path

import pytest

from hpclm import cli, config
from hpclm.documentation.topics import explained
from hpclm.rundir import events
from hpclm.sinks import figures
from hpclm.sinks.feed import Feed, kind
from tests.forks import Ranks, hpclm
from tests.runs import lines, losses

OWN = "tests.sinks.own:"


def rows_of(out):
    """What the sink ``Written`` was sent, without how attempts ended."""
    return [row for row in map(json.loads, lines(out / "written.jsonl")) if "step" in row]


def all_rows(out):
    return [json.loads(line) for line in lines(out / "metrics.jsonl")]


def test_a_run_killed_and_resumed_reaches_a_sink_once(tiny, tmp_path):
    words = tiny("run", f"log.sinks=[{OWN}Written]", "evaluate.every=4", "evaluate.batches=1")
    out = tmp_path / "run"
    with Ranks(1, [*words, "budget.steps=4000"]) as ranks:  # killed between two checkpoints
        ranks.wait_for(out, 11)
        ranks.processes[0].kill()
        ranks.wait()
    assert cli.main(["train", *words, "budget.steps=4000", "stop_at=40"]) == 0
    ends = [row["code"] for row in map(json.loads, lines(out / "written.jsonl")) if "code" in row]
    assert ends == [1, 0]  # killed, done
    sent = rows_of(out)
    assert len({row["id"] for row in sent}) == 1
    assert [(row["step"], row.get("part")) for row in sent] == [(row["step"], row.get("part")) for row in all_rows(out)]
    assert cli.main(["train", *words, "budget.steps=4000", "stop_at=36", "--from", "32"]) == 0
    again = rows_of(out)[len(sent) :]  # it went back: a separate run in the sink, complete
    assert {row["id"] for row in again}.isdisjoint(row["id"] for row in sent)
    assert [row["step"] for row in again if "loss" in row] == list(range(1, 37))


def test_sinks_that_fail_are_reported_and_change_nothing(tiny, tmp_path, capfd):
    assert cli.main(["train", *tiny("plain")]) == 0
    assert cli.main(["train", *tiny("run", f"log.sinks=[{OWN}Refuses, {OWN}Breaks, {OWN}Dies]")]) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "line of a library" not in log + "".join(capfd.readouterr())
    assert log.count("Refuses: ConnectionError: no route to host; training continues") == 1
    assert log.count("Breaks: OSError: [Errno 28] No space left on device; training continues") == 1
    assert log.count("could not send the last rows of metrics.jsonl; the next attempt sends them, or hpclm sync") == 3
    lacking = events.unsent(events.read_events(tmp_path / "run"))
    assert lacking[f"{OWN}Refuses"] == "ConnectionError: no route to host" and len(lacking) == 3
    assert cli.main(["status", str(tmp_path / "run")]) == 0
    told = f"{OWN}Refuses lacks rows of metrics.jsonl (ConnectionError: no route to host): hpclm sync {tmp_path}/run"
    assert told in capfd.readouterr().out
    assert cli.main(["sync", str(tmp_path / "run"), "--sink", f"{OWN}Written"]) == 0
    assert capfd.readouterr().out == f"{OWN}Written: 12 rows sent; it has everything up to step 12\n"
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [*range(1, 13)]


def test_rows_that_cannot_be_read_are_not_taken_for_rows_that_were_sent(tmp_path, capsys):
    (tmp_path / "run/metrics.jsonl").mkdir(parents=True)
    config.dump(config.RunConfig(), tmp_path / "run/config.yaml")
    assert cli.main(["sync", str(tmp_path / "run"), "--sink", f"{OWN}Written"]) == 1
    assert "Is a directory" in capsys.readouterr().err


def test_a_sink_that_blocks_holds_up_neither_steps_nor_the_end_of_a_preempted_run(tiny, tmp_path):
    out = tmp_path / "run"
    with Ranks(2, tiny("run", "budget.steps=100000", f"log.sinks=[{OWN}Blocks]")) as ranks:
        ranks.wait_for(out, 30)
        for process in ranks.processes.values():
            process.terminate()
        ended = ranks.wait()
    assert [code for code, _ in ended.values()] == [85, 85], ended
    log = (out / "log.txt").read_text()
    assert f"sending the last rows to {OWN}Blocks, at most 5 s" in log
    assert (
        f"sink {OWN}Blocks could not send the last rows of metrics.jsonl; the next attempt sends them, or hpclm sync"
        in log
    )


def test_each_kind_of_row_has_its_numbers_and_its_place():
    step = {"step": 4, "samples": 32, "time": 1.5, "loss": 2.0, "skipped": 0, "grad_norm": None}
    valid = {"step": 4, "samples": 32, "time": 2.5, "part": "valid/web", "validation_loss": 1.5}
    tasks = {"step": 4, "samples": 32, "time": 3.5, "tasks": {"arc": {"acc": 0.5, "name": "x"}}}
    assert figures(step) == {"samples": 32, "loss": 2.0, "skipped": 0}
    assert figures(valid) == {"samples": 32, "validation_loss/web": 1.5}
    assert figures(tasks) == {"samples": 32, "arc/acc": 0.5}
    assert [kind(row) for row in (step, valid, tasks)] == ["train", "valid/web", "tasks"]


def test_the_settings_refuse_a_sink_that_is_unknown_or_not_installed(tiny, monkeypatch, capsys):
    assert cli.main(["train", *tiny("run", "log.sinks=[wandbb]")]) == 64
    told = capsys.readouterr().err
    assert "unknown log.sinks 'wandbb'" in told and "Did you mean 'wandb'?" in told
    assert cli.main(["train", *tiny("run", "log.sinks=[wandb, wandb]")]) == 64
    assert "log.sinks has 'wandb' twice" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "mlflow", None)
    for verb in (["train"], ["submit", "--cluster", "local"]):
        assert cli.main([*verb, *tiny("run", "log.sinks=[mlflow]")]) == 64
        wanted = "log.sinks=[mlflow] needs mlflow, which is not installed: pip install 'hpclm[mlflow]'"
        assert wanted in capsys.readouterr().err


def attempts(words, out):
    """Two attempts of 10 and 12 steps, the second of which resumes from step 8, as after a kill."""
    assert cli.main(["train", *words, "stop_at=10"]) == 0
    (out / "checkpoints" / "latest").write_text("step-00000008\n")
    (out / "checkpoints" / "step-00000010").rename(out / "checkpoints" / ".bad-step-00000010")
    assert cli.main(["train", *words]) == 0
    assert sorted(losses(out)) == list(range(1, 13))


def records(content):
    """What a .wandb file holds: 7 bytes, then LevelDB's log, blocks of 32 KiB whose records have a checksum, length and kind."""
    at, whole = 7, b""
    while at < len(content):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # complete, or the last part
            yield whole
            whole = b""


def test_weights_and_biases_offline_has_each_step_once(tiny, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("SERVICE", "RUN_ID", "SWEEP_ID", "SWEEP_PARAM_PATH", "LAUNCH"):  # of a sweep's agent
        monkeypatch.setenv(f"WANDB_{name}", "other")
    from wandb.proto import wandb_internal_pb2 as proto

    out = tmp_path / "run"
    attempts(tiny("run", "name=other", "log.sinks=[wandb]", "log.project=proof"), out)
    files = sorted(out.glob("wandb/offline-run-*/*.wandb"))
    id = json.loads((out / "sinks/wandb.json").read_text())["id"]
    assert [path.name for path in files] == [f"run-{id}.wandb"] * 2  # two attempts, one run
    found, settings, names = [], {}, set()
    for path in files:
        for data in records(path.read_bytes()):
            record = proto.Record.FromString(data)
            names.add(record.run.display_name)
            for item in record.run.config.update:
                settings[item.key] = item.value_json
            if record.WhichOneof("record_type") == "history":
                keys = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                found.append((keys["step"], record.history.step.num, "loss" in keys))
    assert [step for step, _, train in found if train] == list(range(1, 13))
    assert [place for _, place, _ in found] == list(range(12))  # W&B drops what does not grow
    assert settings["optim.lr"] == "0.003" and names - {""} == {"run"}


def test_an_attempt_without_a_row_leaves_no_run_in_the_tracker_and_the_next_keeps_its_id(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "config.yaml").write_text(explained(config.load("debug")))
    for name in ("wandb", f"{OWN}Refuses"):
        feed = Feed(name, tmp_path)
        feed.send(print)
        assert feed.sink is None and not (tmp_path / "wandb").exists()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(ConnectionError):
        feed.send(print)
    assert Feed(f"{OWN}Refuses", tmp_path).id == feed.id


@pytest.mark.whole
def test_trackio_has_each_step_once(tiny, tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    out = tmp_path / "run"
    attempts(tiny("run", "log.sinks=[trackio]", "log.project=proof"), out)
    with sqlite3.connect(tmp_path / "trackio" / "proof.db") as base:
        rows = base.execute("select run_name, step, metrics from metrics order by id").fetchall()
    base.close()
    losses_sent = {step: json.loads(text)["loss"] for _, step, text in rows if b'"loss"' in bytes(text)}
    assert len({name for name, _, _ in rows}) == 1 and len(rows) == 12
    assert losses_sent == {step: float.fromhex(loss) for step, loss in losses(out).items()}


@pytest.mark.whole
def test_mlflow_has_each_step_once(tiny, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    out, base = tmp_path / "run", tmp_path / "base.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{base}")
    attempts(tiny("run", "log.sinks=[mlflow]", "log.project=proof"), out)
    hpclm("sync", out, check=0)
    with sqlite3.connect(base) as opened:
        [run] = opened.execute("select run_uuid, status, name from runs").fetchall()
        sent = opened.execute("select step, value from metrics where key = 'loss' order by step").fetchall()
        rate = opened.execute("select value from params where key = 'optim.lr'").fetchall()
    opened.close()
    assert run[1] == "FINISHED" and rate == [("0.003",)]
    assert dict(sent) == {step: float.fromhex(loss) for step, loss in losses(out).items()} and len(sent) == 12


def test_sync_that_fails_says_what_to_do_and_not_that_training_goes_on(tiny, tmp_path, capsys):
    assert cli.main(["train", *tiny("run", "stop_at=2")]) == 0
    assert cli.main(["sync", str(tmp_path / "run"), "--sink", f"{OWN}Refuses"]) == 1
    message = capsys.readouterr().err
    assert "repeat the command to send the rest" in message and "training continues" not in message
    (tmp_path / "run/config.yaml").unlink()
    assert cli.main(["sync", str(tmp_path / "run"), "--sink", f"{OWN}Written"]) == 64
    assert "is not a run directory: it has no config.yaml" in capsys.readouterr().err


def test_a_settings_file_that_others_can_write_may_not_name_a_sink_of_its_own(tmp_path):
    path = Path(tmp_path / "settings.yaml")
    path.write_text(f"log: {{sinks: [wandb, '{OWN}Written']}}\n")
    path.chmod(0o666)
    refused = hpclm("config", path, check=64)
    assert "would run code in your name" in refused.stderr

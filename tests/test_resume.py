import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.checkpoint import CheckpointStore, Retention
from hpclm.checkpoint.fingerprint import fingerprint
from hpclm.config import dump, from_cli
from hpclm.config.compose import dumped
from hpclm.data import sources
from hpclm.distributed.context import single
from hpclm.launch import resume
from hpclm.preprocess.writer import Writer
from hpclm.rundir import config_history, runs
from hpclm.training import loop, records
from hpclm.training.start import RunStart
from tests.checkpoint.state import State, progress
from tests.events import began, submit
from tests.forks import Hpclm, hpclm
from tests.rundir.test_runs import make
from tests.runs import ROOT, exit_code
from tests.test_cancel import endless, steps
from tests.test_status import attempt, squeue  # noqa: F401 (a fixture)


def test_a_run_that_waits_or_runs_is_not_started_twice(tmp_path, tiny, squeue):  # noqa: F811
    run = make(tmp_path / "a", [attempt(job_id="7")], config_yaml="")
    said = hpclm("resume", run, env=squeue("echo '7|PENDING|0:00|2:57|N/A|2||Priority'"), check=75).stderr
    assert f"is waiting (job 7 PENDING (Priority)); wait for it, or end it: hpclm cancel {run}" in said
    with Hpclm("train", *endless(tiny)):
        steps(tmp_path / "run")
        assert "is running" in hpclm("resume", tmp_path / "run", check=75).stderr


def test_a_run_that_is_done_is_not_started_without_more_to_do(tmp_path, tiny):
    hpclm("train", *tiny("run"), check=0)
    assert (
        "is done: done at step 12, 96 samples; to continue, extend it"
        in hpclm("resume", tmp_path / "run", check=64).stderr
    )


@pytest.mark.parametrize("verb", ["train", "submit"])
def test_settings_without_effect_do_not_change_what_a_run_that_is_done_says_of_itself(tmp_path, tiny, verb):
    out = tmp_path / "run"
    hpclm("train", *tiny("run"), check=0)
    again = ("train", out) if verb == "train" else ("submit", "--cluster", "local", "--config", out / "config.yaml")
    before = [(out / name).read_bytes() for name in ("config.yaml", "events.jsonl")]
    for change, named in (("optim.lr=0.5", "optim.lr=0.5"), ("budget.steps=6", "budget ends at step 6")):
        said = hpclm(*again, change, check=64).stderr
        assert f"{out} is at step 12" in said and named in said and "raise the budget" in said
    assert [(out / name).read_bytes() for name in ("config.yaml", "events.jsonl")] == before
    hpclm(*again, "log.every=3", check=0)  # has an effect, or none that matters
    hpclm(*again, "budget.steps=13", "optim.lr=0.5", check=0)


def test_a_run_is_submitted_again_by_its_own_settings_and_its_last_size(tmp_path):
    make(tmp_path, config_yaml="")
    config = str(tmp_path / "config.yaml")
    for nodes in (1, 2):
        submit(tmp_path, "slurm", str(nodes), "login", nodes, 8, "")
    run = runs.read_run(tmp_path)
    again = ["--config", config, "--cluster", "slurm", "--nodes", "2", "--gpus", "8", f"out={tmp_path}"]
    assert resume.words(run, []) == again
    changes = ["--nodes=4", "--partition", "long", "job.gpus=4", "optim.lr=1e-4"]
    assert resume.words(run, changes) == [*again[:4], f"out={tmp_path}", *changes]


def test_a_run_that_was_started_by_hand_keeps_its_size(tmp_path):
    make(tmp_path, [attempt(size=8, nodes=2)], config_yaml="")
    assert resume.words(runs.read_run(tmp_path), [])[2:6] == ["--nodes", "2", "--gpus", "4"]


def test_a_run_that_was_started_by_hand_on_one_machine_stays_here_unless_another_cluster_is_typed(tmp_path):
    make(tmp_path, [attempt(size=2, nodes=1)], config_yaml="")
    size = ["--nodes", "1", "--gpus", "2"]
    assert resume.words(runs.read_run(tmp_path), [])[2:8] == ["--cluster", "local", *size]
    assert resume.words(runs.read_run(tmp_path), ["--cluster", "slurm"])[2:6] == size
    make(tmp_path, [attempt(size=2, nodes=1, job_id="7")], config_yaml="")
    assert resume.words(runs.read_run(tmp_path), [])[2:6] == size


def test_a_run_that_never_wrote_its_settings_cannot_be_resumed(tmp_path):
    run = make(tmp_path / "a", [attempt(host=os.uname().nodename)])
    assert "has no config.yaml" in hpclm("resume", run, check=64).stderr


@pytest.fixture
def run(tmp_path, tiny):
    """A run directory with settings and a checkpoint, without training; and every byte in it."""
    config = from_cli(tiny("run"))
    out = tmp_path / "run"
    made = CheckpointStore(
        out / "checkpoints",
        Retention(),
        fingerprint(
            config.model, config.seed, sources.build_source(config.data, config.model, config.seed).fingerprint
        ),
    )
    made.save(State(), progress(4))
    dump(config, out / "config.yaml")
    (out / "events.jsonl").write_text("")
    out.chmod(0o700)
    return out


def content(out):
    return {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    "words, told",
    [
        (["model.layers=3"], ["model.layers was 2 and is now 3"]),
        (
            ["seed=5", "model.attention.heads=2"],
            ["model.attention.heads was 4 and is now 2", "seed was 1234 and is now 5"],
        ),
        (["checkpoint.resume=never"], ["already holds step-00000004, but checkpoint.resume=never"]),
    ],
)
def test_settings_that_the_checkpoints_refuse_are_refused_before_anything_is_written(run, words, told, capsys):
    before = content(run)
    again = ["submit", "--config", str(run / "config.yaml"), "--cluster", "local"]
    for command in (["resume", str(run), "--cluster", "local"], again):
        assert cli.main([*command, *words]) == 64, command
        said = capsys.readouterr().err
        assert all(text in said for text in told), (command, said)
        if "resume=never" not in told[0]:
            assert "revert the following settings, or start a new run in another folder (out)" in said
    with pytest.raises(ConfigError) as caught:
        loop.run(RunStart(from_cli([str(run / "config.yaml"), *words])), single())
    assert all(text in str(caught.value) for text in told)
    assert content(run) == before


def test_settings_that_would_have_no_effect_on_a_run_that_is_done_are_refused_by_training_itself(run):
    before = content(run)
    words = [str(run / "config.yaml"), "budget.steps=4", "optim.lr=0.5"]
    with pytest.raises(ConfigError) as caught:
        loop.run(RunStart(from_cli(words)), single())
    told = f"{run} is at step 4 and its budget ends at step 4, so optim.lr=0.5 would have no effect; raise the budget"
    assert str(caught.value).startswith(told) and content(run) == before


def test_data_that_the_checkpoints_refuse_are_refused_before_anything_is_written(run, tmp_path, capsys):
    with Writer(tmp_path / "text", "u2") as writer:
        writer.add_document(range(40))
    before = content(run)
    assert (
        cli.main(["resume", str(run), "--cluster", "local", "data.source=indexed", f"data.prefix={tmp_path}/text"])
        == 64
    )
    assert "data.source was synthetic and is now null" in capsys.readouterr().err
    assert content(run) == before


def test_settings_do_not_change_under_a_job_that_has_not_saved_yet(run, capsys):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints.saved").unlink()
    words = ["submit", "--config", str(run / "config.yaml"), "--again", "--dry-run"]
    assert cli.main([*words, "model.layers=3"]) == 64
    assert "model.layers was 2 and is now 3" in capsys.readouterr().err
    assert cli.main([*words, "optim.lr=1e-4"]) == 0


def test_a_refusal_costs_no_time_for_pytorch(run):
    code = "import sys; from hpclm import cli; print(cli.main(sys.argv[1:]), 'torch' in sys.modules)"
    words = ["resume", str(run), "--cluster", "local", "model.layers=3"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "64 False\n", done.stderr


def test_each_attempt_says_which_version_of_the_settings_it_used(tmp_path, tiny):
    (tmp_path / "run").mkdir()
    for lr in ("1e-3", "1e-3", "2e-3"):
        records.start(from_cli(tiny("run", f"optim.lr={lr}")), single(), None, {"from_step": 0, "micro_size": 4})
    found = [each["config"] for each in began(tmp_path / "run")]
    assert found == ["config-history/0001.yaml"] * 2 + ["config-history/0002.yaml"]
    assert (tmp_path / "run" / found[2]).read_bytes() == (tmp_path / "run/config.yaml").read_bytes()
    assert "config-history/0002.yaml" in hpclm("status", tmp_path / "run", check=0).stdout


def test_a_path_that_is_written_in_another_way_is_not_a_changed_setting(tiny, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run, out = from_cli(tiny("run", f"kill_switch={tmp_path}/k")), tmp_path / "run"
    out.mkdir(mode=0o700)

    def attempted(folder, **changes):
        return {"config": config_history.replace(out, dumped(replace(run, **changes)))[1], "folder": str(folder)}

    first = attempted(tmp_path)
    for changes, folder in (({"out": "run", "kill_switch": "k"}, ""), ({"out": "../run", "kill_switch": "../k"}, "x")):
        records.log_changes(out, first, attempted(tmp_path / folder, **changes), 0)
    assert not caplog.records
    records.log_changes(out, first, attempted(tmp_path, out="run", kill_switch="x/k"), 0)
    [record] = caplog.records
    assert record.getMessage() == f"settings have changed since the last attempt: kill_switch=x/k (was {tmp_path}/k)"


def test_a_run_that_stop_at_ended_is_not_started_only_to_stop_again(tiny, tmp_path, capsys):
    assert cli.main(["train", *tiny("run", "stop_at=4")]) == 0
    capsys.readouterr()
    mistakes = {
        "--nodse=2": (2, "unrecognized arguments: --nodse; did you mean --nodes 2?"),
        "optim.lrr=1": (64, "unknown setting optim.lrr. Did you mean 'optim.lr'?"),
        "--nodes=x": (64, "job.nodes='x' must be a whole number"),
    }
    for word, (code, said) in mistakes.items():  # they come first
        assert exit_code(["resume", str(tmp_path / "run"), "--cluster", "local", word]) == code
        err = capsys.readouterr().err
        assert said in err and "stop_at" not in err
    assert cli.main(["resume", str(tmp_path / "run"), "--cluster", "local", "optim.lr=1e-3"]) == 64
    said = capsys.readouterr().err
    assert "stopped at step 4 (stop_at); to continue: hpclm resume" in said and "stop_at=null" in said

"""What the recipes that hpclm replaces ask for, at small size, through the command line."""

import json
import os

import numpy as np
import pytest

from hpclm import cli
from hpclm.config import from_cli
from hpclm.data.tokenizers import build_tokenizer
from hpclm.preprocess.writer import Writer
from hpclm.rundir import runs
from hpclm.rundir.control_files import ControlFiles
from hpclm.rundir.state import state_of
from tests import ranks
from tests.parity import trained


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def rows(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def steps(out):
    return sorted(int(path.name[5:]) for path in (out / "checkpoints").glob("step-*"))


@pytest.fixture
def corpus(tmp_path):
    """200 documents of 20 bytes: 249 samples of 16 tokens a pass, which no batch size divides."""
    with Writer(tmp_path / "x", "u2") as writer:
        writer.note = {"tokenizer": build_tokenizer("bytes", []).fingerprint}
        for number in range(200):
            writer.add_document(np.arange(number, number + 20) % 60)
    return ["data.source=indexed", f"data.prefix={tmp_path / 'x'}", "data.split=1", "model.vocab_size=257"]


def test_fairseqs_saves_at_the_ends_of_epochs_stay_beside_those_by_updates(tiny, corpus, tmp_path):
    """--save-interval 1 --keep-last-epochs 3 --save-interval-updates 10 --keep-interval-updates 2"""
    words = ["checkpoint.epochs=1", "checkpoint.keep_epochs=3", "checkpoint.every=10", "checkpoint.keep_last=2"]
    words = tiny("run", *corpus, *words, "budget.steps=null", "budget.epochs=5")
    ends = [-(-passes * 249 // 8) for passes in range(1, 6)]  # the first step after each pass
    assert cli.main(["train", *words, f"stop_at={ends[3] + 2}"]) == 0
    assert steps(tmp_path / "run") == sorted({*ends[1:4], ends[3], ends[3] + 2})
    assert cli.main(["train", *words]) == 0  # the last pass's end is where the run ends, a step before a whole batch
    last = 5 * 249 // 8
    assert steps(tmp_path / "run") == sorted({*ends[1:4], 150, last})


def test_fairseqs_no_save(tiny, tmp_path, capsys):
    words = tiny("run", "checkpoint.enabled=false", "checkpoint.every=2")
    assert cli.main(["train", *words]) == 0
    said = capsys.readouterr().err
    assert "saved" not in said and f"next: hpclm report {tmp_path / 'run'}" in said
    assert not list((tmp_path / "run").glob("checkpoints/*")) and rows(tmp_path / "run")[-1]["step"] == 12
    assert cli.main(["train", *words]) == 0  # begins anew
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 13))


def test_megatrons_kill_switch(tiny, tmp_path, capsys):
    switch = tmp_path / "kill-switch"
    words = tiny("run", f"kill_switch={switch}")
    switch.touch()
    assert cli.main(["train", *words]) == 0
    said = capsys.readouterr().err
    assert (
        f"kill_switch: {switch} exists" in said and f"stopped at step 0 (kill_switch); once {switch} is removed" in said
    )
    assert state_of(runs.read_run(tmp_path / "run"), None).ending == "stopped at step 0 (kill_switch)"
    assert switch.exists() and steps(tmp_path / "run") == []  # it may be for other runs, too
    switch.unlink()
    assert cli.main(["train", *words]) == 0 and steps(tmp_path / "run")[-1] == 12


def test_a_kill_switch_of_another_user_and_a_link_do_not_count(tmp_path):
    switch = tmp_path / "kill-switch"
    assert not ControlFiles(tmp_path, str(switch)).requested("kill_switch")
    switch.touch()
    assert ControlFiles(tmp_path, str(switch)).requested("kill_switch") and not ControlFiles(tmp_path).requested(
        "kill_switch"
    )
    if os.getuid() == 0:
        os.chown(switch, 12345, 12345)
        assert not ControlFiles(tmp_path, str(switch)).requested("kill_switch")
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "target").touch()
    assert not ControlFiles(tmp_path, str(tmp_path / "link")).requested("kill_switch")


def test_megatrons_timers_are_in_tensorboard_and_metrics(tiny, tmp_path):
    pytest.importorskip("tensorboard")
    assert cli.main(["train", *tiny("run", "log.timers=true", "log.tensorboard=true", "budget.steps=3")]) == 0
    for row in rows(tmp_path / "run"):
        parts = [row[f"{name}_seconds"] for name in ("forward", "backward", "optimizer", "data")]
        assert min(parts) > 0 and sum(parts) < row["step_seconds"]
    found = scalars(tmp_path / "run/tensorboard")
    for name in ("forward-compute", "backward-compute", "optimizer", "batch-generator"):
        assert len(found.Scalars(f"time/{name}-time")) == 3
        assert len(scalars(tmp_path / "run/tensorboard/samples").Scalars(f"time/{name}-time vs samples")) == 3


TIMED = {
    "fsdp2": ([], {"forward", "backward", "optimizer"}),
    "fairscale": ([], {"forward", "backward", "optimizer"}),
    "deepspeed": ([], {"forward", "backward", "optimizer"}),
    "pipelining": (["parallel.pipeline=2"], {"forward_backward", "optimizer"}),
}


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=[pytest.mark.whole] * (name in ("fsdp2", "fairscale"))) for name in TIMED]
)
def test_every_engine_measures_the_parts_of_a_step(engine):
    more, names = TIMED[engine]
    words = [
        f"engine.name={engine}",
        "model.layers=2",
        "batch.micro_size=2",
        "engine.precision=fp32",
        "log.timers=true",
    ]
    for seconds in trained(2, *words, *more, steps=2)["seconds"]:
        assert seconds.keys() == {f"{name}_seconds" for name in names} and min(seconds.values()) > 0


def test_the_batch_of_bigsciences_recipe_grows(corpus, tmp_path):
    """The recipe with a hundredth of its samples, on one process: --rampup-batch-size 2 2 1_000 and what stands beside it."""
    pytest.importorskip("deepspeed")
    small = ["model.context=16", "parallel.tensor=1", "batch.rampup=[2,2,100]"]
    small += ["budget.samples=300", "optim.schedule_length=120", "evaluate.every=0", "log.every=10"]
    here = ["engine.device=cpu", f"out={tmp_path / 'run'}", f"kill_switch={tmp_path / 'kill-switch'}"]
    words = ["recipes/bigscience", *corpus, *small, *here]
    plan = from_cli(words, None).plan()
    assert ranks.run(1, cli.main, ["train", *words, "stop_at=20"]) == [0]
    assert ranks.run(1, cli.main, ["train", *words]) == [0]  # goes on in the middle of the ramp
    found = [row for row in rows(tmp_path / "run") if "loss" in row]
    sizes = [row["batch_size"] for row in found]
    assert sizes == [plan.batch_size(row["samples"] - row["batch_size"]) for row in found]
    assert sizes == sorted(sizes) and set(sizes) == set(range(2, 17, 2))
    assert found[-1]["samples"] == sum(sizes) and 300 - 16 < sum(sizes) <= 300
    assert len(scalars(tmp_path / "run/tensorboard").Scalars("batch-size/batch-size")) == len(found)
    assert found[-1]["lr"] == 1e-6

"""Steps that are not finite, on one of two processes: both do the same, and nothing bad is kept. And weights that are not."""

import pytest
import torch

from hpclm import cli, config
from hpclm.checkpoint import CheckpointStore, Progress, Retention, directory
from hpclm.engine import Shard
from hpclm.interop.rules import placements
from hpclm.training import messages
from tests.forks import Ranks, hpclm
from tests.runs import ROOT, figures

BLOCK = """
import os
import torch
from hpclm.model.gpt import Block

class Sick(Block):
    '''Gives NaN on rank 1 in those steps of this start that TEST_NAN names.'''

    done = 0

    def forward(self, x, layout):
        if self.training and torch.is_grad_enabled():
            self.done += 1
            if os.environ["RANK"] == "1" and str(self.done) in os.environ["TEST_NAN"].split():
                x = x * float("nan")
        return super().forward(x, layout)
"""


@pytest.fixture
def launch(tiny, tmp_path):
    """Two processes of a run: exit codes, and what both wrote to their logs since the last launch."""
    (tmp_path / "sick.py").write_text(BLOCK)
    logs, read = [tmp_path / "run/log.txt", tmp_path / "run/logs/rank-00001.log"], [0, 0]

    def start(steps, *words):
        own = ["model.block=sick:Sick", "checkpoint.every=2", "cluster.preflight=false"]
        path = f"{tmp_path}:{ROOT}"
        with Ranks(2, tiny("run", *own, *words), PYTHONPATH=path, TEST_NAN=steps) as ranks:
            codes = {code for code, _ in ranks.wait().values()}
        said = [log.read_text()[start:] for log, start in zip(logs, read, strict=True)]
        read[:] = [log.stat().st_size for log in logs]
        return codes, said

    return start


def saved(out):
    return sorted(int(path.name[5:]) for path in (out / "checkpoints").glob("step-*"))


def test_a_run_that_diverged_without_clipping_is_told_to_clip():
    assert messages.way_back(config.load("debug", ["out=none", "optim.clip=0"])).endswith("optim.lr, or optim.clip=1")


def test_what_is_not_finite_on_one_of_two_processes_is_skipped_or_ends_both_and_the_run_goes_on(launch, tmp_path):
    out = tmp_path / "run"
    codes, said = launch("3 7 8", "optim.nonfinite_limit=2")
    assert codes == {93}
    for text in said:
        assert "step 3: loss nan, gradient norm nan; skipped, 1 so far" in text
        assert "step 7: loss nan, gradient norm nan; skipped, 2 so far" in text
        assert (
            f"Resume from its last checkpoint with a lower optim.lr or optim.clip: hpclm resume {out} optim.lr=0.0015;"
            in text
        )
    assert saved(out) == [2, 4, 6]
    codes, said = launch("4", "optim.nonfinite_limit=1")  # resumes from step 6
    assert codes == {93}
    for text in said:
        assert "step 10: loss nan, gradient norm nan; 1 step was not finite (optim.nonfinite_limit)" in text
    assert saved(out) == [4, 6, 8]
    by_step = {step: (loss, skipped) for step, loss, skipped in figures(out, "step", "loss", "skipped")}
    assert [step for step, (loss, _) in by_step.items() if loss is None] == [3, 10] and by_step[9][1] == 1
    for step in (4, 6, 8):
        directory.verified(out / f"checkpoints/step-{step:08d}")


def test_what_has_diverged_takes_no_place_from_a_good_checkpoint(tiny, tmp_path):
    words = ["checkpoint.every=4", "optim.schedule=constant", "cluster.preflight=false", "budget.steps=30"]
    hpclm("train", *tiny("run", *words, "stop_at=5"), check=0)
    before = saved(tmp_path / "run")
    wild = ["optim.lr=1e30", "optim.min_lr=1e30", "optim.clip=0", "optim.nonfinite_limit=12"]
    hpclm("train", *tiny("run", *words, *wild), check=93)  # step 6 ruins the weights, which step 7 shows
    assert saved(tmp_path / "run") == before == [4, 5]
    hpclm("train", *tiny("run", *words, "stop_at=8"), check=0)
    assert saved(tmp_path / "run") == [4, 5, 8]


class Filled:
    """What a store saves of a model whose weights all have one value."""

    def __init__(self, model, value):
        self.forms, self.value = placements(model), value

    def tensors(self):
        for name, form in self.forms.items():
            yield Shard.whole(f"model.{name}", torch.full(form.shape, self.value))

    def scalars(self):
        return {"optimizer_steps": 0}


def test_weights_that_are_not_finite_write_nothing_and_have_no_loss(tiny, tmp_path, capsys):
    run = config.load(None, tiny("run", "model.vocab_size=260"))
    (tmp_path / "run").mkdir()
    config.dump(run, tmp_path / "run/config.yaml")
    CheckpointStore(tmp_path / "run/checkpoints", Retention(), {}).save(Filled(run.model, float("nan")), Progress(3))
    bytes_only = ["data.source=indexed", "data.prefix=none", "data.tokenizer=bytes"]
    assert cli.main(["generate", str(tmp_path / "run"), *bytes_only, "--prompt", "x"]) == 64
    said = capsys.readouterr().err
    assert said.startswith("error: the model gives values that are not finite") and "Traceback" not in said
    assert cli.main(["evaluate", str(tmp_path / "run"), "--samples", "2", "--json"]) == 64
    told = capsys.readouterr()
    assert told.err.startswith("error: the loss is nan: the model gives values that are not finite") and not told.out


def test_weights_that_are_not_finite_are_told_of_and_exported_only_when_that_is_wanted(tiny, tmp_path, capsys):
    pytest.importorskip("transformers")
    run, source = config.load(None, tiny("run")), tmp_path / "run"
    source.mkdir()
    config.dump(run, source / "config.yaml")
    store = CheckpointStore(source / "checkpoints", Retention(), {})
    for step, value in {1: 3e38, 2: float("inf")}.items():  # the sum of the first is not finite, but they are
        store.save(Filled(run.model, value), Progress(step))
    assert cli.main(["checkpoints", str(source)]) == 0
    first, second, way_out = capsys.readouterr().out.splitlines()
    assert "not finite" not in first and "values are not finite in model." in second and " other tensors" in second
    assert way_out.endswith("--from 1")
    assert cli.main(["convert", str(source), str(tmp_path / "hf")]) == 64 and not (tmp_path / "hf").exists()
    assert "has values that are not finite; export another checkpoint" in capsys.readouterr().err
    assert cli.main(["convert", str(source), str(tmp_path / "hf"), "--allow-nan"]) == 0
    assert cli.main(["convert", str(tmp_path / "hf"), str(tmp_path / "back")]) == 64
    assert "values are not finite" in capsys.readouterr().err and not (tmp_path / "back").exists()


def test_a_short_run_whose_weights_are_ruined_does_not_end_well(tiny, tmp_path, capsys):
    words = tiny("run", "optim.lr=1e30", "optim.min_lr=1e30", "evaluate.every=6")
    assert cli.main(["train", *words]) == 93
    assert "the loss on held-out data is not finite either" in (tmp_path / "run/log.txt").read_text()
    assert not (tmp_path / "run/checkpoints/step-00000012").exists()

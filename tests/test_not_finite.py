"""Steps that are not finite, on one of two processes: both do the same, and nothing bad is kept."""

import pytest

from hpclm.checkpoint import shelf
from tests.runs import ROOT, Ranks, figures, hpclm

BLOCK = """
import os
import torch
from hpclm.model.gpt import Block

class Sick(Block):
    '''Gives NaN on rank 1 in those steps of this start that TEST_NAN names; the engine tries the model once before them.'''

    done = -1

    def forward(self, x, layout):
        if self.training and torch.is_grad_enabled():
            self.done += 1
            if os.environ["HPCLM_RANK"] == "1" and str(self.done) in os.environ["TEST_NAN"].split():
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


def test_what_is_not_finite_on_one_of_two_processes_is_skipped_or_ends_both_and_the_run_goes_on(launch, tmp_path):
    out = tmp_path / "run"
    codes, said = launch("3 7 8", "optim.nonfinite_limit=2")
    assert codes == {93}
    for text in said:
        assert "step 3: loss nan, gradient norm nan; skipped, 1 so far" in text
        assert "step 7: loss nan, gradient norm nan; skipped, 2 so far" in text
    assert saved(out) == [2, 4, 6]
    codes, said = launch("4", "optim.nonfinite=stop")  # goes on from step 6
    assert codes == {93}
    for text in said:
        assert "step 10: loss nan, gradient norm nan; stopped as optim.nonfinite=stop says" in text
    assert saved(out) == [4, 6, 8]
    by_step = {step: (loss, skipped) for step, loss, skipped in figures(out, "step", "loss", "skipped")}
    assert [step for step, (loss, _) in by_step.items() if loss is None] == [3, 10] and by_step[9][1] == 1
    for step in (4, 6, 8):
        shelf.verified(out / f"checkpoints/step-{step:08d}")


def test_what_has_diverged_takes_no_place_from_a_good_checkpoint(tiny, tmp_path):
    words = ["checkpoint.every=4", "optim.schedule=constant", "cluster.preflight=false", "budget.steps=30"]
    hpclm("train", *tiny("run", *words, "stop_at=5"), check=0)
    before = saved(tmp_path / "run")
    wild = ["optim.lr=1e30", "optim.min_lr=1e30", "optim.clip=0", "optim.nonfinite_limit=12"]
    hpclm("train", *tiny("run", *words, *wild), check=93)  # step 6 ruins the weights, which step 7 shows
    assert saved(tmp_path / "run") == before == [4, 5]
    hpclm("train", *tiny("run", *words, "stop_at=8"), check=0)
    assert saved(tmp_path / "run") == [4, 5, 8]

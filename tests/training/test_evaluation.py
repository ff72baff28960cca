"""Evaluations while a run trains."""

from types import SimpleNamespace

import pytest

from hpclm import cli
from hpclm.checkpoint import Progress
from hpclm.training import step
from hpclm.training.control import Control
from hpclm.training.evaluation import Evaluator
from hpclm.training.run_data import RunData
from tests.runs import PATIENCE, losses


@pytest.mark.parametrize(
    "losses, mean",
    [
        ({(5, "valid"): 2.5, (4, "valid"): 9.0}, 2.5),
        ({(5, "valid/a"): 1.0, (5, "valid/b"): 3.0, (5, "valid/c"): None}, 2.0),
        ({(5, "valid/a"): 1.0, (5, "valid/b"): float("inf")}, None),
        ({(4, "valid"): 9.0}, None),
    ],
)
def test_the_loss_of_several_parts_is_their_mean_where_all_are_finite(losses, mean):
    evaluator = Evaluator(
        SimpleNamespace(losses={}, meter=None, data=RunData(None, None, Progress(), None, None, None, []))
    )
    evaluator.losses |= losses
    assert evaluator.validation(5) == mean


def test_an_evaluation_asks_the_ranks_no_more_often_than_is_due(tiny, tmp_path, monkeypatch):
    """Each has 40 micro-batches, which take no longer than the time between two questions."""
    monkeypatch.setattr(step, "POLL_SECONDS", PATIENCE)
    asked = []
    ask = Control.ask
    monkeypatch.setattr(Control, "ask", lambda self: [asked.append(1), ask(self)][1])
    quiet = ["budget.steps=8", "checkpoint.every=0", "checkpoint.grace_seconds=1000"]
    assert cli.main(["train", *tiny("plain", *quiet, "evaluate.every=0")]) == 0
    plain, asked[:] = len(asked), []
    assert cli.main(["train", *tiny("run", *quiet, "evaluate.every=4", "evaluate.batches=20")]) == 0
    assert plain <= 5 and len(asked) <= plain + 8
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")

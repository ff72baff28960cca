"""A pipeline's gradients are reduced over the replicas while the last backward passes run."""

import pytest

from hpclm.engine import counted_reduction
from hpclm.engine.counted_reduction import CountedReduction
from tests import ranks
from tests.engine import sharded

WORDS = ["engine.name=pipelining", "parallel.pipeline=2", "model.layers=4", "batch.micro_size=1"]
WORDS += ["engine.precision=fp32", "model.hidden=32"]


def trained(words, early):
    """Losses, norms and values of the weights of three steps, buckets, and those whose reduction began before the end."""
    counted_reduction.SIZE = 1 << 13  # several buckets
    first, found = CountedReduction.__init__, []

    def begun(self, parameters, axis, last=()):
        first(self, parameters, axis, last if early else set(parameters))

    def finish(self):
        found.append((len(self.groups), len(self.pending)))
        before(self)

    before, CountedReduction.finish, CountedReduction.__init__ = CountedReduction.finish, finish, begun
    run, engine, batches, _ = sharded.made(words)
    results = sharded.steps(run, engine, batches, 0, 3)
    values = [weight.parameter.detach().numpy().tobytes() for weight in engine.weights]
    return [(result.loss, result.grad_norm) for result in results], values, found


@pytest.mark.parametrize(
    "more, waiting",
    [
        ([], 1),  # the tied table's, on each stage
        pytest.param(["model.tied=false"], 0, marks=pytest.mark.whole),
        pytest.param(["model.tied=false", "parallel.schedule=gpipe"], 0, marks=pytest.mark.whole),
        pytest.param(["parallel.schedule=interleaved", "parallel.chunks=2", "model.tied=false"], 0, marks=pytest.mark.whole),
        pytest.param(["parallel.schedule=zero_bubble", "model.tied=false"], None, marks=pytest.mark.whole),
    ],
    ids=["tied", "1f1b", "gpipe", "interleaved", "zero-bubble"],
)  # fmt: skip
def test_reducing_early_changes_nothing_but_the_time(more, waiting):
    each = [ranks.run(4, trained, [*WORDS, *more], early) for early in (False, True)]
    for (losses, values, late), (found, same, soon) in zip(*each, strict=True):
        assert found == losses and same == values
        assert all(groups > 2 and begun == 0 for groups, begun in late)
        assert all(groups - begun == (groups if waiting is None else waiting) for groups, begun in soon)

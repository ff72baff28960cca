"""The planner counts the state that an optimizer declares, where it is kept."""

import pytest
import torch

from hpclm import config
from hpclm.config.optimizers import OPTIMIZERS
from hpclm.planning import engines, layout, matrices, memory
from tests.engine.sharded import made, steps
from tests.optim import declared
from tests.parity import TINY

WORDS = [*TINY, "optim.name=muon", "engine.precision=fp32", "model.layers=3", "model.hidden=64", "model.vocab_size=64"]


def planned(words, zero, **sizes):
    """The first stage's bytes of optimizer state, and of what is not divided as its weight."""
    run = config.load(None, [*WORDS, *words])
    shape = layout.Layout(**sizes)
    stage = layout.stages(run.model, shape)[0]
    costs = engines.costs(run.engine, 4, run.parallel, run.optim)
    state = matrices.exchange(run.model, shape, run.optim, zero, stage).state
    return memory.of_stage(run.model, shape, costs, stage).optimizer, state


def test_the_planner_counts_what_a_process_keeps_and_shares_matrices_out(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "muon", declared.KIND)
    run, engine, batches, _ = made(WORDS)
    steps(run, engine, batches, 0, 1)
    kept = [value for entry in engine.optimizer.state.values() for key, value in entry.items() if key != "step"]
    total, state = planned([], 0)
    assert total == pytest.approx(sum(value.numel() * 4 for value in map(torch.as_tensor, kept)), rel=0.02)
    _, shared = planned(["parallel.tensor=2", "engine.zero_stage=1"], 1, data=4, tensor=2)
    largest = max(
        sum(tensor.bytes for tensor in declared.state(weight.placement, None).values() if tensor.where == "matrix")
        for weight in engine.weights
    )
    assert largest <= shared < 2.5 * largest < state

"""optim.guard: what the steps before had decides, on every rank alike, and goes on after a resume."""

import json
import math

import numpy as np
import pytest
import torch

from hpclm.base.errors import ConfigError
from hpclm.engine.outliers import STEPS, ClipUpdate, SkipStep
from hpclm.engine.step import GlobalNorm
from hpclm.parallel.mesh import Compute, Mesh
from tests.engine.test_native import GPT2, settings
from tests.parity import alone, trained

WORDS = ["engine.precision=fp32", "batch.micro_size=2", "model.layers=2"]


@pytest.mark.parametrize("kind, least, ddof, sigma", [(SkipStep, 63, 1, 6), (ClipUpdate, 64, 0, 3)])
def test_limits_are_the_mean_and_some_deviations_of_the_last_128_values_that_are_finite(kind, least, ddof, sigma):
    guard = kind(GlobalNorm([], Compute(torch.device("cpu"), torch.float32, Mesh()), False), torch.device("cpu"))
    drawn = np.random.default_rng(0).normal(3.0, 1.0, (2 * STEPS, guard.columns))
    drawn[::10, 0] = math.nan
    drawn[5::10, -1] = math.inf
    for number, row in enumerate(drawn):
        limits = guard.limits(torch.from_numpy(row)).tolist()
        for column, limit in enumerate(limits):
            before = drawn[max(0, number - STEPS) : number, column]
            before = before[np.isfinite(before)]
            wanted = before.mean() + sigma * before.std(ddof=ddof) if len(before) >= least else math.inf
            assert limit == pytest.approx(wanted, rel=1e-12)
    other = kind(GlobalNorm([], Compute(torch.device("cpu"), torch.float32, Mesh()), False), torch.device("cpu"))
    other.load(json.loads(json.dumps(guard.scalars())))
    assert torch.equal(other.window.nan_to_num(-1), guard.window.nan_to_num(-1))
    other.load({"optimizer_steps": 3})  # an older checkpoint
    assert other.window.isnan().all()


def calm(words, guard, columns):
    """A state after three steps, as if many before had small values."""
    saved = trained(1, *words, steps=3)
    row = [0.1 + 0.001 * column for column in range(columns)]
    window = [[None] * columns] * 20 + [row, [2 * value for value in row]] * 54
    saved["scalars"]["guard"] = {"name": guard, "window": window}
    return saved


LAYOUTS = {
    "zero1": (2, ["engine.zero_stage=1"]),
    "fsdp2": (4, ["engine.name=fsdp2", "parallel.tensor=2"]),
    "pipelining": (4, ["engine.name=pipelining", "parallel.pipeline=2", "model.layers=4"]),
    "fairscale": (2, ["engine.name=fairscale"]),
}
OFTEN = ("fsdp2",)
CASES = [pytest.param(*LAYOUTS[name], id=name, marks=[pytest.mark.whole] * (name not in OFTEN)) for name in LAYOUTS]


@pytest.mark.parametrize("size, layout", CASES)
@pytest.mark.parametrize("guard, columns", [("skip_step", 2), ("clip_update", 1)])
def test_an_outlier_is_skipped_or_limited_in_every_layout_and_a_resumed_run_goes_on_alike(guard, columns, size, layout):
    words = [*WORDS, f"optim.guard={guard}", *[word for word in layout if "layers" in word]]
    before = calm(words, guard, columns)
    one, found = (
        trained(1, *words, steps=6, first=3, saved=before),
        trained(size, *words, *layout, steps=6, first=3, saved=before),
    )
    unguarded = trained(1, *[word for word in words if "guard" not in word], steps=6, first=3, saved=before)
    assert found["guarded"] == one["guarded"] and one["guarded"][0] == 1.0 and one["skipped"] == [False] * 3
    assert found["losses"] == pytest.approx(one["losses"], abs=1e-5)
    moved = [
        max(
            (run["tensors"][name] - before["tensors"][name]).abs().max().item()
            for name in before["tensors"]
            if "model." in name
        )
        for run in (one, unguarded)
    ]
    assert moved[0] == 0.0 if guard == "skip_step" else 0.0 < moved[0] < moved[1]
    for name, tensor in one["tensors"].items():
        assert (found["tensors"][name] - tensor).abs().max().item() < 1e-5, name
    steps = one["scalars"]["optimizer_steps"]
    assert steps == (3 if guard == "skip_step" else 6)
    half = trained(size, *words, *layout, steps=4, first=3, saved=before)
    rest = trained(size, *words, *layout, steps=6, first=4, saved=half)
    assert rest["losses"] == found["losses"][1:] and rest["guarded"] == found["guarded"][1:]
    assert rest["scalars"] == found["scalars"]
    for name, tensor in found["tensors"].items():
        assert torch.equal(rest["tensors"][name], tensor), name


def test_an_update_whose_norm_is_too_large_gets_the_largest_that_may_be():
    words = [*WORDS, "optim.guard=clip_update"]
    before = calm(words, "clip_update", 1)
    after = trained(1, *words, steps=4, first=3, saved=before)
    changes = [after["tensors"][n] - t for n, t in before["tensors"].items() if n.startswith("model.")]
    row = np.array([0.1, 0.2] * 54)
    from hpclm import config
    from hpclm.optim.schedules import learning_rate
    from tests.parity import STEPS as TOTAL
    from tests.parity import TINY

    rate = learning_rate(3, 1, TOTAL, config.load(None, [*TINY, *words]).optim)
    size = torch.nn.utils.get_total_norm(changes).item() / rate
    assert size == pytest.approx(row.mean() + 3 * row.std(), rel=1e-3)


def test_a_usual_step_is_as_without_a_guard_to_the_last_bit():
    plain = alone(*WORDS)
    for guard in ("skip_step", "clip_update"):
        assert alone(*WORDS, f"optim.guard={guard}")["losses"] == plain["losses"]


def test_deepspeed_refuses_a_guard_by_name():
    with pytest.raises(
        ConfigError, match=r"engine 'deepspeed' does not support optim\.guard=skip_step, since its updates"
    ):
        settings(GPT2, engine=dict(name="deepspeed"), optim=dict(guard="skip_step"))

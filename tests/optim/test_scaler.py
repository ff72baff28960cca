"""The loss scale of a run that resumes with other settings of it."""

from dataclasses import asdict

import pytest

from hpclm.config import ScalerConfig
from hpclm.optim.stability import LossScale
from tests.forks import hpclm
from tests.runs import figures


def after(scale, config, steps):
    """The loss scale after ``steps``, True for an overflow."""
    for overflow in steps:
        scale = scale.after(overflow, config)
    return scale


@pytest.mark.parametrize("counted", [4, 5, 6, 999])
def test_a_window_lowered_on_resume_still_lets_the_scale_grow(counted):
    before, now = ScalerConfig(64.0, window=1000), ScalerConfig(64.0, window=5)
    saved = asdict(after(LossScale.first(before), before, [False] * counted))
    assert after(LossScale.of(saved, now), now, [False] * 5).value == 128.0
    assert after(LossScale.of(saved, now), now, [False]).value == 128.0


def test_a_hysteresis_lowered_on_resume_holds_from_the_first_overflow():
    before, now = ScalerConfig(64.0, hysteresis=8), ScalerConfig(64.0, hysteresis=2)
    saved = asdict(LossScale.first(before))
    assert after(LossScale.of(saved, now), now, [True, True]).value == 32.0


def test_an_overflow_never_raises_the_scale_where_a_resumed_run_has_raised_its_minimum():
    before, now = ScalerConfig(64.0, hysteresis=1), ScalerConfig(64.0, hysteresis=1, minimum=16.0)
    saved = asdict(after(LossScale.first(before), before, [True] * 4))
    assert saved["value"] == 4.0
    resumed = LossScale.of(saved, now)
    assert resumed.value == after(resumed, now, [True]).value == 16.0


@pytest.mark.parametrize("steps", [[], [False] * 7, [True], [True, False, True, False], [True] * 30])
@pytest.mark.parametrize("config", [ScalerConfig(), ScalerConfig(8.0, 3, 1, True, 2.0), ScalerConfig(1.0, 1, 4)])
def test_unchanged_settings_resume_exactly_the_saved_scale(config, steps):
    scale = after(LossScale.first(config), config, steps)
    assert LossScale.of(asdict(scale), config) == scale


def test_a_run_that_lowers_its_window_doubles_its_scale_within_that_many_steps(tiny, tmp_path):
    words = tiny("run", "engine.precision=fp16", "scaler.initial=64", "scaler.window=1000")
    hpclm("train", *words, "stop_at=8", check=0)
    again = hpclm("train", *words, "scaler.window=3", "scaler.initial=32", "model.init_std=0.1", check=0)
    idle = "model.init_std=0.1, scaler.initial=32.0 has no effect: the run resumes from step 8 and restores its state"
    assert again.stderr.count(idle) == 1
    assert [scale for _, scale in figures(tmp_path / "run", "step", "loss_scale")] == [64.0] * 9 + [128.0] * 3

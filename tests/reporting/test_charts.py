"""What charts show: means and bands of what was measured, and axes that no diverged run rescales."""

import math

import numpy as np
import pytest

from hpclm.reporting import charts as described
from hpclm.reporting import history, standings
from tests.reporting import made


def charts(folder, **losses):
    runs = {name: history.read_history(made.trained(folder / name, *each)) for name, each in losses.items()}
    return {chart.key: chart for chart in described.charts(runs)}


def falling(steps, seed=0):
    noise = np.random.default_rng(seed).normal(0, 0.05, steps)
    return [float(3 + 2 * math.exp(-step / 30) + noise[step]) for step in range(steps)]


def test_a_point_is_the_mean_of_its_group_and_the_band_its_extremes(tmp_path):
    losses = falling(1000)
    losses[500] = None
    chart = charts(tmp_path, one=(losses,))["loss"]
    [curve] = chart.curves
    assert chart.group == math.ceil(1000 / described.POINTS) and len(curve.steps) <= described.POINTS
    for at, begin in enumerate(range(0, 1000, chart.group)):
        group = [loss for loss in losses[begin : begin + chart.group] if loss is not None]
        assert curve.mean[at] == pytest.approx(sum(group) / len(group))
        assert (curve.low[at], curve.high[at]) == (min(group), max(group))
        assert begin + 1 <= curve.steps[at] <= begin + chart.group
    settled = curve.high[int(described.STEEP * len(curve.steps)) :]  # the steep start need not be on the chart
    assert chart.bottom < min(curve.low) and max(settled) < chart.top < curve.high[0]


def test_the_spike_of_one_step_is_seen_and_named_though_its_mean_is_on_the_chart(tmp_path):
    losses = [3.0] * 10_000
    assert not charts(tmp_path, calm=(losses,))["loss"].clipped
    losses[5000] = 20.0
    chart = charts(tmp_path, spike=(losses,))["loss"]
    [curve] = chart.curves
    assert curve.mean.max() < chart.top < max(curve.band[2]) == 20.0 and chart.clipped
    assert [said for said in chart.said(curve) if "20" in said] == ["3.202 (3 to 20)"]


def test_of_few_steps_each_is_a_point(tmp_path):
    [curve] = charts(tmp_path, one=([3.0, None, 2.0],))["loss"].curves
    assert curve.steps.tolist() == [1, 2, 3] and np.isnan(curve.mean[1]) and curve.mean[2] == curve.low[2] == 2.0


@pytest.mark.parametrize("wild", [1e3, 1e250, None], ids=str)
@pytest.mark.parametrize("at", [0, 3, 150])
def test_a_diverged_run_is_marked_and_rescales_nothing(wild, at, tmp_path):
    healthy = {name: (falling(200, seed), {100: 3.5, 200: 3.2}) for seed, name in enumerate("abcd")}
    alone = charts(tmp_path, **healthy)
    (tmp_path / "with").mkdir()
    lost = (falling(200, 9)[:at] + [wild] * (200 - at), {100: wild if at < 100 else 3.5, 200: wild})
    compared = charts(tmp_path / "with", **healthy, lost=lost)
    for key in ("training_loss", "validation_loss"):
        marks = {curve.name: curve.left for curve in compared[key].curves if curve.left}
        assert compared[key].top <= 1.1 * alone[key].top and compared[key].bottom >= 0.9 * alone[key].bottom
        assert list(marks) == ["lost"]
        step, value = marks["lost"]
        assert at - 2 * compared[key].group < step <= max(at + 2 * compared[key].group, 200 if at >= 100 else 100)
        assert compared[key].bottom <= value <= compared[key].top
    line = compared["training_loss"].curves[-1].line[1]
    assert line.max() <= compared["training_loss"].top * (2 if at else 1) and not np.isnan(line).any()


def test_a_divergence_within_the_last_point_is_marked(tmp_path):
    [curve] = charts(tmp_path, one=([*falling(1000), *[None] * 5],))["loss"].curves
    assert curve.left == (curve.steps[-1], pytest.approx(curve.mean[-2]))


def test_runs_of_different_length_share_their_steps(tmp_path):
    chart = charts(tmp_path, short=(falling(50),), long=(falling(1000),))["training_loss"]
    short, long = sorted(chart.curves, key=lambda curve: len(curve.steps))
    assert set(short.steps) <= set(long.steps) and chart.first == 1 and chart.last == 1000


def test_evaluations_of_several_parts_are_their_mean(tmp_path):
    out = made.trained(tmp_path / "one", [3.0, 2.0])
    rows = [dict(step=2, part=f"valid/{part}", validation_loss=loss) for part, loss in (("a", 2.0), ("b", 3.0))]
    with (out / "metrics.jsonl").open("a") as file:
        file.write(made.lines(rows))
    found = history.read_history(out)
    assert standings.validation(found) == {2: 2.5}
    [loss] = [chart for chart in described.charts({"one": found}) if chart.key == "loss"]
    assert [curve.name for curve in loss.curves] == ["training", "validation a", "validation b"]


def test_steps_out_of_order_are_averaged_in_their_order():
    grid = np.arange(1.0, 7.0)
    pairs = np.array([3.0, 1.0, 2.0, 6.0]), np.array([30.0, 10.0, 20.0, np.nan])
    steps, mean, low, high = described._averaged(pairs, grid, 2)
    assert steps.tolist() == [2.0, 4.0, 6.0] and mean[:2].tolist() == [15.0, 30.0] and np.isnan(mean[2])
    assert (low[:2].tolist(), high[:2].tolist()) == ([10.0, 30.0], [20.0, 30.0])

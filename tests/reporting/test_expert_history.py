"""The load of experts on the page: heat maps, whose cells are the tokens of the steps they cover, and curves of each layer."""

import json

import numpy as np
import pytest

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.reporting import history, images
from hpclm.reporting.charts import charts
from hpclm.reporting.expert_history import COLUMNS, EXPERT_FIGURES, MIN_COLUMNS, expert_history
from tests.reporting import made

pytest.importorskip("bokeh")
pytest.importorskip("matplotlib")


def rows(counts, steps=10):
    """Lines of experts.jsonl of a layer each of ``counts``: [lines, L, E]."""
    return [
        {
            "step": steps * number,
            "steps": steps,
            "tokens": {f"block{layer}": [*map(int, tokens)] for layer, tokens in enumerate(line)},
        }
        for number, line in enumerate(counts, 1)
    ]


def drawn(folder, name, counts):
    made.trained(folder / name, [5 - step / 100 for step in range(60)])
    (folder / name / "experts.jsonl").write_text(made.lines(rows(counts)))
    return folder / name


def test_a_column_has_the_load_of_its_steps():
    load = expert_history(rows([[[1, 3], [2, 2]], [[0, 8], [4, 4]]]))
    assert load.blocks == ("block0", "block1") and load.edges.tolist() == [0, 10, 20]
    assert load.load.tolist() == [[[0.5, 1.5], [1, 1]], [[0, 2], [1, 1]]]
    assert load.steps.tolist() == [10, 20]
    assert load.figures["dead_experts"].tolist() == [[0, 0], [1, 0]]
    assert load.figures["expert_load_max"].tolist() == [[1.5, 1], [2, 1]]
    assert load.figures["expert_entropy"][1].tolist() == [0, 1]


def test_steps_of_a_line_that_lie_in_two_columns_are_shared_out():
    lines = rows([[[4, 0]], [[0, 4]]])
    lines.append({"step": 80, "steps": 60, "tokens": {"block0": [6, 6]}})
    load = expert_history(lines)
    assert load.edges == pytest.approx([0, 80 / 3, 160 / 3, 80])
    assert load.load[0, 0] == pytest.approx([2 * (4 + 2 / 3) / (8 + 4 / 3)] * 2)
    assert load.load[1:].tolist() == pytest.approx(np.ones((2, 1, 2)))


@pytest.mark.parametrize("count", [1, 119, 120, 121, 480, 481, 2000, 5003])
def test_a_long_run_keeps_every_token_and_every_dead_expert(count):
    draw = np.random.default_rng(count)
    counts = draw.integers(1, 100, (count, 2, 4))
    counts[count // 2 :, 1, 3] = 0
    load = expert_history(rows(counts))
    columns = len(load.edges) - 1
    assert columns == min(count, COLUMNS) and load.edges[-1] == 10 * count
    if count % columns == 0 or count < 4 * COLUMNS:
        ends = np.cumsum(counts, 0, dtype=float)
        at = np.array([np.interp(load.edges, 10 * np.arange(count + 1), [0, *ends[:, 0, e]]) for e in range(4)]).T
        assert load.load[:, 0] == pytest.approx(np.diff(at, axis=0) / np.diff(at, axis=0).mean(1, keepdims=True))
    late = load.edges[:-1] >= 10 * (count // 2) + 10 * count / columns
    assert (load.load[late, 1, 3] == 0).all() and (load.load[load.edges[1:] < 5 * count - 10, 1] > 0).all()
    assert len(load.steps) == count


def test_many_experts_have_fewer_columns():
    counts = np.ones((3 * COLUMNS, 60, 384))
    assert expert_history(rows(counts)).load.shape == (MIN_COLUMNS, 60, 384)


def test_lines_of_another_model_or_out_of_order_are_left_out():
    lines = rows([[[1, 3]], [[2, 2]]])
    odd = [
        {"step": 30, "steps": 10, "tokens": tokens}
        for tokens in ({"block1": [1, 1]}, {"block0": [1, 1, 1]}, {"block0": [0, 0]})
    ]
    load = expert_history([*lines, lines[0], *odd])
    assert load.steps.tolist() == [10, 20]
    assert expert_history([]) is None


def test_no_token_differs_from_any():
    load = expert_history(rows([[[0, 1, 9_999, 90_000]]]))
    zero, one, mean, most = load.heat_maps[0].percent[:, 0].tolist()
    assert zero == 0 and one == 1 and mean == 40 and most == 360
    assert expert_history(rows([[[1, *[0] * 99]]])).heat_maps[0].percent.max() == 100 * 100


def test_the_page_has_a_heat_map_of_each_layer_and_curves_of_all(tmp_path):
    run = drawn(tmp_path, "run", np.tile([[0, 3, 6, 3], [3, 3, 3, 3]], (6, 1, 1)))
    assert cli.main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "<h2>Experts</h2>" in page and "<h2>Load of every expert</h2>" in page and "Own metrics" not in page
    drawn_charts = {chart["target_id"]: json.dumps(chart) for chart in map(json.loads, parts(page))}
    assert [*drawn_charts][-5:] == [*EXPERT_FIGURES, "expert-load-0", "expert-load-1"]
    assert '"HoverTool"' in drawn_charts["expert-load-1"] and "% of the mean" in drawn_charts["expert-load-1"]
    assert (run / "report-expert-load.png").stat().st_size > 10_000 and (run / "report-dead-experts.png").exists()
    lines = {chart.key: chart for chart in charts({"run": history.read_history(run)})}
    assert [curve.name for curve in lines["expert_load_max"].curves] == ["block0", "block1"]
    assert lines["expert_load_max"].curves[0].mean.tolist() == [2.0] * 6


def parts(page):
    return [part.partition("</script>")[0] for part in page.split('<script type="application/json">')[1:]]


def test_many_heat_maps_are_folded(tmp_path):
    run = drawn(tmp_path, "run", np.ones((6, 9, 4)))
    assert cli.main(["report", "--no-png", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "<details><summary><h2>Load of every expert</h2></summary>" in page
    assert all(f'id="expert-load-{layer}"' in page for layer in range(9))


def test_runs_are_compared_by_their_worst_layer(tmp_path):
    one = drawn(tmp_path, "one", np.tile([[0, 2, 1, 1], [0, 0, 4, 4]], (6, 1, 1)))
    made.trained(tmp_path / "plain", [5 - step / 100 for step in range(60)])
    runs = {"one": history.read_history(one), "plain": history.read_history(tmp_path / "plain")}
    by_key = {chart.key: chart for chart in charts(runs)}
    values = {key: [curve.mean.tolist() for curve in by_key[key].curves] for key in EXPERT_FIGURES}
    assert values == {"expert_load_max": [[2.0] * 6], "expert_entropy": [[0.5] * 6], "dead_experts": [[3.0] * 6]}
    assert {"expert load one", "dead_experts"} < images.images(runs).keys()
    assert cli.main(["report", "--no-png", str(one), str(tmp_path / "plain"), "-o", str(tmp_path / "both.html")]) == 0
    assert "<h2>Experts</h2>" in (tmp_path / "both.html").read_text()


def test_a_run_without_experts_has_no_section_of_them(tmp_path):
    made.trained(tmp_path / "run", [5.0, 4.0])
    assert cli.main(["report", "--no-png", str(tmp_path / "run")]) == 0
    assert "xperts" not in "".join(
        part.partition("<script")[0] for part in (tmp_path / "run/report.html").read_text().split("</script>")
    )


@pytest.mark.parametrize("content", ["", '{"step": 1', "\0" * 99])
def test_a_file_without_a_whole_line_is_as_good_as_none(content, tmp_path):
    made.trained(tmp_path / "run", [5.0, 4.0])
    (tmp_path / "run/experts.jsonl").write_text(content)
    assert history.read_history(tmp_path / "run").experts is None


@pytest.mark.parametrize("content", ["x\n", '{"step": 1}\n', '{"step": 1, "steps": 1, "tokens": {"a": "b"}}\n'])
def test_a_damaged_line_of_experts_is_named(content, tmp_path):
    made.trained(tmp_path / "run", [5.0, 4.0])
    (tmp_path / "run/experts.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=r"experts\.jsonl, line 1, is damaged"):
        history.read_history(tmp_path / "run")

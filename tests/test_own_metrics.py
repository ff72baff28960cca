"""What a block, an engine or an optimizer of the user's own reports reaches every place where metrics are shown, under its name."""

import json
import re

import pytest
import torch

from hpclm import cli
from hpclm.engine.native import NativeEngine
from hpclm.model.gpt import Block
from hpclm.model.reports import report
from hpclm.reporting import history
from hpclm.reporting.charts import charts
from tests.optim.users import Lion
from tests.runs import lines

NAMES = ["gate/block0", "gate/block1", "rows<b>", "balance", "engine.norm", "momentum"]


class Gated(Block):
    """It reports a scalar of each layer, one of all, and one for each token."""

    def forward(self, x, metadata):
        """[t, B, C] -> [t, B, C]."""
        x = super().forward(x, metadata)
        report(metadata, "gate", x.mean().sigmoid(), by_layer=True)
        report(metadata, "rows<b>", torch.tensor(1.5))
        report(metadata, "balance", -x.square().mean(-1))
        return x


class Measuring(NativeEngine):
    """It measures the norm of the weights."""

    def update(self, loss, scale):
        """As NativeEngine's."""
        results = super().update(loss, scale)
        return {**results, "engine.norm": torch.stack([w.parameter.detach().norm() for w in self.weights]).norm()}


class MeasuredLion(Lion):
    """It says how large its momentum is."""

    def metrics(self):
        """Named scalars."""
        return {"momentum": sum(float(state["exp_avg"].abs().sum()) for state in self.state.values())}


@pytest.fixture
def runs(tiny, tmp_path):
    own = [f"{kind}={__name__}:{name}" for kind, name in (("model.block", "Gated"), ("optim.name", "MeasuredLion"))]
    own += [
        f"engine.name={__name__}:Measuring",
        "model.layers=2",
        "log.sinks=[tests.sinks.own:Written]",
        "log.tensorboard=true",
    ]
    assert cli.main(["train", *tiny("one", *own)]) == 0
    assert cli.main(["train", *tiny("two", *own, "optim.lr=1e-3")]) == 0
    return tmp_path / "one", tmp_path / "two"


def test_whatever_own_code_reports_is_shown_everywhere_under_its_name(runs, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    one, two = runs
    rows = [row for line in lines(one / "metrics.jsonl") if "loss" in (row := json.loads(line))]
    assert all({*NAMES} <= row.keys() for row in rows) and all(row["rows<b>"] == pytest.approx(3.0) for row in rows)
    sent = [row for row in map(json.loads, lines(one / "written.jsonl")) if "loss" in row]
    events = EventAccumulator(str(one / "tensorboard")).Reload()
    for name in NAMES:
        values = [row[name] for row in rows]
        assert [row[name] for row in sent] == values
        assert [event.value for event in events.Scalars(name)] == pytest.approx(values, rel=1e-6)
    read = history.read_history(one)
    assert {*read.steps.reported} == {*NAMES}
    drawn = {chart.key: chart for chart in charts({"one": read})}
    assert {"gate", "rows<b>", "balance", "engine.norm", "momentum"} < drawn.keys()
    assert [curve.name for curve in drawn["gate"].curves] == ["block0", "block1"]
    assert drawn["balance"].bottom < min(row["balance"] for row in rows) <= drawn["balance"].top < 0
    assert cli.main(["report", str(one), "--no-png"]) == 0
    page = (one / "report.html").read_text()
    assert (
        "<h2>Own metrics</h2>" in page
        and "<h3>rows&lt;b&gt;</h3>" in page
        and "rows<b>" not in re.sub("<script.*?</script>", "", page, flags=re.S)
    )
    output = one.parent / "both.html"
    assert cli.main(["report", str(one), str(two), "-o", str(output)]) == 0
    both = output.read_text()
    assert all(f"<button>{name.replace('<b>', '&lt;b&gt;')}</button>" in both for name in NAMES)
    assert all(f"<h3>{name.replace('<b>', '&lt;b&gt;')}</h3>" in both for name in NAMES)
    assert len([*one.parent.glob("both-reported-*.png")]) == len(NAMES)
    read = history.read_history(two)
    assert read.mean("momentum") == pytest.approx(sum(row["momentum"] for row in read.recent) / len(read.recent))


def test_a_run_without_own_metrics_has_no_section_of_them(tiny, tmp_path):
    assert cli.main(["train", *tiny("plain")]) == 0
    assert cli.main(["report", str(tmp_path / "plain"), "--no-png"]) == 0
    assert "Own metrics" not in (tmp_path / "plain/report.html").read_text()

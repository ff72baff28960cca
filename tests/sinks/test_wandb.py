import json
import os
from importlib.util import find_spec

import pytest

from hpclm.sinks import RunInfo
from tests import forks
from tests.runs import until
from tests.sinks.test_sinks import records


def places(folder):
    """Step, and place among all rows, of each row that W&B keeps of those that a run is sent one after the other."""
    os.environ["WANDB_MODE"] = "offline"
    from wandb.proto import wandb_internal_pb2 as proto

    from hpclm.sinks.wandb import WandbSink

    sink = WandbSink(RunInfo("1a", "run", "proof", folder, {}))
    for before, step in enumerate((4, 8, 12)):
        sink.send([{"step": step, "loss": 2.0}], before)
    sink.close(0)
    [path] = folder.glob("wandb/offline-run-*/*.wandb")

    def history():
        return [proto.Record.FromString(data).history for data in records(path.read_bytes())]

    until(lambda: sum(bool(row.item) for row in history()) == 3, "writing of the rows by W&B's own process")
    kept = history()
    steps = [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in row.item} for row in kept]
    return [(values["step"], row.step.num) for values, row in zip(steps, kept, strict=True) if values]


@pytest.mark.skipif(not find_spec("wandb"), reason="needs W&B")
def test_weights_and_biases_counts_the_rows_that_it_has(tmp_path):
    assert forks.call(places, tmp_path) == [(4, 0), (8, 1), (12, 2)]

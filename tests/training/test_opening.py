"""What a run opens before it trains."""

from datetime import timedelta

from hpclm import config
from hpclm.distributed.context import single
from hpclm.training.opening import open_devices


def test_collectives_may_take_as_many_minutes_as_the_settings_say(tmp_path):
    run = config.load("debug", ["cluster.timeout_minutes=1.5", "engine.device=cpu", f"out={tmp_path}"])
    assert open_devices(run, single()).mesh.dp.options.limit == timedelta(seconds=90)

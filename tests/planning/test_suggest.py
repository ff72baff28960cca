"""What is worth suggesting."""

from dataclasses import replace

from hpclm import config
from hpclm.node.gpus import KINDS
from hpclm.planning import forecast, memory, suggest


def test_what_fits_only_if_the_allocator_releases_its_overhead_is_not_suggested():
    run = config.load(None, ["batch.micro_size=1", "engine.precision=bf16", "engine.loss_chunk=512"])
    peak = forecast.predict(run, KINDS["H100"]).peak
    enough, tight = (replace(KINDS["H100"], memory=size / forecast.GIB) for size in (peak.total, peak.total - 1e6))
    assert peak.tensors + memory.PROCESS < peak.total - 1e6 and forecast.predict(run, tight).room == "tight"
    assert next(suggest.fitting(run, enough))[0].batch.micro_size == 1
    assert not list(suggest.fitting(run, tight))

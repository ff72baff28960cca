"""Reports on single ranks."""

import pytest

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.planning import ranks
from hpclm.planning.simulate import CollectiveTotal, Simulation


@pytest.mark.parametrize("text, wanted", [("0", [0]), ("7, 2-4,3", [2, 3, 4, 7]), ("0-7", [*range(8)])])
def test_ranks_are_numbers_and_ranges_in_order(text, wanted):
    assert ranks.parse_ranks(text, 8) == wanted


@pytest.mark.parametrize("text", ["8", "5-8", "-1", "3-2", ""])
def test_ranks_that_the_run_does_not_have_are_refused(text):
    with pytest.raises(ConfigError, match=f"^--ranks={text}"):
        ranks.parse_ranks(text, 8)


def test_the_report_on_a_rank_has_its_memory_in_gigabytes_and_each_kind_of_message():
    run = config.load(None, ["engine.name=native", "batch.micro_size=2", "model.context=64"])
    sent = (CollectiveTotal("all_reduce", "data", 8, 3, 4_500_000), CollectiveTotal("broadcast", "tensor", 2, 1, 999))
    memory = {"weights": 1_500_000_000, "activations": 250_000_000}
    found = [*ranks.lines(Simulation(run, 3, 16, 4, 1000, 500, memory, sent, 0))]
    assert [" ".join(line.split()) for line in found] == [
        "rank 3 of 16: engine native, 4 micro-batches of 2 x 64 tokens",
        "parameters 1,000, of which it updates 500",
        "peak memory of a step, uncompiled, GB",
        "weights 1.500",
        "activations 0.250",
        "total 1.750",
        "collectives of a step",
        "3 x all_reduce over data ( 8 ranks) 1.5 MB each, 4.5 MB in total",
        "1 x broadcast over tensor ( 2 ranks) 999 B each, 999 B in total",
    ]
    alone = [*ranks.lines(Simulation(run, 0, 1, 1, 1, 1, {}, (), 0))]
    assert "1 micro-batch of 2" in alone[0] and alone[-1] == "  collectives of a step: none"
    assert [ranks._bytes(size) for size in (999, 1000, 1e6, 2.5e9)] == ["999 B", "1.0 kB", "1.0 MB", "2.5 GB"]

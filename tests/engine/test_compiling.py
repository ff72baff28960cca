"""What all ranks decide before they build an engine: whether it is compiled, and the type of its activations."""

import pytest
import torch
import torch.distributed as dist

from hpclm.base.errors import ConfigError
from hpclm.engine import compiling
from hpclm.model import compiled
from tests import ranks
from tests.engine import sharded

WORDS = ["batch.micro_size=1", "model.layers=2", "engine.precision=fp32"]


class Lines(list):
    """What is logged, as a handler."""

    level = 0

    def handle(self, record):
        self.append(record.getMessage())


def decided(lacks, words):
    """engine.compile after ranks ``lacks`` could not compile, and what is logged."""
    broken = dist.get_rank() in lacks
    compiled.problem = lambda device: "no kernels today" if broken else ""
    run, _, _, context = sharded.made([*WORDS, *words])
    lines = Lines()
    compiling.log.addHandler(lines)
    settings = compiling.shared_by_all(run.for_engine(2), torch.device("cpu"), context)
    return settings.engine.compile, list(lines)


@pytest.mark.parametrize(
    "lacks, words, wanted",
    [
        ([1], ["engine.compile=true"], False),
        ([], ["engine.compile=true"], True),
        ([0, 1], ["engine.compile=true"], False),
        ([1], ["engine.compile=false"], False),
        ([1], [], None),  # CPUs do not compile by default
    ],
)
def test_all_ranks_compile_or_none_with_one_warning(lacks, words, wanted):
    (first, lines), (second, none) = ranks.run(2, decided, lacks, words)
    assert (first, second, none) == (wanted, wanted, [])
    assert len(lines) == (bool(lacks) and words == ["engine.compile=true"])
    for line in lines:
        assert f"on rank {lacks[0]}" in line and "no kernels today" in line and "engine.compile=false" in line


def of_types(names):
    """What is wrong where ranks compute in these types."""
    _, _, _, context = sharded.made(WORDS)
    try:
        compiling.check_types(names[context.rank], context)
    except ConfigError as error:
        return str(error)
    return ""


def test_all_ranks_compute_in_one_type():
    assert ranks.run(2, of_types, ["bf16", "bf16"]) == ["", ""]
    for text in ranks.run(2, of_types, ["bf16", "fp32"]):
        assert "engine.precision=auto is bf16 on rank 0" in text and "fp32 on rank 1" in text

"""Published runs on one to many nodes, from one GPU to 512: what each cluster loses as it grows."""

import csv
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from hpclm.config import ModelConfig
from hpclm.node.gpus import KINDS, Kind
from hpclm.planning import time
from hpclm.planning.code import BytesPerParameter, Code
from hpclm.planning.layout import Layout
from tests.planning.published import FSDP

TABLE = Path(__file__).with_name("scaling_rows.csv")
# PyTorch's FSDP2 with gradients reduced in fp32, tensor parallelism that waits for NCCL, compiled blocks, and on these GPUs cuDNN's
# attention, about half as fast again as FlashAttention-2
FSDP2 = replace(FSDP, kernel=1.5, reduced=4)


@dataclass(frozen=True)
class Row:
    """One published run."""

    source: str
    model: ModelConfig
    layout: Layout
    code: Code
    kind: Kind
    measured: float
    """Tokens/s of one GPU."""

    def ratio(self, efficiency: float) -> float:
        """Predicted speed over the measured one."""
        step = time.step(self.model, self.layout, self.code, self.kind, efficiency)
        samples = self.layout.micro_size * self.layout.accumulation * self.layout.data
        return samples * self.model.context / step.total / self.layout.gpus / self.measured

    @property
    def family(self) -> str:
        """Runs of one code on one cluster."""
        return f"{self.source.split()[0]} {self.kind.family}"


@cache
def rows():
    with TABLE.open(newline="") as file:
        return [row(cells) for cells in csv.DictReader(file)]


def row(cells):
    def number(name):
        return int(cells[name])

    kempner = cells["source"].startswith("KempnerForge")
    model = ModelConfig(
        vocab_size=number("vocab"),
        layers=number("layers"),
        hidden=number("hidden"),
        heads=number("heads"),
        kv_heads=number("kv_heads"),
        ffn=number("ffn"),
        context=number("seq"),
        activation="swiglu" if kempner else "gelu",
        positions="rope" if kempner else "learned",
        norm="rmsnorm" if kempner else "layernorm",
        bias=False,
        tied=not kempner,
    )
    gpus, tensor, zero = number("gpus"), number("tensor"), number("zero")
    layout = Layout(
        data=gpus // tensor,
        tensor=tensor,
        micro_size=number("micro_size"),
        accumulation=number("accumulation"),
        recompute=cells["recompute"],
        node=number("node"),
    )
    code = replace(FSDP2 if kempner else FSDP, zero=zero)
    code = code if zero == 3 else replace(code, gathered=BytesPerParameter(2), gathers=None)
    return Row(cells["source"], model, layout, code, KINDS[cells["gpu"]], float(cells["tokens_per_second_gpu"]))

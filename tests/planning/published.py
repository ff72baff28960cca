"""Published runs of PyTorch's FSDP, each as the planner's own values: what ran, on what, and how fast it was."""

import csv
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from hpclm.config import ModelConfig
from hpclm.node.gpus import KINDS, Kind
from hpclm.planning import memory, time
from hpclm.planning.engines import BytesPerParameter, EngineCosts
from hpclm.planning.layout import Layout
from tests.shared import shared

SCALING = Path(__file__).with_name("scaling_rows.csv")
PLACES = {"a100_80gb": KINDS["A100"], "a100_40gb": KINDS["A100-40GB"], "h100_80gb": KINDS["H100"]}
WHOLE, SHARDED = BytesPerParameter, lambda size: BytesPerParameter(0, size)
FSDP = EngineCosts(weights=SHARDED(4), gradients=SHARDED(4), optimizer=SHARDED(8), sent=2, logit=4)
FOUNDRY = 0.5
"""llm-foundry's attention, the Triton kernel of the first FlashAttention, relative to the second (Dao 2023)."""
KEMPNER = 1.5
"""cuDNN's attention on Hopper."""


@dataclass(frozen=True)
class Row:
    """One published run."""

    source: str
    model: ModelConfig
    layout: Layout
    costs: EngineCosts
    kind: Kind
    kernel: float
    measured: float
    """Tokens/s of one GPU."""

    @property
    def family(self):
        """Runs of one code on one cluster."""
        return f"{self.source.split()[0]} {self.kind.family}"

    def ratio(self, efficiency=None):
        """Predicted speed over the measured one."""
        step = time.step(self.model, self.layout, self.costs, self.kind, efficiency, self.kernel)
        samples = self.layout.micro_size * self.layout.accumulation * self.layout.data
        return samples * self.model.context / step.total / self.layout.gpus / self.measured

    @property
    def gib(self):
        """Memory that is predicted."""
        return memory.of_stages(self.model, self.layout, self.costs)[0].total / 2**30


def costs(zero, reduced):
    gathered = SHARDED(2) if zero == 3 else WHOLE(2)
    return replace(FSDP, zero=zero, reduced=reduced, gathered=gathered, gathers=2 if zero == 3 else 0)


@cache
def rows():
    """llm-foundry's throughput tables."""
    with shared("reference/planner/published_rows.csv").open(newline="") as file:
        return [row(cells) for cells in csv.DictReader(file) if "llm-foundry" in cells["source"]]


def row(cells):
    def number(name):
        return int(cells[name] or 1)

    heads, hidden, replicas, micro = number("heads"), number("hidden"), number("dp"), number("mbs")
    model = ModelConfig.of(
        {
            "vocab_size": number("vocab"),
            "layers": number("layers"),
            "hidden": hidden - hidden % heads,
            "attention.heads": heads,
            "context": number("seq"),
        }
    )
    layout = Layout(
        data=replicas,
        micro_size=micro,
        accumulation=number("gbs") // (micro * replicas),
        recompute="full" if cells["recompute"] == "full" else "none",
    )
    speed = float(re.search(r"T/s/GPU (\d+)", cells["note"])[1])
    return Row("llm-foundry", model, layout, costs(number("zero"), 2), PLACES[cells["hw"]], FOUNDRY, speed)


@cache
def scaling():
    """Runs on one to 512 GPUs."""
    with SCALING.open(newline="") as file:
        return [scaling_row(cells) for cells in csv.DictReader(file)]


def scaling_row(cells):
    numbers = {name: int(cells[name]) for name in ("layers", "hidden", "ffn")}
    numbers |= {f"attention.{name}": int(cells[name]) for name in ("heads", "kv_heads")}
    kempner = cells["source"].startswith("KempnerForge")
    style = dict(activation="swiglu", positions="rope", norm="rmsnorm", tied=False) if kempner else {}
    model = ModelConfig.of(
        {"vocab_size": int(cells["vocab"]), "context": int(cells["seq"]), "bias": False, **numbers, **style}
    )
    sizes = {name: int(cells[name]) for name in ("tensor", "micro_size", "accumulation", "node")}
    layout = Layout(data=int(cells["gpus"]) // sizes["tensor"], recompute=cells["recompute"], **sizes)
    kernel, reduced = (KEMPNER, 4) if kempner else (FOUNDRY, 2)
    speed, kind = float(cells["tokens_per_second_gpu"]), KINDS[cells["gpu"]]
    return Row(cells["source"], model, layout, costs(int(cells["zero"]), reduced), kind, kernel, speed)

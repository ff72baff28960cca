"""Published runs, each as the planner's own values: what ran, on what, in whose code, and what was measured."""

import csv
import re
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

from hpclm.config import ModelConfig
from hpclm.node.gpus import KINDS, Kind
from hpclm.planning.code import BytesPerParameter, Code
from hpclm.planning.layout import Layout
from tests.shared import shared

# Megatron-DeepSpeed of 2022, fp16: weights, and gradients that become fp32 for the update, in the shard of each replica.
# No flash attention, no sequence parallelism, whole logits (a 16-bit logit, its fp32 copy and the gradient).
FP16 = dict(
    weights=BytesPerParameter(2),
    element=2,
    casts=0,
    flash=False,
    sequence=False,
    outputs=True,
    rows=None,
    logit=10,
    table=0,
)
FP16 |= dict(reduced=2, sent=2, touched=10, overlap=False)
SHARDED = Code(gradients=BytesPerParameter(2, 6), optimizer=BytesPerParameter(0, 12), zero=1, **FP16)
# Without ZeRO: fp32 copies of all gradients, first apart and then in one piece.
WHOLE = Code(gradients=BytesPerParameter(10), optimizer=BytesPerParameter(12), **FP16)
# Its bf16 optimizer accumulates gradients in fp32 beside the 16-bit ones.
BF16 = Code(gradients=BytesPerParameter(6), optimizer=BytesPerParameter(0, 12), zero=1, **FP16)
# Korthikanti's Megatron: the same without ZeRO, gradients in fp32, and sequence parallelism where the row says so.
MEGATRON = replace(WHOLE, outputs=False)
# Megatron-core of 2024 on H100: flash attention, sequence parallelism, a sharded optimizer, communication during products.
CORE = Code(
    weights=BytesPerParameter(2),
    gradients=BytesPerParameter(4),
    optimizer=BytesPerParameter(0, 12),
    casts=0,
    rows=None,
    logit=10,
    table=0,
)
CORE = replace(CORE, zero=1, reduced=4, sent=2, touched=14, overlap_tensor=True)
# llm-foundry: PyTorch's FSDP with a 16-bit copy, and the Triton kernel of the first FlashAttention, which Dao (2023)
# measures at half the speed of the second.
FSDP = Code(
    weights=BytesPerParameter(0, 4),
    gradients=BytesPerParameter(0, 4),
    optimizer=BytesPerParameter(0, 8),
    gathered=BytesPerParameter(0, 2),
    casts=0,
    rows=None,
)
FSDP = replace(FSDP, logit=4, table=0, zero=3, reduced=2, sent=2, touched=20, kernel=0.5)

PLACES = {
    "A100-80G/JeanZay": replace(KINDS["A100"], network=6.25e9),  # 4 Omni-Path adapters of 100 Gbit/s for 8 GPUs
    "A100-80G/Selene": KINDS["A100"],
    "a100_80gb": KINDS["A100"],
    "a100_40gb": KINDS["A100-40GB"],
    "h100_80gb": KINDS["H100"],
    "H100-SXM": KINDS["H100"],
}


@dataclass(frozen=True)
class Row:
    """One published run."""

    name: str
    model: ModelConfig
    layout: Layout
    code: Code
    kind: Kind
    gib: float | None
    """Memory of a GPU; infinite where the run did not fit; None where it is not told."""
    tokens_per_second: float | None
    """Of one GPU."""


@cache
def rows():
    """Every row of the table."""
    with shared("reference/planner/published_rows.csv").open(newline="") as file:
        return [row(cells, line) for line, cells in enumerate(csv.DictReader(file), start=2)]


def row(cells, line):
    def number(name):
        return int(cells[name] or 1)  # no micro-batch size is told: 1

    source, heads, hidden = cells["source"], number("heads"), number("hidden")
    megatron = "llm-foundry" not in source
    dropout = 0.1 if megatron and "model_table" not in source else 0.0
    model = ModelConfig(
        vocab_size=number("vocab"),
        layers=layers(cells),
        hidden=hidden - hidden % heads,
        heads=heads,
        context=number("seq"),
        dropout=dropout,
        attention_dropout=dropout,
    )
    how = cells["recompute"]
    pipeline, data, micro = number("pp"), number("dp"), number("mbs")
    found = re.search(r"v=(\d+)", cells["note"])
    chunks = int(found[1]) if found else 1
    layout = Layout(
        data=data,
        tensor=number("tp"),
        pipeline=pipeline,
        micro_size=micro,
        accumulation=number("gbs") // (micro * data),
        schedule="interleaved" if chunks > 1 else "1f1b",
        chunks=chunks,
        partition="blocks",
        blocks=held(model.layers, pipeline) if chunks == 1 else None,
        recompute="full" if how == "full" else "selective" if "selective+" in how else "none",
    )
    memory = cells["mem_gb"]
    return Row(
        f"line {line}: {cells['size']} on {cells['gpus']} x {cells['hw']}",
        model,
        layout,
        code(cells),
        PLACES[cells["hw"]],
        float("inf") if memory == "OOM" else float(memory) if memory else None,
        speed(cells, model),
    )


def layers(cells):
    """Layers. BigScience's tables name one number for all pipelines and round it so that stages divide it; the size tells."""
    named, pipeline = int(cells["layers"]), int(cells["pp"])
    if named % pipeline == 0 or "bigscience" not in cells["source"]:
        return named
    hidden = int(cells["hidden"])
    return round((float(cells["size"].rstrip("B")) * 1e9 - int(cells["vocab"]) * hidden) / (12 * hidden**2))


def held(layers, pipeline):
    """Blocks of each stage: the same for all, or with the embedding and the head as a block each where that divides."""
    if layers % pipeline and (layers + 2) % pipeline == 0:
        each = (layers + 2) // pipeline
        return (each - 1, *[each] * (pipeline - 2), each - 1)
    each = ceil(layers / pipeline)
    return tuple(max(1, min(each, layers - each * stage)) for stage in range(pipeline))


def code(cells):
    """Whose code, as the row's settings make it."""
    source, zero = cells["source"], int(cells["zero"])
    if "llm-foundry" in source:
        return replace(FSDP, zero=zero, gathered=FSDP.gathered if zero == 3 else BytesPerParameter(2))
    if "model_table" in source:
        return CORE
    if "bigscience" in source:
        return WHOLE if not zero else BF16 if "fp32acc" in cells["dtype"] else SHARDED
    return replace(MEGATRON, sequence="sp" in cells["recompute"])


def speed(cells, model):
    """Tokens/s of one GPU, from the time of a step or from what the row gives instead, by the formula the row names."""
    formula, gpus = cells["flops_formula"], int(cells["gpus"])
    size, width, ratio = model.layers * model.hidden**2, model.hidden, model.context / (6 * model.hidden)
    if cells["sec_it"]:
        return int(cells["gbs"]) * model.context / float(cells["sec_it"]) / gpus
    told = re.search(r"T/s/GPU (\d+)", cells["note"])
    if told:
        return float(told[1])
    if formula == "sc21-recompute" and cells["tflops_hw"]:
        vocabulary = int(cells["vocab"]) / (16 * model.layers * width)
        return float(cells["tflops_hw"]) * 1e12 / (96 * size * (1 + ratio + vocabulary))
    told = re.search(r"model TFLOP/s ([\d.]+)", formula)
    if told:
        vocabulary = int(cells["vocab"]) / (12 * model.layers * width)
        return float(told[1]) * 1e12 / (72 * size * (1 + ratio + vocabulary))
    return None

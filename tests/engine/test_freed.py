"""An engine that is not used any more, such as one of the self-check's, keeps no memory."""

import gc
import weakref

import pytest

from tests import ranks
from tests.engine import sharded

WORDS = ["batch.micro_size=1", "model.layers=2", "engine.precision=fp32"]
KINDS = {
    "native": [],
    "native-bf16": ["engine.precision=bf16"],
    "native-bf16-gradients": ["engine.precision=bf16", "engine.gradients=compute", "engine.recompute=full"],
    "native-fp16": ["engine.precision=fp16", "optim.qk_clip=10", "model.dropout=0.1"],
    "native-muon": ["engine.precision=bf16", "optim.name=muon", "engine.recompute=selective"],
    "native-tensor": ["engine.precision=bf16", "parallel.tensor=2"],
    "native-context": ["engine.precision=bf16", "parallel.context=2"],
    "native-guarded": ["optim.guard=skip_step"],
    "zero1": ["engine.zero_stage=1"],
    "zero1-bf16": ["engine.zero_stage=1", "engine.precision=bf16"],
    "fsdp2": ["engine.name=fsdp2"],
    "fsdp2-bf16": ["engine.name=fsdp2", "engine.precision=bf16", "engine.recompute=full"],
    "fsdp2-stage2": ["engine.name=fsdp2", "engine.zero_stage=2", "engine.defer_reduction=true"],
    "fairscale": ["engine.name=fairscale"],
    "fairscale-stage2": ["engine.name=fairscale", "engine.zero_stage=2", "engine.precision=bf16"],
    "pipelining": ["engine.name=pipelining", "parallel.pipeline=2"],
    "pipelining-bf16": ["engine.name=pipelining", "parallel.pipeline=2", "engine.precision=bf16"],
    **{f"deepspeed-{stage}": ["engine.name=deepspeed", f"engine.zero_stage={stage}"] for stage in range(4)},
    **{
        f"deepspeed-{stage}-bf16": ["engine.name=deepspeed", f"engine.zero_stage={stage}", "engine.precision=bf16"]
        for stage in range(4)
    },
    "deepspeed-sums": ["engine.name=deepspeed", "engine.precision=bf16", "engine.gradients=fp32"],
    "deepspeed-offload": ["engine.name=deepspeed", "engine.zero_stage=2", "engine.offload=optimizer"],
    "deepspeed-pipeline": ["engine.name=deepspeed", "parallel.pipeline=2"],
}


def kept(kinds):
    """Of each kind of engine how many of it and its parameters are still there after it was used, closed and forgotten."""
    alive = {}
    for kind in kinds:
        run, engine, batches, _ = sharded.made([*WORDS, *KINDS[kind]])
        sharded.steps(run, engine, batches, 0, 2)
        engine.evaluate(batches.take(0, 5))
        list(engine.tensors())
        references = [weakref.ref(engine), *map(weakref.ref, engine.model.parameters())]
        references += [weakref.ref(weight.parameter) for weight in engine.weights]
        batches.close()
        engine.close()
        del run, engine, batches
        gc.collect()
        alive[kind] = sum(reference() is not None for reference in references)
    return alive


ENGINES = ("native", "zero1", "fsdp2", "fairscale", "pipelining", "deepspeed")
RARE = ("deepspeed-0-bf16", "deepspeed-1-bf16", "deepspeed-2-bf16", "zero1-bf16", "pipelining-bf16", "fsdp2-bf16")


@pytest.mark.parametrize(
    "kinds",
    [
        *([kind for kind in KINDS if kind.startswith(name) and kind not in RARE] for name in ENGINES),
        *(pytest.param([kind], marks=pytest.mark.whole) for kind in RARE),
    ],
    ids=lambda kinds: kinds[0],
)
@pytest.mark.filterwarnings("ignore")
def test_an_engine_that_is_closed_leaves_no_weights_behind(kinds):
    for alive in ranks.run(2, kept, kinds):
        assert alive == dict.fromkeys(kinds, 0)

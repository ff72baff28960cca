"""The formulas against what training here really holds, counted tensor by tensor on a CPU."""

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from hpclm import config
from hpclm.config import EngineConfig, ModelConfig, OptimConfig, ParallelConfig
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.model import count, gpt
from hpclm.model.loss import TokenLoss
from hpclm.model.stack import Execution, Stack
from hpclm.node.gpus import KINDS
from hpclm.optim.optimizers import optimizer_of
from hpclm.planning import engines, forecast, memory
from hpclm.planning.layout import Layout, stages

TOKENS, ROWS = 640, 256  # a sample is longer than those for which the CPU keeps attention's scores
TYPES = {4: torch.float32, 2: torch.bfloat16}


class Training:
    """A model, its loss and its optimizer as the native engine puts them together."""

    def __init__(self, shape, element=4, micro_size=2, accumulation=2, recompute="none", recompute_every=1):
        self.config = ModelConfig.of(
            {"vocab_size": 512, "layers": 6, "hidden": 64, "attention.heads": 4, "context": TOKENS} | shape
        )
        engine = EngineConfig(recompute=recompute, recompute_every=recompute_every, loss_chunk=ROWS)
        specs = gpt.layers(self.config, engine, TYPES[element], 1)
        self.model = Stack(
            self.config, specs, TYPES[element], execution=Execution(recompute_every=recompute_every)
        ).train()
        weights = [ShardedParameter(n, p, self.model.placements[n]) for n, p in self.model.weights()]
        self.loss, self.optimizer = TokenLoss(ROWS), optimizer_of(weights, OptimConfig())
        self.layout = Layout(
            micro_size=micro_size, accumulation=accumulation, recompute=recompute, recompute_every=recompute_every
        )
        self.planned = engines.costs(engine, element, ParallelConfig())

    def forward(self):
        ids = torch.randint(self.config.vocab_size, (self.layout.micro_size, TOKENS))
        return self.loss(self.model.head(ids), ids, torch.ones_like(ids, dtype=torch.float32) / ids.numel())[0]

    def step(self):
        for _ in range(self.layout.accumulation):
            self.forward().backward()
        self.optimizer.step()

    def forecast(self):
        return memory.of_stages(self.config, self.layout, self.planned)[0]


def size(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def saved(training):
    """Bytes that autograd keeps from a forward pass, each storage once, without the parameters and the loss's own."""
    own = {p.untyped_storage().data_ptr() for p in training.model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.shape[0] != training.config.padded_vocab:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        training.forward()
    return sum(storage.nbytes() for storage in kept.values())


SHAPES = {
    "gpt2": {},
    "learned, untied": dict(tied=False, embed_norm=True),
    "gelu without biases": dict(bias=False, activation="gelu"),
    "grouped": {"attention.kv_heads": 2},
    "rotary": dict(positions="rope"),
    "rotary, grouped, gated": {
        "positions": "rope",
        "attention.kv_heads": 2,
        "activation": "swiglu",
        "bias": False,
        "tied": False,
    },
    "normalised queries": {"positions": "rope", "attention.qk_norm": True},
    "dropout": dict(dropout=0.1),
    "alibi": dict(positions="alibi"),
    "wide": {"hidden": 384, "attention.heads": 6, "layers": 2},
    "large vocabulary": dict(hidden=256, vocab_size=16384, layers=2),
}
WAYS = {
    "none": {},
    "bf16": dict(element=2),
    "selective": dict(recompute="selective"),
    "full": dict(recompute="full"),
    "every two": dict(recompute="full", recompute_every=2),
}


USUAL = {("none", shape) for shape in SHAPES} | {(way, "gpt2") for way in WAYS}


def cases():
    """Every shape trained in every way; those that are not usual are marked whole."""
    for name, shape in SHAPES.items():
        for way, more in WAYS.items():
            marks = [] if (way, name) in USUAL else [pytest.mark.whole]
            yield pytest.param(shape, more, id=f"{name}-{way}", marks=marks)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_weights_gradients_and_optimizer_are_right_to_the_byte(shape):
    training = Training(shape)
    training.step()
    planned, parameters = training.forecast(), list(training.model.parameters())
    assert planned.weights == size(parameters) == 4 * count.parameters(training.config)
    assert planned.gradients == size(p.grad for p in parameters)
    moments = [t for state in training.optimizer.state.values() for name, t in state.items() if name != "step"]
    assert planned.optimizer == size(moments)


@pytest.mark.parametrize("shape, way", list(cases()))
def test_activations_are_right_to_a_twentieth(shape, way):
    training = Training(shape, **way)
    how, layout, planned = training.config, training.layout, training.planned
    stage = stages(how, layout)[0]
    gradient = layout.micro_size * TOKENS * how.hidden * planned.element  # of the loss, which the forward pass computes
    expected = memory.activations(how, layout, planned, stage) + gradient
    # dropout's masks have a byte an element on a GPU, and are as wide as activations on a CPU
    masks = bool(how.dropout) * (1 + 2 * how.layers * (layout.recompute != "full"))
    expected += masks * layout.micro_size * TOKENS * how.hidden * (planned.element - 1)
    if (
        layout.recompute != "full"
    ):  # autograd keeps here what the engine has as copies of the weights in the compute type
        expected += memory.casts(how, layout, replace(planned, casts=planned.gathered.replicated), stage)
    assert saved(training) == pytest.approx(expected, rel=0.05)


WORKSPACES = 64
"""MiB that cuBLAS has in PyTorch's allocator, which the planner counts with the process."""
COMPILED = {
    "llama-1b": (5927, ["batch.micro_size=4"]),
    "llama-1b, fsdp2": (4299, ["batch.micro_size=4", "engine.name=fsdp2", "job.gpus=2"]),
    "llama-1b, deepspeed 1": (7792, ["batch.micro_size=4", "engine.name=deepspeed"]),
    "gpt2-124m, fsdp2": (3990, ["batch.micro_size=16", "engine.name=fsdp2", "job.gpus=2"]),
    "llama-7b, sharded": (5985, ["batch.micro_size=2", "job.gpus=8"]),
    "gpt-13b-3d, tensor": (5033, ["batch.micro_size=4", "job.gpus=8", "parallel.pipeline=1"]),
}
"""Peak MiB of two layers of a preset, compiled for an H200 (tools/kernel_table.py on tests/standin)."""


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_steps_take_the_memory_that_was_measured(name):
    peak, words = COMPILED[name]
    run = config.load(f"configs/{name.partition(',')[0]}.yaml", ["data.source=synthetic", "model.layers=2", *words])
    planned = forecast.predict(run, KINDS["H200"]).memory[0].tensors / 2**20
    assert planned == pytest.approx(peak - WORKSPACES, rel=0.01)

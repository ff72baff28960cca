"""Runs with known weights, and what a checkpoint of theirs computes."""

import torch

from hpclm.checkpoint import CheckpointStore, Progress, Retention
from hpclm.config import DataConfig, ModelConfig, RunConfig, dump, load
from hpclm.engine import Shard
from hpclm.inference import run_model
from hpclm.interop.rules import placements
from hpclm.parallel.mesh import Compute

SHAPE = {"vocab_size": 93, "vocab_multiple": 8, "layers": 2, "hidden": 48, "attention.heads": 6, "context": 16}
LLAMA = {
    **SHAPE,
    "positions": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "tied": False,
    "rope.base": 5000.0,
    "ffn": 80,
}
NETWORKS = {
    "gpt2": ("GPT2LMHeadModel", dict(SHAPE)),
    "gpt2 untied": ("GPT2LMHeadModel", dict(**SHAPE, tied=False, activation="gelu", ffn=112)),
    "gpt2 relu": ("GPT2LMHeadModel", dict(**SHAPE, activation="relu", norm_eps=1e-3)),
    "llama": ("LlamaForCausalLM", LLAMA),
    "llama grouped": ("LlamaForCausalLM", {**LLAMA, "attention.kv_heads": 2, "norm_eps": 1e-6}),
    "llama tied, biases, geglu": (
        "LlamaForCausalLM",
        {**LLAMA, "attention.kv_heads": 1, "tied": True, "bias": True, "activation": "geglu"},
    ),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "attention.kv_heads": 2, "attention.qk_norm": True}),
    "bloom": ("BloomForCausalLM", dict(**SHAPE, positions="alibi", embed_norm=True)),
    "neox": ("GPTNeoXForCausalLM", {**SHAPE, "positions": "rope", "rope.base": 5000.0, "tied": False}),
    "neox tied": ("GPTNeoXForCausalLM", dict(**SHAPE, positions="rope", activation="gelu")),
}
OWN = {
    "bigscience": dict(**SHAPE, embed_norm=True),
    "fairseq": dict(**SHAPE, positions="sinusoidal", embed_scale=True, activation="relu", tied=False),
    "sinusoidal, tied": dict(**SHAPE, positions="sinusoidal", activation="gelu"),
    "no positions": {**SHAPE, "positions": "none", "bias": False, "norm": "rmsnorm", "attention.qk_norm": True},
    "alibi": dict(**SHAPE, positions="alibi", norm_eps=1e-3),
    "rotary, scaled, grouped": {**LLAMA, "embed_scale": True, "attention.kv_heads": 2},
    "squared relu": dict(**SHAPE, activation="relu2"),
    "gated by tanh": dict(LLAMA, activation="geglu_tanh", embed_norm=True),
    "rotary, layer norms, geglu": {
        **SHAPE,
        "positions": "rope",
        "attention.kv_heads": 3,
        "attention.qk_norm": True,
        "activation": "geglu",
    },
}
"""Networks that transformers has no class for."""
TOKENS = torch.randint(0, SHAPE["vocab_size"], (2, 16), generator=torch.Generator().manual_seed(3))


class Drawn:
    """An engine's state as a store sees it: random weights, each in ``blocks`` of rows, and an optimizer's to be ignored."""

    def __init__(self, model: ModelConfig, blocks: int = 1):
        draw = torch.Generator().manual_seed(5)
        self.blocks = blocks
        self.weights = {}
        for name, placement in placements(model).items():
            gain = "norm" in name and name.endswith("weight")
            self.weights[name] = torch.randn(placement.shape, generator=draw) * 0.2 + gain

    def tensors(self):
        for name, whole in self.weights.items():
            at = 0
            for block in whole.chunk(self.blocks):
                yield Shard(f"model.{name}", block, tuple(whole.shape), (at, *[0] * (whole.ndim - 1)))
                at += len(block)
            yield Shard.whole(f"optim.exp_avg.{name}", whole * 0)

    def scalars(self):
        return {"optimizer_steps": 7}


def run(folder, network, blocks=1, fingerprint=None, **data):
    """A run directory whose checkpoint at step 7 holds drawn weights, which are returned."""
    model = ModelConfig.of(network)
    folder.mkdir(mode=0o700)
    dump(RunConfig(name="made", out=str(folder), model=model, data=DataConfig(**data)), folder / "config.yaml")
    drawn = Drawn(model, blocks)
    CheckpointStore(folder / "checkpoints", Retention(), fingerprint or {}).save(drawn, Progress(step=7))
    return drawn.weights


def logits(folder, tokens=TOKENS):
    """What the newest checkpoint of a run gives for tokens."""
    config = load(folder / "config.yaml")
    model, _ = run_model.load_model(folder, config, None, Compute(torch.device("cpu"), torch.float32))
    with torch.no_grad():
        return model.head(tokens).logits()


def close(ours, theirs):
    assert theirs.std() > 0.05  # the comparison says something
    # rounding in fp32, which differs between processors, grows with the logits
    assert ours.shape == theirs.shape and (ours - theirs).abs().max() < max(1e-5, 3e-6 * theirs.abs().max())

"""Other projects' weights under hpclm's names, to hold the model against them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hpclm.config import EngineConfig, ModelConfig
from hpclm.interop.huggingface.families import of_network
from hpclm.interop.megatron.imported import ours
from hpclm.model import gpt
from hpclm.model.stack import Execution, Stack


def build(config: ModelConfig, weights: Mapping[str, Tensor] | None = None, seed: int = 1, **engine) -> Stack:
    """A model on the CPU in fp32; every one of its parameters comes from ``weights`` when they are given."""
    settings = EngineConfig(**engine)
    stack = Stack(
        config,
        gpt.layers(config, settings, torch.float32, seed),
        torch.float32,
        execution=Execution(recompute_every=settings.recompute_every),
    )
    if weights is not None:
        mine = {name.removeprefix("layers."): p for name, p in stack.named_parameters()}
        assert mine.keys() == weights.keys(), mine.keys() ^ weights.keys()
        with torch.no_grad():
            for name, p in mine.items():
                p.copy_(weights[name])
    return stack


def from_mcore(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Megatron-core's GPTModel (local spec)."""
    return {ours(name): array for name, array in arrays.items()}


def from_peer(config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model of transformers that is the network ``config``."""
    return {rule.ours: rule.join([state[name] for name in rule.theirs]) for rule in of_network(config).rules(config)}

"""Import a Megatron checkpoint as a run directory."""

import logging
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hpclm import config as configs
from hpclm.base.errors import ConfigError
from hpclm.checkpoint import Progress
from hpclm.config import ModelConfig
from hpclm.interop import run
from hpclm.interop.megatron import experts, options, torch_dist, training
from hpclm.interop.megatron.layout import MegatronState, distributed, read_files
from hpclm.interop.megatron.settings import model_settings, swapped
from hpclm.interop.rules import ConversionRule, check_depth, per_expert, placements, same, table, without
from hpclm.interop.run import fresh
from hpclm.parallel.placement import Placement

log = logging.getLogger(__name__)
EMBEDDINGS = ("tokens.weight", "output.weight")
OURS = [
    (r"embedding\.word_embeddings\.weight", "tokens.weight"),
    (r"embedding\.word_embeddings\.norm\.(weight|bias)", r"entry.norm.\1"),
    (r"embedding\.position_embeddings\.weight", "entry.table"),
    (r"(?:output_layer|lm_head)\.weight", "output.weight"),
    (r"(?:encoder|transformer|decoder)\.(?:final_layernorm|final_norm)\.(weight|bias)", r"norm.\1"),
]
IN_LAYER = [
    (r"(?:input_layernorm|input_norm)\.(weight|bias)", r"norm1.\1"),
    (r"self_attention\.linear_qkv\.layer_norm_(weight|bias)", r"norm1.\1"),
    (r"(?:post_attention_layernorm|post_attention_norm|pre_mlp_layernorm)\.(weight|bias)", r"norm2.\1"),
    (r"mlp\.linear_fc1\.layer_norm_(weight|bias)", r"norm2.\1"),
    (r"(?:self_attention|attention)\.(?:query_key_value|linear_qkv)\.(weight|bias)", r"attention.qkv.\1"),
    (r"(?:self_attention|attention)\.(?:dense|linear_proj)\.(weight|bias)", r"attention.out.\1"),
    (r"(?:self_attention|attention)\.([qk])_layernorm\.(weight|bias)", r"attention.\1_norm.\2"),
    (r"mlp\.(?:dense_h_to_4h|linear_fc1)\.(weight|bias)", r"mlp.up.\1"),
    (r"mlp\.(?:dense_4h_to_h|linear_fc2)\.(weight|bias)", r"mlp.down.\1"),
    (r"mlp\.router\.(weight|bias)", r"mlp.router.\1"),
    (r"mlp\.router\.expert_bias", "mlp.router.choice_bias"),
    (r"mlp\.shared_experts\.linear_fc1\.weight", "mlp.shared.up.weight"),
    (r"mlp\.shared_experts\.linear_fc2\.weight", "mlp.shared.down.weight"),
    (r"mlp\.experts\.(\d+)\.linear_fc1\.weight", r"mlp.experts.up.\1"),
    (r"mlp\.experts\.(\d+)\.linear_fc2\.weight", r"mlp.experts.down.\1"),
    (r"mlp\.experts\.(\d+)\.linear_fc1\.bias", r"mlp.experts.up_bias.\1"),
    (r"mlp\.experts\.(\d+)\.linear_fc2\.bias", r"mlp.experts.down_bias.\1"),
]


class Merged:
    """The weights of a checkpoint under our names, with the shards of all tensor-parallel ranks merged."""

    def __init__(self, state: MegatronState, config: ModelConfig, moment: str | None = None):
        """``moment``: the name of one of Adam's moments, which is read instead of the weights."""
        self.state = state
        self.config = config
        self.placements = placements(config)
        self.parts = state.moments[moment] if moment else state.parts
        self._names = {ours(name): name for name in self.parts}
        if config.tied:  # the last stage has a copy of the embedding
            self._names.pop("output.weight", None)

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._names)

    def read(self, name: str) -> Tensor:
        """The tensor ``name``; embeddings without padding."""
        parts = self.parts[self._names[name]]
        if ".qkv." in name:
            parts = [reordered(part, self.state.version, self.config) for part in parts]
        whole = merged(parts, self._placement(name), swapped(self.state.args))
        if name in EMBEDDINGS and len(whole) < self.config.vocab_size:
            raise ConfigError(
                f"{self._names[name]} has {len(whole)} rows, but model.vocab_size is {self.config.vocab_size}"
            )
        return whole[: self.config.vocab_size] if name in EMBEDDINGS else whole

    def _placement(self, name: str) -> Placement:
        stack, _, number = name.rpartition(".")
        if not number.isdigit():
            return self.placements[name]
        all_experts = self.placements[stack]
        dim = None if all_experts.dim is None else all_experts.dim - 1
        return replace(all_experts, shape=all_experts.shape[1:], dim=dim, stacked=False)


def _rule(name: str, placement: Placement, config: ModelConfig) -> ConversionRule:
    if name in EMBEDDINGS:
        return table(name, name, config)
    if placement.stacked:
        count = placement.shape[0]
        return per_expert(name, [f"{name}.{number}" for number in range(count)], count)
    return same(name, name)


def merged(parts: Sequence[Tensor], placement: Placement, swap: bool = False) -> Tensor:
    """A tensor from its shards on all tensor-parallel ranks; ``swap`` exchanges its two blocks."""
    if placement.dim is None or (len(parts) == 1 and not (swap and len(placement.parts) == 2)):
        return parts[0]
    count = len(placement.parts)
    blocks = [part.chunk(count, placement.dim) for part in parts]
    order = list(range(count))
    if swap:
        order.reverse()
    return torch.cat([block[number] for number in order for block in blocks], placement.dim)


def reordered(x: Tensor, version: float, config: ModelConfig) -> Tensor:
    """A rank's fused projection in today's order, heads x (q, k, v) x D. In version 0, (q, k, v) is the first dimension; in version 1,
    the last."""
    width = config.head_width
    if version >= 2:
        return x
    if config.attention.groups != config.attention.heads:
        raise ConfigError(
            f"checkpoint version {version} does not support grouped queries, but model.attention.kv_heads={config.attention.kv_heads}"
        )
    if version == 0:
        return x.unflatten(0, (3, -1, width)).transpose(0, 1).flatten(0, 2)
    if version == 1:
        return x.unflatten(0, (-1, width, 3)).transpose(1, 2).flatten(0, 2)
    raise ConfigError(f"checkpoint version {version} is not supported; 0 to 3 are")


def convert(
    folder: Path, target: Path, overrides: list[str], ignored: Sequence[str] = (), weights_only: bool = False
) -> ModelConfig:
    """Import the checkpoint in ``folder`` as the run directory ``target``. ``overrides``: additional model.… settings.

    ``ignored``: options in the checkpoint that are not checked. ConfigError if hpclm does not support the network, if settings and
    weights do not match, or, without ``weights_only``, if hpclm cannot continue the training.
    """
    state = torch_dist.read_torch_dist(folder, weights_only) if distributed(folder) else read_files(folder)
    if state.unread:
        log.warning("the settings in the checkpoint are not used: %s", state.unread)
    if state.args is None and not overrides:
        raise ConfigError(
            f"{folder} does not contain the network's settings; give model.layers=… model.hidden=… model.attention.heads=… and all "
            "others that differ from hpclm's defaults"
        )
    settings_of_run: list[str] = []
    progress = Progress()
    try:
        if ignored:
            state.args = Namespace(**without(vars(state.args or Namespace()), ignored, options.READ, "option"))
        derived = model_settings(state.args) if state.args else {}
        if any(
            name.endswith(experts.ROUTER_BIAS) for name in state.parts
        ):  # versions with the same arguments differ in it
            derived["experts.router_bias"] = True
        config = run.network(derived, overrides)
        if state.moments and state.args:
            settings_of_run = _training(state.args, config)
            progress = training.progress(state)
    except ConfigError as error:
        raise run.located(error, folder) from None
    if not any(override.startswith("model.vocab_size=") for override in overrides):
        log.warning(
            "model.vocab_size=%d is the checkpoint's, which may include padding; if so, give the tokenizer's size",
            config.vocab_size,
        )
    check_depth(config, len(state.parts), str(folder))
    source = Merged(state, config)
    rules = [_rule(name, placement, config) for name, placement in source.placements.items()]
    moments = {moment: Merged(state, config, moment) for moment in state.moments}
    imported = run.ImportedMoments(moments, state.steps)
    weights = run.ImportedWeights(config, source, rules, str(folder), moments=imported)
    with fresh(target, mode=0o700) as staging_dir:
        run.save(staging_dir, run.settings_of(target, config, {}, settings_of_run), weights, progress)
    return config


def _training(args: Namespace, config: ModelConfig) -> list[str]:
    """The run's training settings as key=value; ConfigError if hpclm cannot continue with them."""
    try:
        overrides = training.overrides(args, config)
        configs.load(None, overrides)
    except ConfigError as error:
        lines = [f"the run cannot continue here: {line}" for line in error.problems]
        raise ConfigError([*lines, "to import only the weights, at step 0, give --weights-only"]) from None
    return overrides


def ours(name: str) -> str:
    """Our name of a weight; ``name`` itself without a match."""
    layer = re.fullmatch(r"(?:encoder|transformer|decoder)\.layers\.(\d+)\.(.*)", name)
    prefix, inner, patterns = "", name, OURS
    if layer:
        prefix, inner, patterns = f"block{layer[1]}.", layer[2], IN_LAYER
    for pattern, replacement in patterns:
        match = re.fullmatch(pattern, inner)
        if match:
            return prefix + match.expand(replacement)
    return name

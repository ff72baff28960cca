"""Export a run to a Hugging Face folder, and import such a folder as a run."""

import json
import logging
import math
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.config.reading import json_object
from hpclm.data import tokenizer_folder, tokenizer_writer
from hpclm.data.tokenizer_folder import TokenizerFolder
from hpclm.interop import run
from hpclm.interop.exported import Exported, cast
from hpclm.interop.huggingface import card, custom, families, fp8_blocks, shards, tokenizer, twin
from hpclm.interop.huggingface.family import Family
from hpclm.interop.huggingface.shape import canonical
from hpclm.interop.huggingface.shards import Reader
from hpclm.interop.rules import ConversionRule, first_few
from hpclm.interop.run import RunCheckpoint, TensorSource, fresh
from hpclm.node.hardware import TYPES

log = logging.getLogger(__name__)
SHAPED = dict(
    sliding_window="attention.window", final_logit_softcapping="logit_cap", attn_logit_softcapping="attention.score_cap"
)
SHAPED |= dict(residual_dropout="dropout", logits_scaling="logit_multiplier")
SHAPED |= dict(partial_rotary_factor="rope.fraction", rotary_pct="rope.fraction")
"""Keys of config.json that only a class's ``shape`` reads, with the settings that they become."""
SETTING = re.compile(r"\bmodel(\.\w+)+")
CHOICE_BIAS = ".e_score_correction_bias"


def export_run(
    checkpoint: RunCheckpoint, target: Path, dtype: str = "fp32", limit: float = math.inf, allow_nan: bool = False
) -> str:
    """Export to ``target``, with weights in ``dtype`` and files of at most ``limit`` bytes; returns the class in transformers.

    ConfigError if the network has no Hugging Face form, if a weight is too large for fp16, or if it is not finite without ``allow_nan``.
    """
    config = canonical(checkpoint.config.model)
    family = families.of_network(config)
    rules = list(family.rules(config))
    with fresh(target) as staging_dir:
        with Exported(checkpoint, rules, allow_nan) as exported:
            sizes = [math.prod(exported.shapes[rule.ours]) * TYPES[dtype].itemsize for rule in rules]
            parts = (exported.tensors(part) for part in _divided(rules, sizes, limit))
            shards.write(
                staging_dir, [((name, cast(name, x, _stored_type(name, dtype))) for name, x in part) for part in parts]
            )
        text = checkpoint.text()
        if text is None:
            kept = with_recorded_end(checkpoint)
            tokenizer_writer.write_settings(staging_dir, kept)
        else:
            kept = text.folder
            tokenizer.export(staging_dir, text, config.context)
        if family is custom.FAMILY:
            shutil.copyfile(custom.CODE, staging_dir / custom.CODE.name)
            log.warning(
                "no class of transformers supports this network (%s); %s is written next to the weights: load them with "
                "trust_remote_code=True",
                " | ".join(families.nearest_obstacles(config)),
                custom.CODE.name,
            )
        if family.newer(config):
            log.warning(
                "load this export with transformers 5 or newer: transformers 4 has other rotary positions or scores"
            )
        _write(staging_dir / "config.json", config_json(config, kept.ids, dtype))
        has_tokenizer = (staging_dir / "tokenizer_config.json").is_file()
        readme = card.written(
            checkpoint, target, family.architecture, family is custom.FAMILY, text if has_tokenizer else None, dtype
        )
        (staging_dir / "README.md").write_text(readme, encoding="utf-8")
    return family.architecture


def _stored_type(name: str, dtype: str) -> torch.dtype:
    """The type that a tensor is written in; transformers keeps the bias on the choice of experts in fp32."""
    return torch.float32 if name.endswith(CHOICE_BIAS) else TYPES[dtype]


def config_json(config: ModelConfig, ids: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The folder's config.json. ``ids``: ids of special tokens."""
    family = families.of_network(config)
    kind = str(TYPES[dtype]).removeprefix("torch.")
    return {"architectures": [family.architecture], **family.described(config)} | dict(
        torch_dtype=kind,
        **ids,
    )


def with_recorded_end(checkpoint: RunCheckpoint) -> TokenizerFolder:
    """The known tokens of a run without a known tokenizer: those of its import, and the end of documents in its checkpoint."""
    kept = tokenizer_folder.read(checkpoint.run / "tokenizer")
    noted = checkpoint.manifest.fingerprint.get("data", {}).get("tokenizer") or {}
    end = tokenizer_folder.first(noted.get("eod"))
    if end is None or end in kept.ends:
        return kept
    return replace(kept, generation={**kept.generation, "eos_token_id": end})


def _divided(rules: Sequence[ConversionRule], sizes: Sequence[int], limit: float) -> list[list[ConversionRule]]:
    """``rules`` in consecutive groups. The weights of a group take at most ``limit`` bytes together; a larger weight has its own
    group. ``sizes``: bytes of each weight."""
    parts = [list[ConversionRule]()]
    filled = 0
    for rule, size in zip(rules, sizes, strict=True):
        if parts[-1] and filled + size > limit:
            parts.append([])
            filled = 0
        parts[-1].append(rule)
        filled += size
    return parts


def _write(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


class Prefixed:
    """The tensors of a folder. If it contains the model without its head, they are renamed as in a model with a head."""

    def __init__(self, reader: TensorSource, family: Family, config: ModelConfig, left_out: Collection[str] = ()):
        there = {name for name in reader.names() if not name.endswith(family.buffers or ("\0",))} - {*left_out}
        bare = not any(name.startswith(family.prefix) for name in there)
        self._reader = reader
        heads = [name for name in there if _head(name)]
        self._names = {name: name for name in there}
        if bare:
            self._names = {family.prefix + name: name for name in there if name not in heads}
            self._names |= {name: name for name in heads}
        if not (config.tied or heads):
            raise ConfigError(
                "config.json does not tie the output to the embedding, but the weights have no matrix for the output; give model.tied=true "
                "if the embedding is also the output projection"
            )
        if not config.tied:
            return
        for head in heads:  # some files contain the embedding twice
            del self._names[head]
            tokens = next(rule.theirs[0] for rule in family.rules(config) if rule.ours == "tokens.weight")
            if not torch.equal(reader.read(head), self.read(tokens)):
                raise ConfigError(
                    f"config.json ties the output to the embedding, but {head} in the weights is another matrix; give "
                    "model.tied=false to use this matrix, or remove it"
                )

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._names)

    def read(self, name: str) -> Tensor:
        """The tensor with this ``name`` in the whole model."""
        return self._reader.read(self._names[name])


def import_folder(folder: Path, target: Path, overrides: list[str], pickle: bool = False) -> ModelConfig:
    """Import ``folder`` as the run directory ``target``. ``overrides``: model.… settings that override config.json.

    ConfigError if hpclm does not support the network, or if config.json and weights do not match.
    """
    tree = json_object(folder / "config.json")
    theirs: dict[str, str] = {}
    try:
        family, keys = families.of_config(tree)
        settings = family.settings(keys)
        given = {word.partition("=")[0].strip() for word in overrides}
        names = {ours: key for key, ours in SHAPED.items() if key in tree} | family.theirs
        theirs = {f"model.{ours}": key for ours, key in names.items() if f"model.{ours}" not in given}
        config = run.network(settings, overrides)
    except ConfigError as error:
        lines = [SETTING.sub(lambda name: theirs.get(name[0], name[0]), line) for line in error.problems]
        raise run.located(ConfigError(lines), folder / "config.json") from None
    reader = fp8_blocks.dequantized(Reader(folder, pickle), tree)
    left_out = sorted(name for name in reader.names() if family.left_out(keys, name))
    if left_out:
        log.warning("multi-token prediction, which hpclm does not train, is left out: %s", first_few(left_out))
    source = Prefixed(reader, family, config, left_out)
    weights = run.ImportedWeights(config, source, family.rules(config), str(folder))
    with fresh(target, mode=0o700) as staging_dir:
        data = tokenizer.take(folder, config.vocab_size, staging_dir, target, tree)
        run.save(staging_dir, run.settings_of(target, config, data), weights)
        try:  # after the shapes of the weights were checked, so that the twin is small
            twin.prove(family, keys, run.network(settings, []), Prefixed)
        except ConfigError as error:
            raise run.located(error, folder / "config.json") from None
    return config


def _head(name: str) -> bool:
    return name in ("lm_head.weight", "embed_out.weight", "output.weight")  # the last in HpclmForCausalLM

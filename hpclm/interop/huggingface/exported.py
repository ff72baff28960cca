"""A run's weights as a folder that transformers reads."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hpclm.checkpoint.tensors import Tensors
from hpclm.config import ModelConfig
from hpclm.data.disk.indexed import sidecar
from hpclm.errors import ConfigError
from hpclm.interop.huggingface import families, tokenizer
from hpclm.interop.huggingface.shards import Writer
from hpclm.interop.rules import Rule, check_names
from hpclm.interop.run import Found
from hpclm.interop.target import fresh

log = logging.getLogger(__name__)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(found: Found, target: Path, dtype: str = "fp32", limit: float = math.inf) -> str:
    """Write ``target``, weights as ``dtype`` in files of at most ``limit`` bytes; gives the class that it is for.

    ConfigError where the network has no Hugging Face form, or a weight is too large for fp16.
    """
    config = found.config.model
    family = families.of_network(config)
    rules = list(family.rules(config))
    words = tokenizer.of_run(found.config.data)
    with fresh(target) as draft:
        with Tensors(found.folder, found.manifest) as saved:
            there = [name.removeprefix("model.") for name in saved.shapes() if name.startswith("model.")]
            check_names([rule.ours for rule in rules], there, str(found.folder))
            writer = Writer(draft, limit)
            with tqdm(rules, unit="weight", disable=None) as bar:
                for rule in bar:
                    _add(writer, rule, saved, DTYPES[dtype])
            writer.finish()
        end = None if words is None else words.eod
        _write(draft / "config.json", config_json(config, end, dtype))
        _write(draft / "generation_config.json", {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None})
        if words is not None:
            tokenizer.write(draft, words, _files(found), config.context)
    return family.architecture


def config_json(config: ModelConfig, end: int | None, dtype: str) -> dict[str, Any]:
    """The folder's config.json; ``end`` is the id of the end-of-document token."""
    family = families.of_network(config)
    kind = str(DTYPES[dtype]).removeprefix("torch.")
    return {"architectures": [family.architecture], **family.described(config)} | dict(
        vocab_size=config.vocab_size,
        tie_word_embeddings=config.tied,
        initializer_range=config.init_std,
        bos_token_id=end,
        eos_token_id=end,
        torch_dtype=kind,
    )


def _add(writer: Writer, rule: Rule, saved: Tensors, dtype: torch.dtype) -> None:
    whole = saved.whole(f"model.{rule.ours}")
    for name, piece in zip(rule.theirs, rule.split(whole), strict=True):
        cast = piece.to(dtype)
        if not cast.isfinite().all() and piece.isfinite().all():
            raise ConfigError(
                f"{name} has values up to {piece.abs().max():.3g}, which fp16 cannot hold; take --dtype bf16"
            )
        writer.add(name, cast)


def _files(found: Found) -> list[str]:
    """The files of the run's tokenizer, as its settings or its dataset's note name them."""
    data = found.config.data
    if data.tokenizer is not None:
        return data.tokenizer_files
    notes = (sidecar(prefix) for prefix in data.prefixes())
    return next((list(note["tokenizer_files"]) for note in notes if note), [])


def _write(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")

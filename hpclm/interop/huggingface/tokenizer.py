"""The tokenizer beside the weights: written for transformers, and found in its folders."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from hpclm.config import DataConfig
from hpclm.data import tokenizers
from hpclm.data.tokenizers import Options, Tokenizer
from hpclm.data.tokenizers.huggingface import Library
from hpclm.data.tokenizers.sentencepieces import SentencePiece
from hpclm.errors import ConfigError
from hpclm.interop.huggingface.shards import read_json

log = logging.getLogger(__name__)
KINDS = (
    ("json", ("tokenizer.json",)),
    ("gpt2", ("vocab.json", "merges.txt")),
    ("sentencepiece", ("tokenizer.model",)),
    ("sentencepiece", ("spiece.model",)),
)
"""Our kinds, and the files of each in a Hugging Face folder; the first that is there is taken."""


def of_run(data: DataConfig) -> Tokenizer | None:
    """The run's tokenizer; None, with a word, where it is not known or its files are gone."""
    if data.source != "indexed" and data.tokenizer is None:
        return None
    try:
        return tokenizers.of_run(data)
    except ConfigError as error:
        log.warning("no tokenizer is written: %s", error)
        return None


def write(folder: Path, tokenizer: Tokenizer, paths: list[str], context: int) -> None:
    """Put what transformers' AutoTokenizer reads into ``folder``; ``paths`` are the tokenizer's own files."""
    kind = tokenizer.identity["kind"]
    settings: dict[str, Any] = {"model_max_length": context, "clean_up_tokenization_spaces": False}
    if isinstance(tokenizer, Library):
        text = Path(paths[0]).read_text(encoding="utf-8") if kind == "json" else tokenizer.model.to_str(pretty=True)
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        if kind == "gpt2":
            for path, name in zip(paths, ("vocab.json", "merges.txt"), strict=True):
                shutil.copyfile(path, folder / name)
        end = None if tokenizer.eod is None else tokenizer.model.id_to_token(tokenizer.eod)
        settings |= {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"eos_token": end} if end else {})
    elif isinstance(tokenizer, SentencePiece):
        bpe = merges(tokenizer)
        name = "tokenizer.model" if bpe else "spiece.model"  # a class that takes one for the other gives wrong ids
        (folder / name).write_bytes(tokenizer.model.serialized_model_proto())
        if not bpe:
            log.warning("%s is no BPE, which transformers would read otherwise; use it with sentencepiece itself", name)
            return
        end = None if tokenizer.eod is None else tokenizer.model.id_to_piece(tokenizer.eod)
        settings |= {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "legacy": False, "eos_token": end}
    else:
        log.warning("the %s has no Hugging Face form; no tokenizer is written", tokenizers.describe(tokenizer.identity))
        return
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def merges(tokenizer: SentencePiece) -> bool:
    """Whether a sentencepiece model is a BPE: its scores are the ranks of merges, where others have probabilities."""
    return all(float(tokenizer.model.get_score(id)).is_integer() for id in range(tokenizer.size))


def take(folder: Path, entries: int, draft: Path, final: Path) -> dict[str, Any]:
    """Copy the tokenizer of a Hugging Face folder into the run ``draft``, and give the data settings that name it.

    ``entries``: of the network's vocabulary. ``final``: where the run will be. {} where there is none that hpclm reads, with a word.
    """
    found = next(((kind, names) for kind, names in KINDS if all((folder / name).is_file() for name in names)), None)
    if found is None:
        log.warning("%s has no tokenizer that hpclm reads; set data.tokenizer and data.tokenizer_files", folder)
        return {}
    kind, names = found
    try:
        made = _built(kind, [str(folder / name) for name in names], _end(folder))
        if made.size > entries:
            raise ConfigError(f"it has {made.size} entries, and the network {entries}")
    except ConfigError as error:
        log.warning("the tokenizer in %s is left out: %s", folder, "; ".join(error.problems))
        return {}
    place = draft / "tokenizer"
    place.mkdir()
    for name in names:
        shutil.copyfile(folder / name, place / name)
    settings = dict(tokenizer=kind, tokenizer_files=[str(final.absolute() / "tokenizer" / name) for name in names])
    end = made.identity.get("options", {}).get("eod")
    return settings | ({"eod": end} if end else {})


def _built(kind: str, paths: list[str], end: str | None) -> Tokenizer:
    """The tokenizer, with the folder's end-of-text token where its kind finds no end itself or another."""
    made = tokenizers.build(kind, paths)
    if end is None:
        return made
    try:
        other = tokenizers.build(kind, paths, Options(eod=end))
    except ConfigError as error:
        log.warning("the end-of-text token %s is not used: %s", end, "; ".join(error.problems))
        return made
    return made if made.eod == other.eod else other


def _end(folder: Path) -> str | None:
    """Text of the end-of-text token that the folder's notes name."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            end = read_json(folder / name).get("eos_token")
            text = end.get("content") if isinstance(end, dict) else end
            if isinstance(text, str) and text:
                return text
    return None

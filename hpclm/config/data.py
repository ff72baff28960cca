"""Settings of the data: where samples come from, and how they are cut and ordered."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from os.path import realpath
from pathlib import Path
from typing import Any, ClassVar, Literal

from hpclm.base.errors import ConfigError
from hpclm.config.phases import Phase
from hpclm.config.reading import number
from hpclm.config.section import Rule, Section, problems_of
from hpclm.config.setting import setting

SOURCES = {"indexed": "hpclm.data.corpus:corpus", "synthetic": "hpclm.data.synthetic:synthetic"}
FILES = "data.source=indexed|own"
SPLIT = "not data.train: only data.prefix and data.blend are split"
UNSPLIT = "data.train: without it, data.split divides data.prefix and data.blend"
NO_LINES = "not data.break_mode"
UNPACKED = "data.order!=packed: it pads samples and masks the loss between documents"
TOKENIZERS = {
    "bytes": "hpclm.preprocess.tokenizers.plain:Bytes",
    "fairseq": "hpclm.preprocess.tokenizers.fairseq:Fairseq",
    "gpt2": "hpclm.preprocess.tokenizers.huggingface:GPT2",
    "json": "hpclm.preprocess.tokenizers.huggingface:TokenizerJson",
    "sentencepiece": "hpclm.preprocess.tokenizers.sentencepieces:SentencePiece",
    "whitespace": "hpclm.preprocess.tokenizers.plain:Whitespace",
    "wordpiece": "hpclm.preprocess.tokenizers.huggingface:WordPiece",
    "wordpiece_lower": "hpclm.preprocess.tokenizers.huggingface:WordPieceLower",
}


def _readable(name: str) -> Rule:
    return Rule(lambda data: getattr(data, name) and problems_of(mixture, getattr(data, name), f"data.{name}"))


def _unweighted(train: list[str]) -> bool:
    """Whether several datasets have no weights."""
    return len(train) > 1 and not problems_of(mixture, train, "data.train") and mixture(train, "").weights is None


def _is_split(text: str) -> bool:
    try:
        numbers = [float(part) for part in text.replace("/", ",").split(",")]
    except ValueError:
        return False
    return len(numbers) <= 3 and min(numbers) >= 0 and 0 < sum(numbers) < math.inf


def _trained(data: Any) -> Iterator[str]:
    """A problem for each held-out list of datasets that contains a training dataset."""
    if not data.train:
        return
    lists = {name: mixture(getattr(data, name), name).prefixes for name in ("valid", "test") if getattr(data, name)}
    sets = named_mixtures(data.validation, "validation").values()
    lists["validation"] = tuple(prefix for entry in sets for prefix in entry.prefixes)
    trained = set(map(realpath, mixture(data.train, "train").prefixes))
    for name, prefixes in lists.items():
        both = next((prefix for prefix in prefixes if realpath(prefix) in trained), None)
        if both:
            yield f"data.{name} has no effect as held-out data: data.train contains {both} too, so its loss is that of text seen in training"


@dataclass(frozen=True)
class DataConfig(Section, key="data"):
    """Training, validation and test data."""

    source: str = setting(
        "indexed", "indexed: Megatron's .bin/.idx; synthetic: no files; or package.module:name.", names=SOURCES
    )
    prefix: str | None = setting(None, "Path of the dataset without .bin or .idx.", path=True, only_with=(FILES, SPLIT))
    blend: list[str] = setting(
        [],
        "Datasets: weights and paths, [0.3, a, 0.7, b], or paths only, each read completely.",
        path=True,
        only_with=(FILES, SPLIT),
    )
    split: str = setting(
        "969,30,1",
        "Proportions of the documents, or tokens, of data.prefix or data.blend for training, validation and test.",
        only_with=(FILES, SPLIT),
    )
    split_by: Literal["documents", "tokens"] | None = setting(
        None,
        "Divide each dataset between documents, or by tokens: its first tokens train. null: tokens if documents "
        "would leave less than one sample for training or validation; decided when a run begins.",
        only_with=(FILES, SPLIT),
    )
    train: list[str] = setting([], "Training datasets, as in data.blend but not split.", path=True, only_with=FILES)
    valid: list[str] = setting([], "Validation datasets.", path=True, only_with=(FILES, UNSPLIT))
    test: list[str] = setting([], "Test datasets.", path=True, only_with=(FILES, UNSPLIT))
    validation: list[str] = setting(
        [],
        "More validation datasets, evaluated separately: [law=/data/law, code=/data/code]. A repeated name adds "
        "to its set.",
        path="=",
        only_with=FILES,
    )
    order: Literal["mcore", "bigscience", "dse", "packed", "per_dataset"] = setting(
        "mcore",
        "Sample order of Megatron-core, BigScience or Megatron-LM v1.1.5 (dse); packed: whole documents, as many "
        "as fit; per_dataset: each dataset in a separate order, which phases go on with.",
        only_with=(FILES, NO_LINES),
    )
    phases: list[Phase] = setting(
        [],
        "[{from: TOKENS, data.train: [0.5, a, 0.5, b], optim.lr: 1e-3}]: settings that change after this many tokens "
        "(hpclm docs data).",
        path=True,
        only_with="data.order=per_dataset",
    )
    max_epochs: float | None = setting(
        None,
        "Refuse a run that would read any training dataset more often than this.",
        more_than=0,
        only_with="data.order=per_dataset",
    )
    break_mode: Literal["none", "complete", "complete_doc", "eos"] | None = setting(
        None, "fairseq's --sample-break-mode: padded blocks of lines; null: Megatron's samples.", only_with=FILES
    )
    keep_partial: bool = setting(
        False,
        "Keep the rest of validation and test data as one padded, masked sample.",
        only_with=(FILES, NO_LINES, UNPACKED),
    )
    short_part: Literal["refuse", "repeat"] = setting(
        "refuse",
        "Refuse or, as Megatron does, repeat a part with fewer tokens than one sample.",
        only_with=(FILES, NO_LINES, UNPACKED),
    )
    loss_mask: Literal["auto", "require", "ignore"] = setting(
        "auto",
        "Use the dataset PREFIX_loss, which marks the tokens that count in the loss; auto: if there is one.",
        only_with=FILES,
    )
    without: str | None = setting(
        None,
        "File with documents to leave out of training from here on, one `PREFIX NUMBER`, or `NUMBER`, per line: "
        "end-of-document tokens replace theirs, and count in no loss; the order stays.",
        path=True,
        only_with=FILES,
    )
    index_cache: str | None = setting(
        None,
        "Folder for indices of the sample order; null: PREFIX.index beside each large dataset.",
        path=True,
        only_with=(FILES, NO_LINES),
    )
    workers: int = setting(1, "Threads that prefetch samples; 0: none.", at_least=0, unit="threads")
    tokenizer: str | None = setting(
        None,
        "bytes, fairseq, gpt2, json, sentencepiece, whitespace, wordpiece, wordpiece_lower, or "
        "package.module:Name; null: the dataset's.",
        names=TOKENIZERS,
        only_with=FILES,
    )
    tokenizer_files: list[str] = setting(
        [],
        "vocab.json and merges.txt (gpt2), tokenizer.json (json), .model (sentencepiece), vocab.json "
        "(whitespace), vocab.txt (wordpiece), dict.txt and optionally .model (fairseq).",
        path=True,
        only_with="data.tokenizer: set the kind of tokenizer",
    )
    eod: str | None = setting(
        None,
        "End-of-document token; null: the tokenizer's default.",
        only_with=(FILES, "data.tokenizer: a dataset's own tokenizer is used with its own token"),
    )
    eod_mask_loss: bool = setting(False, "Mask the loss of the token after an end of document.", only_with=UNPACKED)
    reset_position_ids: bool = setting(False, "Restart positions at each document.")
    reset_attention_mask: bool = setting(False, "Attend only within a document.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda data: data.break_mode and data.split_by == "tokens",
            "data.split_by=tokens divides inside lines, which {data.break_mode} reads whole; set data.split_by=documents",
        ),
        Rule(
            lambda data: data.order == "packed" and data.source not in ("indexed", "synthetic"),
            "data.order=packed packs datasets on disk; {data.source} orders its own samples",
        ),
        Rule(
            lambda data: data.order == "per_dataset" and (data.source != "indexed" or not data.train),
            "data.order=per_dataset needs datasets in data.train: [0.7, a, 0.3, b]",
        ),
        Rule(
            lambda data: data.order == "per_dataset" and _unweighted(data.train),
            "data.order=per_dataset needs a weight for each dataset of {data.train}, such as [0.7, a, 0.3, b]",
        ),
        Rule(
            lambda data: data.loss_mask == "require" and data.order != "packed" and data.source != "synthetic",
            "data.loss_mask=require needs data.order=packed",
        ),
        Rule(
            lambda data: not _is_split(data.split),
            "{data.split} must be up to three non-negative numbers, such as 969,30,1",
        ),
        Rule(
            lambda data: data.prefix and data.blend and not data.train,
            "{data.prefix} and {data.blend} cannot be combined; put the path into data.blend",
        ),
        *(_readable(name) for name in ("blend", "train", "valid", "test")),
        Rule(lambda data: problems_of(named_mixtures, data.validation, "data.validation")),
    )
    warnings: ClassVar[tuple[Rule, ...]] = (Rule(_trained),)

    @property
    def all_tokens_count(self) -> bool:
        """Whether training samples are never padded and no token of them is masked in the loss."""
        padded = self.order == "packed" or self.break_mode or self.source not in SOURCES
        return not (padded or self.eod_mask_loss or self.without)

    def prefixes(self) -> list[str]:
        """The prefixes of all datasets that the settings name."""
        mixtures = [mixture(entries, "data") for entries in (self.blend, self.train, self.valid, self.test) if entries]
        mixtures += named_mixtures(self.validation, "data.validation").values()
        return list(filter(None, [self.prefix, *(prefix for entry in mixtures for prefix in entry.prefixes)]))


@dataclass(frozen=True)
class Mixture:
    """Datasets that are read as one, as Megatron lists them: paths, or weights and paths."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    """In any unit; None: each dataset is read completely."""


def mixture(entries: list[str], setting: str) -> Mixture:
    """Parse paths, or alternating weights and paths; ConfigError, which names ``setting``, for invalid entries."""
    if number(entries[0]) is None:
        stray = [entry for entry in entries if number(entry) is not None]
        if stray:
            raise ConfigError(
                f"{setting}={entries}: {stray[0]} is a weight, but the first dataset has none; give all or none"
            )
        return Mixture(tuple(entries), None)
    weights = [number(entry) for entry in entries[::2]]
    prefixes = entries[1::2]
    if len(entries) % 2 or None in weights or any(number(prefix) is not None for prefix in prefixes):
        raise ConfigError(
            f"{setting}={entries} must be alternating weights and paths, such as [0.3, a, 0.7, b], or only paths; "
            "write ./2024 for a path that looks like a number"
        )
    given = tuple(weight for weight in weights if weight is not None)
    if not all(weight > 0 and math.isfinite(weight) for weight in given):
        raise ConfigError(
            f"{setting}={entries}: weights must be more than 0; leave out datasets that should not be read"
        )
    if len(set(prefixes)) != len(prefixes):
        raise ConfigError(f"{setting}={entries} contains a dataset twice; add up its weights")
    return Mixture(tuple(prefixes), given)


def named_mixtures(entries: list[str], setting: str) -> dict[str, Mixture]:
    """Parse a list of name=path; a repeated name adds a dataset. ConfigError, which names ``setting``, for other entries."""
    paths: dict[str, list[str]] = {}
    for entry in entries:
        name, sign, prefix = entry.partition("=")
        if not (name and sign and prefix) or "/" in name or not name.isprintable():
            raise ConfigError(f"{setting}: {entry!r} must be name=path, such as law=/data/law_text_document")
        paths.setdefault(name, []).append(prefix)
    return {name: Mixture(tuple(prefixes), None) for name, prefixes in paths.items()}


def absolute(data: DataConfig) -> DataConfig:
    """``data`` with absolute paths."""

    def whole(path: str) -> str:
        return str(Path(path).absolute())

    def listed(entries: list[str]) -> list[str]:
        if not entries:
            return []
        paths = set(mixture(entries, "data").prefixes)
        return [whole(entry) if entry in paths else entry for entry in entries]

    return replace(
        data,
        prefix=data.prefix and whole(data.prefix),
        blend=listed(data.blend),
        train=listed(data.train),
        phases=[
            {**phase, "data.train": listed(phase["data.train"])} if "data.train" in phase else phase
            for phase in data.phases
        ],
        valid=listed(data.valid),
        test=listed(data.test),
        validation=[f"{name}={whole(path)}" for name, _, path in (entry.partition("=") for entry in data.validation)],
        without=data.without and whole(data.without),
        index_cache=data.index_cache and whole(data.index_cache),
        tokenizer_files=[whole(file) for file in data.tokenizer_files],
    )

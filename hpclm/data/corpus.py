"""The datasets on disk that a run reads: which parts it has, and the tokenizer they share."""

from collections.abc import Iterator
from typing import Any

from hpclm.config import DataConfig
from hpclm.config.mixture import Mixture, mixture, named
from hpclm.data import tokenizers
from hpclm.data.disk.indexed import IndexedDataset, sidecar
from hpclm.data.order import split_bounds, split_parts
from hpclm.data.portions import Part, Portion, Reading
from hpclm.data.sources import Samples
from hpclm.errors import ConfigError

PARTS = ("train", "valid", "test")
NAMED = "valid/"  # before the names of further validation sets


class Corpus:
    """The source for ``data.source=indexed``."""

    def __init__(self, settings: DataConfig, context: int, seed: int, vocab_size: int):
        self.settings, self.context = settings, context
        self._datasets: dict[str, IndexedDataset] = {}
        wanted = dict(listed(settings))
        for entry in wanted.values():
            for prefix in entry.prefixes:
                self._datasets.setdefault(prefix, opened(prefix))
        tokenizer = shared_tokenizer(settings, list(self._datasets), vocab_size)
        self.eod: int | None = tokenizer.get("eod")
        if not settings.break_mode:
            eos = -1
        elif self.eod is not None:
            eos = self.eod
        else:
            raise ConfigError(
                "data.break_mode needs the end-of-line token, which the dataset does not name; set data.tokenizer and "
                "data.tokenizer_files, for example to fairseq and its dict.txt"
            )
        self._reading = Reading(context, seed, settings.order, settings.break_mode, settings.index_cache, eos)
        self.parts = {name: self._part(name, entry) for name, entry in wanted.items()}
        self.held_out = [name for name in self.parts if name.startswith("valid")]
        train = self.parts["train"]
        self.identity: dict[str, Any] = {
            "datasets": [portion.identity() for portion in train.portions],
            "weights": train.weights and list(train.weights),
            "order": settings.order,
            "break_mode": settings.break_mode,
            "tokenizer": tokenizer or None,
        }

    def per_epoch(self, part: str) -> int:
        """Samples in one pass of the part; 0 where it is shorter than one."""
        return self.parts[part].per_epoch if part in self.parts else 0

    def samples(self, part: str, wanted: int | None) -> Samples:
        """At least ``wanted`` samples of the part, or those of one pass; ConfigError where it is shorter than one."""
        if part not in self.parts:
            raise ConfigError(f"the settings name no data for {part!r}; they do for {', '.join(self.parts)}")
        return self.parts[part].samples(wanted, self.settings, self.context)

    def _part(self, name: str, entry: Mixture) -> Part:
        keep = self.settings.keep_partial and name != "train"
        own = self.settings.train or name.startswith(NAMED)  # datasets of its own, read whole
        portions = []
        for prefix in entry.prefixes:
            dataset = self._datasets[prefix]
            span = range(len(dataset))
            if not own:
                span = range(*split_bounds(self.settings.split, len(dataset), self.settings.order)[PARTS.index(name)])
            portions.append(Portion(dataset, span, self._reading, keep))
        return Part(name, tuple(portions), entry.weights)


def listed(settings: DataConfig) -> Iterator[tuple[str, Mixture]]:
    """The parts that the settings keep data for, and their datasets."""
    if settings.train:
        for name in PARTS:
            if getattr(settings, name):
                yield name, mixture(getattr(settings, name), f"data.{name}")
    else:
        whole = mixture(settings.blend, "data.blend") if settings.blend else Mixture((settings.prefix or "",), None)
        for name, share in zip(PARTS, split_parts(settings.split), strict=True):
            if name == "train" or share:
                yield name, whole
    for name, entry in named(settings.validation, "data.validation").items():
        yield NAMED + name, entry


def opened(prefix: str) -> IndexedDataset:
    """The dataset; ConfigError where there is none, or nothing in it."""
    if not prefix:
        raise ConfigError("data.prefix is not set; give the path of a dataset made by 'hpclm preprocess'")
    dataset = IndexedDataset(prefix)
    if not len(dataset.flat):
        raise ConfigError(f"dataset {dataset.prefix} holds no tokens ({len(dataset)} sequences)")
    return dataset


def corpus(data: DataConfig, context: int, seed: int, vocab_size: int) -> Corpus:
    """The source for ``data.source=indexed``; ConfigError where datasets or tokenizer do not fit the settings."""
    return Corpus(data, context, seed, vocab_size)


def shared_tokenizer(settings: DataConfig, prefixes: list[str], vocab_size: int) -> dict[str, Any]:
    """Identity of the tokenizer that the settings or the datasets' notes name; {} where none does.

    ConfigError where two of them differ, or the model's vocabulary is smaller.
    """
    known: list[tuple[str, dict[str, Any]]] = []
    if settings.tokenizer is not None:
        options = tokenizers.Options(settings.eod, settings.extra_ids)
        known.append(
            ("data.tokenizer", tokenizers.build(settings.tokenizer, settings.tokenizer_files, options).identity)
        )
    for prefix in prefixes:
        note = sidecar(prefix)
        if note:
            known.append((f"dataset {prefix}", note["tokenizer"]))
    for place, identity in known[1:]:
        differs = tokenizers.mismatch(identity, known[0][1])
        if differs:
            way_out = (
                "leave data.tokenizer out to use the dataset's own"
                if settings.tokenizer
                else "make the datasets with one tokenizer"
            )
            raise ConfigError(f"{place} and {known[0][0]} do not have the same tokenizer: {differs}; {way_out}")
    if not known:
        return {}
    place, identity = known[0]
    if identity["size"] > vocab_size:
        raise ConfigError(
            f"model.vocab_size={vocab_size} is smaller than the {identity['size']} entries of the {identity['kind']} "
            f"tokenizer of {place}; set model.vocab_size={identity['size']}"
        )
    return identity

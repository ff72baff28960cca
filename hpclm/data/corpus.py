"""The datasets on disk that a run reads, divided into splits, and their common tokenizer."""

import logging
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.base.files import typed
from hpclm.config import DataConfig
from hpclm.config.data import Mixture, mixture, named_mixtures
from hpclm.config.phases import Timeline
from hpclm.config.section import no_effect
from hpclm.data import exclusion, loss_mask, tokenizer_folder, tokenizers
from hpclm.data.content import DIGEST, check_some, noted
from hpclm.data.exclusion import Exclusion
from hpclm.data.indexed import IndexedDataset, sidecar
from hpclm.data.order import split_bounds, split_parts
from hpclm.data.scan import SharedFacts
from hpclm.data.sources import NEED_EOD, WITHOUT, Samples
from hpclm.data.splits import DatasetSlice, SampleSettings, Split
from hpclm.data.streams import PhasedSamples, Stream, Stretch, stretch

log = logging.getLogger(__name__)
SPLITS = ("train", "valid", "test")
SAMPLED = 64  # blocks verified when a run starts, in all datasets together
FIRST = 1 << 20  # tokens checked against the vocabulary at start, in a dataset without PREFIX.json
ENDS = 64  # documents examined for an end-of-document token
WASTEFUL = 2  # a vocabulary this many times larger than the tokenizer's is not just padded
NAMED = "valid/"  # prefix of the names of further validation sets


class Corpus:
    """The source for ``data.source=indexed``."""

    def __init__(self, settings: DataConfig, context: int, seed: int, vocab_size: int, facts: SharedFacts):
        self.settings = settings
        self.context = context
        self._datasets: dict[str, IndexedDataset] = {}
        mixtures = dict(listed(settings))
        self._mixtures = [*mixtures_of_phases(settings)]
        for entry in [*mixtures.values(), *self._mixtures]:
            for prefix in entry.prefixes:
                if prefix not in self._datasets:
                    self._datasets[prefix] = open_dataset(prefix, facts)
        masks = {prefix: loss_mask.opened(dataset, settings) for prefix, dataset in self._datasets.items()}
        self._masks = {prefix: mask for prefix, mask in masks.items() if mask is not None}
        tokenizer = facts.find("tokenizer", lambda: shared_tokenizer(settings, list(self._datasets), vocab_size))
        if not tokenizer:
            for dataset in self._datasets.values():
                dataset.once("vocabulary", partial(check_tokens, dataset, vocab_size))
        self.eod: int | None = tokenizer.get("eod")
        if settings.break_mode and self.eod is None:
            raise ConfigError(
                "data.break_mode needs the end-of-line token, which the dataset does not name; set data.tokenizer and "
                "data.tokenizer_files, for example to fairseq and its dict.txt"
            )
        eos = -1 if self.eod is None else self.eod  # only break_mode reads it
        repeat = settings.short_part == "repeat"
        order = "mcore" if settings.order == "per_dataset" else settings.order  # of data that are held out
        self._sampling = SampleSettings(context, seed, order, settings.break_mode, settings.index_cache, eos, repeat)
        self.exclusion: Exclusion | None = None
        """The documents that training leaves out."""
        if settings.without is not None:
            self.exclusion = self._exclusion(settings.without, facts)
        self.splits = {name: self._split(name, entry) for name, entry in mixtures.items()}
        self.held_out = [name for name in self.splits if name.startswith("valid")]
        self.fingerprint: dict[str, Any] = facts.find("fingerprint", lambda: self._fingerprint(tokenizer))

    def _exclusion(self, path: str, facts: SharedFacts) -> Exclusion:
        if self.eod is None:
            raise ConfigError(
                "data.without replaces documents by the end-of-document token, which the dataset does not name; set data.tokenizer and "
                "data.tokenizer_files"
            )
        text = facts.find(WITHOUT, lambda: exclusion.read(path))
        return Exclusion(text, path, self._datasets.values(), self.eod)

    def check_content(self) -> list[str]:
        """Verify random blocks of the datasets against the hashes in PREFIX.json. Returns the findings, one sentence each.

        ConfigError if a block differs.
        """
        datasets = self._datasets | {str(mask.prefix): mask for mask in self._masks.values()}
        blocks = max(1, SAMPLED // len(datasets))
        draw = random.Random()
        looked = 0
        total = 0
        unknown = []
        for prefix, dataset in datasets.items():
            content = noted(prefix)
            if content is None:
                unknown.append(prefix)
                continue
            looked += check_some(dataset, content, blocks, draw)
            total += len(content.blocks) // DIGEST
        said = []
        if looked:
            said.append(
                f"data: verified {looked:,} random blocks of {total:,}, each of 1 MiB; hpclm data verify reads all"
            )
        if unknown:
            names = ", ".join(unknown[:3])
            if len(unknown) > 3:
                names += f" and {len(unknown) - 3} more"
            command = f"hpclm data verify --record {' '.join(map(typed, unknown))}"
            said.append(
                f"data: lengths and index of {names} are valid; their tokens cannot be verified without hashes; to add them: {command}"
            )
        return said

    def without_effect(self) -> list[str]:
        """A sentence for each setting without effect on these datasets, and for data that teach nothing."""
        said = []
        settings = self.settings
        names = [f"data.{name}=true" for name in NEED_EOD if getattr(settings, name)]
        if names and self.eod is not None and settings.order != "packed":
            lacking = [prefix for prefix, dataset in self._datasets.items() if not holds(dataset, self.eod)]
            if lacking:
                said.append(
                    f"{no_effect(names)} on {', '.join(lacking)}: no end-of-document token ({self.eod}) was found there, neither at the end "
                    "of documents nor in the first tokens; hpclm preprocess --append-eod adds such tokens"
                )
        if settings.loss_mask == "ignore" and not any(map(loss_mask.exists, self._datasets.values())):
            said.append("data.loss_mask=ignore has no effect: no dataset has a loss mask")
        for name, split in self.splits.items():
            said += [
                f"{part.masked_out:,} of {len(part.span):,} sequences of the {name} split of {part.dataset.prefix} have no token that "
                "counts in the loss: they are read but teach nothing; preprocess again without them"
                for part in split.slices
                if part.masked_out
            ]
        return said

    @cached_property
    def _streams(self) -> dict[str, Stream]:
        """The stream of each training dataset, by prefix."""
        prefixes = tuple(dict.fromkeys(prefix for entry in self._mixtures for prefix in entry.prefixes))
        parts = self._split("train", Mixture(prefixes, None)).slices
        return {prefix: Stream(part) for prefix, part in zip(prefixes, parts, strict=True)}

    def check_phases(self, timeline: Timeline, end: int) -> None:
        """ConfigError if a run until sample ``end`` would read a dataset more often than data.max_epochs allows, or if a mixture has
        the same dataset twice."""
        planned: dict[str, float] = {}
        for number, entry in enumerate(self._mixtures):
            names: dict[str, str] = {}
            for prefix in entry.prefixes:
                same = names.setdefault(self._streams[prefix].key, prefix)
                if same != prefix:
                    raise ConfigError(
                        f"data.train or data.phases: {same} and {prefix} have the same tokens; add up their weights"
                    )
            begin = timeline.begins[number].samples
            stop = timeline.begins[number + 1].samples if number + 1 < len(timeline.begins) else end
            weights = entry.weights or (1.0,)
            tokens = max(0, min(stop, end) - begin) * timeline.settings[number].model.context
            for prefix, weight in zip(entry.prefixes, weights, strict=True):
                key = self._streams[prefix].key
                planned[key] = planned.get(key, 0.0) + tokens * weight / sum(weights)
        most = self.settings.max_epochs
        for prefix, stream in self._streams.items():
            often = planned.get(stream.key, 0.0) / stream.tokens
            if most is not None and often > most:
                raise ConfigError(
                    f"the run would read {prefix}, which has {stream.tokens:,} tokens, {often:.2f} times; data.max_epochs={most:g} allows "
                    "less: lower its weight, shorten the run, or raise data.max_epochs"
                )

    def in_phases(self, timeline: Timeline, end: int) -> PhasedSamples:
        """The training samples of a run until sample ``end``, or until a phase that needs another start of the ranks."""
        self.check_phases(timeline, end)
        position = timeline.position
        first = max(len(position.read) - 1, 0)
        begins = timeline.begins
        stretches: list[Stretch] = []
        for phase in range(first, timeline.next_restart(position.samples)):
            begin = begins[phase]
            if stretches:
                begin = replace(begin, sources=stretches[-1].after(stretches[-1].count))
            stop = begins[phase + 1].samples if phase + 1 < len(begins) else end
            entry = self._mixtures[phase]
            split = self._split("train", entry)
            streams = [self._streams[prefix] for prefix in entry.prefixes]
            count = max(0, min(stop, end) - begin.samples)
            context = timeline.settings[phase].model.context
            again = phase > 0 and self.settings.phases[phase - 1].get("again", False)
            stretches.append(stretch(split, streams, begin, count, context, again))
        short = Counter(Path(prefix).name for prefix in self._streams)
        names = {
            stream.key: Path(prefix).name if short[Path(prefix).name] == 1 else prefix
            for prefix, stream in self._streams.items()
        }
        return PhasedSamples(stretches, position.read[:first], names)

    def per_epoch(self, split: str) -> int:
        """Samples in one epoch of the split; 0 if it is shorter than a sample."""
        if split == "train" and self.settings.order == "per_dataset":  # a stream has no end
            return max(1, sum(stream.tokens for stream in self._streams.values()) // self.context)
        return self.splits[split].per_epoch if split in self.splits else 0

    def bytes_per_token(self, split: str) -> float | None:
        """See Split.bytes_per_token; None also if not every token counts in the loss."""
        held_out = replace(self.settings, without=None)  # only training leaves documents out
        return self._known(split).bytes_per_token if held_out.all_tokens_count else None

    def check(self, split: str, requested: int | None) -> None:
        """ConfigError if ``samples`` cannot provide ``requested`` samples; reads and builds nothing large."""
        self._known(split).check(requested, self.settings, self.context)

    def samples(self, split: str, requested: int | None) -> Samples:
        """At least ``requested`` samples of the split, or one epoch; ConfigError if the split is shorter than one sample."""
        return self._known(split).samples(requested, self.settings, self.context)

    def _known(self, split: str) -> Split:
        if split not in self.splits:
            raise ConfigError(f"the settings define no data for {split!r}, only for {', '.join(self.splits)}")
        return self.splits[split]

    def _fingerprint(self, tokenizer: dict[str, Any]) -> dict[str, Any]:
        train = self.splits["train"]
        return {
            "datasets": [part.fingerprint() for part in train.slices],
            "weights": train.weights and list(train.weights),
            "order": self.settings.order,
            "break_mode": self.settings.break_mode,
            "tokenizer": tokenizer or None,
            **({"phases": self._phases()} if self.settings.order == "per_dataset" else {}),
        }

    def _phases(self) -> list[dict[str, Any]]:
        """The phases after the first, with hashes of their datasets (JSON)."""
        phases: list[dict[str, Any]] = []
        for changes, entry in zip(self.settings.phases, self._mixtures[1:], strict=True):
            phases.append(dict(changes))
            if "data.train" in changes:
                hashes = [self._datasets[prefix].fingerprint["bin"] for prefix in entry.prefixes]
                phases[-1]["data.train"] = [list(entry.weights or ()), hashes]
        return phases

    def _split(self, name: str, entry: Mixture) -> Split:
        keep = self.settings.keep_partial and name != "train"
        separate = self.settings.train or name.startswith(NAMED)  # not split
        slices = []
        for prefix in entry.prefixes:
            dataset = self._datasets[prefix]
            if not separate and self.settings.split_by == "tokens":
                if prefix in self._masks:
                    raise ConfigError(
                        f"data.split_by=tokens would divide inside the conversations of {prefix}, which has a loss mask; set "
                        "data.split_by=documents, or list its parts in data.train and data.valid"
                    )
                inside = range(*split_bounds(self.settings.split, dataset.token_count)[SPLITS.index(name)])
                slices.append(DatasetSlice.of_tokens(dataset, inside, self._sampling, keep))
                continue
            span = range(len(dataset))
            if not separate:
                span = range(*split_bounds(self.settings.split, len(dataset), self.settings.order)[SPLITS.index(name)])
            slices.append(DatasetSlice(dataset, span, self._sampling, keep, self._masks.get(prefix)))
        return Split(name, tuple(slices), entry.weights)


def listed(settings: DataConfig) -> Iterator[tuple[str, Mixture]]:
    """The splits that the settings define, with their datasets."""
    if settings.train:
        for name in SPLITS:
            if getattr(settings, name):
                yield name, mixture(getattr(settings, name), f"data.{name}")
    else:
        whole = divided(settings)
        for name, share in zip(SPLITS, split_parts(settings.split), strict=True):
            if name == "train" or share:
                yield name, whole
    for name, entry in named_mixtures(settings.validation, "data.validation").items():
        yield NAMED + name, entry


def mixtures_of_phases(settings: DataConfig) -> Iterator[Mixture]:
    """The training datasets of each phase; none unless data.order=per_dataset."""
    if settings.order == "per_dataset":
        entries = settings.train
        yield mixture(entries, "data.train")
        for phase in settings.phases:
            entries = phase.get("data.train", entries)
            yield mixture(entries, "data.phases")


def divided(settings: DataConfig) -> Mixture:
    """The datasets that data.split divides."""
    return mixture(settings.blend, "data.blend") if settings.blend else Mixture((settings.prefix or "",), None)


def open_dataset(prefix: str, facts: SharedFacts) -> IndexedDataset:
    """The dataset ``prefix``; ConfigError if it does not exist or is empty."""
    if not prefix:
        raise ConfigError("data.prefix is not set; give the path of a dataset")
    dataset = IndexedDataset(prefix, facts)
    if not len(dataset.flat):
        raise ConfigError(f"dataset {dataset.prefix} has no tokens ({len(dataset)} sequences)")
    return dataset


def check_tokens(dataset: IndexedDataset, vocab_size: int) -> None:
    """ConfigError if one of the first tokens is outside the vocabulary; the others are checked when they are read."""
    first = dataset.flat[0:FIRST]
    low = int(first.min())
    high = int(first.max())
    if low < 0 or high >= vocab_size:
        token = low if low < 0 else high
        raise ConfigError(
            f"dataset {dataset.prefix} holds token {token}, outside model.vocab_size={vocab_size}; set "
            "model.vocab_size to the size of the tokenizer it was made with, or check the dataset"
        )


def holds(dataset: IndexedDataset, token: int) -> bool:
    """Whether ``token`` ends one of ENDS documents spread over the dataset, or is among its first tokens."""

    def search() -> bool:
        last = dataset.document_count - 1
        for number in {last * part // (ENDS - 1) for part in range(ENDS)}:
            begin, end = map(int, dataset.bounds(number, number + 1))
            if end > begin and token in dataset.tokens(end - 1)[-1:]:
                return True
        return bool((dataset.flat[0:FIRST] == token).any())

    return dataset.find(f"holds {token}", search)


def corpus(data: DataConfig, context: int, seed: int, vocab_size: int, facts: SharedFacts | None = None) -> Corpus:
    """The source for ``data.source=indexed``; ConfigError if datasets or tokenizer do not match the settings."""
    return Corpus(data, context, seed, vocab_size, facts or SharedFacts())


def shared_tokenizer(settings: DataConfig, prefixes: list[str], vocab_size: int) -> dict[str, Any]:
    """Fingerprint of the tokenizer of settings and datasets; {} if unknown. ConfigError if they or the chat templates of the datasets
    differ, or if the model's vocabulary is smaller."""
    tokenizer_folder.of_datasets(prefixes, settings.tokenizer)
    fingerprints: list[tuple[str, dict[str, Any]]] = []
    if settings.tokenizer is not None:
        tokenizer = tokenizers.build_tokenizer(settings.tokenizer, settings.tokenizer_files, settings.eod)
        fingerprints.append(("data.tokenizer", tokenizer.fingerprint))
    for prefix in prefixes:
        note = sidecar(prefix)
        if "tokenizer" in note:
            fingerprints.append((f"dataset {prefix}", note["tokenizer"]))
    for place, fingerprint in fingerprints[1:]:
        differs = tokenizers.mismatch(fingerprint, fingerprints[0][1])
        if differs:
            way_out = "make the datasets with one tokenizer"
            if settings.tokenizer:
                way_out = (
                    "preprocess again with this tokenizer (--tokenizer RUN takes that of a run), or, for a network that has not learned it, "
                    "omit data.tokenizer"
                )
            raise ConfigError(f"{place} and {fingerprints[0][0]} do not have the same tokenizer: {differs}; {way_out}")
    if not fingerprints:
        return {}
    place, fingerprint = fingerprints[0]
    if fingerprint["size"] > vocab_size:
        raise ConfigError(
            f"model.vocab_size={vocab_size} is smaller than the {fingerprint['size']} entries of the {fingerprint['kind']} "
            f"tokenizer of {place}; set model.vocab_size={fingerprint['size']}"
        )
    if vocab_size > WASTEFUL * fingerprint["size"] and vocab_size > 1024:
        log.warning(
            "model.vocab_size=%d, but the tokenizer of %s has %d entries; with model.vocab_size=%d the model is smaller and faster",
            vocab_size, place, fingerprint["size"], fingerprint["size"],
        )  # fmt: skip
    return fingerprint

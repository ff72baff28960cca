"""What the steps of a run have read: samples, and documents of datasets; and which steps have read a document."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpclm.base import files
from hpclm.base.errors import ConfigError, unread
from hpclm.checkpoint import directory
from hpclm.config import RunConfig, compose
from hpclm.config.length import run_length
from hpclm.config.phases import Timeline
from hpclm.config.plan import Length, Rampup
from hpclm.data import tokenizer_folder
from hpclm.data.exclusion import Exclusion
from hpclm.data.indexed import IndexedDataset
from hpclm.data.pieces import Piece, Traceable, sample_hash
from hpclm.data.scan import SharedFacts
from hpclm.data.sources import WITHOUT, Samples, Source, build_source, excluded, train_samples
from hpclm.ledger.history import Span, StepCounter, spans
from hpclm.preprocess import document_index
from hpclm.rundir import metrics_file

FACTS = "ledger.json"
"""A file of the run: facts about the files of its datasets, which would take a second to find out. It may be deleted."""
OF_SETTINGS = ("tokenizer", "fingerprint", WITHOUT)  # facts that depend on settings
SECTIONS = re.compile(r"^(?:seed|model|data|batch|budget|optim):.*\n(?:[ #].*\n)*", re.MULTILINE)
HEX = 16  # digits of a sum of hashes


@dataclass(frozen=True)
class DocumentPart:
    """Consecutive tokens of a document in a sample."""

    sample: int
    """Number of the sample in the run."""
    dataset: str
    document: int
    offset: int
    """Position of the first one in the document."""
    tokens: int


@dataclass(frozen=True)
class DocumentReads:
    """The steps of one span that read a document."""

    span: Span
    steps: NDArray[np.int64]
    """[n] ascending."""
    samples: NDArray[np.int64]
    """[n] how many samples of each step have a token of the document."""


@dataclass(frozen=True)
class Checked:
    """A step whose sum has been computed again."""

    step: int
    recorded: str | None
    """The sum in metrics.jsonl; None if the row has none."""
    computed: str


class Ledger:
    """The ledger of the run in ``out``."""

    def __init__(self, out: Path):
        self.out = out
        self.spans = spans(out)
        if not self.spans:
            raise ConfigError(f"{out} has not trained a step yet")
        self._configs: dict[str, RunConfig] = {}
        self._timelines: dict[Any, Timeline] = {}
        self._sources: dict[str, Source] = {}
        self._samples: dict[Any, Samples] = {}
        self._exclusions: dict[Any, Exclusion | None] = {}

    def timeline(self, span: Span) -> Timeline:
        """The phases of the run by the settings of a span."""
        if span.key not in self._timelines:
            text = _text_of_data(span.out / span.config)
            if text not in self._configs:  # composing settings takes 50 ms, and most versions differ only in others
                self._configs[text] = compose.of_run(span.out, [], span.config)
            self._timelines[span.key] = Timeline(self._configs[text], span.position)
        return self._timelines[span.key]

    def config(self, span: Span) -> RunConfig:
        """The settings of a span: those of its first phase, after which context and batch size do not change."""
        timeline = self.timeline(span)
        config: RunConfig = timeline.settings[timeline.phase(span.samples)]
        return config

    def counter(self, span: Span) -> StepCounter:
        """Steps and samples of a span."""
        batch = self.config(span).batch
        return StepCounter(span, batch.global_size, Rampup(*batch.rampup) if batch.rampup else None)

    def samples(self, span: Span) -> Samples:
        """The training samples of a span, in the order of the run; ConfigError if its datasets cannot be read."""
        if span.key in self._samples:
            return self._samples[span.key]
        timeline = self.timeline(span)
        run: RunConfig = timeline.run
        data = replace(run.data, without=span.without and str(span.out / span.without))
        known = _known_facts(self.out)
        facts = SharedFacts(known)
        name = repr((data, self.config(span).model.context, run.seed))
        if name not in self._sources:
            self._sources[name] = build_source(data, self.config(span).model, run.seed, facts)
        source = self._sources[name]
        key: Any = name, span.planned
        length = Length(None, None)
        if run.data.order == "per_dataset":
            length = run_length(run, source.per_epoch("train"), span.position)
            # the phases that the samples are of: from the last one that had been read to the next restart
            phases = len(span.phases), timeline.next_restart(span.samples)
            key = name, repr(timeline.begins), phases, length
        if key not in self._samples:
            self._samples[key] = train_samples(source, timeline, length, span.planned)
        if facts.values.keys() > known.keys():
            _keep_facts(self.out, facts.values)
        self._samples[span.key] = self._samples[key]
        self._exclusions[span.key] = excluded(source, data)
        return self._samples[key]

    def traced(self, span: Span) -> Traceable:
        """``samples``; ConfigError if they are not of datasets on disk."""
        source = self.config(span).data.source
        samples = None if source == "synthetic" else self.samples(span)
        if not isinstance(samples, Traceable):
            raise ConfigError(
                f"data.source={source} has no documents on disk, so no step has read one; --verify still works"
            )
        return samples

    def of_step(self, step: int) -> list[Span]:
        """The spans with ``step``; ConfigError without one."""
        found = [span for span in self.spans if step in span.steps()]
        if not found:
            begin, end = min(span.first for span in self.spans), max(span.last for span in self.spans)
            raise ConfigError(f"{self.out} has trained steps {begin} to {end}; it has no step {step}")
        return found

    def parts(self, span: Span, step: int) -> Iterator[DocumentPart]:
        """The documents that ``step`` read, in the order of the samples."""
        samples = self.traced(span)
        exclusion = self._exclusions[span.key]
        for number in self.counter(span).samples(step):
            for piece in samples.pieces(number % len(samples)):
                dataset = samples.datasets[piece.dataset]
                for part in _divided(number, dataset, piece):
                    if exclusion is None or (dataset, part.document) not in exclusion:
                        yield part

    @cached_property
    def datasets(self) -> dict[str, IndexedDataset]:
        """The datasets that the run has read, by prefix; ConfigError if they are not on disk."""
        return {str(dataset.prefix): dataset for span in self.spans for dataset in self.traced(span).datasets}

    def dataset(self, name: str | None) -> IndexedDataset:
        """The dataset with this prefix or last component of it; None: the only one. ConfigError otherwise."""
        every = self.datasets
        match = [dataset for prefix, dataset in every.items() if name in (None, prefix, dataset.prefix.name)]
        if name is not None and not match:
            match = [dataset for dataset in every.values() if dataset.prefix == Path(name).absolute()]
        if len(match) == 1:
            return match[0]
        wrong = f"give PREFIX:DOCUMENT, because {name} is {'several' if match else 'none'} of them"
        if name is None:
            wrong = "name the dataset, as PREFIX:DOCUMENT"
        raise ConfigError(f"{self.out} has read {', '.join(every)}: {wrong}")

    def document(self, dataset: IndexedDataset, number: int) -> list[DocumentReads]:
        """The steps that read a document, by span; ConfigError if the dataset has no such document."""
        if number >= dataset.document_count:
            raise ConfigError(
                f"{dataset.prefix} has documents 0 to {dataset.document_count - 1:,}; it has no document {number:,}"
            )
        begin, end = dataset.document_tokens(number)
        found: dict[int, NDArray[np.int64]] = {}
        reads = []
        for span in self.spans:
            samples = self.traced(span)
            exclusion = self._exclusions[span.key]
            if exclusion is not None and (dataset, number) in exclusion:
                continue
            if id(samples) not in found:
                found[id(samples)] = _readers(samples, dataset.prefix, begin, end)
            counter = self.counter(span)
            steps, often = np.unique(
                counter.steps(_repeated(found[id(samples)], len(samples), counter.all_samples())), return_counts=True
            )
            if len(steps):
                reads.append(DocumentReads(span, steps, often))
        return reads

    def with_text(self, path: Path) -> list[tuple[IndexedDataset, int]]:
        """The documents with the text of the file ``path``, with or without the end of its last line; ConfigError without one."""
        try:
            text = files.read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        last = self.spans[-1]
        tokenizer = tokenizer_folder.of_run(last.out, self.config(last).data).build()
        encoded = [tokenizer.encode(one) for one in (text, text.removesuffix("\n"))]
        if tokenizer.eod is not None:  # a dataset that does not name it
            encoded += [[*ids, tokenizer.eod] for ids in encoded]
        found = []
        for dataset in self.datasets.values():
            found += [(dataset, number) for number in document_index.find(dataset, encoded)]
        if not found:
            raise ConfigError(f"no document of {', '.join(self.datasets)} has the text of {path}")
        return found

    def checkpoint_before(self, step: int) -> Path | None:
        """The newest checkpoint of the steps before ``step``; None without one."""
        newest: tuple[int, Path] | None = None
        for span in self.spans:
            # an attempt begins with a checkpoint of the step before
            usable = range(span.first - 1, min(span.steps(undone=False).stop, step))
            for path in directory.steps(span.out / "checkpoints"):
                number = int(path.name[5:])
                if number in usable and (newest is None or number > newest[0]):
                    newest = number, path
        return newest[1] if newest else None

    def verify(self, step: int | None = None) -> Iterator[Checked]:
        """Compute the sums of the run's steps again, or that of ``step``. ConfigError if a row does not fit the history."""
        own = [span for span in self.spans if span.out == self.out]
        for row in metrics_file.stream(self.out):
            number = row["step"]
            if "loss" not in row or step not in (None, number):
                continue
            span = next((span for span in reversed(own) if number in span.steps(undone=False)), None)
            if span is None:
                raise ConfigError(
                    f"{self.out} has a row of step {number}, which no attempt trained according to its events"
                )
            yield Checked(number, row.get("data_hash"), self.step_hash(span, number))

    def step_hash(self, span: Span, step: int) -> str:
        """The sum of the hashes of the samples that ``step`` read, modulo 2**64."""
        samples = self.samples(span)
        exclusion = self._exclusions[span.key]
        row = np.empty(self.config(span).model.context + 1, samples.dtype if exclusion is None else np.int64)
        total = 0
        for number in self.counter(span).samples(step):
            samples.read(number % len(samples), row)
            if exclusion is not None:
                exclusion.replace(self.traced(span), number % len(samples), row)
            total += sample_hash(row.astype(np.int64))
        return f"{total % 2**64:0{HEX}x}"


def _text_of_data(path: Path) -> str:
    """The sections of a settings file that decide which samples are read."""
    try:
        return "".join(SECTIONS.findall(files.read_text(path)))
    except OSError as error:
        raise unread(error, path, "restore it: it says what the run has read") from None


def _known_facts(out: Path) -> dict[str, Any]:
    """What an earlier call found out about the files of the datasets."""
    with suppress(OSError, ValueError):
        facts = json.loads(files.read_text(out / FACTS))
        return facts if isinstance(facts, dict) else {}
    return {}


def _keep_facts(out: Path, facts: Mapping[str, Any]) -> None:
    """Keep facts for the next call: those whose names have the sizes and dates of the files."""
    with suppress(OSError):  # another user's run
        files.write_text(out / FACTS, json.dumps({name: facts[name] for name in facts if name not in OF_SETTINGS}))


def _readers(samples: Traceable, prefix: Path, begin: int, end: int) -> NDArray[np.int64]:
    """The samples that have a token of ``begin`` to ``end`` of the dataset ``prefix``."""
    numbers = [number for number, dataset in enumerate(samples.datasets) if dataset.prefix == prefix]
    return np.unique(
        np.concatenate([samples.find(number, begin, end) for number in numbers] or [np.empty(0, np.int64)])
    )


def _repeated(readers: NDArray[np.int64], length: int, samples: range) -> NDArray[np.int64]:
    """The ``samples`` of a run that are ``readers``; after ``length`` samples they repeat."""
    passes = np.arange(samples.start // length, -(-samples.stop // length)) * length
    every = (passes[:, None] + readers).ravel()
    return every[(every >= samples.start) & (every < samples.stop)]


def _divided(sample: int, dataset: IndexedDataset, piece: Piece) -> Iterator[DocumentPart]:
    """The documents of a piece."""
    begin = piece.begin
    end = begin + piece.size
    while begin < end:
        document = dataset.document_at(begin)
        first, last = dataset.document_tokens(document)
        yield DocumentPart(sample, str(dataset.prefix), document, begin - first, min(end, last) - begin)
        begin = last

"""Build datasets from text: what one process and several processes have in common.

inputs (whole lines) → encode (tokens, in worker processes) → output (a dataset for each key)
"""

import json
import logging
import re
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from hpclm import extras
from hpclm.data import tokenizers
from hpclm.data.disk.indexed import IndexedDataset, files
from hpclm.data.next_command import too_small, train_command
from hpclm.data.text.encode import Job, encode, read, tokenizer_of
from hpclm.data.text.inputs import Share, chunks
from hpclm.data.text.options import Corpus, Dictionary, Request
from hpclm.data.text.output import Output, Report
from hpclm.data.text.pool import ordered
from hpclm.errors import ConfigError, unwritten
from hpclm.files import read_text, readable, write_text
from hpclm.terminal import say

log = logging.getLogger(__name__)
SHOWN = 5  # unreadable lines that are described in the log
ALONE = Share(0, 1)
BY_SPACES = ("whitespace", "fairseq")
"""Tokenizers that split text at white space."""
LOOKED_AT = 1 << 22  # tokens
LEAST = 500  # in shorter texts many words occur once
UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
"""A Chinese character or a kana."""
CLAUSE = 4  # of which a word between spaces usually has fewer
TOO_MANY = 0.5
QUIET = 60  # seconds between log lines without --log-interval


def write(
    corpus: Corpus,
    asked: Request,
    prefixes: Sequence[Path],
    share: Share = ALONE,
    more: dict[str, Any] | None = None,
    digests: Sequence[Path | None] | None = None,
) -> list[Report]:
    """Write ``share`` of the corpus as a dataset for each of ``prefixes``; either all of them or none.

    They are the same for any number of workers, and memory does not grow with the input. ``more`` goes into the notes;
    ``digests``: files for the hashes of each dataset's documents. ConfigError for unreadable input, or input without tokens.
    """
    job, size = asked.job, sum(source.size for source in corpus.inputs)
    size = size * (share.part + 1) // share.parts - size * share.part // share.parts
    work = ordered(partial(encode, job=job), chunks(list(corpus.inputs), share, asked.longest_line), asked.workers)
    described = 0
    try:
        with ExitStack() as opened:
            targets = digests or [None] * len(prefixes)
            outputs = [
                opened.enter_context(Output(prefix, job, target, asked.overwrite or share != ALONE))
                for prefix, target in zip(prefixes, targets, strict=True)
            ]
            stream = opened.enter_context(closing(work))
            progress = opened.enter_context(Progress(prefixes[0].name, size or None, asked.log_interval))
            for done in stream:
                for output, column in zip(outputs, done.columns, strict=True):
                    output.add(column)
                    output.bad.update(done.bad)
                for problem in done.problems[: SHOWN - described]:
                    log.warning("skipped: %s%s", done.chunk.where(problem.line), problem.message)
                    described += 1
                progress.update(done.chunk.consumed, done.records, sum(output.tokens for output in outputs))
            if share == ALONE:
                for output in outputs:
                    refuse_nothing(output.report(), corpus.names)
            return [output.close(more or {}) for output in outputs]
    except OSError as error:
        raise unwritten(error, prefixes[0], "no dataset was written") from error


def job_fingerprint(corpus: Corpus, asked: Request) -> dict[str, Any]:
    """Everything that determines the dataset (JSON): inputs, options, tokenizer."""
    job = asdict(asked.job) | {"files": tokenizer_of(asked.job).fingerprint}
    return dict(json.loads(json.dumps({"inputs": [asdict(source) for source in corpus.inputs], "job": job})))


def check(job: Job) -> tokenizers.Tokenizer:
    """The job's tokenizer, after checking it against the options."""
    tokenizer = tokenizer_of(job)
    if job.append_eod and tokenizer.eod is None:
        raise ConfigError(f"--append-eod: the {job.tokenizer} tokenizer has no end-of-document token")
    ends_itself = getattr(tokenizer, "ends_itself", False)  # optional for user-defined tokenizers
    if job.append_eod and ends_itself:
        raise ConfigError(f"the {job.tokenizer} tokenizer ends every document by itself; leave out --append-eod")
    if job.language is not None and ends_itself:
        raise ConfigError(f"the {job.tokenizer} tokenizer ends every text by itself; leave out --split-sentences")
    if job.language is not None and (wrong := extras.missing("--split-sentences", "sentencex")):
        raise ConfigError(wrong)
    return tokenizer


def refuse_to_replace(asked: Request, prefixes: Sequence[Path]) -> None:
    """ConfigError if one of these datasets exists, unless it may be replaced."""
    there = [str(path) for path in (files(prefix)[1] for prefix in prefixes) if path.exists()]
    if there and not asked.overwrite:
        verb = "exists" if len(there) == 1 else "exist"
        raise ConfigError(
            f"{' and '.join(there)} {verb}; give --overwrite to replace it, or another name for the output"
        )


def refuse_nothing(report: Report, names: str) -> None:
    """ConfigError for a dataset without tokens."""
    if not report.tokens:
        raise ConfigError(f"no documents in {names} ({lost(report)}); no dataset was written")


def lost(report: Report) -> str:
    """What was dropped from the input, in words."""
    words = [f"{report.counts['skipped']:,} empty documents skipped"]
    if report.counts["repeated"]:
        words.append(f"{report.counts['repeated']:,} duplicates dropped")
    if report.bad:
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in report.bad.items())
        words.append(f"{sum(report.bad.values()):,} unreadable lines skipped ({reasons})")
    if report.counts["unsplit"]:
        words.append(f"{report.counts['unsplit']:,} documents could not be split into sentences")
    return ", ".join(words)


def tell(reports: list[Report], job: Job | None = None, end: str = "") -> None:
    """Print what was written, and warn if the tokenizer does not suit the text."""
    for report in reports:
        if job is not None:
            warn_of_unbroken_text(report.prefix, job)
        what = f"{report.documents:,} documents, {report.tokens:,} tokens; {lost(report)}"
        say(f"{report.prefix}.bin, .idx, .json: {what}{end}")


def tell_next(prefixes: list[Path], asked: Request) -> None:
    """Print the command to run next, for one dataset or for train, valid, ... datasets."""
    if len(prefixes) == 1:
        words = [f"data.prefix={prefixes[0]}"]
        train, valid = prefixes[0], None
    else:
        parts = {part: [p for p in prefixes if p.name.startswith(part)] for part in ("train", "valid", "test")}
        words = [f"data.{part}=[{found[0]}]" for part, found in parts.items() if found]
        more = [f"{prefix.name}={prefix}" for prefix in parts["valid"][1:]]
        words += [f"data.validation=[{', '.join(more)}]"] if more else []
        train, valid = (parts["train"] or prefixes)[0], parts["valid"]
    words.append(f"model.vocab_size={tokenizer_of(asked.job).size}")
    if asked.vocab_multiple is not None:
        words.append(f"model.vocab_multiple={asked.vocab_multiple}")
    command = train_command(train, valid, words)
    say(f"next: {shlex.join(command) if command else too_small(train)}")


def write_dictionary(dictionary: Dictionary, asked: Request) -> None:
    """Write dict.txt next to the datasets; ConfigError rather than change an existing one."""
    if dictionary.given is not None:
        text = read_text(readable(dictionary.given, "dictionary"))
    else:
        lines = (
            line
            for chunk in chunks(list(dictionary.corpus.inputs), longest=asked.longest_line)
            for line in read(chunk, asked.job.keys, asked.job.on_error)[0][0]
        )
        text = tokenizers.dictionary(lines, dictionary.threshold, dictionary.words, dictionary.padding)
    path = dictionary.path
    if path.exists() and read_text(path, errors="replace") != text and not asked.overwrite:
        raise ConfigError(f"{path} exists and has other words; give --overwrite to replace it, or another --destdir")
    write_text(path, text)


def warn_of_unbroken_text(prefix: Path, job: Job) -> None:
    """Log a warning if most words of a dataset are whole clauses, are unknown, or occur only once or twice."""
    tokenizer = tokenizer_of(job)
    if job.tokenizer not in BY_SPACES or getattr(tokenizer, "model", None) is not None:
        return
    found = np.bincount(IndexedDataset(prefix).block(0, LOOKED_AT), minlength=tokenizer.size)
    if tokenizer.eod is not None:
        found[tokenizer.eod] = 0
    words, kinds = int(found.sum()), int(np.count_nonzero(found))
    ids: dict[str, int] = tokenizer.ids  # type: ignore[attr-defined]  # as both kinds have it
    unknown = int(found[ids["<unk>"]])
    clauses = sum(int(found[id]) for word, id in ids.items() if found[id] and len(UNSPACED.findall(word)) >= CLAUSE)
    if clauses > TOO_MANY * words:
        what = f"most words between spaces have {CLAUSE} or more Chinese characters or kana"
    elif words >= LEAST and kinds > TOO_MANY * words:
        what = f"{kinds:,} of {words:,} words are different ones (types/tokens {kinds / words:.2f})"
    elif unknown > TOO_MANY * words:
        what = f"{100 * unknown / words:.0f}% of the words are not in the vocabulary (<unk>)"
    else:
        return
    log.warning(
        "%s: %s; text without spaces between its words, such as Chinese, needs a tokenizer of pieces: hpclm train-tokenizer "
        "--output t.model --kind unigram, then --tokenizer sentencepiece --tokenizer-files t.model",
        prefix,
        what,
    )


class Progress:
    """Shows progress: a bar on a terminal, otherwise a log line every ``every`` documents (None: every minute).

    ``total``: bytes to read, if known.
    """

    def __init__(self, name: str, total: int | None, every: int | None):
        self._name, self._total, self._every = name, total, every
        self._bytes = self._documents = self._shown = 0
        self._began = self._next = 0.0
        self._bar: Any = None

    def update(self, consumed: int, documents: int, tokens: int) -> None:
        """Add ``consumed`` bytes and ``documents`` documents; ``tokens`` in all."""
        self._bytes += consumed
        self._documents += documents
        now = time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(f"{tokens / max(now - self._began, 1e-9):,.0f} tokens/s", refresh=False)
            self._bar.update(consumed)
            return
        due = now >= self._next if self._every is None else self._documents - self._shown >= self._every
        if due:
            log.info(self._line(now - self._began, tokens))
            self._shown, self._next = self._documents, now + QUIET

    def _line(self, seconds: float, tokens: int) -> str:
        said = f"{self._name}: {self._documents:,} documents, {self._bytes / 1e6 / seconds:.1f} MB/s, "
        said += f"{tokens / seconds:,.0f} tokens/s"
        if self._total:
            left = seconds * max(self._total - self._bytes, 0) / max(self._bytes, 1)
            said += f", {min(self._bytes / self._total, 1):.0%}, {timedelta(seconds=round(left))} left"
        return said

    def __enter__(self) -> "Progress":
        self._began = time.monotonic()
        self._next = self._began + QUIET
        if sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit="B", unit_scale=True, desc=self._name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

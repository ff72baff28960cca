"""Build datasets from text.

inputs (whole lines) → encode (tokens, in worker processes) → DatasetOutput (a dataset for each key)
"""

import json
import logging
import re
import time
from collections.abc import Sequence, Set
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpclm.base import extras, terminal
from hpclm.base.errors import ConfigError, unwritten
from hpclm.base.files import read_text, readable, write_text
from hpclm.base.terminal import many, say
from hpclm.data import loss_mask, tokenizer_folder, tokenizer_writer, tokenizers
from hpclm.data.indexed import COUNTS, files
from hpclm.preprocess.counts import Counts
from hpclm.preprocess.encode import (
    END_OF_DOCUMENT,
    LONG_TOKEN,
    Column,
    EncodeJob,
    encode,
    may_cut,
    read_texts,
    tokenizer_of,
)
from hpclm.preprocess.inputs import Share, chunks
from hpclm.preprocess.kinds import Format
from hpclm.preprocess.options import Dictionary, InputCorpus, PreprocessRequest
from hpclm.preprocess.tokenizers.fairseq import dictionary_of
from hpclm.preprocess.workers import ordered
from hpclm.preprocess.writer import Writer

log = logging.getLogger(__name__)
SHOWN = 5  # unreadable lines described in the log
WHOLE = Share(0, 1)
EVERY = 60  # seconds between log lines
SHORT_DOCUMENT = 32  # tokens on average; shorter documents cause a warning
FEW_DOCUMENTS = 10  # fewer documents say little about a corpus
DATED = re.compile(r"\bstrftime_now\s*\(")  # how templates of transformers ask for the date


class DatasetOutput(Writer):
    """The dataset of one key, with counts of omitted text. ``replaces``: see Writer."""

    def __init__(self, prefix: Path, job: EncodeJob, column: int = 0, replaces: bool = True):
        super().__init__(prefix, job.dtype(column), job.layout, replaces)
        self.prefix = prefix
        self._job = job
        self.counts = Counts()

    def add(self, column: Column) -> None:
        """Append a column's documents."""
        self.counts += column.counts
        if column.is_piece:
            self._add_piece(column)
            return
        self.extend(column.tokens, column.sizes, column.documents)

    def _add_piece(self, column: Column) -> None:
        """Append a piece of a document."""
        tokens = column.tokens
        job = self._job
        if column.closes and not self.open_tokens + tokens.size:
            self.counts += Counts(skipped=int(job.empty == "skip"))
            if job.empty == "keep":
                self.extend(tokens, np.empty(0, np.int64), np.array([0]))
            return
        if column.closes and job.append_eod:
            tokens = np.append(tokens, tokenizers.end(tokenizer_of(job))).astype(tokens.dtype)
        self.add_piece(tokens, column.closes)

    def refuse_empty(self, names: str) -> None:
        """ConfigError if the inputs ``names`` had no tokens."""
        if not self.tokens:
            problem = f"no documents in {names}"
            omitted = self._omissions()
            if omitted:
                problem += f" ({omitted})"
            raise ConfigError(f"{problem}; no dataset was written")

    def complete(self, more: dict[str, Any]) -> None:
        """Complete the files, with ``more`` in PREFIX.json; after this only renaming remains (see ``Writer.finish``)."""
        self.note = {
            "tokenizer": tokenizer_of(self._job).fingerprint,
            "documents": self.documents,
            "tokens": self.tokens,
            COUNTS: self.counts.note(),
        }
        self.note |= more
        self.finish()

    def describe(self, end: str = "") -> None:
        """Print what was written."""
        written = f"{many(self.documents, 'document')}, {many(self.tokens, 'token')}"
        say(f"{self.prefix}.bin, .idx, .json: {'; '.join(filter(None, (written, self._omissions())))}{end}")

    def warn(self, formats: Set[Format]) -> None:
        """Warn of text that contains the end-of-document token, of very short documents, and of long tokens. Also warn of conversations
        that do not teach when to stop, or with answers after tokens that generation never produces. ``formats``: formats of the inputs."""
        for problem in filter(None, (self._short_documents(formats), self._long_tokens())):
            log.warning("%s: %s", self.prefix, problem)
        for name, count in sorted(self.counts.special.items()):
            times = "once" if count == 1 else f"{count:,} times"
            log.warning(
                "%s: the text has the token %s %s (%.1f%% of the tokens). It %s",
                self.prefix, name, times, 100 * count / self.tokens, self._meaning(name),
            )  # fmt: skip
        if self.counts.line_ends:
            log.warning(
                "%s: the tokens do not restore the %s line ends of the text, because the %s tokenizer turns them into spaces; text that "
                "a model generates will have no lines. hpclm train-tokenizer makes a tokenizer that keeps them",
                self.prefix, f"{self.counts.line_ends:,}", self._job.tokenizer,
            )  # fmt: skip
        if self.counts.spanning:
            log.warning(
                "%s: in %s one token spans the end of a prompt and the beginning of its answer, and this tokenizer cannot "
                "separate them. Generation tokenizes the prompt alone, so the model learns the answer after tokens that generation "
                "never produces. Give --chat-template FILE, a version that puts a special token or a line end before the answer",
                self.prefix, many(self.counts.spanning, "conversation"),
            )  # fmt: skip
        if self._job.chat and DATED.search(self._job.chat.template):
            log.warning(
                "%s: the chat template writes the date, so all conversations contain today's (%s); another day gives a different dataset. "
                "Give --chat-template FILE, a version with a fixed date",
                self.prefix, time.strftime("%Y-%m-%d"),
            )  # fmt: skip
        if self.counts.endless:
            log.warning(
                "%s: in %s no end of a turn is learned: with this chat template the assistant's text does not end with a special "
                "token, so a model tuned on it may not stop. Give --chat-template FILE, a version that ends the assistant's "
                "turns with one, inside its {%% generation %%} marks if it has them",
                self.prefix, many(self.counts.endless, "conversation"),
            )  # fmt: skip

    def _meaning(self, name: str) -> str:
        """What a special token inside a text does, and what to do about it."""
        tokenizer = tokenizer_of(self._job)
        names = getattr(tokenizer, "special_ids", {})
        if name == names.get(tokenizer.eod, END_OF_DOCUMENT):
            return (
                "ends a document: training sees the end of a document there, and data.reset_attention_mask splits the document. Remove "
                "the token from the input, or name another one with --eod"
            )
        if "unk" in name.lower():
            return "replaces text that the tokenizer does not know: use a tokenizer made for such text (hpclm train-tokenizer)"
        return "is a special token to the model, not text: remove it from the input unless that is intended"

    def _short_documents(self, formats: Set[Format]) -> str | None:
        """Advice for documents that are too short to learn from; None for longer documents, and for fairseq's, which are lines of a
        text."""
        mean = self.tokens / self.documents
        if mean >= SHORT_DOCUMENT or self.documents < FEW_DOCUMENTS or self._job.chat or self._job.layout == "fairseq":
            return None
        way = "if consecutive ones belong together, join them into one document"
        if "lines" in formats:
            way = "each line is a document; if the lines form one text, omit --format lines, so that a .txt is one document with line ends"
        elif formats == {"files"}:
            way = "each file is a document; if the files are parts of one text, join them"
        return (
            f"a document has only {mean:.1f} tokens on average, so a model hardly learns to write longer text ({way}). To keep independent "
            "documents apart in training, set data.reset_attention_mask=true data.reset_position_ids=true"
        )

    def _long_tokens(self) -> str | None:
        """Advice for a tokenizer that hardly divides the text; None for others."""
        size = self.counts.text_bytes
        if size <= LONG_TOKEN * self.tokens:
            return None
        return (
            f"tokens have {size / self.tokens:.0f} bytes of text on average (3 to 5 are usual): the {self._job.tokenizer} "
            "tokenizer does not divide this text into words, so hardly any token occurs twice and little can be learned. Text without spaces, "
            "such as Chinese, needs subwords: hpclm train-tokenizer --input TEXT --output t.model --vocab-size 32000, then --tokenizer "
            "sentencepiece --tokenizer-files t.model"
        )

    def _omissions(self) -> str:
        counts = self.counts
        omitted = []
        if counts.skipped:
            omitted.append(f"{many(counts.skipped, 'empty document')} skipped")
        if self._job.chat and counts.cut:
            omitted.append(f"{many(counts.cut, 'conversation')} cut to {self._job.chat.context + 1:,} tokens")
        if counts.dropped:
            omitted.append(f"{many(counts.dropped, 'conversation')} dropped: too long, or nothing left to learn")
        if counts.unreadable:
            reasons = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(counts.unreadable.items()))
            omitted.append(f"{many(counts.unreadable.total(), 'unreadable line')} skipped ({reasons})")
        return ", ".join(omitted)


def write(
    corpus: InputCorpus,
    request: PreprocessRequest,
    prefixes: Sequence[Path],
    share: Share = WHOLE,
    more: dict[str, Any] | None = None,
) -> None:
    """Write ``share`` of the corpus as a dataset for each of ``prefixes``; all of them or none.

    The result does not depend on the number of workers, and memory does not grow with the input. ``more`` goes into PREFIX.json.
    ConfigError for unreadable input, or input without tokens.
    """
    from hpclm.base.progress import ProgressBar

    job = request.job
    size = sum(source.size for source in corpus.inputs) // share.parts
    work = chunks(list(corpus.inputs), share, request.longest_line, may_cut(job))
    described = 0
    began = logged = time.monotonic()
    try:
        with ExitStack() as opened:
            replaces = request.overwrite or share != WHOLE
            outputs = [
                opened.enter_context(DatasetOutput(prefix, job, i, replaces)) for i, prefix in enumerate(prefixes)
            ]
            results = opened.enter_context(closing(ordered(partial(encode, job=job), work, request.workers)))
            bar = opened.enter_context(
                ProgressBar(
                    size or None, unit="B", unit_scale=True, desc=f"{terminal.shortened(prefixes[0].name, 16)}: "
                )
            )
            for encoded in results:
                for output, column in zip(outputs, encoded.columns, strict=True):
                    output.add(column)
                for line in encoded.described[: SHOWN - described]:
                    log.warning("skipped: %s", line)
                    described += 1
                now = time.monotonic()
                tokens = sum(output.tokens for output in outputs)
                speed = f"{tokens / (now - began):,.0f} tokens/s"
                bar.beside = (speed,)
                bar.update(encoded.consumed)
                if bar.disable and now - logged >= EVERY:
                    log.info("%s: %s tokens, %s", prefixes[0].name, f"{tokens:,}", speed)
                    logged = now
            for output in outputs:
                if share == WHOLE:
                    output.refuse_empty(corpus.names)
            complete(outputs, job, more or {})
    except OSError as error:
        raise unwritten(error, prefixes[0], "no dataset was written") from error
    formats = {source.format for source in corpus.inputs}
    for output in outputs:
        is_mask = job.chat and output is not outputs[0]
        if output.tokens and not is_mask:  # a part may have no tokens
            output.warn(formats)
    speed = f"; {size / 1e6 / (time.monotonic() - began):.1f} MB/s" if size and share == WHOLE else ""
    for output in outputs:
        output.describe(speed)


def complete(outputs: Sequence[DatasetOutput], job: EncodeJob, more: dict[str, Any]) -> None:
    """Complete all datasets of ``job``. The dataset of conversations records the hash of its loss mask. Each dataset of text gets the folder
    of its tokenizer, unless it is a part, which has ``more``."""
    is_part = bool(more)
    tokenizer = tokenizer_of(job)
    folder = tokenizer_writer.with_ends(tokenizer_folder.of_files(job.tokenizer, list(job.files), job.eod), tokenizer)
    if job.chat:
        ends = sorted(outputs[0].counts.ends)
        folder = tokenizer_writer.tuned(folder, tokenizer, job.chat.template, dict(job.chat.tokens), ends)
    else:
        folder = replace(folder, template=None)
    for output in reversed(outputs):
        is_mask = job.chat and output is not outputs[0]
        if not (is_part or is_mask):
            output.write_beside = partial(tokenizer_writer.write, folder=folder, tokenizer=tokenizer)
        output.complete(more)
        if is_mask and output.content:
            more = {**more, loss_mask.KEY: output.content.bin}


def job_fingerprint(corpus: InputCorpus, request: PreprocessRequest) -> dict[str, Any]:
    """Everything that determines the dataset, as JSON: inputs, options, tokenizer."""
    job = asdict(request.job) | {"files": tokenizer_of(request.job).fingerprint}
    return dict(json.loads(json.dumps({"inputs": [asdict(source) for source in corpus.inputs], "job": job})))


def check_job(job: EncodeJob) -> None:
    """ConfigError if the job's tokenizer cannot be built or does not fit the options."""
    tokenizer = tokenizer_of(job)
    if job.chat and job.tokenizer != "json":
        raise ConfigError(
            f"--chat needs a tokenizer.json: the {job.tokenizer} tokenizer has no special tokens in a text"
        )
    needed = []
    if job.chat:
        needed.append(("--chat", "transformers"))
    if job.language is not None:
        needed.append(("--split-sentences", "sentencex"))
    for option, library in needed:
        problem = extras.missing(option, library)
        if problem:
            raise ConfigError(problem)
    if job.append_eod and tokenizer.eod is None:
        raise ConfigError(
            f"--append-eod: the {job.tokenizer} tokenizer has no end-of-document token; name one with --eod, or leave out --append-eod"
        )
    if getattr(tokenizer, "ends_itself", False):  # optional for user-defined tokenizers
        for option, chosen in (("--append-eod", job.append_eod), ("--split-sentences", job.language is not None)):
            if chosen:
                raise ConfigError(f"the {job.tokenizer} tokenizer ends every text by itself; leave out {option}")


def refuse_to_replace(request: PreprocessRequest, prefixes: Sequence[Path]) -> None:
    """ConfigError if one of these datasets exists, unless --overwrite is given."""
    existing = [str(path) for path in (files(prefix)[1] for prefix in prefixes) if path.exists()]
    if existing and not request.overwrite:
        verb = "exists" if len(existing) == 1 else "exist"
        raise ConfigError(f"{' and '.join(existing)} {verb}; give --overwrite to replace it, or another output name")


def write_dictionary(dictionary: Dictionary, request: PreprocessRequest) -> None:
    """Write dict.txt next to the datasets; ConfigError if a different one exists."""
    if dictionary.given is not None:
        text = read_text(readable(dictionary.given, "dictionary"))
    else:
        pieces = chunks(list(dictionary.corpus.inputs), longest=request.longest_line)
        texts = (read_texts(piece, request.job.keys, request.job.on_error)[0][0] for piece in pieces)
        text = dictionary_of(line for lines in texts for line in lines)
    path = dictionary.path
    if path.exists() and read_text(path, errors="replace") != text and not request.overwrite:
        raise ConfigError(
            f"{path} exists and has different words; give --overwrite to replace it, or another --destdir"
        )
    write_text(path, text)

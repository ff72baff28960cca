"""Build datasets from text: what one process and several processes have in common.

inputs (whole lines) → encode (tokens, in worker processes) → output (a dataset for each key)
"""

import json
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hpclm import extras
from hpclm.data.indexed import files
from hpclm.datasets.encode import Job, encode, read_texts, tokenizer_of
from hpclm.datasets.inputs import Share, chunks
from hpclm.datasets.next_command import next_command
from hpclm.datasets.options import Dictionary, InputCorpus, Request
from hpclm.datasets.output import BuildReport, Output
from hpclm.datasets.tokenizers.fairseq import dictionary_of
from hpclm.datasets.workers import ordered
from hpclm.errors import ConfigError, unwritten
from hpclm.files import read_text, readable, write_text
from hpclm.terminal import say

log = logging.getLogger(__name__)
SHOWN = 5  # unreadable lines that are described in the log
WHOLE = Share(0, 1)
EVERY = 60  # seconds between log lines


def write(
    corpus: InputCorpus,
    request: Request,
    prefixes: Sequence[Path],
    share: Share = WHOLE,
    more: dict[str, Any] | None = None,
) -> list[BuildReport]:
    """Write ``share`` of the corpus as a dataset for each of ``prefixes``; either all of them or none.

    They are the same for any number of workers, and memory does not grow with the input. ``more`` goes into PREFIX.json.
    ConfigError for unreadable input, or input without tokens.
    """
    from tqdm import tqdm

    job, size = request.job, sum(source.size for source in corpus.inputs) // share.parts
    work = chunks(list(corpus.inputs), share, request.longest_line)
    described = 0
    try:
        with ExitStack() as opened:
            replaces = request.overwrite or share != WHOLE
            outputs = [opened.enter_context(Output(prefix, job, replaces)) for prefix in prefixes]
            results = opened.enter_context(closing(ordered(partial(encode, job=job), work, request.workers)))
            bar = opened.enter_context(
                tqdm(total=size or None, unit="B", unit_scale=True, desc=prefixes[0].name, disable=None)
            )
            began = logged = time.monotonic()
            for encoded in results:
                for output, column in zip(outputs, encoded.columns, strict=True):
                    output.add_column(column)
                    output.bad.update(encoded.bad)
                for problem in encoded.problems[: SHOWN - described]:
                    log.warning("skipped: %s%s", encoded.chunk.location(problem.line), problem.message)
                    described += 1
                now, tokens = time.monotonic(), sum(output.tokens for output in outputs)
                bar.set_postfix_str(f"{tokens / (now - began):,.0f} tokens/s", refresh=False)
                bar.update(encoded.chunk.consumed)
                if bar.disable and now - logged >= EVERY:
                    log.info(
                        "%s: %s tokens, %s tokens/s", prefixes[0].name, f"{tokens:,}", f"{tokens / (now - began):,.0f}"
                    )
                    logged = now
            if share == WHOLE:
                for output in outputs:
                    refuse_empty(output.report(), corpus.names)
            return [output.complete(more or {}) for output in outputs]
    except OSError as error:
        raise unwritten(error, prefixes[0], "no dataset was written") from error


def job_fingerprint(corpus: InputCorpus, request: Request) -> dict[str, Any]:
    """Everything that determines the dataset (JSON): inputs, options, tokenizer."""
    job = asdict(request.job) | {"files": tokenizer_of(request.job).fingerprint}
    return dict(json.loads(json.dumps({"inputs": [asdict(source) for source in corpus.inputs], "job": job})))


def check(job: Job) -> None:
    """ConfigError if the job's tokenizer cannot be built, or does not go with the options."""
    tokenizer = tokenizer_of(job)
    if job.append_eod and tokenizer.eod is None:
        raise ConfigError(f"--append-eod: the {job.tokenizer} tokenizer has no end-of-document token")
    ends_itself = getattr(tokenizer, "ends_itself", False)  # optional for user-defined tokenizers
    if job.append_eod and ends_itself:
        raise ConfigError(f"the {job.tokenizer} tokenizer ends every document by itself; leave out --append-eod")
    if job.language is not None and ends_itself:
        raise ConfigError(f"the {job.tokenizer} tokenizer ends every text by itself; leave out --split-sentences")
    if job.language is not None and (problem := extras.missing("--split-sentences", "sentencex")):
        raise ConfigError(problem)


def refuse_to_replace(request: Request, prefixes: Sequence[Path]) -> None:
    """ConfigError if one of these datasets exists, unless it may be replaced."""
    existing = [str(path) for path in (files(prefix)[1] for prefix in prefixes) if path.exists()]
    if existing and not request.overwrite:
        verb = "exists" if len(existing) == 1 else "exist"
        raise ConfigError(
            f"{' and '.join(existing)} {verb}; give --overwrite to replace it, or another name for the output"
        )


def refuse_empty(report: BuildReport, names: str) -> None:
    """ConfigError for a dataset without tokens."""
    if not report.tokens:
        raise ConfigError(f"no documents in {names} ({report.omissions}); no dataset was written")


def print_reports(reports: list[BuildReport], end: str = "") -> None:
    """Print what was written."""
    for report in reports:
        counts = f"{report.documents:,} documents, {report.tokens:,} tokens; {report.omissions}"
        say(f"{report.prefix}.bin, .idx, .json: {counts}{end}")


def print_next(prefixes: list[Path], request: Request) -> None:
    """Print the command to run next, for one dataset or for train, valid, ... datasets."""
    say(f"next: {next_command(prefixes, tokenizer_of(request.job).size)}")


def write_dictionary(dictionary: Dictionary, request: Request) -> None:
    """Write dict.txt next to the datasets; ConfigError rather than change an existing one."""
    if dictionary.given is not None:
        text = read_text(readable(dictionary.given, "dictionary"))
    else:
        lines = (
            line
            for chunk in chunks(list(dictionary.corpus.inputs), longest=request.longest_line)
            for line in read_texts(chunk, request.job.keys, request.job.on_error)[0][0]
        )
        text = dictionary_of(lines)
    path = dictionary.path
    if path.exists() and read_text(path, errors="replace") != text and not request.overwrite:
        raise ConfigError(f"{path} exists and has other words; give --overwrite to replace it, or another --destdir")
    write_text(path, text)

"""Turn text into a dataset: ``hpclm preprocess``, known to Megatron's users as tools/preprocess_data.py.

inputs (whole lines) → encode (tokens, in worker processes) → output (a dataset for each key). Several processes take a
part each: parts.py.
"""

import json
import logging
import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hpclm import log as logs
from hpclm.data import tokenizers
from hpclm.data.disk.indexed import files
from hpclm.data.text.encode import Job, encode, read, tokenizer_of
from hpclm.data.text.inputs import Share, chunks
from hpclm.data.text.options import Corpus, Dictionary, Request, request
from hpclm.data.text.output import Output, Report
from hpclm.data.text.pool import ordered, told_to_end
from hpclm.data.text.progress import Progress
from hpclm.errors import ConfigError, unwritten
from hpclm.files import readable, writable_folder, write_text

log = logging.getLogger(__name__)
SHOWN = 5  # bad lines that are described in the log
ALONE = Share(0, 1)


def main(argv: list[str]) -> int:
    """``hpclm preprocess``: read the arguments, write the datasets, say what to type next."""
    logs.setup()
    asked = request(argv)
    tokenizer_of.cache_clear()  # its files may have changed since an earlier call
    with told_to_end():
        if asked.share.parts > 1:
            from hpclm.data.text import parts

            return parts.main(asked)
        refuse_to_replace(asked, [prefix for corpus in asked.corpora for prefix in corpus.prefixes])
        for corpus in asked.corpora:
            writable_folder(corpus.prefixes[0].parent, "output folder")
        if asked.dictionary is not None:
            _write_dictionary(asked.dictionary, asked)
        check(asked.job)
        for corpus in asked.corpora:
            began = time.monotonic()
            reports = write(corpus, asked, corpus.prefixes)
            seconds = time.monotonic() - began
            size = sum(source.size for source in corpus.inputs)
            tell(reports, f"; {size / 1e6 / seconds:.1f} MB/s" if size else "")
    tell_next([corpus.prefixes[0] for corpus in asked.corpora], asked)
    return 0


def write(
    corpus: Corpus,
    asked: Request,
    prefixes: Sequence[Path],
    share: Share = ALONE,
    more: dict[str, Any] | None = None,
    digests: Sequence[Path | None] | None = None,
) -> list[Report]:
    """Write ``share`` of the corpus as a dataset for each of ``prefixes``; all of them, or none that opens.

    They are the same for any number of workers, and memory does not grow with the input. ``more`` goes into the notes;
    ``digests``: where each dataset's hashes go too. ConfigError for input that cannot be read, and where it has no token.
    """
    job, size = asked.job, sum(source.size for source in corpus.inputs)
    size = size * (share.part + 1) // share.parts - size * share.part // share.parts
    work = ordered(partial(encode, job=job), chunks(list(corpus.inputs), share), asked.workers)
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


def identity(corpus: Corpus, asked: Request) -> dict[str, Any]:
    """All that decides what a dataset becomes (JSON): inputs, options, tokenizer."""
    job = asdict(asked.job) | {"files": tokenizer_of(asked.job).identity}
    return dict(json.loads(json.dumps({"inputs": [asdict(source) for source in corpus.inputs], "job": job})))


def check(job: Job) -> tokenizers.Tokenizer:
    """The job's tokenizer, after what it and the options cannot do together."""
    tokenizer = tokenizer_of(job)
    if job.append_eod and tokenizer.eod is None:
        raise ConfigError(f"--append-eod: the {job.tokenizer} tokenizer has no end-of-document token")
    ends_itself = getattr(tokenizer, "ends_itself", False)  # a person's own may not say
    if job.append_eod and ends_itself:
        raise ConfigError(f"the {job.tokenizer} tokenizer ends every document by itself; leave out --append-eod")
    if job.language is not None and ends_itself:
        raise ConfigError(f"the {job.tokenizer} tokenizer ends every text by itself; leave out --split-sentences")
    return tokenizer


def refuse_to_replace(asked: Request, prefixes: Sequence[Path]) -> None:
    """ConfigError where one of these datasets is there already, unless it may be replaced."""
    there = [str(path) for path in (files(prefix)[1] for prefix in prefixes) if path.exists()]
    if there and not asked.overwrite:
        verb = "exists" if len(there) == 1 else "exist"
        raise ConfigError(
            f"{' and '.join(there)} {verb}; give --overwrite to replace it, or another name for the output"
        )


def refuse_nothing(report: Report, names: str) -> None:
    """ConfigError for a dataset without a token."""
    if not report.tokens:
        raise ConfigError(f"no documents in {names} ({lost(report)}); no dataset was written")


def lost(report: Report) -> str:
    """What the input had and the dataset has not, in words."""
    words = [f"{report.counts['skipped']:,} empty documents skipped"]
    if report.counts["repeated"]:
        words.append(f"{report.counts['repeated']:,} repeats left out")
    if report.bad:
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in report.bad.items())
        words.append(f"{sum(report.bad.values()):,} lines skipped that cannot be read ({reasons})")
    if report.counts["unsplit"]:
        words.append(f"{report.counts['unsplit']:,} documents not split, as their sentences could not be told apart")
    return ", ".join(words)


def tell(reports: list[Report], end: str = "") -> None:
    """Say what was written."""
    for report in reports:
        what = f"{report.documents:,} documents, {report.tokens:,} tokens; {lost(report)}"
        print(f"{report.prefix}.bin, .idx, .json: {what}{end}")


def tell_next(prefixes: list[Path], asked: Request) -> None:
    """Say what to type next: for one dataset, or for train, valid, ... of them."""
    if len(prefixes) == 1:
        words = [f"data.prefix={shlex.quote(str(prefixes[0]))}"]
    else:
        parts = {part: [p for p in prefixes if p.name.startswith(part)] for part in ("train", "valid", "test")}
        words = [f"data.{part}=" + shlex.quote(f"[{found[0]}]") for part, found in parts.items() if found]
        more = [f"{prefix.name}={prefix}" for prefix in parts["valid"][1:]]
        words += ["data.validation=" + shlex.quote(f"[{', '.join(more)}]")] if more else []
    words.append(f"model.vocab_size={tokenizer_of(asked.job).size}")
    if asked.vocab_multiple is not None:
        words.append(f"model.vocab_multiple={asked.vocab_multiple}")
    print("next: hpclm train gpt2-124m", *words)


def _write_dictionary(dictionary: Dictionary, asked: Request) -> None:
    """Put dict.txt where its datasets will be; ConfigError rather than change one that is there."""
    if dictionary.given is not None:
        text = readable(dictionary.given, "dictionary").read_text("utf-8")
    else:
        lines = (
            line
            for chunk in chunks(list(dictionary.corpus.inputs))
            for line in read(chunk, asked.job.keys, asked.job.on_error)[0][0]
        )
        text = tokenizers.dictionary(lines, dictionary.threshold, dictionary.words, dictionary.padding)
    path = dictionary.path
    if path.exists() and path.read_text("utf-8") != text and not asked.overwrite:
        raise ConfigError(f"{path} exists and has other words; give --overwrite to replace it, or another --destdir")
    write_text(path, text)

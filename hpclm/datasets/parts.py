"""Preprocess one corpus with several processes: each writes a part, and the last to finish joins them.

The parts are datasets in PREFIX.parts/, with the job they belong to in their PREFIX.json. No process waits for another's
part: one that finds parts missing exits. joined.json remains, so that a process of the same job that starts late or again
knows that nothing is left to do.
"""

import json
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hpclm.data.indexed import IndexedDataset, files, sidecar
from hpclm.datasets.build import (
    check,
    job_fingerprint,
    print_next,
    print_reports,
    refuse_empty,
    refuse_to_replace,
    write,
)
from hpclm.datasets.encode import Column
from hpclm.datasets.hashing import TokenReader
from hpclm.datasets.options import Request
from hpclm.datasets.output import BuildReport, Output
from hpclm.errors import ConfigError, HpclmError, unwritten
from hpclm.files import locked, read_text, writable_folder, write_text
from hpclm.terminal import say

log = logging.getLogger(__name__)


def main(request: Request) -> int:
    """Write this process's part unless it exists, and join the parts if all of them exist."""
    [corpus] = request.corpora
    check(request.job)
    folder = Path(f"{corpus.prefixes[0]}.parts")
    if _joined(folder, request):
        say(f"{' and '.join(map(str, corpus.prefixes))}: already written by this job")
        return 0
    try:
        refuse_to_replace(request, corpus.prefixes)
        writable_folder(folder, "shared folder of the parts")
        reports = _write_and_join(folder, request)
    except (HpclmError, OSError):
        if not _joined_meanwhile(folder, request):  # otherwise another process has joined and removed the parts
            raise
        reports = None
    if reports:
        print_reports(reports, request.job)
        print_next(list(corpus.prefixes[:1]), request)
    else:
        part, parts = request.share.part, request.share.parts
        say(f"part {part} of {parts} is done; the last process to finish joins all parts in {folder}")
    return 0


def _write_and_join(folder: Path, request: Request) -> list[BuildReport] | None:
    """Write the part, and join all parts if they exist: reports, or None if this process does not join."""
    [corpus] = request.corpora
    job = job_fingerprint(corpus, request) | {"parts": request.share.parts}
    mine = _prefixes(folder, request, request.share.part)
    if all(_complete(prefix, job) for prefix in mine):
        log.info("part %d of %d exists already", request.share.part, request.share.parts)
    elif _joined(folder, request):  # in the meantime
        return None
    else:
        print_reports(write(corpus, request, mine, request.share, {"job": job}))
    everything = [_prefixes(folder, request, part) for part in range(request.share.parts)]
    if not all(_complete(prefix, job) for part in everything for prefix in part):
        return None
    with locked(folder):  # if two processes see all parts, one of them joins
        if _joined(folder, request):
            return None
        reports = _join(everything, request)
        write_text(folder / "joined.json", json.dumps(_result(request)))
        for path in folder.iterdir():
            if path.name != "joined.json":
                path.unlink(missing_ok=True)
    return reports


def _joined(folder: Path, request: Request) -> bool:
    """Whether this job has written its datasets, and nothing has replaced them."""
    try:
        return bool(json.loads(read_text(folder / "joined.json")) == _result(request))
    except (OSError, ValueError, RecursionError):
        return False


def _joined_meanwhile(folder: Path, request: Request) -> bool:
    """Whether this job has written its datasets, once no other process is joining (it publishes them one by one)."""
    if not folder.is_dir():
        return False
    with locked(folder):
        return _joined(folder, request)


def _result(request: Request) -> dict[str, Any]:
    """The job, and the files that it wrote (JSON); OSError if they do not exist."""
    [corpus] = request.corpora
    status = [path.stat() for prefix in corpus.prefixes for path in files(prefix)[:2]]
    return {"job": job_fingerprint(corpus, request), "files": [[file.st_size, file.st_mtime_ns] for file in status]}


def _prefixes(folder: Path, request: Request, part: int) -> list[Path]:
    names = [prefix.name for prefix in request.corpora[0].prefixes]
    return [folder / f"{name}-{part}-of-{request.share.parts}" for name in names]


def _complete(prefix: Path, job: dict[str, Any]) -> bool:
    """Whether a part exists, and belongs to the job."""
    try:
        return sidecar(prefix).get("job") == job and bool(IndexedDataset(prefix).layout)
    except ConfigError:
        return False


def _join(parts: list[list[Path]], request: Request) -> list[BuildReport]:
    """Write the parts, in order, as the datasets that a single process would write."""
    [corpus] = request.corpora
    try:
        with ExitStack() as opened:
            outputs = [opened.enter_context(Output(prefix, request.job)) for prefix in corpus.prefixes]
            for key, output in enumerate(outputs):
                for part in parts:
                    _add(part[key], output)
                refuse_empty(output.report(), corpus.names)
            return [output.close({}) for output in outputs]
    except OSError as error:
        raise unwritten(error, corpus.prefixes[0], "the parts are kept; start again") from error


def _add(prefix: Path, output: Output) -> None:
    """Append a part's documents, and add its counts."""
    note = sidecar(prefix)
    output.bad.update(note.get("bad", {}))
    output.skipped += note["skipped"]
    try:
        for documents in TokenReader(IndexedDataset(prefix)).documents():
            output.add(Column(documents.tokens, documents.sizes, documents.per_document))
    except ConfigError as error:
        raise ConfigError(f"{error}. This is a part: remove {prefix}.*, and start its process again") from None

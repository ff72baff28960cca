"""Preprocess text with one process, or one corpus with several: each writes a part, and the last to finish joins them.

The parts are datasets in PREFIX.parts/, each with its job in its .json file. Processes do not wait for each other: a process that finds
parts missing exits. joined.json remains, so that a late or restarted process of the same job knows that nothing is left to do.
"""

import json
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hpclm.base.errors import ConfigError, unwritten
from hpclm.base.files import locked, read_text, write_text
from hpclm.base.folders import writable_folder
from hpclm.base.terminal import say
from hpclm.data.indexed import IndexedDataset, files, sidecar
from hpclm.preprocess import counts
from hpclm.preprocess.build import (
    DatasetOutput,
    check_job,
    complete,
    job_fingerprint,
    refuse_to_replace,
    write,
    write_dictionary,
)
from hpclm.preprocess.merge import copy
from hpclm.preprocess.options import PreprocessRequest

log = logging.getLogger(__name__)


def preprocess(request: PreprocessRequest) -> bool:
    """Write the requested datasets, or this process's part of one. Returns whether they are complete."""
    if request.share.parts > 1:
        return write_part(request)
    refuse_to_replace(request, [prefix for corpus in request.corpora for prefix in corpus.prefixes])
    for corpus in request.corpora:
        writable_folder(corpus.prefixes[0].parent, "output folder")
    if request.dictionary is not None:
        write_dictionary(request.dictionary, request)
    check_job(request.job)
    for corpus in request.corpora:
        write(corpus, request, corpus.prefixes)
    return True


def write_part(request: PreprocessRequest) -> bool:
    """Write this process's part unless it exists, and join the parts if all exist. Returns whether this process has joined them."""
    [corpus] = request.corpora
    part = request.share.part
    parts = request.share.parts
    folder = Path(f"{corpus.prefixes[0]}.parts")
    check_job(request.job)
    if not folder.is_dir():
        refuse_to_replace(request, corpus.prefixes)
    writable_folder(folder, "shared folder of the parts")
    job = job_fingerprint(corpus, request) | {"parts": parts}
    prefixes = [[folder / f"{prefix.name}-{i}-of-{parts}" for prefix in corpus.prefixes] for i in range(parts)]
    with locked(folder):  # another process may be joining
        if _joined(folder, request):
            say(f"{' and '.join(map(str, corpus.prefixes))}: already written by this job")
            return False
        refuse_to_replace(request, corpus.prefixes)
        complete = _complete(prefixes[part], job)
    if complete:
        log.info("part %d of %d exists already", part, parts)
    else:
        write(corpus, request, prefixes[part], request.share, {"job": job})
    if all(_complete(prefix, job) for prefix in prefixes):
        with locked(folder):  # if two processes see all parts, one of them joins
            if not _joined(folder, request):
                _join(prefixes, request)
                write_text(folder / "joined.json", json.dumps(_result(request)))
                for path in folder.iterdir():
                    if path.name != "joined.json":
                        path.unlink(missing_ok=True)
                return True
    for number, prefix in enumerate(prefixes):
        if sidecar(prefix[0]).get("job", job) != job:
            log.warning(
                "part %d was made from other inputs or with other options; start it again with --overwrite", number
            )
    say(f"part {part} of {parts} is done; the last process to finish joins all parts in {folder}")
    return False


def _joined(folder: Path, request: PreprocessRequest) -> bool:
    """Whether this job has written its datasets, and nothing has replaced them."""
    try:
        return bool(json.loads(read_text(folder / "joined.json")) == _result(request))
    except (OSError, ValueError, RecursionError):
        return False


def _result(request: PreprocessRequest) -> dict[str, Any]:
    """The job and the files that it wrote, as JSON; OSError if the files do not exist."""
    [corpus] = request.corpora
    status = [path.stat() for prefix in corpus.prefixes for path in files(prefix)[:2]]
    return {"job": job_fingerprint(corpus, request), "files": [[file.st_size, file.st_mtime_ns] for file in status]}


def _complete(prefixes: list[Path], job: dict[str, Any]) -> bool:
    """Whether the datasets of a part exist and belong to the job."""
    try:
        return all(sidecar(prefix).get("job") == job and IndexedDataset(prefix).layout for prefix in prefixes)
    except ConfigError:
        return False


def _join(parts: list[list[Path]], request: PreprocessRequest) -> None:
    """Write the parts, in order, as the datasets that a single process would write."""
    [corpus] = request.corpora
    try:
        with ExitStack() as opened:
            outputs = [
                opened.enter_context(DatasetOutput(prefix, request.job, i)) for i, prefix in enumerate(corpus.prefixes)
            ]
            for output, prefixes in zip(outputs, zip(*parts, strict=True), strict=True):
                for prefix in prefixes:
                    _add(prefix, output)
                output.refuse_empty(corpus.names)
            complete(outputs, request.job, {})
    except OSError as error:
        raise unwritten(error, corpus.prefixes[0], "the parts are kept; start again") from error
    for output in outputs:
        output.describe()


def _add(prefix: Path, output: DatasetOutput) -> None:
    """Append a part's documents, and add its counts."""
    output.counts += counts.noted(sidecar(prefix))
    try:
        copy(IndexedDataset(prefix), output)
    except ConfigError as error:
        raise ConfigError(f"{error}. This is a part: remove {prefix}.*, and start its process again") from None

"""Preprocess one corpus with several processes: each writes a part, and the last to finish joins them.

The parts are datasets in PREFIX.parts/, with the job they belong to in their PREFIX.json. No process waits for another: one
that finds parts missing, or another process joining them, exits. joined.json remains, so that a process of the same job that
starts late or again knows that nothing is left to do.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hpclm.data.disk.content import Verification
from hpclm.data.disk.indexed import IndexedDataset, files, sidecar
from hpclm.data.disk.merge import document_ranges
from hpclm.data.text.build import check, job_fingerprint, refuse_nothing, refuse_to_replace, tell, tell_next, write
from hpclm.data.text.encode import DIGEST, Column
from hpclm.data.text.options import Request
from hpclm.data.text.output import Output, Report
from hpclm.errors import ConfigError, HpclmError, unwritten
from hpclm.files import appending, read_text, writable_folder, write_text
from hpclm.rundir.lock import take
from hpclm.terminal import say

log = logging.getLogger(__name__)


def main(asked: Request) -> int:
    """Write this process's part unless it exists, and join the parts if all of them exist."""
    [corpus] = asked.corpora
    check(asked.job)
    if _joined(asked):
        say(f"{' and '.join(map(str, corpus.prefixes))}: already written by this job")
        return 0
    folder = _folder(asked)
    try:
        if _read(folder / "joining") != job_fingerprint(corpus, asked):  # otherwise killed while joining
            refuse_to_replace(asked, corpus.prefixes)
        reports = _take_part(folder, asked)
    except (HpclmError, OSError):
        if not _joined(asked):  # otherwise another process has joined and removed the parts
            raise
        reports = None
    if reports:
        tell(reports, asked.job)
        tell_next(list(corpus.prefixes[:1]), asked)
    else:
        say(
            f"part {asked.share.part} of {asked.share.parts} is done; the last process to finish joins all parts in {folder}"
        )
    return 0


def _take_part(folder: Path, asked: Request) -> list[Report] | None:
    """Write the part, and join all parts if they exist: reports, or None if this process does not join."""
    [corpus] = asked.corpora
    writable_folder(folder, "shared folder of the parts")
    belongs = job_fingerprint(corpus, asked) | {"parts": asked.share.parts}
    mine = _prefixes(folder, asked, asked.share.part)
    if all(_whole(prefix, belongs) for prefix in mine):
        log.info("part %d of %d exists already", asked.share.part, asked.share.parts)
    elif _joined(asked):  # in the meantime
        return None
    else:
        digests = [_digests(prefix) if asked.job.deduplicate else None for prefix in mine]
        tell(write(corpus, asked, mine, asked.share, {"job": belongs}, digests))
    return _join_if_all_are_there(folder, asked, belongs)


def _folder(asked: Request) -> Path:
    return Path(f"{asked.corpora[0].prefixes[0]}.parts")


def _joined(asked: Request) -> bool:
    try:
        return bool(_read(_folder(asked) / "joined.json") == _account(asked))
    except OSError:
        return False


def _read(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return None


def _account(asked: Request) -> dict[str, Any]:
    """The job, and the resulting files (JSON); OSError if they do not exist."""
    [corpus] = asked.corpora
    status = [path.stat() for prefix in corpus.prefixes for path in files(prefix)[:2]]
    return {"job": job_fingerprint(corpus, asked), "files": [[each.st_size, each.st_mtime_ns] for each in status]}


def _prefixes(folder: Path, asked: Request, part: int) -> list[Path]:
    names = [prefix.name for prefix in asked.corpora[0].prefixes]
    return [folder / f"{name}-{part}-of-{asked.share.parts}" for name in names]


def _digests(prefix: Path) -> Path:
    return Path(f"{prefix}.digests")


def _whole(prefix: Path, belongs: dict[str, Any]) -> bool:
    try:
        if sidecar(prefix).get("job") != belongs:
            return False
        dataset = IndexedDataset(prefix)
        wanted = DIGEST * dataset.document_count
        return not belongs["job"]["deduplicate"] or _digests(prefix).stat().st_size == wanted
    except (ConfigError, OSError):
        return False


def _join_if_all_are_there(folder: Path, asked: Request, belongs: dict[str, Any]) -> list[Report] | None:
    """Join the parts; None if some are missing, or if another process joins them."""

    def complete() -> bool:
        every = range(asked.share.parts)
        return all(_whole(prefix, belongs) for part in every for prefix in _prefixes(folder, asked, part))

    # If two processes see all parts, the lock lets one of them join.
    if not complete():
        return None
    with _lock(folder) as held:
        if not held or not complete():  # or joined and removed in the meantime
            return None
        write_text(folder / "joining", json.dumps(job_fingerprint(asked.corpora[0], asked)))
        reports = _join(folder, asked)
        write_text(folder / "joined.json", json.dumps(_account(asked)))
        for path in folder.iterdir():
            if path.name != "joined.json":
                path.unlink(missing_ok=True)
        return reports


@contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Whether this process may join; a lock ends with its process."""
    try:
        file = os.fdopen(appending(folder / "lock"), "ab")
    except FileNotFoundError:  # joined and removed by another
        yield False
        return
    with file:
        yield take(file, folder / "lock")


def _join(folder: Path, asked: Request) -> list[Report]:
    """Write the parts, in order, as the datasets that a single process would write."""
    [corpus] = asked.corpora
    parts = [_prefixes(folder, asked, part) for part in range(asked.share.parts)]
    try:
        with ExitStack() as opened:
            outputs = [opened.enter_context(Output(prefix, asked.job)) for prefix in corpus.prefixes]
            for key, output in enumerate(outputs):
                for part in parts:
                    _add(part[key], output)
                refuse_nothing(output.report(), corpus.names)
            return [output.close({}) for output in outputs]
    except OSError as error:
        raise unwritten(error, corpus.prefixes[0], f"the parts in {folder} are kept; start again") from error


def _add(prefix: Path, output: Output) -> None:
    """Append a part's documents, and add its counts."""
    note, dataset = sidecar(prefix), IndexedDataset(prefix)
    verification = Verification(dataset)
    output.bad.update(note.get("bad", {}))
    output.counts.update({name: note.get(name, 0) for name in ("skipped", "repeated", "unsplit")})
    path = _digests(prefix)
    digests = np.memmap(path, f"V{DIGEST}", "r") if path.exists() and path.stat().st_size else None
    for first, last in document_ranges(dataset):
        bounds = dataset.bounds(first, last)
        sizes = dataset.sizes[bounds[0] : bounds[-1]].astype(np.int64)
        begin, end = dataset.place(int(bounds[0])), dataset.place(int(bounds[-1]))
        tokens = dataset.block(begin, end)
        verification.update(begin, end)
        hashes = np.asarray(digests[first:last]) if digests is not None else None
        output.add(Column(tokens, sizes, np.diff(bounds), hashes))
        dataset.release()
    try:
        verification.end()
    except ConfigError as error:
        raise ConfigError(f"{error}. This is a part: remove {prefix}.*, and start its process again") from None

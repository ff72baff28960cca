"""Several processes preprocess one corpus: each writes a part, and whoever finishes last joins them.

The parts lie in PREFIX.parts/ as datasets with a note of the job that they belong to. No process waits for another: one
that finds parts missing, or somebody else joining, is done. Of the parts, joined.json stays: a process of the same job that
starts late, or again, sees there that nothing is left to do.
"""

import fcntl
import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hpclm.data.disk.copying import stretches
from hpclm.data.disk.indexed import IndexedDataset, files, sidecar
from hpclm.data.preprocess import (
    check,
    identity,
    refuse_nothing,
    refuse_to_replace,
    tell,
    tell_next,
    write,
)
from hpclm.data.text.encode import DIGEST, Column
from hpclm.data.text.options import Request
from hpclm.data.text.output import Output, Report
from hpclm.errors import ConfigError, HpclmError, unwritten
from hpclm.files import writable_folder, write_text

log = logging.getLogger(__name__)


def main(asked: Request) -> int:
    """Write this process's part unless it is there, and join the parts if they are all there."""
    [corpus] = asked.corpora
    check(asked.job)
    if _joined(asked):
        print(f"{' and '.join(map(str, corpus.prefixes))}: this very job has written it already")
        return 0
    folder = _folder(asked)
    try:
        if _read(folder / "joining") != identity(corpus, asked):  # else killed while it joined, with a dataset done
            refuse_to_replace(asked, corpus.prefixes)
        reports = _take_part(folder, asked)
    except (HpclmError, OSError):
        if not _joined(asked):  # else another has joined the parts, and removed them under this process's hands
            raise
        reports = None
    if reports:
        tell(reports)
        tell_next(list(corpus.prefixes[:1]), asked)
    else:
        print(f"part {asked.share.part} of {asked.share.parts} is done; whoever finds all parts in {folder} joins them")
    return 0


def _take_part(folder: Path, asked: Request) -> list[Report] | None:
    """Write the part, and join all: the reports of whoever joins, else None."""
    [corpus] = asked.corpora
    writable_folder(folder, "folder of the parts, which all processes must share,")
    belongs = identity(corpus, asked) | {"parts": asked.share.parts}
    mine = _prefixes(folder, asked, asked.share.part)
    if all(_whole(prefix, belongs) for prefix in mine):
        log.info("part %d of %d is there already", asked.share.part, asked.share.parts)
    elif _joined(asked):  # while this process started
        return None
    else:
        digests = [_digests(prefix) if asked.job.deduplicate else None for prefix in mine]
        tell(write(corpus, asked, mine, asked.share, {"job": belongs}, digests))
    return _join_if_all_are_there(folder, asked, belongs)


def _folder(asked: Request) -> Path:
    return Path(f"{asked.corpora[0].prefixes[0]}.parts")


def _joined(asked: Request) -> bool:
    """Whether this job's parts have been joined, and the datasets are still the ones that came of it."""
    try:
        return bool(_read(_folder(asked) / "joined.json") == _account(asked))
    except OSError:
        return False


def _read(path: Path) -> Any:
    """The JSON in a file, None where there is none."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _account(asked: Request) -> dict[str, Any]:
    """The job, and which datasets came of it (JSON); OSError where they are not there."""
    [corpus] = asked.corpora
    status = [path.stat() for prefix in corpus.prefixes for path in files(prefix)[:2]]
    return {"job": identity(corpus, asked), "files": [[each.st_size, each.st_mtime_ns] for each in status]}


def _prefixes(folder: Path, asked: Request, part: int) -> list[Path]:
    """Where the datasets of a part lie, one for each key."""
    names = [prefix.name for prefix in asked.corpora[0].prefixes]
    return [folder / f"{name}-{part}-of-{asked.share.parts}" for name in names]


def _digests(prefix: Path) -> Path:
    return Path(f"{prefix}.digests")


def _whole(prefix: Path, belongs: dict[str, Any]) -> bool:
    """Whether a dataset of this job lies there and opens."""
    try:
        if sidecar(prefix).get("job") != belongs:
            return False
        dataset = IndexedDataset(prefix)
        wanted = DIGEST * dataset.document_count
        return not belongs["job"]["deduplicate"] or _digests(prefix).stat().st_size == wanted
    except (ConfigError, OSError):
        return False


def _join_if_all_are_there(folder: Path, asked: Request, belongs: dict[str, Any]) -> list[Report] | None:
    """Join the parts, or None where some are missing or somebody else does it."""

    def complete() -> bool:
        every = range(asked.share.parts)
        return all(_whole(prefix, belongs) for part in every for prefix in _prefixes(folder, asked, part))

    # The last to finish sees all parts. Where two see them, one joins and the other is turned away at the lock.
    if not complete():
        return None
    with _lock(folder) as held:
        if not held or not complete():  # or joined and removed in the meantime
            return None
        write_text(folder / "joining", json.dumps(identity(asked.corpora[0], asked)))
        reports = _join(folder, asked)
        write_text(folder / "joined.json", json.dumps(_account(asked)))
        for path in folder.iterdir():
            if path.name != "joined.json":
                path.unlink(missing_ok=True)
        return reports


@contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Whether this process may join; a dead process's lock is free."""
    try:
        file = (folder / "lock").open("ab")
    except FileNotFoundError:  # joined and removed by another
        yield False
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            raise HpclmError(
                f"{folder}/lock cannot be locked: {error.strerror}; write to a file system with flock"
            ) from None
        yield True


def _join(folder: Path, asked: Request) -> list[Report]:
    """The parts, in order, as the datasets that one process would have written."""
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
        raise unwritten(error, corpus.prefixes[0], f"the parts in {folder} are kept: start again") from error


def _add(prefix: Path, output: Output) -> None:
    """Append a part's documents, and what was counted in it."""
    note, dataset = sidecar(prefix), IndexedDataset(prefix)
    output.bad.update(note.get("bad", {}))
    output.counts.update({name: note.get(name, 0) for name in ("skipped", "repeated", "unsplit")})
    path = _digests(prefix)
    digests = np.memmap(path, f"V{DIGEST}", "r") if path.exists() and path.stat().st_size else None
    for first, last in stretches(dataset):
        bounds = dataset.bounds(first, last)
        sizes = dataset.sizes[bounds[0] : bounds[-1]].astype(np.int64)
        tokens = dataset.block(dataset.place(int(bounds[0])), dataset.place(int(bounds[-1])))
        hashes = np.asarray(digests[first:last]) if digests is not None else None
        output.add(Column(tokens, sizes, np.diff(bounds), hashes))
        dataset.release()

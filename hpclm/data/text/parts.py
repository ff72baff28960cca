"""Several processes preprocess one corpus: each writes a part, and whoever finishes last joins them.

The parts lie in PREFIX.parts/ as datasets with a note of the job that they belong to. No process waits for another: one
that finds parts missing, or somebody else joining, is done.
"""

import fcntl
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hpclm.data.disk.indexed import IndexedDataset, sidecar
from hpclm.data.preprocess import check, refuse_nothing, refuse_to_replace, tell, tell_next, write
from hpclm.data.text.encode import DIGEST, Column, tokenizer_of
from hpclm.data.text.options import Request
from hpclm.data.text.output import Output, Report
from hpclm.errors import ConfigError, HpclmError
from hpclm.files import writable_folder

log = logging.getLogger(__name__)
BLOCK = 1 << 14  # documents that the join copies at a time


def main(asked: Request) -> int:
    """Write this process's part unless it is there, and join the parts if they are all there."""
    [corpus] = asked.corpora
    check(asked.job)
    folder = Path(f"{corpus.prefixes[0]}.parts")
    identity = _identity(asked)
    share = asked.share
    if not any(_whole(prefix, identity) for part in range(share.parts) for prefix in _prefixes(folder, asked, part)):
        refuse_to_replace(asked)  # else this job has begun to write there
    writable_folder(folder, "folder of the parts")
    mine = _prefixes(folder, asked, share.part)
    if all(_whole(prefix, identity) for prefix in mine):
        print(f"part {share.part} of {share.parts} is there already")
    else:
        digests = [_digests(prefix) if asked.job.deduplicate else None for prefix in mine]
        tell(write(corpus, asked, mine, share, {"job": identity}, digests))
    reports = _join_if_all_are_there(folder, asked, identity)
    if reports is None:
        print(f"part {share.part} of {share.parts} is done; whoever finishes last joins the parts")
    else:
        tell(reports)
        tell_next(list(corpus.prefixes), asked)
    return 0


def _identity(asked: Request) -> dict[str, Any]:
    """What must be the same for parts to belong together (JSON)."""
    [corpus] = asked.corpora
    job = asdict(asked.job) | {"files": tokenizer_of(asked.job).identity}
    whole = {"inputs": [asdict(source) for source in corpus.inputs], "job": job, "parts": asked.share.parts}
    return dict(json.loads(json.dumps(whole)))


def _prefixes(folder: Path, asked: Request, part: int) -> list[Path]:
    """Where the datasets of a part lie, one for each key."""
    names = [prefix.name for prefix in asked.corpora[0].prefixes]
    return [folder / f"{name}-{part}-of-{asked.share.parts}" for name in names]


def _digests(prefix: Path) -> Path:
    return Path(f"{prefix}.digests")


def _whole(prefix: Path, identity: dict[str, Any]) -> bool:
    """Whether a dataset of this job lies there and opens."""
    try:
        if sidecar(prefix).get("job") != identity:
            return False
        dataset = IndexedDataset(prefix)
        wanted = DIGEST * (len(dataset.documents) - 1)
        return not identity["job"]["deduplicate"] or _digests(prefix).stat().st_size == wanted
    except (ConfigError, OSError):
        return False


def _join_if_all_are_there(folder: Path, asked: Request, identity: dict[str, Any]) -> list[Report] | None:
    """Join the parts, or None where some are missing or somebody else does it."""

    def complete() -> bool:
        every = range(asked.share.parts)
        return all(_whole(prefix, identity) for part in every for prefix in _prefixes(folder, asked, part))

    # The last to finish sees all parts. Where two see them, one joins and the other is turned away at the lock.
    if not complete():
        return None
    with _lock(folder) as held:
        if not held or not complete():  # or joined and removed in the meantime
            return None
        reports = _join(folder, asked)
        gone = folder.with_name(f"{folder.name}.tmp-{os.getpid()}-{secrets.token_hex(3)}")
        folder.rename(gone)  # in one step: a half-removed folder would look like a job to go on with
        shutil.rmtree(gone)
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
        raise ConfigError(
            f"{error.filename or corpus.prefixes[0]}: {error.strerror}; the parts in {folder} are kept: start again"
        ) from error


def _add(prefix: Path, output: Output) -> None:
    """Append a part's documents, and what was counted in it."""
    note, dataset = sidecar(prefix), IndexedDataset(prefix)
    output.bad.update(note.get("bad", {}))
    output.counts.update({name: note.get(name, 0) for name in ("skipped", "repeated", "unsplit")})
    path = _digests(prefix)
    digests = np.memmap(path, f"V{DIGEST}", "r") if path.exists() and path.stat().st_size else None
    bounds = dataset.documents
    for first in range(0, len(bounds) - 1, BLOCK):
        here = np.asarray(bounds[first : first + BLOCK + 1])
        sizes = dataset.sizes[here[0] : here[-1]].astype(np.int64)
        begin = int(dataset.pointers[here[0]]) // dataset.dtype.itemsize if len(sizes) else 0
        tokens = dataset.flat[begin : begin + int(sizes.sum())]
        hashes = np.asarray(digests[first : first + BLOCK]) if digests is not None else None
        output.add(Column(tokens, sizes, np.diff(here), hashes))

"""Files a person names: checked before they are used, written whole or not at all."""

import fcntl
import glob
import hashlib
import logging
import mmap
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpclm.errors import ConfigError

log = logging.getLogger(__name__)
HASHED = 1 << 18  # bytes of a block of a file that goes into its fingerprint
BLOCKS = 64  # of them
ABANDONED = 24 * 3600  # seconds without a write after which what another machine left unfinished is swept too


def readable(path: str | Path, what: str) -> Path:
    """``path`` if it is a file that can be opened; ``what`` names it in the error."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{what} {path} is not a regular file")
    except FileNotFoundError:
        raise ConfigError(f"{what} {path} does not exist; looked in {path.absolute().parent}") from None
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}") from None
    return path


def writable_folder(path: str | Path, what: str, mode: int = 0o777) -> Path:
    """``path`` as a folder that files can be made in, created with ``mode`` if need be; ``what`` names it in the error."""
    path = Path(path)
    try:
        path.mkdir(mode, parents=True, exist_ok=True)
        probe = aside(path / ".writable")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{what} {path} cannot be written: {error.strerror} (errno {error.errno}); choose another place or free this one"
        ) from None
    return path


def private_folder(path: str | Path, what: str) -> Path:
    """``path`` as ``writable_folder``, made for its owner alone; ConfigError where others may write in it."""
    path = writable_folder(path, what, mode=0o700)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{what} {path} can be written by others (mode {mode:04o}), who could change what a run reads back; "
            f"chmod go-w {path}"
        )
    return path


def write_text(path: Path, text: str) -> None:
    """Put ``text`` at ``path`` in one step: a reader, or a crash, sees the old file or the new one."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path`` in one step, as ``write_text`` does."""
    written = aside(path)
    try:
        with written.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)
    sync(path.parent)


def aside(path: Path) -> Path:
    """A name beside ``path`` for what is not finished yet; it says whose it is, so that ``sweep`` can tell."""
    return path.with_name(f"{path.name}.tmp-{_here()}-{os.getpid()}-{secrets.token_hex(3)}")


def sweep(path: Path) -> None:
    """Remove what was left aside of ``path`` by processes that are gone."""
    own = re.compile(rf"\.tmp-{re.escape(_here())}-(\d+)-[0-9a-f]+.*")
    for old in path.parent.glob(f"{glob.escape(path.name)}.tmp-*"):
        owner = own.fullmatch(old.name.removeprefix(path.name))
        with suppress(FileNotFoundError):  # another process may be sweeping too
            if owner:
                gone = Path("/proc/self").exists() and not Path(f"/proc/{owner[1]}").exists()
            else:
                gone = time.time() - old.stat().st_mtime > ABANDONED
            if gone:
                shutil.rmtree(old) if old.is_dir() else old.unlink()


def fingerprint(content: mmap.mmap | bytes) -> str:
    """blake2b of evenly spaced blocks of a file, its beginning and end among them; of all of a short one."""
    digest, size = hashlib.blake2b(digest_size=16), len(content)
    whole = size <= HASHED * BLOCKS
    for k in range(BLOCKS):
        begin = k * HASHED if whole else (size - HASHED) * k // (BLOCKS - 1)
        digest.update(content[begin : begin + HASHED])
    return digest.hexdigest()


def _here() -> str:
    """Where a process number means one process: this machine, and the container on it."""
    try:
        space = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        space = ""
    return socket.gethostname() + "".join(filter(str.isdigit, space))


@contextmanager
def locked(path: Path, waiting: str | None = None) -> Iterator[None]:
    """Wait until no other process is in such a block for this folder or file, where the file system knows locks.

    A file that is not there is made. ``waiting`` is logged before a wait.
    """
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting:
                    log.info(waiting)
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """Make what a file holds, or the names in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

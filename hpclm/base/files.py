"""Open, read and write files safely: regular files only, without blocking, up to a size, and atomically.

All code opens files for reading and appending with ``opened``.
"""

import errno
import fcntl
import glob
import hashlib
import io
import logging
import mmap
import os
import re
import secrets
import shlex
import shutil
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

from hpclm.base.errors import ConfigError, unread

log = logging.getLogger(__name__)
HASHED = 1 << 18  # bytes of each block in a file's fingerprint
FINGERPRINT_BLOCKS = 64
ABANDONED = 24 * 3600  # seconds after which unfinished files of other machines are removed
MAX_READ_BYTES = 1 << 26  # default limit, in bytes, for reading a file
NO_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)
"""Errors of file systems that cannot fsync folders."""
LOCK_SECONDS = 10.0
NO_ANSWER = (
    "the file system does not answer; choose a folder on a file system with flock (on NFS, start the lock service)"
)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Unfit(OSError):
    """Not a regular file, or too large."""

    def __init__(self, reason: str, path: str):
        super().__init__(errno.EINVAL, reason, path)


def opened(path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """A descriptor of the regular file at ``path``; OSError for anything else. Never blocks."""
    path = os.fspath(path)
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    except ValueError as error:
        raise Unfit(f"invalid file name: {error}", path) from None
    except OSError as error:
        if error.errno == errno.ENXIO:  # a pipe without a reader, or a socket
            raise Unfit("not a regular file", path) from None
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise OSError(errno.ELOOP, "is a link; links are not followed here", path) from None
        raise
    try:
        kind = os.fstat(handle).st_mode
        if stat.S_ISDIR(kind):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(kind):
            raise Unfit("not a regular file", path)
    except OSError:
        os.close(handle)
        raise
    return handle


def reader(path: str | Path) -> BinaryIO:
    """The regular file at ``path``, open for reading."""
    return os.fdopen(opened(path), "rb")


def text_reader(path: str | Path) -> TextIO:
    """The regular file at ``path``, open for reading as lines of UTF-8."""
    return io.TextIOWrapper(reader(path), encoding="utf-8")


def appending(path: str | Path, mode: int = 0o644) -> int:
    """A descriptor for appending to the file ``path``, which is created with ``mode`` if necessary; does not follow links."""
    return opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, mode)


def append(path: str | Path, text: str, mode: int = 0o644) -> None:
    """Append ``text`` to the file ``path``; does not follow links."""
    with naming(path), os.fdopen(appending(path, mode), "w", encoding="utf-8") as file:
        file.write(text)


def overwrite(path: str | Path, text: str) -> None:
    """Overwrite the file ``path`` with ``text``, not atomically; does not follow links."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    with naming(path), os.fdopen(opened(path, flags), "w", encoding="utf-8") as file:
        file.truncate(0)
        file.write(text)


def read_with_status(path: str | Path, max_bytes: int = MAX_READ_BYTES) -> tuple[bytes, os.stat_result]:
    """The content of a regular file, and its status; OSError, before it is read, if it has more than ``max_bytes``."""
    with reader(path) as file, naming(path):
        status = check_size(file, path, max_bytes)
        content = file.read(status.st_size + 1)  # Python allocates the size that it is asked for
        if len(content) != status.st_size:
            content += file.read(max_bytes + 1 - len(content))
    if len(content) > max_bytes:  # it has grown, or is in /proc, where sizes are unknown
        raise too_large(path, max_bytes)
    return content, status


def check_size(file: BinaryIO, path: str | Path, max_bytes: int) -> os.stat_result:
    """The status of an open file; OSError, which names ``path``, if it has more than ``max_bytes``."""
    status = os.fstat(file.fileno())
    if status.st_size > max_bytes:
        raise too_large(path, max_bytes)
    return status


def too_large(path: str | Path, max_bytes: int) -> Unfit:
    """The error for a file of more than ``max_bytes``."""
    return Unfit(f"larger than {max_bytes / 1e6:,.1f} MB, the limit", os.fspath(path))


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Add ``path`` to an OSError of the block: errors of reading, writing and fsync name no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


def read_bytes(path: str | Path, max_bytes: int = MAX_READ_BYTES) -> bytes:
    """The content of a regular file; OSError if it has more than ``max_bytes``."""
    return read_with_status(path, max_bytes)[0]


def read_text(path: str | Path, max_bytes: int = MAX_READ_BYTES, errors: str = "strict") -> str:
    """The content of a regular file as text; UnicodeDecodeError if it is not UTF-8."""
    return read_with_status(path, max_bytes)[0].decode("utf-8", errors)


def readable(path: str | Path, what: str) -> Path:
    """``path`` as a Path; ConfigError if it is not a file that can be opened. ``what``: its name in the error."""
    path = Path(path)
    try:
        os.close(opened(path))
    except FileNotFoundError:
        raise ConfigError(f"{what} {path} does not exist; looked in {path.absolute().parent}") from None
    except OSError as error:
        if isinstance(error, (Unfit, IsADirectoryError)):
            raise ConfigError(f"{what} {path} is not a regular file") from None
        raise unread(error, f"{what} {path}") from None
    return path


def is_file(path: Path) -> bool:
    """Whether ``path`` is a regular file or a link to one; False if that is unknown."""
    with suppress(OSError, ValueError):
        return path.is_file()
    return False


def age(path: Path | str) -> float | None:
    """Seconds since the file at ``path`` was written, by the file system's clock and this machine's; None without a file."""
    try:
        handle = opened(path)  # on NFS, opening a file asks the server when it was written
    except OSError:
        return None
    try:
        return max(0.0, time.time() - os.fstat(handle).st_mtime)
    finally:
        os.close(handle)


def shown(path: str | Path) -> str:
    """``path`` for messages, in a form that a shell does not take for an option or a home folder."""
    text = str(path)
    return f"./{text}" if text.startswith(("-", "~")) else text


def typed(path: str | Path) -> str:
    """``path`` for a command line: quoted, and in a form that is not taken for an option."""
    return shlex.quote(shown(path))


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes, durable: bool = True) -> None:
    """Write a file atomically, writable only for its owner. If not ``durable``, a power failure may leave it empty."""
    written = aside(path)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with naming(path), os.fdopen(os.open(written, flags, 0o644), "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)
    if durable:
        sync(path.parent)


def aside(path: Path) -> Path:
    """A temporary name next to ``path``, with machine and process id for ``sweep``."""
    return path.with_name(f"{path.name}.tmp-{here()}-{os.getpid()}-{secrets.token_hex(3)}")


def sweep(path: Path) -> None:
    """Remove the temporary files of ``path`` (see ``aside``) that ended processes have left."""
    temporary_name = re.compile(rf"\.tmp-{re.escape(here())}-(\d+)-[0-9a-f]+.*")
    for old in path.parent.glob(f"{glob.escape(path.name)}.tmp-*"):
        owner = temporary_name.fullmatch(old.name.removeprefix(path.name))
        with suppress(FileNotFoundError):  # another process may be sweeping too
            if owner:
                gone = Path("/proc/self").exists() and not Path(f"/proc/{owner[1]}").exists()
            else:
                gone = time.time() - old.stat().st_mtime > ABANDONED
            if gone:
                shutil.rmtree(old) if old.is_dir() else old.unlink()


def fingerprint(content: mmap.mmap | bytes) -> str:
    """blake2b of evenly spaced blocks of a file, both ends included; a short file is hashed as a whole."""
    digest = hashlib.blake2b(digest_size=16)
    size = len(content)
    whole = size <= HASHED * FINGERPRINT_BLOCKS
    for k in range(FINGERPRINT_BLOCKS):
        begin = k * HASHED if whole else (size - HASHED) * k // (FINGERPRINT_BLOCKS - 1)
        digest.update(content[begin : begin + HASHED])
    return digest.hexdigest()


def here() -> str:
    """This machine's kernel, network namespace and PID namespace, as BOOT-NET-PID. Where it is equal, PIDs mean the same process.

    Several machines may have the same host name, but each boot has its own ID.
    """
    boot = ""
    with suppress(OSError):
        boot = BOOT_ID.read_text("ascii").strip().replace("-", "")[:16]
    spaces = []
    for kind in ("net", "pid"):
        link = ""
        with suppress(OSError):
            link = os.readlink(f"/proc/self/ns/{kind}")  # noqa: PTH115 - it names no path
        spaces.append("".join(filter(str.isdigit, link)))
    return "-".join([boot or socket.gethostname().replace("-", ""), *spaces])


def network_of(machine: str) -> str:
    """The BOOT-NET part of ``machine``, a value of ``here``. Processes with the same part share the loopback interface."""
    return machine.rpartition("-")[0]


def kernel_of(machine: str) -> str:
    """The BOOT part of ``machine``, a value of ``here``. Processes with the same part see each other's locks."""
    return machine.partition("-")[0]


@contextmanager
def locked(path: Path, waiting: str | None = None, refusal: Exception | None = None) -> Iterator[int]:
    """During the block, hold a lock on a folder, or on a file, which is created if it is missing; yields the descriptor.

    On a file system without locks, the block runs without one. A process that inherits the descriptor holds the lock, too.
    If another process holds the lock, ``refusal`` is raised, or ``waiting`` is logged before waiting.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    handle = os.open(path, os.O_RDONLY) if path.is_dir() else opened(path, flags, 0o666)
    try:
        with suppress(OSError):
            try:
                lock(handle, path)
            except BlockingIOError:
                if refusal:
                    raise refusal from None
                if waiting:
                    log.info(waiting)
                lock(handle, path, fcntl.LOCK_EX, "another process has locked it; waiting for that process")
        yield handle
    finally:
        os.close(handle)


def lock(handle: int, path: Path, kind: int = fcntl.LOCK_EX | fcntl.LOCK_NB, slow: str = NO_ANSWER) -> None:
    """Lock the file at ``path``, open as ``handle``; OSError if that fails. hpclm takes all its locks here.

    ``slow``: the probable reason, which is logged if the lock takes long. A file system without a lock service never answers.
    """
    timer = threading.Timer(LOCK_SECONDS, log.warning, ("%s is not locked after %.0f s: %s", path, LOCK_SECONDS, slow))
    timer.daemon = True
    timer.start()
    try:
        fcntl.flock(handle, kind)
    finally:
        timer.cancel()


def sync(path: Path) -> None:
    """fsync a file or folder. Does nothing for a folder on a file system that cannot fsync folders."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would block
    try:
        with naming(path):
            os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_FSYNC or not stat.S_ISDIR(os.fstat(handle).st_mode):
            raise
    finally:
        os.close(handle)

"""Errors with a message for the user, and their exit codes.

HpclmError
├── UsageError          options of a command that cannot be combined
├── ConfigError         invalid settings, arguments or input files
│   └── ArgumentError   arguments with invalid values, of a command or of its Python function
├── NoCheckpointError   the run has saved before, but has lost all good checkpoints
├── LockedError         another process uses the run directory
├── CorruptedError      bits have changed, or a processor computes wrongly; a restart begins from a good checkpoint
├── DivergedError       a restart without changes would fail again
└── DeviceMemoryError   a GPU, or the machine, has too little memory for the settings; a restart would fail again
"""

import errno
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of commands and ranks. For a process that signal n ends, it is 128 + n (``shell_code``)."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> "ExitCode":
        """``meaning``: a text for users."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    DONE = 0, "done"
    FAILED = 1, "error in hpclm"
    USAGE = 2, "invalid arguments"
    INVALID = 64, "invalid settings or input files"
    NO_CHECKPOINT = 66, "no good checkpoint"
    LOCKED = 75, "run directory in use"
    REQUEUE = 85, "saved, restart"
    DIVERGED = 93, "do not restart"
    INTERRUPTED = 130, "ended at once by Ctrl-C"

    @property
    def requeue(self) -> bool:
        """Whether a job starts again after this exit code."""
        return self is ExitCode.REQUEUE

    @property
    def final(self) -> bool:
        """Whether another start would end the same way."""
        return self in (ExitCode.INVALID, ExitCode.NO_CHECKPOINT, ExitCode.LOCKED, ExitCode.DIVERGED)


FAILURES = frozenset(ExitCode) - {ExitCode.DONE, ExitCode.USAGE}
"""The exit codes that sys.exit() in a rank may keep; any other code becomes FAILED."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
MACHINE = {*FULL, errno.EIO, errno.EROFS, errno.ESTALE, errno.EREMOTEIO}
"""Faults of a disk: full, failing or unreachable."""
REFUSED = {errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL}
"""Faults of a path: no permission, or the wrong kind of file."""


class OneLine:
    """An exception that notebooks show without a traceback."""

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows (its documentation: custom exception tracebacks)."""
        return [f"{type(self).__name__}: {self}"]


class Interrupted(OneLine, KeyboardInterrupt):
    """A signal, such as a notebook's interrupt, has ended a Python call. After training, the text says whether the run has saved."""


class HpclmError(OneLine, Exception):
    """An error that commands and notebooks print without a traceback."""

    exit_code = ExitCode.FAILED
    shared = False
    """Whether every process of the run raises it, so that only one of them reports it."""


class UsageError(HpclmError):
    """Options of a command that cannot be combined."""

    exit_code = ExitCode.USAGE


class ConfigError(HpclmError, ValueError):
    """Invalid settings or input; contains every problem, not only the first."""

    exit_code = ExitCode.INVALID

    def __init__(self, problems: str | Iterable[str]):
        if isinstance(problems, str):
            problems = [problems]
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


class ArgumentError(ConfigError):
    """Arguments with invalid values. A command shows --top-k where Python shows top_k."""

    def __init__(self, wrong: Iterable[tuple[str, object, str]]):
        """``wrong``: name, value and rule of each argument, such as ("top_k", 0, "must be at least 1")."""
        self.wrong = list(wrong)
        super().__init__(f"{name}={value!r} {rule}" for name, value, rule in self.wrong)

    @classmethod
    def refuse(cls, wrong: Iterable[tuple[str, object, str]]) -> None:
        """Raise the error if ``wrong`` is not empty."""
        listed = list(wrong)
        if listed:
            raise cls(listed)


class NoCheckpointError(HpclmError):
    """A good checkpoint is required but missing."""

    exit_code = ExitCode.NO_CHECKPOINT


class LockedError(HpclmError):
    """Another process is using the run directory."""

    exit_code = ExitCode.LOCKED


class CorruptedError(HpclmError):
    """Weights or optimizer state have changed by themselves, or a processor computes wrongly."""

    exit_code = ExitCode.REQUEUE


class DivergedError(HpclmError):
    """Training cannot continue, and a restart would fail again."""

    exit_code = ExitCode.DIVERGED


class DeviceMemoryError(HpclmError):
    """Out of memory on a GPU, or on a machine that trains on its CPU; a restart would fail again."""

    exit_code = ExitCode.DIVERGED


def shell_code(returned: int) -> int:
    """The exit code as shells show it. ``returned``: the return code of Python's subprocess, -n after signal n."""
    return returned if returned >= 0 else 128 - returned


def unwritten(error: OSError, target: object, what: str) -> HpclmError:
    """The error for a failure to write ``target``: HpclmError for the disk, ConfigError for the path. ``what``: what to do."""
    kind = HpclmError if error.errno in MACHINE else ConfigError
    path = error.filename or target
    if str(path).startswith(f"{target}.tmp-"):  # a temporary name means nothing to the reader
        path = target
    return kind(f"{path}: {error.strerror}; {what}")


def unread(error: OSError, target: object, way_out: str = "") -> HpclmError:
    """The error for a failure to read ``target``: HpclmError for the disk, otherwise ConfigError with the ``way_out``, if any."""
    why = str(error.strerror or error)
    if error.errno in MACHINE:
        return HpclmError(f"{target} cannot be read now: {why}; check the disk, then start again")
    return ConfigError("; ".join(filter(None, [f"{target} cannot be read: {why}", way_out])))

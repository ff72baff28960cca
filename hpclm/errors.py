"""Errors with a message for the user, and their exit codes.

HpclmError
├── ConfigError         64  invalid settings, arguments or input files
├── NoCheckpointError   66  the run has saved before, but there is no good checkpoint
├── LockedError         75  another process uses the run directory
├── CorruptedError      85  bits have changed, or a processor computes wrongly; it is started again from a good checkpoint
├── DivergedError       93  the run must not be restarted unchanged
└── DeviceMemoryError   93  the same: a GPU, or the machine, has too little memory for its settings

Otherwise 85 is not an error: the run has saved, exited as requested, and should be started again.
"""

import errno
from collections.abc import Iterable

REQUEUE = 85
CODES = frozenset({1, 64, 66, 75, REQUEUE, 93, 130})
"""Exit codes of a rank that ends by itself, but for 0; 130 is Ctrl-C."""
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
    """A signal, such as a notebook's interrupt, has ended a call in Python; of training it says whether the run has saved."""


class HpclmError(OneLine, Exception):
    """An error that command-line verbs and notebooks print without a traceback."""

    exit_code = 1
    shared = False
    """Whether every process of the run raises it, so that only one of them reports it."""


class ConfigError(HpclmError, ValueError):
    """Invalid settings or input; contains every problem, not only the first."""

    exit_code = 64

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class NoCheckpointError(HpclmError):
    """A checkpoint is required, but there is no good one."""

    exit_code = 66


class LockedError(HpclmError):
    """Another process is using the run directory."""

    exit_code = 75


class CorruptedError(HpclmError):
    """Weights or optimizer state have changed by themselves, or a processor computes wrongly."""

    exit_code = REQUEUE


class DivergedError(HpclmError):
    """Training cannot continue, and a restart would fail again."""

    exit_code = 93


class DeviceMemoryError(HpclmError):
    """Out of memory on a GPU, or on a machine that trains without; a restart would fail again."""

    exit_code = 93


def unwritten(error: OSError, target: object, what: str) -> HpclmError:
    """The error for a failure to write ``target``; ``what`` follows. HpclmError for the disk, ConfigError for the path."""
    kind = HpclmError if error.errno in MACHINE else ConfigError
    aside = str(error.filename).startswith(f"{target}.tmp-")  # a temporary name means nothing to the reader
    return kind(f"{target if aside else error.filename or target}: {error.strerror}; {what}")


def unread(error: OSError, target: object, way_out: str = "") -> HpclmError:
    """The error for a failure to read ``target``. HpclmError for the disk, which says nothing about ``target``; otherwise
    ConfigError, with the ``way_out``, if any."""
    why = error.strerror or error
    if error.errno in MACHINE:
        return HpclmError(f"{target} cannot be read now: {why}; check the disk, then start again")
    return ConfigError(f"{target} cannot be read: {why}{f'; {way_out}' if way_out else ''}")

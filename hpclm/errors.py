"""What can go wrong in words a person can act on, and the exit code each one ends the process with.

HpclmError
├── ConfigError         64  settings, arguments or input files that cannot work as given
├── NoCheckpointError   66  the run has history, but no good checkpoint to go on from
├── LockedError         75  another job holds the run directory
└── DivergedError       93  the run must not be restarted as it is

85 is not an error: the run was told to leave, saved, and asks to be started again.
"""

import errno
from collections.abc import Iterable

REQUEUE = 85
MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
"""Faults of a disk, full or failing, and not of what a person set."""


class HpclmError(Exception):
    """An error whose message is all a person needs; command-line verbs print it without a traceback."""

    exit_code = 1
    shared = False
    """Every process of the run raises it alike, so one of them tells it."""


class ConfigError(HpclmError, ValueError):
    """Something a person set cannot work; holds every problem found, not only the first."""

    exit_code = 64

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class NoCheckpointError(HpclmError):
    """A checkpoint was expected and none can be trusted."""

    exit_code = 66


class LockedError(HpclmError):
    """Another process is using the run directory."""

    exit_code = 75


class DivergedError(HpclmError):
    """Training cannot go on, and starting it again would end the same way."""

    exit_code = 93


def unwritten(error: OSError, target: object, what: str) -> HpclmError:
    """``error`` of writing ``target`` in a sentence that ends with ``what``: the machine's fault, or a person's."""
    kind = HpclmError if error.errno in MACHINE else ConfigError
    return kind(f"{error.filename or target}: {error.strerror}; {what}")

"""Errors of the user or the machine become a message and an exit code, without a traceback."""

import errno
import io
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from hpclm.errors import FULL, MACHINE, REFUSED, ExitCode, HpclmError, shell_code
from hpclm.node import ends, import_errors, secrets, threads
from hpclm.terminal import say


def run(verb: Callable[[list[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Call a verb's main. Errors of the user or the machine become a message and an exit code, without a traceback."""
    _open_streams()
    threads.prepare()
    redact = secrets.Redactor()
    try:
        Path.cwd()  # it may have been deleted
    except OSError as error:
        say(f"error: the current folder cannot be read: {error.strerror}; change to another one (cd)", file=sys.stderr)
        return ExitCode.INVALID
    try:
        code = verb(list(sys.argv[1:] if argv is None else argv)) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except HpclmError as error:
        ends.note(error.exit_code, redact(str(error)))
        if not getattr(error, "logged", False):
            _tell(error, redact)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader, such as head, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return shell_code(-signal.SIGPIPE)
    except MemoryError as error:
        print(f"error: not enough memory: {error if str(error) else _memory(error)}", file=sys.stderr)
        return ExitCode.FAILED
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return _no_more_processes()
        target = error.filename or _standard_output()
        if error.errno in MACHINE:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise closing it would fail too
            way_out = f"; {'free space on' if error.errno in FULL else 'check'} the disk, then start again"
        elif error.errno in REFUSED and error.filename is not None:
            way_out = "; check what it is, and its permissions"
        else:
            return _fault(error, redact)
        say(redact(f"error: {target}: {error.strerror}{way_out}"), file=sys.stderr)
        return ExitCode.FAILED if error.errno in MACHINE else ExitCode.INVALID
    except Exception as error:
        return _no_more_processes() if "start new thread" in str(error) else _fault(error, redact)


def _standard_output() -> str:
    """What could not be written by a call that names no file: others name theirs (``files.naming``)."""
    try:
        target = os.readlink("/proc/self/fd/1")  # noqa: PTH115 - it may be a pipe
    except OSError:
        target = ""
    return f"standard output ({target})" if target.startswith("/") else "standard output"


def _memory(error: MemoryError) -> str:
    """What is known of memory that Python could not get: where, how much there was, and the limit."""
    frames = traceback.extract_tb(error.__traceback__)
    innermost = next((frame for frame in reversed(frames) if "hpclm" in Path(frame.filename).parts), frames[-1])
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    limit = (
        "" if soft == resource.RLIM_INFINITY else f"; the limit of this process is {soft / 2**20:,.0f} MiB (ulimit -v)"
    )
    return f"{innermost.name} in {Path(innermost.filename).name} could not get more; {used:,.0f} MiB are in use{limit}"


class PerRunErrors:
    """A context for each of several runs in a verb: with more than one run, an error does not stop the others."""

    def __init__(self, count: int):
        self.several, self.codes = count > 1, set[int]()

    @property
    def code(self) -> int:
        """The verb's exit code: that of the failed runs, or 1 if they differ."""
        return max(self.codes) if len(self.codes) < 2 and self.codes else min(len(self.codes), 1)

    def __enter__(self) -> None:
        """Begin a block."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not self.several or not isinstance(error, HpclmError):
            return False
        self.codes.add(error.exit_code)
        sys.stdout.flush()
        _tell(error, secrets.Redactor())
        return True


def _tell(error: HpclmError, redact: secrets.Redactor) -> None:
    for line in str(error).splitlines():
        say(f"error: {redact(line)}", file=sys.stderr)


def _no_more_processes() -> int:
    print(
        "error: the system allows no more processes or threads for this user; raise the limit (ulimit -u), or end some, "
        "then start again",
        file=sys.stderr,
    )
    return ExitCode.FAILED


def _fault(error: Exception, redact: Callable[[str], str]) -> int:
    """Print what is wrong with the environment if that explains the current error, otherwise the traceback, without secrets; the
    exit code."""
    reason = import_errors.explained(error)
    ends.note(ExitCode.INVALID if reason else ExitCode.FAILED, redact(reason or traceback.format_exc()))
    if reason:
        say(redact(f"error: {reason}"), file=sys.stderr)
        return ExitCode.INVALID
    say(redact(traceback.format_exc()), end="", file=sys.stderr)
    return ExitCode.FAILED


def _open_streams() -> None:
    """Replace closed standard streams by /dev/null."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            while (opened := os.open(os.devnull, os.O_RDWR)) < number:  # the lowest that is free: 0, 1 or 2
                continue
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, "r" if number == 0 else "w", closefd=False))
        elif number and isinstance(getattr(sys, name), io.TextIOWrapper):
            getattr(sys, name).reconfigure(errors="backslashreplace")  # for characters outside the locale's encoding

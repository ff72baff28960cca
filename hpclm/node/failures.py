"""Turn errors of the user or the machine into a message and an exit code, without a traceback."""

import errno
import io
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hpclm.base.errors import FULL, MACHINE, REFUSED, ExitCode, HpclmError, shell_code
from hpclm.base.terminal import say
from hpclm.node import ends, import_errors, secrets, threads

NO_PROCESSES = (
    "error: the system allows no more processes or threads for this user; raise the limit (ulimit -u), or end some, "
    "then start again"
)


def run(command: Callable[[list[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Call a command's main function; returns its exit code, or that of an error, which is printed."""
    _open_streams()
    threads.prepare()
    redact = secrets.Redactor()
    try:
        Path.cwd()  # it may have been deleted
    except OSError as error:
        say(f"error: the current folder cannot be read: {error.strerror}; change to another one (cd)", file=sys.stderr)
        return ExitCode.INVALID
    try:
        code = command(list(sys.argv[1:] if argv is None else argv)) or 0
        sys.stdout.flush()
        return code
    except HpclmError as error:
        ends.note(error.exit_code, redact(str(error)))
        if not getattr(error, "logged", False):
            _print(error, redact)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader, such as head, has exited
        _drop_output()
        return shell_code(-signal.SIGPIPE)
    except MemoryError as error:
        print(f"error: not enough memory{_memory(error)}", file=sys.stderr)
        return ExitCode.FAILED
    except OSError as error:
        return _report_os_error(error, redact)
    except Exception as error:
        if "start new thread" in str(error):
            print(NO_PROCESSES, file=sys.stderr)
            return ExitCode.FAILED
        return _unexpected(error, redact)


def _report_os_error(error: OSError, redact: Callable[[str], str]) -> int:
    """Print an error of the operating system; returns the exit code."""
    if error.errno == errno.EAGAIN:
        print(NO_PROCESSES, file=sys.stderr)
        return ExitCode.FAILED
    target = error.filename or _standard_output()
    if error.errno in MACHINE:
        _drop_output()  # otherwise closing it would fail too
        code = ExitCode.FAILED
        way_out = "check the disk, then start again"
        if error.errno in FULL:
            way_out = "free space on the disk, then start again"
    elif error.errno in REFUSED and error.filename is not None:
        code = ExitCode.INVALID
        way_out = "check the path and its permissions"
    else:
        return _unexpected(error, redact)
    say(redact(f"error: {target}: {error.strerror}; {way_out}"), file=sys.stderr)
    return code


def _unexpected(error: Exception, redact: Callable[[str], str]) -> int:
    """Print ``error`` in one line if the installation explains it, otherwise its traceback; returns the exit code."""
    reason = import_errors.explained(error)
    if reason:
        ends.note(ExitCode.INVALID, redact(reason))
        say(redact(f"error: {reason}"), file=sys.stderr)
        return ExitCode.INVALID
    report = redact(traceback.format_exc())
    ends.note(ExitCode.FAILED, report)
    say(report, end="", file=sys.stderr)
    return ExitCode.FAILED


def _drop_output() -> None:
    """Send standard output to /dev/null from now on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _standard_output() -> str:
    """The name of standard output, for an error without a file name. Errors of all other files have one (``files.naming``)."""
    with suppress(OSError):
        target = os.readlink("/proc/self/fd/1")  # noqa: PTH115 - it may be a pipe
        if target.startswith("/"):
            return f"standard output ({target})"
    return "standard output"


def _memory(error: MemoryError) -> str:
    """The text of ``error`` or, without one, the memory in use and the limit of this process."""
    if str(error):
        return f": {error}"
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    text = f": {used:,.0f} MiB are in use"
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        text += f"; the limit of this process is {soft / 2**20:,.0f} MiB (ulimit -v)"
    return text


class PerRunErrors:
    """A context around a command's work on each of its runs: with several runs, the error of one does not stop the others."""

    def __init__(self, count: int):
        self.several = count > 1
        self.codes = set[int]()

    @property
    def code(self) -> int:
        """The command's exit code: that of the failed runs, or 1 if their codes differ."""
        if len(self.codes) > 1:
            return ExitCode.FAILED
        return max(self.codes, default=ExitCode.DONE)

    def __enter__(self) -> None:
        """Begin the block of a run."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not self.several or not isinstance(error, HpclmError):
            return False
        self.codes.add(error.exit_code)
        sys.stdout.flush()
        _print(error, secrets.Redactor())
        return True


def _print(error: HpclmError, redact: Callable[[str], str]) -> None:
    for line in str(error).splitlines():
        say(f"error: {redact(line)}", file=sys.stderr)


def _open_streams() -> None:
    """Replace closed standard streams by /dev/null. Let the other streams write characters outside the locale's encoding."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        stream = getattr(sys, name)
        if stream is None:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number: 0, 1 or 2
            while opened < number:
                opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, mode, closefd=False))
        elif number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

"""A launcher that leaves nothing behind, however it ends.

The launcher that a person sees starts a guardian, and the guardian starts the ranks. Both adopt orphans, so every process
that a rank started, and be it a daemon in a session of its own, is a descendant of theirs. Whoever of the two is left
when the other is killed (SIGKILL too) ends them all.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from hpclm.cluster import children
from hpclm.job import remains

WARNINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def guarded(act: Callable[[int], int], tell: bool = True) -> int:
    """Exit code of ``act(lifeline)``, called in a guardian process; signals that come here are passed on to it.

    ``lifeline`` is a pipe that ends when this process is gone. The guardian has a session of its own, so that a
    terminal's Ctrl-C comes here alone; it starts with the signals of WARNINGS blocked and must unblock them.
    ``tell``: say when the guardian was killed.
    """
    mine = frozenset(children.descendants(os.getpid()))
    children.adopt()
    sys.stdout.flush()
    sys.stderr.flush()
    lifeline, held = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)
    pid = os.fork()
    if pid == 0:
        os.close(held)
        _guardian(act, lifeline)
    os.close(lifeline)
    try:
        with _passed_on(pid):
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(held)
    ended = remains.end(keep=mine, quiet=0, grace=0)
    if code >= 0:
        return code
    if tell:
        name = signal.Signals(-code).name
        print(f"error: the guardian of the run (pid {pid}) was killed by {name};", end=" ", file=sys.stderr)
        print(f"ended {len(ended)} processes it had started", file=sys.stderr)
    return 128 - code


def _guardian(act: Callable[[int], int], lifeline: int) -> None:
    """What the guardian process does; it does not return."""
    code = 1
    try:
        os.setsid()
        children.adopt()
        code = act(lifeline)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


@contextmanager
def _passed_on(pid: int) -> Iterator[None]:
    """Signals go on to process ``pid`` while the block runs. A hang-up that nohup has silenced stays so."""

    def send(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    heard = [n for n in WARNINGS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, send) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

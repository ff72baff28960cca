"""How a rank ends that has failed: it leaves the cause in a file, reports it unless another rank has, and ends itself.

What started the ranks ends the others.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from hpclm import files
from hpclm.distributed import failure, hang
from hpclm.distributed.failure import LostRankError
from hpclm.distributed.hang import RankState
from hpclm.distributed.ranks import RankInfo
from hpclm.errors import ExitCode
from hpclm.node import ends, processes, secrets
from hpclm.node.ends import End
from hpclm.terminal import plain

log = logging.getLogger(__name__)
CAUSE = 3.0  # seconds for the rank that is the cause to say so, before one that lost its connection reports that
OTHERS = 10.0  # seconds for all ranks of a run that hangs to say where they are
LATEST = 15.0  # seconds until this process exits, even if a lock, a collective or a dead disk blocks it
POLL = 0.1


class Ending:
    """The end of this rank. One of its threads ends it."""

    def __init__(self, me: RankInfo, ranks: Sequence[RankInfo], lost_code: int = ExitCode.FAILED):
        """``lost_code``: exit code when another rank is gone."""
        self.me, self.ranks, self.lost_code = me, ranks, lost_code
        self.folder = ends.folder()
        """For the files of the ranks; None until the run directory is open, if nothing has handed one over."""
        self.out: Path | None = None
        self.record: Callable[..., object] = lambda kind, **facts: None
        """Adds an event to the run's record."""
        self.listeners: list[Callable[[str], None]] = []
        """Hear of the cause on the rank that reports it, and pass it on within seconds."""
        self._once = threading.Lock()
        self._urged = False
        """Whether its launcher has told this rank to end."""
        if self.folder and me.rank == 0:
            ends.announce(self.folder, [_row(info) for info in ranks])

    def write_to(self, out: Path, record: Callable[..., object]) -> None:
        """From now on the run directory is open: the cause goes into its log, and ``record`` adds events to its record."""
        self.out, self.record = out, record
        if self.folder is None:
            self.folder = out / "logs" / "errors" / self.ranks[0].start
            if self.me.rank == 0 and len(self.ranks) > 1:
                ends.announce(self.folder, [_row(info) for info in self.ranks])

    def claim(self) -> bool:
        """Whether the calling thread is the one that ends this process."""
        # main thread and watchdog may both want to end the process, with different reasons; the first one's counts
        return self._once.acquire(blocking=False)

    def explained(self, error: BaseException) -> BaseException:
        """Leave and report why this rank ends with ``error``. The error to raise: where a connection was lost, the cause of that."""
        if not self.claim():
            time.sleep(LATEST)  # in which the watchdog ends this process
        if failure.lost_a_peer(error):
            error = self._lost(str(error).strip().partition("\n")[0])
            code: int = error.exit_code
        else:
            code, text = failure.described(error)
            text = f"{self.me} failed: {failure.shortened(secrets.Redactor()(text))}"  # a traceback may show a token
            self._leave(code, text)
            # the command line need not say it again
            error.logged = self.report(text) and self.me.rank == 0  # type: ignore[attr-defined]
            error.reported = True  # type: ignore[attr-defined]
            if isinstance(error, SystemExit):
                error = LostRankError(text, code)
        processes.kill_children()
        exit_after(LATEST, code)
        return error

    def _lost(self, why: str) -> LostRankError:
        """The error of a rank that has lost a connection, once the cause is known or has had time to be."""
        self._leave(self.lost_code, why, symptom=True)
        where, found = self.folder, None
        if where:
            # a launcher that has told this rank to end may kill it a second later
            processes.wait_until(lambda: self._urged or ends.first(ends.read(where).values()), CAUSE, POLL)
            found = failure.verdict(where)
        lost = f"{self.me} lost its connection to another rank"
        if found is None:
            error = LostRankError(f"{lost} ({why}); see the output of the others", self.lost_code)
            self.report(str(error))
        else:
            error = LostRankError(f"{lost}: {found.text}", found.exit_code or self.lost_code)
            self.report(found.text)
        return error

    def told(self) -> None:
        """Leave a trace that this rank was alive when its launcher told it to end."""
        self._urged = True
        if self.folder:
            ends.leave_trace(self.folder, self.me.rank)

    def answer(self) -> None:
        """Leave a trace that this rank is alive, if others have failed: it may be the last to hear of that."""
        if self.folder and ends.read(self.folder):
            ends.leave_trace(self.folder, self.me.rank)

    def hang(self, state: RankState) -> None:
        """End this rank, which makes no progress: once all ranks have said where they are, or have had time to."""
        if not self.claim():
            return
        exit_after(OTHERS + LATEST, ExitCode.REQUEUE)  # a disk may be why it hangs
        states, where = {self.me.rank: state}, self.folder
        if where:
            with suppress(OSError):
                hang.write_stacks(where, self.me, state)
            self._leave(ExitCode.REQUEUE, f"{self.me} made no progress for {state.idle:.0f} s", hang=state)
            processes.wait_until(lambda: len(ends.read(where)) == len(self.ranks), OTHERS, POLL)
            states |= {rank: RankState(**end.hang) for rank, end in ends.read(where).items() if end.hang}
        text = hang.report(states, self.ranks, where)
        if self.report(text, text.partition("\n")[0]):
            with suppress(OSError):
                self.record("hang", **hang.facts(text, states, self.ranks))
        self._exit(ExitCode.REQUEUE)

    def stop(self, text: str, code: int = ExitCode.REQUEUE) -> None:
        """End this rank with ``code`` for a reason that is said completely; any thread may call this."""
        if self.claim():
            exit_after(LATEST, code)
            self._leave(code, text)
            self.report(text)
            self._exit(code)

    def done(self, text: str, code: int) -> None:
        """End this rank, which has done its work, although its main thread waits for another rank."""
        if self.claim():
            exit_after(LATEST, code)
            log.warning(text)
            ends.note(code)
            self._exit(code)

    def report(self, text: str, short: str = "") -> bool:
        """Log why the run ends, and tell the listeners in one line, ``short``; False if another process has done so."""
        if self.folder and not ends.claim_report(self.folder):
            return False
        if self.me.rank == 0 or self.out is None:
            log.error(text)
        else:
            with suppress(OSError):
                append_to_log(self.out, text)
        for listener in self.listeners:
            listener(short or ends.one_line(text))
        return True

    def _leave(self, code: int, text: str, symptom: bool = False, hang: RankState | None = None) -> None:
        if self.folder:
            state = asdict(hang) if hang else None
            ends.leave(self.folder, End(self.me.rank, code, text, time.time(), symptom, state))

    def _exit(self, code: int) -> NoReturn:
        processes.kill_children()
        with suppress(OSError, ValueError):  # the launcher, which read them, may be gone
            sys.stdout.flush()
            sys.stderr.flush()
        # not sys.exit: the interpreter would wait for the main thread, which may hang in a collective
        os._exit(code)


def exit_after(seconds: float, code: int) -> None:
    """End this process with ``code`` after ``seconds``."""
    late = threading.Timer(seconds, os._exit, args=(code,))
    late.daemon = True
    late.start()


def append_to_log(out: Path, text: str) -> None:
    """Append an error to the log of a run whose rank 0 does not."""
    # no link: one in place of the log could lead anywhere
    handle = files.opened(out / "log.txt", os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
    with os.fdopen(handle, "ab") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} E {plain(text)}\n".encode(errors="backslashreplace"))


def _row(info: RankInfo) -> dict[str, object]:
    return asdict(info)

"""How a failed rank ends: it leaves the cause in a file, reports it unless another rank has, and exits.

The launcher of the ranks ends the others.
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

from hpclm.base import files
from hpclm.base.errors import ExitCode
from hpclm.base.terminal import plain
from hpclm.distributed import failure, hang
from hpclm.distributed.failure import LostRankError
from hpclm.distributed.hang import RankState
from hpclm.distributed.ranks import RankInfo
from hpclm.node import ends, processes, secrets
from hpclm.node.ends import End

log = logging.getLogger(__name__)
# seconds for the rank at fault to leave the cause, before a rank that lost its connection reports only the lost connection
CAUSE = 3.0
OTHERS = 10.0  # seconds for all ranks of a hanging run to leave their positions
LATEST = 15.0  # seconds until this process exits, even if a lock, a collective or a dead disk blocks it
POLL = 0.1  # seconds between two looks at the files


class RankEnding:
    """Ends this rank. Several threads may try to end it; only the first does."""

    def __init__(self, me: RankInfo, ranks: Sequence[RankInfo], lost_code: int = ExitCode.FAILED):
        """``lost_code``: exit code if another rank is lost."""
        self.me = me
        self.ranks = ranks
        self.lost_code = lost_code
        self.folder = ends.folder()
        """Folder of the ranks' files. Unless the launcher has set one, it is None until the run directory is open."""
        self.out: Path | None = None
        self.record: Callable[..., object] = lambda kind, **facts: None
        """Adds an event to the run's record."""
        self.listeners: list[Callable[[str], None]] = []
        """Called with the cause on the rank that reports it; each must return within seconds."""
        self._claimed = threading.Lock()
        self._told_to_end = False
        if self.folder and me.rank == 0:
            ends.announce(self.folder, [asdict(info) for info in ranks])

    def write_to(self, out: Path, record: Callable[..., object]) -> None:
        """Write causes to the log of the run directory ``out``, which is now open. ``record`` adds an event to its record."""
        self.out = out
        self.record = record
        if self.folder is None:
            self.folder = out / "logs" / "errors" / self.ranks[0].start
            if self.me.rank == 0 and len(self.ranks) > 1:
                ends.announce(self.folder, [asdict(info) for info in self.ranks])

    def claim(self) -> bool:
        """Whether the calling thread is the first to claim the end of this process; only this thread may end it."""
        return self._claimed.acquire(blocking=False)

    def explained(self, error: BaseException) -> BaseException:
        """Leave and report why this rank ends with ``error``. Returns the error to raise: the cause, if only a connection was lost."""
        if not self.claim():
            time.sleep(LATEST)  # the watchdog's thread is ending this process
        if failure.lost_a_peer(error):
            error = self._lost(str(error).strip().partition("\n")[0])
            code: int = error.exit_code
        else:
            code, text = failure.described_error(error)
            text = f"{self.me} failed: {failure.shortened(secrets.Redactor()(text))}"  # a traceback may show a token
            self._leave(code, text)
            # the command line then does not print the error again
            error.logged = self.report(text) and self.me.rank == 0  # type: ignore[attr-defined]
            error.reported = True  # type: ignore[attr-defined]
            if isinstance(error, SystemExit):
                error = LostRankError(text, code)
        processes.kill_children()
        exit_after(LATEST, code)
        return error

    def _lost(self, why: str) -> LostRankError:
        """Wait up to CAUSE seconds for the cause of a lost connection, and report it; returns the error to raise."""
        self._leave(self.lost_code, why, symptom=True)
        folder = self.folder
        verdict = None
        if folder:
            # a launcher that has told this rank to end may kill it a second later
            processes.wait_until(lambda: self._told_to_end or ends.first(ends.read_ends(folder).values()), CAUSE, POLL)
            verdict = failure.verdict(folder)
        lost = f"{self.me} lost its connection to another rank"
        if verdict is None:
            error = LostRankError(f"{lost} ({why}); see the output of the others", self.lost_code)
            self.report(str(error))
        else:
            error = LostRankError(f"{lost}: {verdict.text}", verdict.exit_code or self.lost_code)
            self.report(verdict.text)
        return error

    def told_to_end(self) -> None:
        """Leave a trace that this rank was alive when its launcher told it to end."""
        self._told_to_end = True
        if self.folder:
            ends.leave_trace(self.folder, self.me.rank)

    def answer(self) -> None:
        """If others have failed, leave a trace that this rank is alive: it may be the last to notice."""
        if self.folder and ends.read_ends(self.folder):
            ends.leave_trace(self.folder, self.me.rank)

    def hang(self, state: RankState) -> None:
        """End this rank, which makes no progress, once all ranks have left their positions or OTHERS seconds have passed."""
        if not self.claim():
            return
        exit_after(OTHERS + LATEST, ExitCode.REQUEUE)  # a disk may be the reason for the hang
        states = {self.me.rank: state}
        folder = self.folder
        if folder:
            with suppress(OSError):
                hang.write_stacks(folder, self.me, state)
            self._leave(ExitCode.REQUEUE, f"{self.me} made no progress for {state.idle:.0f} s", hang=state)
            processes.wait_until(lambda: len(ends.read_ends(folder)) == len(self.ranks), OTHERS, POLL)
            states |= {rank: RankState(**end.hang) for rank, end in ends.read_ends(folder).items() if end.hang}
        text = hang.report(states, self.ranks, folder)
        if self.report(text, text.partition("\n")[0]):
            with suppress(OSError):
                self.record("hang", **hang.facts(text, states, self.ranks))
        self._exit(ExitCode.REQUEUE)

    def stop(self, text: str, code: int = ExitCode.REQUEUE) -> None:
        """Report ``text`` and end this rank with ``code``; any thread may call this."""
        if self.claim():
            exit_after(LATEST, code)
            self._leave(code, text)
            self.report(text)
            self._exit(code)

    def done(self, text: str, code: int) -> None:
        """End this rank after its work, although its main thread still waits for another rank; ``text`` is only logged."""
        if self.claim():
            exit_after(LATEST, code)
            log.warning(text)
            ends.note(code)
            self._exit(code)

    def report(self, text: str, short: str = "") -> bool:
        """Log why the run ends, and call the listeners with one line, ``short``; False if another process has done so."""
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
        with suppress(OSError, ValueError):  # the launcher, which read the streams, may be gone
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
    """Append an error to the run's log, for a rank other than 0."""
    # links are not followed: one in place of the log could lead anywhere
    handle = files.opened(out / "log.txt", os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
    with os.fdopen(handle, "ab") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} E {plain(text)}\n".encode(errors="backslashreplace"))

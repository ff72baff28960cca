"""Request files, which ask a training run to act: save-now and stop in its directory. Commands create them; the run polls them."""

import logging
import os
import stat
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from hpclm.base import files
from hpclm.base.errors import ConfigError, HpclmError
from hpclm.base.terminal import say
from hpclm.node import failures
from hpclm.rundir import runs
from hpclm.rundir.lease import HolderWatch
from hpclm.rundir.state import State, StateOf

log = logging.getLogger(__name__)
NAMES = ("save-now", "stop")
KILL_SWITCH = "kill_switch"
INTERVAL = 1.0  # seconds between checks by the run: a shared file system answers slowly
LATE = 15.0  # seconds without a heartbeat after which a run may have ended; one is sent every 5 s
SILENT = 60.0  # seconds without a heartbeat after which a run of unknown state counts as ended
POLL = 0.3  # seconds between checks whether the run has complied


class ControlFiles:
    """The requests in ``folder``. Links and files of other users than the folder's owner are ignored."""

    def __init__(self, folder: Path, kill_switch: str | None = None):
        """``kill_switch``: the path of a file that asks the run to stop for as long as it exists."""
        self.folder = folder
        self._kill_switch = Path(kill_switch) if kill_switch else None
        self._checked = -INTERVAL
        self._requests: frozenset[str] = frozenset()

    def requested(self, name: str, now: bool = False) -> bool:
        """Whether ``name``, one of NAMES or KILL_SWITCH, is requested. The folder is checked once a second, or ``now``."""
        if now or time.monotonic() - self._checked >= INTERVAL:
            owners = {os.getuid()}
            with suppress(OSError):
                owners.add(self.folder.stat().st_uid)
            self._requests = frozenset(name for name in NAMES if _counts(self.folder / name, owners))
            if self._kill_switch and _counts(self._kill_switch, (os.getuid(), 0)):
                log.warning("kill_switch: %s exists, so the run saves and exits", self._kill_switch)
                self._requests |= {KILL_SWITCH}
            self._checked = time.monotonic()
        return name in self._requests

    def remove(self, name: str) -> None:
        """Remove the request ``name``, which was carried out."""
        self._requests -= {name}
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s was carried out and cannot be removed: %s", self.folder / name, error.strerror)


def _counts(path: Path, owners: Collection[int]) -> bool:
    """Whether ``path`` is a regular file of one of ``owners``, not a link."""
    try:
        info = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(info.st_mode) and info.st_uid in owners


def request(name: str, out: Path, state_of: StateOf) -> Path:
    """Create the request file ``name`` for the run in ``out``; returns its path. ConfigError if the run is not training."""
    other = runs.other_owner(out)
    if other:
        raise ConfigError(f"{files.shown(out)} belongs to {other}: a run follows only its owner's requests")
    status = state_of(out)
    if status.name not in ("running", "starting"):
        ways = {
            "waiting": f"; hpclm cancel {files.typed(out)} takes it out of the queue",
            "unknown": f"; if it is training elsewhere, ask it with: touch {files.typed(out / name)}",
        }
        raise ConfigError(f"{files.shown(out)} is not training: {status.how()}{ways.get(status.name, '')}")
    return create(out, name)


def request_all(name: str, chosen: Sequence[Path], seconds: float, done: str, state_of: StateOf) -> int:
    """Create the request file ``name`` for each run in ``chosen``, and wait at most ``seconds`` for all; returns the exit code.

    ``done`` is printed before the name of a run that has complied.
    """
    per_run = failures.PerRunErrors(len(chosen))
    asked = dict[Path, Path]()
    for out in chosen:
        with per_run:
            asked[out] = request(name, out, state_of)
    until = time.monotonic() + seconds
    for out, path in asked.items():
        with per_run:
            if followed(path, until, state_of):
                say(f"{done} {files.typed(out)}", flush=True)
    return per_run.code


def create(out: Path, name: str) -> Path:
    """Create the request file ``name`` in the run directory ``out``; returns its path."""
    path = out / name
    try:
        os.close(files.appending(path, 0o600))
    except OSError as error:
        raise HpclmError(f"{path} cannot be written: {error.strerror}") from None
    return path


def followed(path: Path, until: float, state_of: StateOf) -> bool:
    """Wait until a run has complied with the request ``path``; False if it has ended meanwhile with everything saved.

    HpclmError if it has not complied by the monotonic time ``until`` (the request stays), or ended without saving (it is withdrawn).
    """
    out = path.parent
    heartbeat = HolderWatch(out)
    while path.exists():
        if time.monotonic() > until:
            raise HpclmError(
                f"{files.shown(out)} has not responded in time; the request stays pending until its current step ends. Look with "
                f"hpclm status {files.typed(out)}; rm {files.typed(path)} withdraws it"
            )
        released, silent = heartbeat.silent()
        if released or silent > LATE:
            status = state_of(out)
            if path.exists() and not status.live and (status.name != "unknown" or silent > SILENT):
                path.unlink(missing_ok=True)
                _report_end(status)
                return False
        time.sleep(POLL)
    return True


def _report_end(status: State) -> None:
    """Say that a run has ended with everything saved; HpclmError if something is not saved."""
    saved = status.run.saved_step or 0
    text = f"{files.shown(status.run.out)} has ended meanwhile: {status.how()}; "
    if saved < status.run.step:
        is_saved = f"step {saved} is saved" if saved else "nothing is saved"
        raise HpclmError(f"{text}it was at step {status.run.step}, and {is_saved}. The request was withdrawn")
    say(f"{text}saved at step {saved}")

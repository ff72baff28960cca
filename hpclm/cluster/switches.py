"""Orders to a run that trains, given by a file in its directory: save-now and stop."""

import logging
import os
import stat
import time
from pathlib import Path

log = logging.getLogger(__name__)
NAMES = ("save-now", "stop")
PAUSE = 1.0  # seconds between looks: a file system of many nodes answers slowly


class Switches:
    """The orders that were left in ``folder``. Only its owner's count, and no links: others might give them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._looked = -PAUSE
        self._found: frozenset[str] = frozenset()

    def given(self, name: str, now: bool = False) -> bool:
        """Whether the order ``name`` stands, or stood a second ago; ``now``: whatever the look at the folder costs."""
        if now or time.monotonic() - self._looked >= PAUSE:
            self._found = frozenset(name for name in NAMES if self._stands(name))
            self._looked = time.monotonic()
        return name in self._found

    def done(self, name: str) -> None:
        """Take the order away: it was followed."""
        self._found -= {name}
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s was followed and cannot be removed: %s", self.folder / name, error.strerror)

    def _stands(self, name: str) -> bool:
        try:
            info = os.lstat(self.folder / name)
        except OSError:
            return False
        return stat.S_ISREG(info.st_mode) and info.st_uid in (os.getuid(), self.folder.stat().st_uid)

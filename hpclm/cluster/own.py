"""How much of its steps a rank spends on its own work, and not in waiting for others."""

import sys
import threading
from pathlib import Path
from typing import Any

from hpclm.cluster import stacks


class Own:
    """Counts by looking at the main thread again and again."""

    def __init__(self) -> None:
        self.own = self.all = 0.0
        self._ran = 0.0

    def look(self, passed: float, meant: float, in_step: bool) -> None:
        """A look, ``passed`` seconds after the last though ``meant`` to come earlier, while a step is made or not.

        In the backward pass, which Python does not see into, only what the main thread ran or wanted to run counts, and
        what this look came late: the process was stopped, or the machine is busy with something else. With a GPU, whose
        work and waiting look alike from here, only reading data and such lateness do.
        """
        before, self._ran = self._ran, ran()
        if not in_step:
            return
        self.all += passed
        frame = stacks.main_frame()
        waits = stacks.waits(frame)
        if not waits and (stacks.reads(frame) or not on_gpu()):
            self.own += passed
        else:
            worked = self._ran - before if waits == "backward" else 0.0
            self.own += min(passed, worked + max(0.0, passed - 2 * meant))

    def word(self, steps: int) -> dict[str, Any]:
        """What the others are told."""
        return {"steps": steps, "own": round(self.own, 3), "all": round(self.all, 3)}


def on_gpu() -> bool:
    """Whether this process uses a GPU."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def ran() -> float:
    """Seconds that the main thread ran or waited for a core; 0 where the system does not say."""
    try:
        text = Path(f"/proc/self/task/{threading.main_thread().native_id}/schedstat").read_text()
        running, ready, _ = text.split()
    except (OSError, ValueError):
        return 0.0
    return (int(running) + int(ready)) / 1e9

"""A torch.profiler trace of some steps, and a table of their most expensive operations (profile.steps)."""

import logging
from pathlib import Path
from typing import Any

import torch

from hpclm.base import files, folders
from hpclm.base.side_path import SidePath
from hpclm.config.monitoring import ProfileConfig

log = logging.getLogger(__name__)
ROWS = 10  # operations in the table


class Profile:
    """Records the steps that the settings name, on rank 0; use it as a context manager."""

    def __init__(self, config: ProfileConfig, out: Path, rank: int, device: torch.device):
        self.steps = config.steps if rank == 0 else None
        self.path = out / "profile" / f"rank-{rank:05d}.json"
        self.cuda = device.type == "cuda"
        self._recording: Any = None
        self._first = 0  # the first step that is recorded
        self._side = SidePath(f"the profile of {self.path} cannot be written")

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: object) -> None:
        if self._recording is not None:  # the run ends before the last of the steps
            self._finish(None)

    def before(self, step: int) -> None:
        """Start recording if ``step``, which begins now, is one of the steps."""
        if self.steps is not None and self._recording is None and self.steps[0] <= step <= self.steps[1]:
            self._side.attempt(lambda: self._start(step))
            if self._recording is None:
                self.steps = None

    def _start(self, step: int) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        recording = torch.profiler.profile(activities=activities, profile_memory=True)
        recording.start()
        self._recording = recording
        self._first = step

    def after(self, step: int) -> None:
        """Write the trace if ``step``, which is done, was the last of the steps."""
        if self._recording is not None and self.steps is not None and step >= self.steps[1]:
            self._finish(step)

    def _finish(self, last: int | None) -> None:
        recorded = self._recording
        self._recording = None
        self.steps = None

        def write() -> None:
            recorded.stop()
            folders.make_folder(self.path.parent, 0o700)
            recorded.export_chrome_trace(str(self.path))
            order = "self_cuda_time_total" if self.cuda else "self_cpu_time_total"
            table = recorded.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=60)
            files.write_text(self.path.with_suffix(".txt"), table + "\n")

        if self._side.attempt(write, now=True):
            to = "the last" if last is None else last
            text = "profile of steps %d to %s: %s, for ui.perfetto.dev; the most expensive operations: %s"
            log.info(text, self._first, to, self.path, self.path.with_suffix(".txt"))

"""Which checkpoints to keep."""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpclm.base.errors import HpclmError
from hpclm.checkpoint import directory
from hpclm.checkpoint import manifest as manifests
from hpclm.checkpoint.manifest import BadCheckpoint, Manifest

log = logging.getLogger(__name__)
MIN_COMPLETE = 2  # complete checkpoints: one may become corrupt


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of a run are kept; the others are removed once a newer one is published."""

    last: int = 3
    """Number of newest regular checkpoints to keep. A checkpoint saved on exit is kept in addition, until the next regular one."""
    every: int = 0
    """Also keep every step that is a multiple of this; 0: none."""
    best: int = 0
    """Also keep this many checkpoints, those with the lowest validation loss."""
    passes: int = 0
    """Also keep the first checkpoint after each of the last ``passes`` epochs; 0: none."""
    samples: float = math.inf
    """Samples per epoch."""

    def prunable(self, complete: Sequence[tuple[Path, Manifest]]) -> list[Path]:
        """The ``complete`` checkpoints (oldest first) that can be removed.

        The newest ``last`` healthy regular checkpoints stay, and always the newest MIN_COMPLETE.
        """
        good = healthy([manifest for _, manifest in complete])
        regular = [folder for folder, manifest in complete if manifest.why is None]
        kept = {
            *[folder for folder in regular if good[int(folder.name[5:])]][-max(self.last, MIN_COMPLETE) :],
            *regular[-MIN_COMPLETE:],
        }
        kept |= {folder for folder, _ in complete[-1:]}  # of those saved on exit, only the newest is kept
        if len(kept) < MIN_COMPLETE:
            kept |= {folder for folder, _ in complete[-MIN_COMPLETE:]}
        if self.every:
            kept |= {folder for folder, manifest in complete if manifest.progress["step"] % self.every == 0}
        measured = [(m.validation, -m.progress["step"], folder) for folder, m in complete if m.validation is not None]
        kept |= {folder for *_, folder in sorted(measured)[: self.best]}
        kept |= set(self._ends_of_passes(complete))
        return [folder for folder, _ in complete if folder not in kept]

    def _ends_of_passes(self, complete: Sequence[tuple[Path, Manifest]]) -> list[Path]:
        if not self.passes:
            return []
        first: dict[int, Path] = {}
        for folder, manifest in complete:
            first.setdefault(int(manifest.progress.get("samples", 0) / self.samples), folder)
        first.pop(0, None)
        return [first[number] for number in sorted(first)[-self.passes :]]


def healthy(manifests: Sequence[Manifest]) -> dict[int, bool]:
    """Step -> whether the run was healthy there, according to all of its checkpoints (oldest first).

    A checkpoint is unhealthy if it was saved during a loss spike or while steps were skipped, or if the next step began a spike:
    the loss of a step belongs to the weights before it.
    """
    good: dict[int, bool] = {}
    begins = math.inf
    """First step of the earliest spike recorded by a later checkpoint."""
    for manifest in reversed(manifests):
        step = int(manifest.progress["step"])
        health = manifest.health
        good[step] = health.good and step + 1 < begins
        if health.spiking_since is not None:
            begins = min(begins, health.spiking_since)
    return good


class CompleteCheckpoints:
    """Finds a run's complete checkpoints; a manifest, which may have many megabytes, is read again only if it has changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[int, Manifest]] = {}

    def among(self, folders: Iterable[Path]) -> list[tuple[Path, Manifest]]:
        """The checkpoints with all files of the right size, with their manifests (without the tensors).

        A bad one is set aside. One that cannot be read now, or that another version of hpclm wrote, is left alone.
        """
        complete = []
        for folder in folders:
            try:
                complete.append((folder, self._manifest(folder)))
            except BadCheckpoint as reason:
                directory.set_aside(folder, str(reason))
            except (OSError, HpclmError) as reason:
                log.warning("checkpoint %s is ignored: %s", folder, reason)
        return complete

    def _manifest(self, folder: Path) -> Manifest:
        path = folder / manifests.NAME
        written = path.stat().st_mtime_ns if path.exists() else 0
        if folder not in self._known or self._known[folder][0] != written:
            self._known[folder] = written, replace(manifests.read_manifest(folder), tensors={})
        manifest = self._known[folder][1]
        manifests.check_sizes(folder, manifest)
        return manifest

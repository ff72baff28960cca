"""Which checkpoints to keep."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpclm.checkpoint import directory
from hpclm.checkpoint import manifest as manifests
from hpclm.checkpoint.manifest import BadCheckpoint, Manifest
from hpclm.errors import HpclmError

log = logging.getLogger(__name__)
LEAST = 2  # complete checkpoints: one may become corrupt


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of a run are kept; the others are removed once a newer one is published."""

    last: int = 3
    """Newest regular checkpoints. One that was saved because the run had to exit is kept in addition until the next regular one."""
    every: int = 0
    """Also keep every step that is a multiple of this; 0: none."""
    best: int = 0
    """Also keep this many with the lowest validation loss."""
    passes: int = 0
    """Also keep the first one after each of this many last epochs; 0: none."""
    samples: float = math.inf
    """Samples per epoch."""

    def dispensable(self, folders: Sequence[Path]) -> list[Path]:
        """The checkpoints among ``folders`` (oldest first) that can be removed.

        Incomplete ones are set aside and do not count; ones that cannot be read now are left alone. Of the regular ones, the
        newest ``last`` healthy ones are kept, and the newest LEAST in any case.
        """
        whole = [(folder, manifest) for folder in folders if (manifest := complete(folder))]
        good = healthy([manifest for _, manifest in whole])
        regular = [folder for folder, manifest in whole if manifest.why is None]
        kept = {
            *[folder for folder in regular if good[int(folder.name[5:])]][-max(self.last, LEAST) :],
            *regular[-LEAST:],
        }
        kept |= {folder for folder, _ in whole[-1:]}  # of those saved on exit only the newest is kept
        kept |= {folder for folder, _ in whole[-LEAST:] if len(kept) < LEAST}
        if self.every:
            kept |= {folder for folder, manifest in whole if manifest.progress["step"] % self.every == 0}
        measured = [(m.validation, -m.progress["step"], folder) for folder, m in whole if m.validation is not None]
        kept |= {folder for *_, folder in sorted(measured)[: self.best]}
        kept |= set(self._ends_of_passes(whole))
        newest = whole[-1][0] if whole else None
        return [folder for folder, _ in whole if folder not in kept and newest is not None and folder < newest]

    def _ends_of_passes(self, whole: Sequence[tuple[Path, Manifest]]) -> list[Path]:
        first: dict[int, Path] = {}
        for folder, manifest in whole:
            first.setdefault(int(manifest.progress.get("samples", 0) / self.samples), folder)
        first.pop(0, None)
        return [first[number] for number in sorted(first)[-self.passes :]] if self.passes else []


def healthy(manifests: Sequence[Manifest]) -> dict[int, bool]:
    """Step -> whether the run was healthy there, according to all of its checkpoints (oldest first).

    Unhealthy are those saved during a loss spike or while steps were skipped, and those whose next step began a spike: the
    loss of a step is that of the weights before it.
    """
    found: dict[int, bool] = {}
    begins = None
    """First step of the earliest spike that a later checkpoint records."""
    for manifest in reversed(manifests):
        step, health = int(manifest.progress["step"]), manifest.health
        spiking = health.spiking_since
        found[step] = health.good and (begins is None or step + 1 < begins)
        begins = spiking if begins is None or (spiking is not None and spiking < begins) else begins
    return found


def complete(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint if all files exist and have the right size; None otherwise.

    A bad one is set aside, but not if the disk fails or another version of hpclm wrote the manifest.
    """
    try:
        manifest = manifests.read(folder)
        manifests.check_sizes(folder, manifest)
    except BadCheckpoint as reason:
        directory.set_aside(folder, str(reason))
        return None
    except (OSError, HpclmError) as reason:
        log.warning("checkpoint %s is ignored: %s", folder, reason)
        return None
    return manifest

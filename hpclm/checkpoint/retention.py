"""Which checkpoints stay."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpclm.checkpoint import manifest as manifests
from hpclm.checkpoint import shelf
from hpclm.checkpoint.manifest import BadCheckpoint, Manifest
from hpclm.errors import HpclmError

log = logging.getLogger(__name__)
LEAST = 2  # that are complete: one may go bad


@dataclass(frozen=True)
class Retention:
    """What is kept of a run's checkpoints; the rest may go once a newer one is published."""

    last: int = 3
    """Newest regular ones. One that was made because the run was told to leave stays beside them until a regular one follows."""
    every: int = 0
    """Also every step that is a multiple of it; 0: none."""
    best: int = 0
    """Also those with the lowest loss on held-out data."""

    def dispensable(self, folders: Sequence[Path]) -> list[Path]:
        """Those of ``folders``, oldest first, that need not stay.

        One that is not complete does not count as kept: it is set aside; what cannot be read now stays where it is.
        """
        whole = [(folder, manifest) for folder in folders if (manifest := complete(folder))]
        regular = [folder for folder, manifest in whole if manifest.why is None]
        kept = set(regular[-max(self.last, LEAST) :])
        kept |= {
            folder for folder, _ in whole[-1:]
        }  # however often a run is told to leave, only the last such one stays
        kept |= {folder for folder, _ in whole[-LEAST:] if len(kept) < LEAST}
        if self.every:
            kept |= {folder for folder, manifest in whole if manifest.progress["step"] % self.every == 0}
        measured = [(m.validation, -m.progress["step"], folder) for folder, m in whole if m.validation is not None]
        kept |= {folder for *_, folder in sorted(measured)[: self.best]}
        newest = whole[-1][0] if whole else None
        return [folder for folder, _ in whole if folder not in kept and newest is not None and folder < newest]


def complete(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint all of whose files are there and of the right size; None otherwise.

    A bad one is set aside; a disk that fails, or a manifest of another hpclm, proves nothing.
    """
    try:
        manifest = manifests.read(folder)
        manifests.check_sizes(folder, manifest)
    except BadCheckpoint as reason:
        shelf.set_aside(folder, str(reason))
        return None
    except (OSError, HpclmError) as reason:
        log.warning("checkpoint %s does not count: %s", folder, reason)
        return None
    return manifest

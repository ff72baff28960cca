"""The settings of a run at one of its checkpoints: those of the phase that it had read last."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpclm.checkpoint import directory, manifest
from hpclm.checkpoint.manifest import BadCheckpoint
from hpclm.config import RunConfig, compose
from hpclm.config.phases import in_phase


def settings_at(run: Path, overrides: Sequence[str], checkpoint: Path | None = None) -> RunConfig:
    """The settings of ``run`` at ``checkpoint``, or at its newest one, with ``overrides`` (key=value) on top.

    They have no data.phases. ConfigError if ``run`` is not a run directory.
    """
    config = compose.of_run(run, overrides)
    if not config.data.phases:
        return config
    phase = 0
    for folder in [checkpoint] if checkpoint else reversed(directory.steps(run / "checkpoints")):
        with suppress(BadCheckpoint, OSError):  # the caller reports it
            phase = max(0, len(manifest.read_manifest(folder).progress.get("phases", ())) - 1)
            break
    return compose.changed(in_phase(compose.of_run(run, []), phase), overrides)

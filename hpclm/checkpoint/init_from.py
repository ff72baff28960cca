"""Start a new run from the weights of another run's checkpoint (checkpoint.init_from)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hpclm.checkpoint import directory
from hpclm.checkpoint.fingerprint import differences, tokenizer_clash
from hpclm.checkpoint.manifest import NAME, BadCheckpoint, Manifest
from hpclm.checkpoint.tensors import Tensors
from hpclm.config import RunConfig
from hpclm.distributed.context import DistributedContext
from hpclm.engine import Engine
from hpclm.errors import ConfigError, NoCheckpointError

FRESH = {"optimizer_steps": 0, "loss_scale": None}


class Weights:
    """Only the weights of a checkpoint."""

    def __init__(self, saved: Tensors):
        self.saved = saved

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight, by its name in the checkpoint."""
        return {name: shape for name, shape in self.saved.shapes().items() if name.startswith("model.")}

    def block(self, name: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """A block of one of them."""
        return self.saved.block(name, start, size)


def begin_from(path: Path, engine: Engine, context: DistributedContext, fingerprint: dict[str, Any]) -> str:
    """Load the weights from a checkpoint, or from the newest good one of a run directory; returns its path.

    ConfigError if there is none, or if model or tokenizer differ; NoCheckpointError if none is good.
    """

    def located() -> tuple[str, dict[str, Any]]:
        folder, manifest = locate(path)
        check_model(folder, manifest, fingerprint)
        return str(folder), manifest.fields

    name, content = context.run_on_main(located)
    folder, manifest = Path(name), Manifest(**content)
    with Tensors(folder, manifest) as saved:
        engine.load(Weights(saved), FRESH)
    return str(folder)


def locate(path: Path, read: bool = True) -> tuple[Path, Manifest]:
    """The checkpoint that ``path`` refers to, and its manifest; ``read``: verify the hashes of all files, not only sizes."""
    look = directory.verified if read else directory.sized
    if (path / NAME).exists():
        try:
            return path, look(path)
        except BadCheckpoint as reason:
            raise NoCheckpointError(f"checkpoint {path} is bad: {reason}") from None
    if not directory.steps(path / "checkpoints"):
        raise ConfigError(f"checkpoint.init_from={path} is neither a run directory with checkpoints nor a checkpoint")
    return directory.newest(path / "checkpoints", look)


def check_model(folder: Path, manifest: Manifest, fingerprint: dict[str, Any]) -> None:
    """ConfigError if the checkpoint's model or tokenizer is known and differs from the run's."""
    saved = manifest.fingerprint
    wrong = [] if (clash := tokenizer_clash(saved, fingerprint.get("data", {}).get("tokenizer"))) is None else [clash]
    if "model" in saved:
        wrong += differences({"model": saved["model"]}, {"model": fingerprint["model"]})
    if wrong:
        raise ConfigError([f"{folder} has a different model:", *wrong])


def check_init_from(run: RunConfig, fingerprint: Mapping[str, Any] | None) -> None:
    """ConfigError or NoCheckpointError if the run cannot start as checkpoint.resume and init_from require.

    Reads names, sizes and manifests only. ``fingerprint``: of the run; None if unknown.
    """
    own = Path(run.out) / "checkpoints"
    saved = directory.steps(own) if own.is_dir() else []  # anything else is reported by the check of the run directory
    if saved and run.checkpoint.resume == "never":
        raise ConfigError(f"{own} already holds {saved[-1].name}, but checkpoint.resume=never; choose another out")
    if saved or run.checkpoint.init_from is None:
        return
    folder, manifest = locate(Path(run.checkpoint.init_from), read=False)
    if fingerprint is not None:
        check_model(folder, manifest, dict(fingerprint))

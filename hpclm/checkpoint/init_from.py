"""Start a new run from the weights of another run's checkpoint (checkpoint.init_from)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpclm.base.errors import ConfigError
from hpclm.checkpoint import directory, manifest
from hpclm.checkpoint.fingerprint import differences, network, tokenizer_clash
from hpclm.checkpoint.manifest import Manifest
from hpclm.distributed.context import DistributedContext

if TYPE_CHECKING:
    from torch import Tensor

    from hpclm.checkpoint.tensors import CheckpointTensors
    from hpclm.engine import Engine

FRESH = {"optimizer_steps": 0}


class SavedWeights:
    """Only the weights of a checkpoint."""

    def __init__(self, saved: "CheckpointTensors"):
        self.saved = saved

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight, by its name in the checkpoint."""
        return {name: shape for name, shape in self.saved.shapes().items() if name.startswith("model.")}

    def block(self, name: str, start: Sequence[int], size: Sequence[int]) -> "Tensor":
        """A block of the weight ``name``."""
        return self.saved.block(name, start, size)


def begin_from(path: Path, engine: "Engine", context: DistributedContext, fingerprint: dict[str, Any]) -> str:
    """Load the weights from a checkpoint, or from the newest good one of a run directory; returns its path.

    ConfigError without a checkpoint, or if model or tokenizer differ; NoCheckpointError if none is good.
    """

    def located() -> tuple[str, dict[str, Any]]:
        folder, manifest = _located(path, directory.verified)
        _check_model(folder, manifest, fingerprint)
        return str(folder), manifest.fields

    from hpclm.checkpoint.tensors import CheckpointTensors  # imports PyTorch

    folder, fields = context.run_on_main(located)
    with CheckpointTensors(Path(folder), Manifest(**fields)) as saved:
        engine.load(SavedWeights(saved), FRESH)
    return folder


def check_init_from(path: str | None, checkpoints: Path, fingerprint: Mapping[str, Any]) -> None:
    """ConfigError or NoCheckpointError if a run cannot start from ``path``, its checkpoint.init_from.

    Reads names, sizes and manifests only. ``checkpoints``: the folder of the run's checkpoints; a run that has some resumes
    from them instead. ``fingerprint``: that of the run, without its data if unknown.
    """
    if path is not None and not (checkpoints.is_dir() and directory.steps(checkpoints)):
        _check_model(*_located(Path(path), directory.checked), fingerprint)


def _located(path: Path, look: Callable[[Path], Manifest]) -> tuple[Path, Manifest]:
    """The checkpoint that ``path`` refers to, and its manifest, which ``look`` reads and verifies."""
    if not (path / manifest.NAME).exists() and not directory.steps(path / "checkpoints"):
        raise ConfigError(f"checkpoint.init_from={path} is neither a run directory with checkpoints nor a checkpoint")
    return directory.locate(path, look)


def _check_model(folder: Path, manifest: Manifest, fingerprint: Mapping[str, Any]) -> None:
    """ConfigError if the checkpoint's model or tokenizer is known and differs from the run's."""
    saved = manifest.fingerprint
    wrong = tokenizer_clash(saved, fingerprint.get("data", {}).get("tokenizer"))
    if "model" in saved:
        wrong += differences({"model": network(saved)}, {"model": fingerprint["model"]})
    if wrong:
        raise ConfigError(
            [
                f"checkpoint.init_from needs the same network, and {folder} has another one; change these settings:",
                *wrong,
            ]
        )

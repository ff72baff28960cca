"""The weights of another run's checkpoint, for a new run to begin with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hpclm.checkpoint import manifest as manifests
from hpclm.checkpoint import shelf
from hpclm.checkpoint.identity import differences, tokenizer_clash
from hpclm.checkpoint.manifest import NAME, BadCheckpoint, Manifest
from hpclm.checkpoint.tensors import Tensors
from hpclm.cluster.team import Team
from hpclm.engine import Engine
from hpclm.errors import ConfigError, NoCheckpointError

FRESH = {"optimizer_steps": 0, "loss_scale": None}


class Weights:
    """The weights among a checkpoint's tensors."""

    def __init__(self, saved: Tensors):
        self.saved = saved

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight, under its name in the checkpoint."""
        return {name: shape for name, shape in self.saved.shapes().items() if name.startswith("model.")}

    def block(self, name: str, start: Sequence[int], size: Sequence[int]) -> Tensor:
        """A block of one of them."""
        return self.saved.block(name, start, size)


def begin_from(path: Path, engine: Engine, team: Team, identity: dict[str, Any]) -> str:
    """Load the weights of the newest good checkpoint of a run directory, or of one checkpoint's folder; gives that folder.

    ConfigError where the path holds none or the model, or its tokenizer, is another; NoCheckpointError where none is good.
    """
    folder = Path(team.first(lambda: str(locate(path))))
    manifest = manifests.read(folder)
    team.first(lambda: check_model(folder, manifest, identity))
    with Tensors(folder, manifest) as saved:
        engine.load(Weights(saved), FRESH)
    return str(folder)


def locate(path: Path) -> Path:
    """The folder of the checkpoint that ``path`` means, verified."""
    if (path / NAME).exists():
        try:
            shelf.verified(path)
        except BadCheckpoint as reason:
            raise NoCheckpointError(f"checkpoint {path} is bad: {reason}") from None
        return path
    if not shelf.steps(path / "checkpoints"):
        raise ConfigError(f"checkpoint.init_from={path} is neither a run directory with checkpoints nor a checkpoint")
    return shelf.newest(path / "checkpoints")[0]


def check_model(folder: Path, manifest: Manifest, identity: dict[str, Any]) -> None:
    """ConfigError where the checkpoint's model, or its tokenizer, is not the run's; what is not known of it is not held against it."""
    saved = manifest.identity
    wrong = [] if (clash := tokenizer_clash(saved, identity.get("data", {}).get("tokenizer"))) is None else [clash]
    if "model" in saved:
        wrong += differences({"model": saved["model"]}, {"model": identity["model"]})
    if wrong:
        raise ConfigError([f"{folder} has another model:", *wrong])

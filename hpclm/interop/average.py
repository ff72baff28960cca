"""The mean of the weights of several checkpoints, as a new run."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from hpclm.base.errors import ConfigError
from hpclm.base.terminal import many
from hpclm.checkpoint import directory
from hpclm.checkpoint.manifest import Manifest
from hpclm.checkpoint.settings_at import settings_at
from hpclm.checkpoint.tensors import CheckpointTensors
from hpclm.engine import Shard
from hpclm.interop import run as runs


class MeanWeights:
    """The mean of the weights of checkpoints of one run; holds one weight in memory."""

    def __init__(self, checkpoints: Sequence[tuple[Path, Manifest]]):
        self.checkpoints = checkpoints

    def tensors(self) -> Iterator[Shard]:
        """Every weight whole: the sum in fp64 divided by the number of checkpoints, in fp32."""
        with ExitStack() as opened:
            saved = [opened.enter_context(CheckpointTensors(*checkpoint)) for checkpoint in self.checkpoints]
            for name in (name for name in saved[0].shapes() if name.startswith("model.")):
                total = saved[0].whole(name).double()
                for other in saved[1:]:
                    total += other.whole(name)
                yield Shard.whole(name, (total / len(saved)).to(torch.float32))

    def scalars(self) -> dict[str, Any]:
        """The optimizer has made no step."""
        return {"optimizer_steps": 0}


def averaged(run: Path, target: Path, last: int | None, steps: Sequence[int]) -> str:
    """Write the mean of the ``last`` checkpoints of ``run``, or of those of ``steps``, as the run ``target``. Returns a description.

    ConfigError if a checkpoint does not exist, HpclmError if one is corrupt; nothing is written then.
    """
    there = {int(folder.name.removeprefix("step-")): folder for folder in directory.steps(run / "checkpoints")}
    chosen = sorted(set(steps)) if steps else sorted(there)[-(last or 0) :]
    missing = [step for step in chosen if step not in there]
    if len(chosen) == 1 and steps and not missing:
        raise ConfigError(
            f"{run} can only be averaged over two different steps or more, not over {chosen[0]} alone; its checkpoints: "
            f"{', '.join(map(str, sorted(there)))}"
        )
    if missing or len(chosen) < (last or 2):
        wrong = f"no checkpoint of step {missing[0]}" if missing else f"only {many(len(there), 'checkpoint')}"
        raise ConfigError(f"{run} has {wrong}; its checkpoints: {', '.join(map(str, sorted(there))) or 'none'}")
    config = settings_at(run, [], there[chosen[-1]])
    checkpoints = [directory.locate(there[step]) for step in chosen]
    runs.save_beside(run, target, config, MeanWeights(checkpoints))
    return f"{target}: the mean of the weights of steps {', '.join(map(str, chosen))}"

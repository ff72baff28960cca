"""An engine for a step that is only looked at."""

from typing import Any

import torch

from hpclm.config import RunConfig
from hpclm.config.engine import ENGINES
from hpclm.engine import CHECK
from hpclm.parallel.mesh import Mesh
from hpclm.registry import lookup


def built(run: RunConfig, mesh: Mesh, device: torch.device, dtype: torch.dtype) -> Any:
    """The engine of the settings; whether this machine could train with it is not checked."""
    return lookup("engine", run.engine.name, ENGINES, CHECK)(run, mesh, device, dtype)

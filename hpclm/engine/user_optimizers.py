"""Whether a user's optimizer can train in a layout, by what it declares (hpclm.optim.maker), and what no checkpoint would have of it."""

from collections.abc import Iterator
from typing import Any

import torch

from hpclm.base.errors import ConfigError
from hpclm.config import EngineSettings
from hpclm.config.optimizers import OPTIMIZERS
from hpclm.config.supports import Supports, with_feature
from hpclm.model.own_block import KeptValues, comparable
from hpclm.model.weights import stacked_experts
from hpclm.optim import maker
from hpclm.optim.user_optimizer import UserOptimizer


def check_optimizer(config: EngineSettings, can: Supports | None, sharded: bool = False) -> None:
    """ConfigError if optim.name names a user's optimizer that cannot run with these settings.

    ``can``: features of the engine; ``sharded``: whether a user's engine splits weights over replicas.
    """
    name = config.optim.name
    if name in OPTIMIZERS:
        return
    loaded = maker.load(config.optim)
    matrices = loaded.matrices
    if can and not can.matrices and matrices:
        able = with_feature(lambda supports: supports.matrices)
        raise ConfigError(
            f"engine {config.engine.name!r} does not support optim.name={name}, which declares `matrices`; engines that do: {able}"
        )
    experts = stacked_experts(config.model, config.model.experts) if config.model.experts.count else ()
    for weight, row in experts:
        if matrices and matrices(row.placement):
            raise ConfigError(
                f"optim.name={name} declares block0.mlp.experts.{weight} of the shape {list(row.shape)} in `matrices`, but that is a stack of one "
                "weight per expert, not a matrix: let matrices(placement) be false if placement.stacked and treat the values of these weights on "
                "their own, or set optim.name=muon"
            )
    divides = [] if loaded.splits or matrices else list(_dividing(config, can, sharded))
    if divides:
        raise ConfigError(
            f"{' and '.join(divides)} divides the weights over processes, and optim.name={name} does not declare that it can train like that: "
            "set its attribute splits = True if its update treats every value on its own, or matrices = True if it needs whole weights, and "
            f"test it with hpclm selftest {name}. Or set engine.name=native engine.zero_stage=0 parallel.tensor=1 parallel.pipeline=1"
        )


def _dividing(config: EngineSettings, can: Supports | None, sharded: bool) -> Iterator[str]:
    """The settings that divide weights, or their state, over processes."""
    engine = config.engine
    parallel = config.parallel
    for setting in ("tensor", "pipeline", "expert"):
        if getattr(parallel, setting) > 1:
            yield f"parallel.{setting}={getattr(parallel, setting)}"
    stage = can.stage(config) if can else engine.zero_stage or 0
    replicas = config.plan.data * parallel.context
    # DeepSpeed flattens the weights of a single replica too
    if (stage > 0 or sharded) and (replicas > 1 or engine.name == "deepspeed"):
        yield f"engine.name={engine.name} engine.zero_stage={stage}"


class OptimizerAttributes(KeptValues):
    """Values that a user's optimizer keeps outside of its state and its parameter groups."""

    def __init__(self, optimizer: UserOptimizer):
        super().__init__()
        self.optimizer = optimizer.inner

    def current(self) -> dict[str, Any]:
        """The attributes that every optimizer does not have."""
        optimizer = self.optimizer
        left_out = vars(torch.optim.SGD([torch.zeros(1)])).keys() | {*getattr(optimizer, "transient", ())}
        # optimizers inside this one may share its state
        saved = {id(optimizer.state), *map(id, optimizer.state.values()), *map(id, optimizer.param_groups)}
        mine = {name: value for name, value in vars(optimizer).items() if name not in left_out}
        return {f"{type(optimizer).__name__}.{name}": comparable(value, saved) for name, value in mine.items()}

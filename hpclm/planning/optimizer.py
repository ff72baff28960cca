"""What the planner knows of the optimizer."""

from hpclm.config import OptimConfig, RunConfig
from hpclm.config.optimizers import OPTIMIZERS, OptimizerKind, row
from hpclm.config.supports import SUPPORTS
from hpclm.errors import ConfigError
from hpclm.optim.optimizers import kind_of


def kind(optim: OptimConfig) -> OptimizerKind:
    """The optimizer; of one of the user's own that cannot be loaded here, what is assumed."""
    return row(optim.name) if assumed(optim) else kind_of(optim)


def assumed(optim: OptimConfig) -> str | None:
    """What is assumed of the user's optimizer, and why; None if it is known."""
    try:
        kind_of(optim)
    except ConfigError as error:
        return (
            f"optim.name={optim.name} is taken to keep two tensors of each weight's shape, as AdamW does, since it cannot be tried here: "
            f"{error.problems[0]}"
        )
    return None


def check(run: RunConfig) -> None:
    """ConfigError if the user's optimizer, as far as it can be tried here, cannot train in the run's layout."""
    if run.optim.name in OPTIMIZERS or assumed(run.optim):
        return
    from hpclm.engine.user_optimizers import check_optimizer  # imports PyTorch

    check_optimizer(run.for_engine(run.job.nodes * run.job.gpus), SUPPORTS.get(run.engine.name))

"""The optimizer that the planner assumes, known or a user's own."""

from hpclm.base.errors import ConfigError
from hpclm.config import OptimConfig, RunConfig
from hpclm.config.optimizers import OPTIMIZERS, OptimizerKind, row
from hpclm.config.supports import SUPPORTS
from hpclm.optim.optimizers import kind_of


def kind(optim: OptimConfig) -> OptimizerKind:
    """The optimizer's kind; for a user's optimizer that cannot be loaded here, an assumed kind."""
    return row(optim.name) if _not_loaded(optim) else kind_of(optim)


def assumed(optim: OptimConfig) -> str | None:
    """The assumption about a user's optimizer; None for hpclm's own."""
    if optim.name in OPTIMIZERS:
        return None
    text = f"optim.name={optim.name} is assumed to keep two tensors of each weight's shape, like AdamW"
    why = _not_loaded(optim)
    return f"{text}, and to train in any layout, because it cannot be loaded here: {why}" if why else text


def _not_loaded(optim: OptimConfig) -> str | None:
    """Why a user's optimizer cannot be loaded here."""
    try:
        kind_of(optim)
    except ConfigError as error:
        return error.problems[0]
    return None


def check_user_optimizer(run: RunConfig) -> None:
    """ConfigError if a user's optimizer cannot train in the run's layout. An optimizer that cannot be loaded here is accepted."""
    if run.optim.name in OPTIMIZERS or _not_loaded(run.optim):
        return
    from hpclm.engine.user_optimizers import check_optimizer  # imports PyTorch

    check_optimizer(run.for_engine(run.job.nodes * run.job.gpus), SUPPORTS.get(run.engine.name))

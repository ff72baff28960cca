"""Checks whether a user's optimizer can run in a layout. A trial on small weights shows its needs (hpclm.optim.trial)."""

from collections.abc import Callable, Iterator
from dataclasses import fields

from hpclm.base.errors import ConfigError
from hpclm.config import EngineSettings, ModelConfig, OptimConfig
from hpclm.config.optimizers import OPTIMIZERS, Shape
from hpclm.config.supports import Supports, with_feature
from hpclm.model.weights import stacked_experts
from hpclm.optim import user_optimizer
from hpclm.optim.trial import RANDOM
from hpclm.optim.user_optimizer import LoadedOptimizer

DECLARE = "declare in it which weights it needs whole (`matrices`: hpclm docs your-own-code)"


def check_optimizer(config: EngineSettings, can: Supports | None, sharded: bool = False) -> None:
    """ConfigError if optim.name names a user's optimizer that cannot run with these settings.

    ``can``: features of the engine; ``sharded``: whether a user's engine splits weights over replicas.
    """
    if config.optim.name in OPTIMIZERS:
        return
    loaded = user_optimizer.load(config.optim)
    problems = [*_without_effect(config.optim, loaded), *_problems(config, loaded, can, sharded)]
    if problems:
        raise ConfigError(problems)


def _without_effect(optim: OptimConfig, loaded: LoadedOptimizer) -> Iterator[str]:
    """Settings without effect, because the optimizer's class does not take them."""
    if loaded.maker.decays:
        return
    default = next(entry.default for entry in fields(optim) if entry.name == "weight_decay")
    if optim.weight_decay not in (default, 0):
        yield f"optim.weight_decay={optim.weight_decay} has no effect with optim.name={optim.name}, which has no parameter weight_decay"
    for entry in optim.groups:
        if "weight_decay" in entry:
            yield f"optim.groups: {entry}: optim.name={optim.name} has no parameter weight_decay"


def _problems(config: EngineSettings, loaded: LoadedOptimizer, can: Supports | None, sharded: bool) -> Iterator[str]:
    """Conflicts between the layout and the optimizer."""
    optim = config.optim
    engine = config.engine
    parallel = config.parallel
    kind = loaded.kind
    if can and not can.matrices and kind.matrices:
        able = with_feature(lambda supports: supports.matrices)
        yield f"engine {engine.name!r} does not support optim.name={optim.name}, which declares `matrices`; engines that do: {able}"
        return
    if can and not can.any_state and not kind.elementwise(optim):
        able = with_feature(lambda supports: supports.any_state)
        yield (
            f"engine {engine.name!r} does not support optim.name={optim.name}, which keeps more than tensors of the weights' shapes; "
            f"engines that do: {able}"
        )
    wrong = None
    if config.model.experts.count and kind.matrices:
        wrong = next(_stacks(config.model, kind.matrices), None)
    if wrong:
        yield (
            f"optim.name={optim.name} declares {wrong} in `matrices`, but that is a stack of one weight per expert, not a matrix: let "
            "matrices(name, shape) be false for names with .mlp.experts. and update these weights value by value, or set optim.name=muon"
        )
        return
    trial = user_optimizer.tried_with_experts(optim) if config.model.experts.count else loaded.trial
    processes = parallel.replica * config.plan.data
    if trial.parts_differ == RANDOM and processes > 1:
        yield f"optim.name={optim.name} cannot train in {processes} processes: {RANDOM}"
        return
    splits = list(_splits(config, can, sharded))
    differ = trial.parts_differ
    depend = trial.weights_depend
    if splits and differ:
        yield (
            f"{' and '.join(splits)} splits weights, and optim.name={optim.name} needs whole ones: {differ}. Train with engine.name=native "
            f"engine.zero_stage=0 parallel.tensor=1, or {DECLARE}"
        )
    if parallel.pipeline > 1 and depend:
        yield (
            f"parallel.pipeline={parallel.pipeline} gives each process different weights, but optim.name={optim.name} needs all of them: {depend}. "
            "Train with parallel.pipeline=1 engine.name=native"
        )
    elif splits and depend and not differ:
        yield f"{' and '.join(splits)} splits weights, and optim.name={optim.name} needs whole ones: {depend}"


def _stacks(model: ModelConfig, matrices: Callable[[str, Shape], bool]) -> Iterator[str]:
    """The expert weights that an optimizer treats as matrices."""
    for name, weight in stacked_experts(model, model.experts):
        if matrices(f"block0.mlp.experts.{name}", weight.shape):
            yield f"block0.mlp.experts.{name} of the shape {list(weight.shape)}"


def _splits(config: EngineSettings, can: Supports | None, sharded: bool) -> Iterator[str]:
    """The settings that split weights over processes."""
    engine = config.engine
    parallel = config.parallel
    if parallel.tensor > 1:
        yield f"parallel.tensor={parallel.tensor}"
    if parallel.expert > 1:
        yield f"parallel.expert={parallel.expert}"
    stage = can.stage(config) if can else engine.zero_stage or 0
    replicas = config.plan.data * parallel.context
    # DeepSpeed flattens the weights of a single replica too
    if (stage > 0 or sharded) and (replicas > 1 or engine.name == "deepspeed"):
        yield f"engine.name={engine.name} engine.zero_stage={stage}"

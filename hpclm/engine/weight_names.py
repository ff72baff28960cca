"""Settings that name weights, model.freeze and optim.groups: whether they match any, and leave any to train."""

import fnmatch
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate

from hpclm.base.errors import ConfigError
from hpclm.base.registry import hint
from hpclm.config import EngineSettings
from hpclm.config.layer import Layer
from hpclm.config.supports import SUPPORTS
from hpclm.engine.stages import stages
from hpclm.model.init import saved_buffers
from hpclm.model.spec import LayerSpec
from hpclm.optim.optimizers import rate_and_decay
from hpclm.parallel.placement import Placement


def check_weights(config: EngineSettings, specs: Sequence[LayerSpec]) -> None:
    """ConfigError if an entry of model.freeze or optim.groups matches no weight of these layers, or if they leave nothing to train."""
    names = weight_names(specs)
    trained = [name for name, by_layer in names.items() if by_layer and not config.model.freezes(name)]
    problems = [*_unmatched(config, names, trained)]
    if not trained:
        problems.append(f"model.freeze={config.model.freeze} freezes every weight; nothing would be learned")
    elif not any(rate_and_decay(name, Placement(()), config.optim)[0] for name in trained):
        problems.append(
            f"optim.groups={config.optim.groups} sets the learning rate of every trained weight to 0; nothing would be learned"
        )
    supports = SUPPORTS.get(config.engine.name)
    if trained and config.parallel.pipeline > 1 and not (supports and supports.frozen_stages):
        problems += _frozen_stages(config, specs, {name.split(".")[0] for name in trained})
    if problems:
        raise ConfigError(problems)


def weight_names(specs: Sequence[LayerSpec]) -> dict[str, bool]:
    """The names of all weights of these layers, and whether the layers train them; saved state that is not a weight is not trained. Of
    equal blocks, only one is built."""
    built: dict[Layer | str, dict[str, bool]] = {}
    for spec in specs:
        kind = spec.layer or spec.name
        if kind not in built:
            layer = spec.build()
            weights = {name: weight.requires_grad for name, weight in layer.named_parameters()}
            built[kind] = weights | {name: False for name, _ in saved_buffers(layer)}
    return {f"{spec.name}.{name}": by for spec in specs for name, by in built[spec.layer or spec.name].items()}


def _unmatched(config: EngineSettings, names: Mapping[str, bool], trained: Collection[str]) -> Iterator[str]:
    examples = ", ".join(dict.fromkeys(re.sub(r"^block\d+", "block0", name) for name in names))
    modules = dict.fromkeys(f"{path}.*" for name in names for path in accumulate(name.split(".")[:-1], "{}.{}".format))
    for pattern in config.model.freeze:
        if not fnmatch.filter(names, pattern):
            yield f"model.freeze: {pattern} matches no weight; weights are {examples}.{hint(pattern, [*names, *modules])}"
    for entry in config.optim.groups:
        if not any(re.search(entry["match"], name) for name in trained):
            yield f"optim.groups: {entry} matches no weight that is trained; weights are {examples}"


def _frozen_stages(config: EngineSettings, specs: Sequence[LayerSpec], trained: Collection[str]) -> Iterator[str]:
    """A problem for each pipeline stage without any of the layers ``trained``."""
    for number, part in enumerate(stages(config, specs)):
        if not any(spec.name in trained for spec in part):
            yield (
                f"model.freeze={config.model.freeze} leaves nothing to train in stage {number} of the pipeline, {part[0].name} to {part[-1].name}, "
                f"which engine {config.engine.name!r} does not support; set engine.name=pipelining, lower parallel.pipeline, or freeze less"
            )

"""Loss on held-out data while a run trains."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from hpclm.checkpoint import Progress
from hpclm.config import Plan, RunConfig
from hpclm.data.batches import Batch, Batches
from hpclm.data.sources import Source, evaluated, without_evaluation
from hpclm.engine import Engine
from hpclm.errors import ConfigError
from hpclm.training.metrics import Meter

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOut:
    """Samples of one part, always the same ones."""

    part: str
    batches: Batches
    size: int
    """Samples an evaluation reads."""


def held_out(source: Source, config: RunConfig, plan: Plan, device: torch.device, replica: int = 0) -> list[HeldOut]:
    """What evaluations read, part by part, of it this replica's share: ``evaluate.batches`` global batches, or all there are.

    ConfigError where a part is too short.
    """
    if config.evaluate.every and not source.held_out:
        log.info("no evaluation: the data settings keep nothing for it")
    found = []
    for part in source.held_out if config.evaluate.every else ():
        size = evaluated(source, config, part)
        try:
            samples = source.samples(part, size)
        except ConfigError as error:
            raise without_evaluation(source, part, error) from None
        found.append(HeldOut(part, Batches(samples, config, plan, source.eod, device, replica), size))
    return found


def evaluate(
    parts: list[HeldOut], engine: Engine, meter: Meter, progress: Progress, warned: Callable[[], bool], every: int
) -> None:
    """Measure the parts that have no figure for this step yet, until a signal warns.

    ``warned``: whether any rank was; all ask together, every so many micro-batches, and get one answer.
    """
    stopped = False

    def until_warned(batches: Iterator[Batch]) -> Iterator[Batch]:
        nonlocal stopped
        for number, batch in enumerate(batches):
            if number and number % every == 0 and warned():
                stopped = True
                return
            yield batch

    for part in parts:
        if (progress.step, part.part) not in meter.losses:
            loss = engine.evaluate(until_warned(part.batches.take(0, part.size)))
            if stopped:
                return
            meter.evaluated(progress.step, progress.samples, loss, part.part)

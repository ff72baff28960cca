"""Silent corruption: bits of weights and optimizer state that flip, and processors that compute wrongly.

Every cluster.verify_every steps, and before every save, the ranks compare values that must be equal:

- Checksums of each rank's state after an update and before the next one, to detect flipped bits in memory.
- Checksums of state that several ranks hold, which also detect a wrong update.
- Two losses of the same micro-batch, on each rank, to detect a processor that computes wrongly.

A check waits for the device. Between checks, checksums are only queued.
"""

import hashlib
import inspect
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from hpclm.base import files
from hpclm.base.errors import CorruptedError, DivergedError
from hpclm.base.side_path import SidePath
from hpclm.diagnostics import facts
from hpclm.distributed.context import DistributedContext
from hpclm.engine import Engine
from hpclm.engine.base import BaseEngine
from hpclm.engine.checksum import checksums, counts, local_tensors, pieces
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.node import hardware
from hpclm.parallel.mesh import Mesh
from hpclm.parallel.micro_batch import MicroBatch
from hpclm.rundir import events

log = logging.getLogger(__name__)
MAX_TIME_FRACTION = 0.003
"""Maximum fraction of the time for checksums before and after updates; it limits the number of watched steps."""
TOLERANCE = 1e-3
"""Relative difference allowed between two losses of one micro-batch if kernels are not bit-exact."""
MAX_NAMED = 8  # maximum number of ranks or weights named in a message

Group = tuple[int, int, bool]
"""Ranks that hold the same state: the first rank, the number of data-parallel ranks, and whether tensor-parallel ranks are among them."""

BETWEEN_UPDATES = "change weights and optimizer state only in the optimizer's step"
TWO_LOSSES = "make the evaluation loss depend on weights and batch alone, not on random numbers or state of the block"
ACROSS_TENSOR = (
    "if every tensor-parallel rank holds a whole weight, pass it in forward through hpclm.parallel.collectives.copy_to_tp(weight, tp), "
    "which sums the gradient over the ranks, and initialise the weight equally on all ranks"
)
ACROSS_REPLICAS = "make the update independent of the rank, its random numbers and its time, and initialise the same weights on all ranks"


@dataclass(frozen=True)
class CorruptionFinding:
    """A fault that the ranks have detected."""

    ranks: tuple[int, ...]
    text: str
    certain: bool = True
    """Whether each of ``ranks`` is at fault; otherwise one of them is."""
    advice: str = ""
    """The change to make if a program is at fault."""
    group: Group | None = None
    """The group with differing state."""
    weights: tuple[str, ...] = ()
    """Names of the weights that differ, or that have differing optimizer state."""

    def described(self, names: Sequence[str]) -> str:
        """A text with the ranks at fault, the fault, and the weights that differ. ``names``: the name of every rank."""
        text = f"{'; '.join(_first([names[rank] for rank in self.ranks]))}: {self.text}"
        if self.weights:
            text += f" ({', '.join(_first(self.weights))})"
        return text


def _first(names: Sequence[str]) -> list[str]:
    """The first of ``names``, and the number of the others."""
    if len(names) <= MAX_NAMED:
        return list(names)
    return [*names[:MAX_NAMED], f"{len(names) - MAX_NAMED} more"]


class Verifier:
    """Checks this rank's state and computation; all ranks call its methods at the same points."""

    def __init__(self, engine: BaseEngine, mesh: Mesh, context: DistributedContext, share: float = MAX_TIME_FRACTION):
        """``share``: see MAX_TIME_FRACTION."""
        self.engine = engine
        self.mesh = mesh
        self.context = context
        self.share = share
        self.exact = engine.device.type == "cpu" or engine.config.engine.deterministic
        """Whether kernels are bit-exact."""
        self.recomputes = "alone" in inspect.signature(engine.evaluate).parameters
        if not self.recomputes:
            log.warning(
                "cluster.verify_every: %s.evaluate has no parameter `alone`, so losses are not computed twice",
                type(engine).__name__,
            )
        self.period = 1
        """One of this many steps is watched: checksums are taken after its update and before the next one."""
        self._weights = () if engine.config.engine.offload_folder else engine.weights
        if not self._weights:
            log.info("cluster.verify_every: state in engine.offload_folder is not checked for corruption")
        self._shared: dict[Group, list[ShardedParameter]] = {}
        for weight in self._weights:
            group = self._group(weight)
            if group:
                self._shared.setdefault(group, []).append(weight)
        self._routers: dict[str, list[Tensor]] = {}
        """The routers' state, which every process has in full."""
        routers = engine.router_state
        if routers:
            rows = routers.rows.items()
            self._routers = {f"{name}.mlp.router": [routers.bias[row], routers.load[row]] for name, row in rows}
        self._all_ranks: Group = (0, mesh.world.size, False)
        if self._routers and mesh.world.size > 1:
            self._shared.setdefault(self._all_ranks, [])
        self._batch: MicroBatch | None = None
        self._changed = torch.zeros((), dtype=torch.bool, device=engine.device)
        self._pieces: list[list[Tensor]] = []
        self._entries = 0
        """Number of entries in the optimizer's state when ``_pieces`` was made."""
        self._before: Tensor | None = None
        self._steps = 0
        self._mark = (0, 0.0)
        engine.optimizer.register_step_pre_hook(lambda *_: self._close())
        self._open()

    def after_step(self, batch: MicroBatch) -> None:
        """Call after a step's update, which the device may not have finished; ``batch``: a micro-batch to compute twice."""
        self._batch = batch
        self._steps += 1
        if self._steps == 1:
            self._mark = 1, time.perf_counter()
        elif self._steps == 2:  # the first step took longer
            self._set_period()
        if self._steps % self.period == 0:
            self._open(anew=self._steps <= 2)

    def check(self, recompute: bool = True) -> list[CorruptionFinding]:
        """The faults, the same on every rank; a collective. ``recompute``: also compute a micro-batch twice."""
        batches = [self._batch] * 2 if recompute and self._batch and self.recomputes else []
        losses = [(self.engine.evaluate([batch], alone=True) or 0.0).hex() for batch in batches]
        self._close()
        answer = {
            "shared": [
                (*group, self._digest(self._state_of(group, weights))) for group, weights in self._shared.items()
            ],
            "changed": bool(self._changed),
            # ranks that compute each other's tokens have wrong losses together
            "replica": self.mesh.dp.rank // math.lcm(self.mesh.cp.size, self.mesh.ep.size),
            "losses": losses,
        }
        self._set_period()
        self._open()
        problems = findings(self.context.all_gather(answer), self.exact)
        return [
            replace(finding, weights=self._differing(finding.group)) if finding.group else finding
            for finding in problems
        ]

    def _differing(self, group: Group) -> tuple[str, ...]:
        """The weights of a group that differ between its ranks, in values or optimizer state; a collective."""
        digests = {weight.name: self._digest(self._shared_tensors([weight])) for weight in self._shared.get(group, ())}
        if group == self._all_ranks:
            digests |= {name: self._digest(tensors) for name, tensors in self._routers.items()}
        answers = [answer for answer in self.context.all_gather(digests) if answer]
        return tuple(name for name in answers[0] if len({answer.get(name) for answer in answers}) > 1)

    def _group(self, weight: ShardedParameter) -> Group | None:
        """The ranks that hold the same values of a weight as this one; None without others."""
        tp = self.mesh.tp
        replicas = weight.replicas
        everywhere = tp.size > 1 and weight.placement.dim is None
        if replicas.size == 1 and not everywhere:
            return None
        first = replicas.ranks[0] if replicas.size > 1 else self.context.rank
        if everywhere:
            first -= tp.rank  # tensor-parallel ranks are consecutive
        return first, replicas.size, everywhere

    def _shared_tensors(self, weights: Iterable[ShardedParameter]) -> Iterator[Tensor]:
        """The part of these weights' state that other ranks hold too."""
        return local_tensors(self.engine, weights, shared=True)

    def _state_of(self, group: Group, weights: Iterable[ShardedParameter]) -> Iterator[Tensor]:
        """The state that the ranks of a group share; ``weights``: the group's weights."""
        yield from self._shared_tensors(weights)
        if group == self._all_ranks:
            yield from chain(*self._routers.values())

    def _digest(self, tensors: Iterable[Tensor]) -> str:
        """A hash of the checksums of ``tensors``."""
        sums = self._sums(pieces(tensors))
        return hashlib.blake2b(sums.cpu().numpy().tobytes(), digest_size=16).hexdigest()

    def _sums(self, divided: Iterable[list[Tensor]]) -> Tensor:
        return checksums(divided, self.engine.device)

    def _open(self, anew: bool = True) -> None:
        """Take checksums for ``_close`` to compare. ``anew``: look up all tensors again, as after the optimizer's first update."""
        self._close()  # if the last step was skipped without an update
        if anew or len(self.engine.optimizer.state) != self._entries:
            self._entries = len(self.engine.optimizer.state)
            self._pieces = pieces(
                [
                    *local_tensors(self.engine, self._weights, shared=False),
                    *chain(*self._routers.values()),
                    *counts(self.engine.optimizer),
                ]
            )
        self._before = self._sums(self._pieces)

    def _close(self) -> None:
        """Record whether the state has changed since ``_open``."""
        if self._before is not None:
            self._changed |= (self._sums(self._pieces) != self._before).any()
            self._before = None

    def _set_period(self) -> None:
        """Measure the time of a step and of a checksum, and watch as many steps as ``share`` allows."""
        if self._steps == self._mark[0]:
            return
        wait = hardware.synchronizer(self.engine.device)
        wait()
        now = time.perf_counter()
        self._sums(self._pieces)
        wait()
        steps, began = self._mark
        self._mark = self._steps, time.perf_counter()
        cost = 2 * (self._mark[1] - now)
        step = (now - began) / (self._steps - steps)
        self.period = max(1, math.ceil(cost / (self.share * step)))
        if steps == 1 and self.period > 1:
            log.debug("checksums are taken around the update of 1 in %d steps", self.period)


def verifier(engine: Engine, mesh: Mesh, context: DistributedContext, every: int) -> Verifier | None:
    """The verifier of a run with cluster.verify_every=``every``; None without one."""
    if not every:
        return None
    if not isinstance(engine, BaseEngine):
        log.warning("cluster.verify_every: an engine that is not derived from BaseEngine is not checked for corruption")
        return None
    return Verifier(engine, mesh, context)


def findings(answers: Sequence[Mapping[str, Any]], exact: bool) -> list[CorruptionFinding]:
    """The faults that follow from all ranks' answers. ``exact``: whether kernels are bit-exact."""
    problems = [
        CorruptionFinding((rank,), "its weights or optimizer state changed between two updates", advice=BETWEEN_UPDATES)
        for rank, answer in enumerate(answers)
        if answer["changed"]
    ]
    unequal = {answer["replica"] for answer in answers if answer["losses"] and _differ(exact, *answer["losses"])}
    for replica in sorted(unequal):
        # any rank of the replica may be at fault, whichever rank's loss differed
        ranks = [rank for rank, answer in enumerate(answers) if answer["replica"] == replica]
        text = "one micro-batch, computed twice, had two different losses"
        problems.append(CorruptionFinding(tuple(ranks), text, len(ranks) == 1, TWO_LOSSES))
    problems += _outvoted(answers)
    certain = {rank for finding in problems if finding.certain for rank in finding.ranks}
    return [finding for finding in problems if finding.certain or certain.isdisjoint(finding.ranks)]


def _outvoted(answers: Sequence[Mapping[str, Any]]) -> Iterator[CorruptionFinding]:
    """Ranks that differ from the majority in their state; without a majority, all ranks that hold the state."""
    groups: dict[Group, dict[int, str]] = {}
    for rank, answer in enumerate(answers):
        for first, count, everywhere, digest in answer["shared"]:
            groups.setdefault((first, count, everywhere), {})[rank] = digest
    for group, votes in groups.items():
        [(digest, count)] = Counter(votes.values()).most_common(1)
        if count == len(votes):
            continue
        certain = 2 * count > len(votes)
        odd = tuple(rank for rank, vote in votes.items() if vote != digest or not certain)
        text = "they hold different values of the same weights or optimizer state"
        if certain:
            text = f"its weights or optimizer state differ from those of {count} ranks that hold the same"
        advice = ACROSS_TENSOR if group[2] else ACROSS_REPLICAS
        yield CorruptionFinding(odd, text, certain, advice, group)


def _differ(exact: bool, first: str, second: str) -> bool:
    a = float.fromhex(first)
    b = float.fromhex(second)
    return first != second if exact else abs(a - b) > TOLERANCE * abs(a)


def blame_program(
    problems: Sequence[CorruptionFinding], step: int, saved: int, own_code: Sequence[str], context: DistributedContext
) -> NoReturn:
    """DivergedError on every rank, without excluding a node: user code takes part, and may have caused the ``problems``.

    ``own_code``: the settings that name user code. ``saved``: the step of the newest checkpoint; 0 without one.
    """
    texts = [finding.described([str(info) for info in context.ranks]) for finding in problems]
    advice = list(dict.fromkeys(finding.advice for finding in problems))
    way = "starts from the beginning: nothing was saved"
    if saved:
        way = f"resumes from step {saved}, which was good when it was saved"
    error = DivergedError(
        f"state that must be equal differs after step {step}: {'; '.join(texts)}. Your own code takes part in training "
        f"({', '.join(own_code)}), so hpclm blames that code and excludes no node. To fix it, {'; '.join(advice)}. Then hpclm resume: the run {way}"
    )
    error.shared = True
    raise error


def end_run(
    problems: Sequence[CorruptionFinding],
    step: int,
    saved: int,
    context: DistributedContext,
    device: torch.device,
    out: Path,
) -> None:
    """CorruptedError on every rank for the ``problems`` detected after ``step``. Records the nodes at fault in ``out``, and excludes
    them if the scheduler may requeue this job. ``saved``: the step of the newest checkpoint, which was good; 0 without one."""
    device_identity = " ".join(filter(None, [hardware.describe(device), facts.of_device(device).get("uuid")]))
    places = context.all_gather([context.job.node, device_identity, files.network_of(files.here())])
    all_nodes = {(node, machine) for node, _, machine in places}

    def tell() -> None:
        faulty: set[tuple[str, str]] = set()
        for finding in problems:
            nodes = {(places[rank][0], places[rank][2]) for rank in finding.ranks}
            if finding.certain or len(nodes) == 1:
                faulty |= nodes
        if 2 * len(faulty) > max(2, len(all_nodes)):  # software is then the more likely cause
            faulty = set()
        bad = {name for name, _ in faulty}
        names = ", ".join(sorted(bad))
        run = files.typed(out)
        devices = [f"{info}, {device}" for info, (_, device, _) in zip(context.ranks, places, strict=True)]
        texts = [("" if finding.certain else "one of ") + finding.described(devices) for finding in problems]
        text = f"silent corruption detected after step {step}: {'; '.join(texts)}"
        record = SidePath(f"{out / events.NAME} cannot be written")
        record.attempt(lambda: events.append(out, "corrupt", step=step, bad=sorted(bad), text=text))
        way = "Nothing was saved"
        if saved:
            way = f"The run resumes from step {saved}, which was good when it was saved"
        if bad and context.world.launcher not in ("single", "local") and context.job.requeue(sorted(bad)):
            way += f"; {context.job.scheduler} was asked to start the job again without {names}"
        elif bad:
            way += f"; to exclude {names}: hpclm resume {run} --exclude-bad {run}"
        raise CorruptedError(f"{text}. {way}")

    context.run_on_main(tell)

"""The self-check at the start of a run (cluster.prove): the machine shows that it computes what it should.

Known numbers are summed, gathered and scattered over every process group. Then a small twin of the run trains as the run will
(its engine, compiled, its attention kernel, its type, asynchronous) and plainly (eager, plain attention, fp32, one replica): what
both give may differ by what the type itself costs, which the plain way in that type shows. Where the steps must have the same bits
each time, they are done twice; and a snapshot taken while the device computes must be the state at rest.

What fails is replaced by the plain way, which is slower and right.
"""

import gc
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hpclm import engine as engines
from hpclm import files
from hpclm.checkpoint.staging import Snapshot
from hpclm.config import EngineSettings, RunConfig
from hpclm.config.model import BLOCKS
from hpclm.config.supports import SUPPORTS
from hpclm.diagnostics import facts
from hpclm.distributed.context import DistributedContext
from hpclm.engine import Shard
from hpclm.engine.base import BaseEngine
from hpclm.errors import HpclmError
from hpclm.model.attention import backend as attention_backend
from hpclm.node import environment
from hpclm.parallel.compute import Compute
from hpclm.rundir import code
from hpclm.training import compiling
from hpclm.training.differences import floor, of_step, of_updates, unequal
from hpclm.training.known_numbers import lost_matrices, wrong_sums
from hpclm.training.replay import Updates
from hpclm.training.twin import Measured, Twin, measured

log = logging.getLogger(__name__)
FILE = "self-check.json"
AS_SET = "as set"
SNAPSHOT = 1 << 30  # bytes of state of which two snapshots are compared


@dataclass(frozen=True)
class SelfCheckResult:
    """How the run is to compute."""

    settings: EngineSettings
    background: bool
    """Whether checkpoints may be written while training continues."""


def check(config: RunConfig, context: DistributedContext, compute: Compute) -> SelfCheckResult:
    """Check that this run computes what it should, on every rank; HpclmError, the same on every rank, where even the plain way does
    not, or messages arrive changed."""
    settings = compiling.shared_by_all(config.for_engine(context.size), compute.device, context)
    background = config.checkpoint.background
    given = SelfCheckResult(settings, background)
    wanted = compute.device.type == "cuda" if config.cluster.prove is None else config.cluster.prove
    if not wanted:
        return given
    began = time.monotonic()
    _raise_together(context, list(wrong_sums(compute)))
    if settings.model.block not in BLOCKS or settings.engine.name not in SUPPORTS:
        log.info("self-check: sums over all process groups are right; your own block or engine is not checked")
        return given
    if settings.parallel.pipeline > 1 and (reason := engines.unavailable("pipelining")):  # which is the plain way
        log.info("self-check: sums over all process groups are right; steps are not compared: %s", reason)
        return given
    restarts = config.data.reset_attention_mask, config.data.reset_position_ids
    memory = torch.cuda.mem_get_info(compute.device)[0] if compute.device.type == "cuda" else _host_memory()
    (least,) = context.all_reduce_max(-float(memory))  # the same twin on every rank
    twin = Twin.of(settings, compute, int(-least), restarts)
    kept = _cache(twin, settings, background)
    known: Mapping[str, Any] | None = context.run_on_main(lambda: _read(kept))
    report = known or _prove(twin, settings, background, context)
    way = dict(_ways(settings, compute.device))[report["way"]]
    seconds = time.monotonic() - began

    def conclude() -> None:
        with suppress(OSError):
            files.write_text(
                Path(config.out) / FILE, json.dumps({**report, "remembered": bool(known)}, indent=1) + "\n"
            )
        if not known and not report["problems"]:  # one bad GPU must not slow down the others of its kind
            with suppress(OSError):
                kept.parent.mkdir(parents=True, exist_ok=True)
                files.write_text(kept, json.dumps(report) + "\n")
        for problem in report["problems"]:
            log.warning("self-check: %s", problem)
        how = f"this run computes {report['way']}" if report["problems"] else "the step agrees with a plain one"
        log.info("self-check: %s%s; %.1f s", how, ", as checked before" if known else "", seconds)

    context.run_on_main(conclude)
    return SelfCheckResult(way, report["background"])


def _host_memory() -> int:
    """Bytes of this machine's memory that are free."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _raise_together(context: DistributedContext, problems: list[str]) -> None:
    """HpclmError on every rank with the problems of all."""
    everyone = context.all_gather(problems)
    wrong = [f"{context.ranks[rank]}: {problem}" for rank, each in enumerate(everyone) for problem in each]
    if wrong:
        error = HpclmError("\n".join(f"self-check: {line}" for line in wrong[:10]))
        error.shared = True
        raise error


def _ways(settings: EngineSettings, device: torch.device) -> Iterator[tuple[str, EngineSettings]]:
    """As the settings say, and what replaces it, from the fastest to the plainest."""
    eager, model = replace(settings.engine, compile=False), settings.model
    yield AS_SET, settings
    flash = None
    if device.type == "cuda" and model.attention in ("auto", "cudnn", "flex") and not model.needs_scores:
        flash = replace(settings, model=replace(model, attention="flash"))
        yield "with FlashAttention", flash
    if engines.compiles(settings, device)[0]:
        yield "uncompiled", replace(settings, engine=eager)
        if flash:
            yield "uncompiled, with FlashAttention", replace(flash, engine=eager)
    plain = replace(model, attention="math", kernels="torch")
    yield "uncompiled, with plain attention", replace(settings, engine=eager, model=plain, in_place=False)


def _prove(twin: Twin, settings: EngineSettings, background: bool, context: DistributedContext) -> dict[str, Any]:
    """The first way that computes what it should, and what is wrong with those before it; HpclmError if none does."""
    compute, problems = twin.compute, []
    context.watchdog.enter("self-check")
    plain = twin.plainly(exact=True)
    in_type = plain if twin.exact else twin.plainly(exact=False)
    uncompiled = False
    for way, tried in _ways(settings, compute.device):
        if uncompiled and engines.compiles(tried, compute.device)[0]:
            continue
        _begin(tried, compute.device)
        engine, batches = twin.as_run(tried)
        run = measured(engine, batches)
        failed = compiling.failed_on_some(engine.compilations, context)
        uncompiled, wrong = bool(failed), "".join(f"torch.compile failed on {why}" for why in list(failed.values())[:1])
        least = floor(tried, compute)
        if not wrong and engine.exchange:
            wrong = next(filter(None, context.all_gather(lost_matrices(engine.exchange))), "")
        if not wrong:
            wrong, closest = of_step(0, run, in_type, plain, least, context)
        loaded = background and not wrong and _snapshot_moves(engine, batches, context)
        engine.close()
        del engine
        _free(compute.device)  # before there is another
        if not wrong:
            wrong, closest_update = _misupdated(twin, run, context)
        if not wrong:
            wrong, _ = of_step(1, run, in_type, plain, least, context)
        if not wrong and (settings.engine.deterministic or compute.device.type == "cpu"):
            run = replace(run, updates=Updates())
            engine, batches = twin.as_run(tried)
            wrong = unequal(run, measured(engine, batches), context)
            engine.close()
            del engine
            _free(compute.device)
        if wrong:
            problems.append(f"computed {way}, {wrong}")
            continue
        if loaded:
            problems.append(
                "a snapshot taken while the device computes differs from the state at rest: saves are not made in the background"
            )
        closest = f"{closest}; {closest_update}"
        return {"way": way, "background": background and not loaded, "problems": problems, "closest": closest}
    error = HpclmError(
        "self-check failed in every mode, including eager with math attention:\n"
        + "\n".join(problems)
        + "\ncheck its GPUs (dcgmi diag -r 3) and drivers; cluster.prove=false trains all the same"
    )
    error.shared = True  # every rank has come to it
    raise error


def _misupdated(twin: Twin, run: Measured, context: DistributedContext) -> tuple[str, str]:
    """What the run's optimizer makes of its gradients otherwise than plain PyTorch does, and what comes closest to that."""
    exact = twin.replayed(run.updates, exact=True, plain=True)
    rounded = twin.replayed(run.updates, exact=True, plain=True, rounded=True)
    if twin.exact_updates:
        return of_updates(run.outcomes, rounded, exact, context)
    in_type = twin.replayed(run.updates, exact=False, plain=True, rounded=True)
    wrong, closest = of_updates(run.outcomes, in_type, exact, context)
    if not wrong:  # what is less than the type costs shows in fp32
        wrong, _ = of_updates(twin.replayed(run.updates, exact=True, plain=False), rounded, exact, context)
    return wrong, closest


def _begin(tried: EngineSettings, device: torch.device) -> None:
    """Let this way to compute choose its attention kernel. What is compiled keeps the kernel that it was compiled with, whatever is
    preferred when it runs, so nothing is kept of the way before."""
    attention_backend.use(tried.model, device)
    if "torch._dynamo" in sys.modules:  # importing it takes every process a second
        torch.compiler.reset()


def _free(device: torch.device) -> None:
    """Give back the memory of engines that are not used any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _snapshot_moves(engine: BaseEngine, batches: Any, context: DistributedContext) -> bool:
    """Whether a snapshot taken while the device computes a step, or kept during the next one, is not that of the state at rest."""
    engine.train_step(batches, 0.0, 2)
    taken = Snapshot().take(_first(engine))
    kept = [shard.tensor.clone() for shard in taken]
    rest = [shard.tensor.detach().to("cpu", copy=True) for shard in _first(engine)]
    same = all(map(torch.equal, kept, rest))
    engine.train_step(batches, 0.0, 3)
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    same = same and all(torch.equal(a, b.tensor) for a, b in zip(kept, taken, strict=True))
    return any(context.all_gather(not same))


def _first(engine: BaseEngine) -> Iterator[Shard]:
    """The first of the state's shards."""
    used = 0
    for shard in engine.tensors():  # on every rank, all of them
        used += shard.tensor.nbytes
        if used <= SNAPSHOT:
            yield shard


def _cache(twin: Twin, settings: EngineSettings, background: bool) -> Path:
    """Where the user's cache remembers this check: for these devices, versions, code, settings and layout."""
    device = facts.of_device(twin.compute.device)
    versions = {name: facts.version(name) for name in facts.DECISIVE} | {"driver": facts.driver()}
    versions |= {name: value for name, value in device.items() if name in ("device_name", "torch", "cuda", "nccl")}
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    facts_of = [versions, cudnn, environment.of_computing(), code.digest(code.sources(()))]
    run = [settings, background, twin.settings, twin.rows.shape, twin.restarts, twin.compute.dtype]
    return (
        environment.user_cache()
        / "self-checks"
        / f"{hashlib.sha256(repr([facts_of, run]).encode()).hexdigest()[:24]}.json"
    )


def _read(kept: Path) -> dict[str, Any] | None:
    """What is remembered; None if nothing is."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        report = json.loads(files.read_text(kept))
        return (
            report
            if report["way"] == AS_SET and report["problems"] == [] and report["background"] in (True, False)
            else None
        )
    return None

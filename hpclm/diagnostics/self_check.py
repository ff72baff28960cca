"""The self-check at the start of a run (cluster.self_check): the machine proves that it computes correctly.

Known numbers are summed, gathered and scattered over every process group. Then a miniature of the run trains like the run (its engine,
compiled, its attention kernel, its type, asynchronous) and plainly (eager, plain attention, fp32, one replica). The results may differ
by the error of the type, which the plain way in that type measures. If steps must be bit-exact, they are computed twice. A snapshot taken
while the device computes must equal the state at rest.

A failing way to compute is replaced by a plainer one, which is slower but correct.
"""

import gc
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hpclm import engine as engines
from hpclm.base import files
from hpclm.base.errors import HpclmError
from hpclm.checkpoint.staging import ShardSnapshot
from hpclm.config import EngineSettings, RunConfig
from hpclm.config.model import BLOCKS
from hpclm.config.optimizers import OPTIMIZERS
from hpclm.config.supports import SUPPORTS
from hpclm.diagnostics import facts
from hpclm.diagnostics.known_numbers import lost_matrices, wrong_sums
from hpclm.diagnostics.miniature import Measured, MiniatureRun, measured
from hpclm.diagnostics.samples import UPDATE_TOLERANCE, Samples, Tolerance, differing, step_tolerance, unequal
from hpclm.distributed.context import DistributedContext
from hpclm.engine import Shard, compiling
from hpclm.engine.base import BaseEngine
from hpclm.model.attention import backend as attention_backend
from hpclm.node import environment
from hpclm.parallel.mesh import Compute
from hpclm.rundir import code

log = logging.getLogger(__name__)
FILE = "self-check.json"
AS_SET = "as set"
SNAPSHOT_BYTES = 1 << 30  # bytes of state that are compared in two snapshots
SNAPSHOT_MOVES = (
    "a snapshot taken while the device computes differs from the state at rest: saves are not made in the background"
)


@dataclass(frozen=True)
class SelfCheckResult:
    """How the run should compute."""

    settings: EngineSettings
    background: bool
    """Whether checkpoints may be written while training continues."""


def check_computation(config: RunConfig, context: DistributedContext, compute: Compute) -> SelfCheckResult:
    """Check that this run computes correctly. HpclmError on every rank if even the plain way fails, or messages arrive changed."""
    settings = compiling.shared_by_all(config.for_engine(context.size), compute.device, context)
    background = config.checkpoint.background
    on_gpu = compute.device.type == "cuda"
    unchecked = SelfCheckResult(settings, background)
    if not (on_gpu if config.cluster.self_check is None else config.cluster.self_check):
        return unchecked
    began = time.monotonic()
    problems = context.all_gather(list(wrong_sums(compute)))
    wrong = [f"{context.ranks[rank]}: {problem}" for rank, of_rank in enumerate(problems) for problem in of_rank]
    if wrong:
        raise _on_all_ranks("\n".join(f"self-check: {line}" for line in wrong[:10]))
    if settings.model.block not in BLOCKS or settings.engine.name not in SUPPORTS:
        log.info("self-check: sums over all process groups are right; your own block or engine is not checked")
        return unchecked
    if settings.optim.name not in OPTIMIZERS:
        log.info("self-check: the compared steps use AdamW instead of optim.name=%s", settings.optim.name)
    reason = None
    if settings.parallel.pipeline > 1:  # the plain way needs this engine
        reason = engines.unavailable("pipelining")
    if reason:
        log.info("self-check: sums over all process groups are right; steps are not compared: %s", reason)
        return unchecked
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if on_gpu:
        free, _ = torch.cuda.mem_get_info(compute.device)
    (negative_free,) = context.all_reduce_max(-float(free))  # the same miniature on every rank
    restarts = config.data.reset_attention_mask, config.data.reset_position_ids
    miniature = MiniatureRun.of(settings, compute, int(-negative_free), restarts)
    kept = _cache(miniature, settings, background)
    remembered: dict[str, Any] | None = context.run_on_main(lambda: _read(kept))
    report = remembered or _compared(miniature, settings, background, context)
    seconds = time.monotonic() - began

    def conclude() -> None:
        content = json.dumps({**report, "remembered": bool(remembered)}, indent=1) + "\n"
        with suppress(OSError):
            files.write_text(Path(config.out) / FILE, content)
        if not remembered and not report["problems"]:  # one bad GPU must not slow down the others of its kind
            with suppress(OSError):
                kept.parent.mkdir(parents=True, exist_ok=True)
                files.write_text(kept, json.dumps(report) + "\n")
        for problem in report["problems"]:
            log.warning("self-check: %s", problem)
        how = f"this run computes {report['way']}" if report["problems"] else "the step agrees with a plain one"
        log.info("self-check: %s%s; %.1f s", how, ", as checked before" if remembered else "", seconds)

    context.run_on_main(conclude)
    return SelfCheckResult(dict(_ways(settings, compute.device))[report["way"]], report["background"])


def _on_all_ranks(text: str) -> HpclmError:
    """An error that every rank raises."""
    error = HpclmError(text)
    error.shared = True
    return error


def _ways(settings: EngineSettings, device: torch.device) -> Iterator[tuple[str, EngineSettings]]:
    """The configured way to compute, and its replacements, from the fastest to the plainest."""
    eager = replace(settings.engine, compile=False)
    model = settings.model
    yield AS_SET, settings
    flash = None
    if (
        device.type == "cuda"
        and model.attention.kernel in ("auto", "cudnn", "flex")
        and not model.attention.needs_scores
    ):
        flash = replace(settings, model=model.replaced({"attention.kernel": "flash"}))
        yield "with FlashAttention", flash
    if engines.compiles(settings, device)[0]:
        yield "uncompiled", replace(settings, engine=eager)
        if flash:
            yield "uncompiled, with FlashAttention", replace(flash, engine=eager)
    plain = model.replaced({"attention.kernel": "math", "kernels": "torch"})
    if eager.fp8:
        yield "in bf16, not FP8", replace(settings, engine=replace(settings.engine, fp8=None))
        eager = replace(eager, fp8=None)
    yield "uncompiled, with plain attention", replace(settings, engine=eager, model=plain, in_place=False)


def _compared(
    miniature: MiniatureRun, settings: EngineSettings, background: bool, context: DistributedContext
) -> dict[str, Any]:
    """The first way that computes correctly, and the problems of the ways before it; HpclmError if none does."""
    device = miniature.compute.device
    problems = list[str]()
    context.watchdog.enter("self-check")
    plain = miniature.plainly(exact=True)
    in_type = plain if miniature.exact else miniature.plainly(exact=False)
    for way, tried in _ways(settings, device):
        _choose_kernels(tried, device)
        engine, batches = miniature.as_run(tried)
        run = measured(engine, batches)
        wrong = ""
        if engine.exchange:
            wrong = next(filter(None, context.all_gather(lost_matrices(engine.exchange))), "")
        if not wrong and engine.router_state:
            wrong = next(filter(None, context.all_gather(miniature.lost_tokens(run, plain))), "")
        moves = background and not wrong and _snapshot_moves(engine, batches, context)
        engine.close()
        del engine
        _free(device)  # before another engine is built
        closest = list[str]()
        for what in (
            () if wrong else _comparisons(miniature, run, in_type, plain, step_tolerance(tried, miniature.compute))
        ):
            wrong, nearest = differing(*what, context)
            closest.append(nearest)
            if wrong:
                break
        if not wrong and (settings.engine.deterministic or device.type == "cpu"):
            run = replace(run, weights=(), gradients=())
            engine, batches = miniature.as_run(tried)
            again = measured(engine, batches)
            engine.close()
            del engine
            _free(device)
            pairs = [(run.first, again.first), (run.second, again.second), (run.outcomes, again.outcomes)]
            wrong = unequal(pairs, context)
        if wrong:
            problems.append(f"computed {way}, {wrong}")
            continue
        if moves:
            problems.append(SNAPSHOT_MOVES)
        return {"way": way, "background": background and not moves, "problems": problems, "closest": "; ".join(closest)}
    raise _on_all_ranks(
        "self-check failed in every mode, including eager with math attention:\n"
        + "\n".join(problems)
        + "\ncheck the GPUs (dcgmi diag -r 3) and drivers; cluster.self_check=false trains anyway"
    )


def _comparisons(
    miniature: MiniatureRun, run: Measured, in_type: Measured, plain: Measured, of_step: Tolerance
) -> Iterator[tuple[Samples, Samples, Samples, Tolerance]]:
    """All comparisons: results of the run, in its type, and exact, with the tolerance.

    The run's updates are compared with plain PyTorch's updates by the same gradients.
    """
    yield run.first, in_type.first, plain.first, of_step
    exact = miniature.replayed(run, exact=True, plain=True)
    rounded = miniature.replayed(run, exact=True, plain=True, rounded=True)
    if miniature.exact_updates:
        yield run.outcomes, rounded, exact, UPDATE_TOLERANCE
    else:
        yield run.outcomes, miniature.replayed(run, exact=False, plain=True, rounded=True), exact, UPDATE_TOLERANCE
        # errors smaller than that of the type show in fp32
        yield miniature.replayed(run, exact=True, plain=False), rounded, exact, UPDATE_TOLERANCE
    yield run.second, in_type.second, plain.second, of_step


def _choose_kernels(tried: EngineSettings, device: torch.device) -> None:
    """Let this way to compute choose its attention kernel. Compiled code keeps the kernel that it was compiled with, so the
    compiled code of the previous way is dropped."""
    attention_backend.use(tried.model, device)
    if "torch._dynamo" in sys.modules:  # importing it takes every process a second
        torch.compiler.reset()


def _free(device: torch.device) -> None:
    """Free the memory of engines that are no longer used."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _snapshot_moves(engine: BaseEngine, batches: Any, context: DistributedContext) -> bool:
    """Whether a snapshot taken while the device computes a step, or kept during the next one, differs from the state at rest."""
    engine.train_step(batches, 0.0, 2)
    taken = ShardSnapshot().take(_first(engine))
    kept = [shard.tensor.clone() for shard in taken]
    rest = [shard.tensor.detach().to("cpu", copy=True) for shard in _first(engine)]
    same = all(map(torch.equal, kept, rest))
    engine.train_step(batches, 0.0, 3)
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    same = same and all(torch.equal(a, b.tensor) for a, b in zip(kept, taken, strict=True))
    return any(context.all_gather(not same))


def _first(engine: BaseEngine) -> Iterator[Shard]:
    """The first shards of the state, up to SNAPSHOT_BYTES."""
    used = 0
    for shard in engine.tensors():  # a collective: every rank iterates over all shards
        used += shard.tensor.nbytes
        if used <= SNAPSHOT_BYTES:
            yield shard


def _cache(miniature: MiniatureRun, settings: EngineSettings, background: bool) -> Path:
    """Path in the user's cache for the result of this check: for these devices, versions, code, settings and layout."""
    device = facts.of_device(miniature.compute.device)
    versions = {name: facts.version(name) for name in facts.DECISIVE} | {"driver": facts.driver()}
    versions |= {name: value for name, value in device.items() if name in ("device_name", "torch", "cuda", "nccl")}
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    installed = [versions, cudnn, environment.of_computing(), code.digest(code.sources(()))]
    run = [settings, background, miniature.settings, miniature.rows.shape, miniature.restarts, miniature.compute.dtype]
    digest = hashlib.sha256(repr([installed, run]).encode()).hexdigest()
    return environment.user_cache() / "self-checks" / f"{digest[:24]}.json"


def _read(kept: Path) -> dict[str, Any] | None:
    """The cached result; None without one."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        report: dict[str, Any] = json.loads(files.read_text(kept))
        good = report["way"] == AS_SET and report["problems"] == [] and report["background"] in (True, False)
        if good:
            return report
    return None

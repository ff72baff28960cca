"""A training run, the whole story. Nothing in it knows an engine, a launcher or a data format."""

import logging
import shlex
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from hpclm import __version__, apex, files, log, record
from hpclm import engine as engines
from hpclm.agreement import Agreement
from hpclm.checkpoint import CheckpointStore, Progress, Retention, begin_from
from hpclm.cluster import bootstrap, hardware, placement, preflight, secrets
from hpclm.cluster.lease import Lease
from hpclm.cluster.preempt import Preemption
from hpclm.cluster.switches import Switches
from hpclm.cluster.team import Team
from hpclm.config import Plan, RunConfig, budget
from hpclm.config.budget import Length
from hpclm.data import sources
from hpclm.data.batches import Batches
from hpclm.data.sources import Source
from hpclm.deadline import Deadline, StepLeft
from hpclm.errors import REQUEUE, DivergedError
from hpclm.meter import Meter, Mute, Speed
from hpclm.model import count
from hpclm.optim.guard import Guard
from hpclm.optim.schedules import learning_rate, shape
from hpclm.parallel.mesh import Mesh
from hpclm.saver import Saver
from hpclm.validation import HeldOut, evaluate, held_out

logger = logging.getLogger(__name__)


def run(config: RunConfig, team: Team) -> int:
    """Train until the budget is used up, ``stop_at`` is reached or a signal warns; gives the exit code.

    Every rank of ``team`` runs this, and all take every turn together.
    """
    plan = config.plan(team.size)
    with Preemption() as preemption, ExitStack() as opened:
        device = hardware.device(config.engine, team.local_rank, team.local_size)
        if config.cluster.bind:
            logger.info("%s", placement.bind(team.local_rank, team.local_size, hardware.pci_address(device)))
        team.connect(device, config.cluster.timeout_minutes)
        dtype = hardware.compute_type(config.engine, device)
        products = hardware.set_matmul(config.engine, device)
        logger.info("%s, %s; fp32 products %s", hardware.describe(device), str(dtype).removeprefix("torch."), products)

        team.watch.at("data")
        mesh = Mesh.build(team.rank, team.size, config.parallel, timedelta(minutes=config.cluster.timeout_minutes))
        source, train, parts, length = data(config, plan, team, mesh.dp.rank, device)
        opened.callback(train.close)
        shape(config.optim)  # a schedule that cannot be loaded is no news for the end of the warm-up
        if team.leads:
            tell(config, plan, team, length, len(train.samples))

        team.watch.at("start-up")
        make = engines.named(config, device)
        out = Path(config.out)  # what cannot work has left no trace
        leases: list[Lease] = []
        team.first(lambda: leases.append(occupy(out, opened)))
        lease = leases[0] if leases else None
        preflight.check(team, device, config, out, room=checkpoint_bytes(config))
        log_files(out, team, opened)
        team.watch.write_to(out, team.first(lambda: time.strftime("stacks-%Y%m%d-%H%M%S")), config.parallel.pipeline)
        tell_kernels(config, device)
        engine = make(config, mesh, device, dtype)
        store = CheckpointStore(
            out / "checkpoints", retention(config), identity(config, source), team, lease, made(config, team)
        )
        progress = begin(start(store, engine, config, team), length)
        team.first(lambda: record.check_progress(out, progress.step))
        if team.leads:
            attempt = record.start(out, config, team, progress.step, length.steps)
        logger.info("run directory %s, %s", out, f"goes on from step {progress.step}" if progress.step else "a new run")

        guard, saver = Guard(config.optim, progress.skipped), Saver(store, config, progress.step)
        switches = Switches(out) if team.leads else None
        agreement = Agreement(team, preemption, store, switches, lease, config.exit_minutes)
        deadline = Deadline(agreement, saver)
        begun, fast = (progress.step, progress.samples), speed(config, team.size, device, dtype)
        meter = opened.enter_context(Meter(out, config.log, begun, length.steps, fast) if team.leads else Mute())
        known = team.first(lambda: list(meter.losses.items()))
        meter.losses = {(step, part): loss for (step, part), loss in known}
        owed = False
        while True:
            orders = agreement()
            saver.settle(orders)
            over = finished(config, length, progress)
            if over or due(config.evaluate.every, progress):
                team.watch.at("evaluation", progress.step)
                evaluate(parts, engine, meter, progress, lambda: agreement().leaving)
                orders = agreement()
            enough = due(config.exit_interval or 0, progress) and progress.step > begun[0]
            if over or enough or orders.leaving:
                again = bool(orders.signal and not over and not orders.stop)
                team.watch.at("save", progress.step)
                saver.leave(engine, progress, meter.validation(progress.step), orders, again)
                break
            owed = owed or saver.due(progress, orders)
            if owed and not guard.in_a_row:  # what may have diverged takes no place from what is known to be good
                team.watch.at("save", progress.step)
                saver.save(engine, progress, meter.validation(progress.step), orders)
                owed = False
            if orders.save and switches and not owed:
                switches.done("save-now")
            team.watch.at("step", progress.step + 1)
            lr = rate(config, plan, length, progress)
            try:
                progress, result, measured = one_step(engine, train, plan, team, lr, progress, deadline)
            except StepLeft:
                continue  # to where the run leaves
            meter.step(progress.step, progress.samples, measured | {"memory": hardware.peak_memory(device)})
            scale_can_fall = result.loss_scale > config.scaler.minimum
            try:
                guard.check(progress.step, result.loss, result.grad_norm, result.skipped, scale_can_fall)
            except DivergedError:  # on every rank; what is being written was good
                saver.land()
                raise
        code = REQUEUE if again else 0
        if team.leads:
            record.end(out, attempt, code, saver.step)
        if orders.stop and switches:
            switches.done("stop")
        if code:
            logger.warning("%s: %s and leaving; the same command goes on from here", orders.signal, saver.told())
        else:
            logger.info(ending(config, length, progress, "" if over else orders.leaving or "exit_interval"))
        return code


def data(
    config: RunConfig, plan: Plan, team: Team, replica: int, device: torch.device
) -> tuple[Source, Batches, list[HeldOut], Length]:
    """The source of the samples, the micro-batches of this rank's ``replica``, what evaluations read, and the run's length."""

    def build() -> tuple[Source, Batches, list[HeldOut], Length]:
        source = sources.build(config)
        per_epoch = source.per_epoch("train") or len(source.samples("train", None))  # which says why there are none
        length = budget.length(config, plan, per_epoch)
        train = Batches(source.samples("train", length.samples), config, plan, source.eod, device, replica)
        return source, train, held_out(source, config, plan, device, replica), length

    mine: list[tuple[Source, Batches, list[HeldOut], Length]] = []
    team.first(lambda: mine.append(build()))  # it writes the index cache, which the others read
    return mine[0] if mine else build()


def checkpoint_bytes(config: RunConfig) -> int:
    """Bytes of a checkpoint: weights and Adam's two moments in fp32."""
    return 12 * count.parameters(config.model)


def occupy(out: Path, opened: ExitStack) -> Lease:
    """Make the run directory, and keep other runs out of it while ``opened`` lasts."""
    files.private_folder(out, "run directory")
    return opened.enter_context(Lease(out))


def retention(config: RunConfig) -> Retention:
    """Which checkpoints stay."""
    return Retention(config.checkpoint.keep_last, config.checkpoint.keep_every, config.checkpoint.keep_best)


def made(config: RunConfig, team: Team) -> dict[str, object]:
    """What a checkpoint says of the attempt that made it."""
    return {
        "processes": team.size,
        "engine": config.engine.name,
        "parallel": vars(config.parallel),
        "hpclm": __version__,
        **bootstrap.job(),
    }


def start(store: CheckpointStore, engine: engines.Engine, config: RunConfig, team: Team) -> Progress:
    """Take over the state to go on from: the run's own, or at its beginning the weights it is to begin with."""
    progress = store.resume(engine, config.checkpoint.resume)
    if config.checkpoint.init_from and not progress.step:
        found = begin_from(Path(config.checkpoint.init_from), engine, team, store.identity)
        logger.info("weights of %s; optimizer, step and data begin anew", found)
    return progress


def log_files(out: Path, team: Team, opened: ExitStack) -> None:
    """Send this rank's log to its file: rank 0's to log.txt beside the terminal, another's to its own instead."""
    if team.leads:
        opened.enter_context(log.also_to(out / "log.txt", secrets.Redactor()))
    else:
        log.instead_to(out / "logs" / f"rank-{team.rank:05d}.log", secrets.Redactor())
    opened.enter_context(team.guard(out / "log.txt"))


def begin(progress: Progress, length: Length) -> Progress:
    """Note what the data's order was made for; warn where going on with another budget changes it."""
    if progress.step and progress.planned != length.samples:
        logger.warning(
            "the budget was %s samples and is %s: as with Megatron, the order of the data follows from it, so from here on "
            "samples may come again or be left out unless all of it is within one epoch",
            progress.planned,
            length.samples,
        )
    return replace(progress, planned=length.samples)


def one_step(
    engine: engines.Engine, train: Batches, plan: Plan, team: Team, lr: float, progress: Progress, deadline: Deadline
) -> tuple[Progress, engines.StepResult, dict[str, float]]:
    """Read a step's samples and learn from them: how far the run is now, the outcome, and what was measured (seconds).

    StepLeft on every rank, when a signal leaves no time to finish it.
    """
    began = time.perf_counter()
    size = plan.batch_size(progress.samples)
    batches = train.step(progress.samples)
    loaded = time.perf_counter()
    result = engine.train_step(batches, lr, progress.step, deadline.of_step(len(batches)))
    seconds = team.highest(time.perf_counter() - began)  # one figure for all, since budget.hours counts it
    deadline.took(seconds, len(batches))
    progress = progress.after(size, seconds, result.skipped)
    measured = dict(loss=result.loss, lr=lr, grad_norm=result.grad_norm, loss_scale=result.loss_scale)
    waited = loaded - began
    measured |= dict(skipped=progress.skipped, batch_size=size, step_seconds=seconds)
    measured |= dict(data_seconds=waited, data_fraction=waited / seconds)
    return progress, result, measured


def rate(config: RunConfig, plan: Plan, length: Length, progress: Progress) -> float:
    """Learning rate of the next step."""
    by_step = config.optim.unit == "steps"
    position, amount = (progress.step, 1) if by_step else (progress.samples, plan.batch_size(progress.samples))
    return learning_rate(position, amount, length.in_unit(config.optim.unit), config.optim)


def speed(config: RunConfig, processes: int, device: torch.device, dtype: torch.dtype) -> Speed:
    """What turns samples and seconds into tokens a second, MFU and HFU, of all processes together."""
    peak = hardware.peak_flops(device, dtype)
    again = count.flops_again(config.model, config.engine.recompute)
    return Speed(config.model.context, count.flops_per_token(config.model), peak and peak * processes, again)


def due(every: int, progress: Progress) -> bool:
    """Whether something that happens ``every`` steps happens now; 0 is never."""
    return bool(every) and progress.step > 0 and progress.step % every == 0


def finished(config: RunConfig, length: Length, progress: Progress) -> bool:
    """Whether the run has reached its end, or ``stop_at``."""
    ends = [end for end in (length.steps, config.stop_at) if end is not None]
    out_of_time = config.budget.hours is not None and progress.seconds >= config.budget.hours * 3600
    return out_of_time or any(progress.step >= end for end in ends)


def identity(config: RunConfig, source: Source) -> dict[str, object]:
    """What a run that goes on from a checkpoint must find unchanged: the network, the data and their order."""
    free = {"dropout", "attention_dropout", "init_std", "kernels"}
    shape = {key: value for key, value in vars(config.model).items() if key not in free}
    return {"model": shape, "data": source.identity, "seed": config.seed}


def tell(config: RunConfig, plan: Plan, team: Team, length: Length, samples: int) -> None:
    """Log what is about to happen, and warn of what is probably not meant."""
    steps = "until the time is up" if length.steps is None else f"{length.steps} steps"
    logger.info(
        "%s parameters; %s of %d samples x %d tokens, %s samples of training data",
        f"{count.parameters(config.model):,}",
        steps,
        plan.global_size,
        config.model.context,
        f"{samples:,}",
    )
    if team.size > 1:
        logger.info(
            "%d processes, started by %s, on %s; micro-batches of %d, %d a step for each",
            team.size,
            team.launcher,
            ", ".join(dict.fromkeys(team.hosts)),
            plan.micro_size,
            plan.accumulation(0),
        )
    end, limit = length.in_unit(config.optim.unit), config.optim.schedule_length
    warmup = config.optim.warmup or (config.optim.warmup_fraction or 0) * (limit or end or 0)
    if end is not None and warmup >= end:
        logger.warning(
            "the run ends after %d %s, inside its warm-up of %d: optim.lr is never reached",
            end,
            config.optim.unit,
            warmup,
        )


def tell_kernels(config: RunConfig, device: torch.device) -> None:
    """Log whose fused operations are used, where the settings ask for apex's."""
    if config.model.kernels != "apex":
        return
    found = apex.kernels().names() if device.type == "cuda" else []
    if found:
        logger.info("kernels: NVIDIA apex's %s; PyTorch's for the rest", ", ".join(found))
    else:
        why = "it is for GPUs" if device.type != "cuda" else "it is not usable here (hpclm doctor says why)"
        logger.warning("model.kernels=apex: %s; PyTorch's own operations", why)


def ending(config: RunConfig, length: Length, progress: Progress, leaving: str) -> str:
    """The last words: where the run is, and what to type next. ``leaving``: what ends it before its time."""
    if leaving:
        return f"stopped at step {progress.step} as {leaving} says; the same command goes on"
    if config.stop_at == progress.step and progress.step != length.steps:
        return f"stopped at step {progress.step} as stop_at says; the same command without stop_at goes on"
    out = shlex.quote(str(Path(config.out)))
    follow = f"hpclm generate {out} --prompt ..." if config.data.source == "indexed" else f"ls {out}"
    return f"done at step {progress.step}, {progress.samples:,} samples; next: {follow}"

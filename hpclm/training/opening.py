"""Open a run on every rank: what cannot work is refused before anything is written, and all that is opened is closed again."""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch

from hpclm import engine as engines
from hpclm.checkpoint import CheckpointStore, Progress
from hpclm.checkpoint.fingerprint import fingerprint
from hpclm.config import RunConfig
from hpclm.config.plan import Length
from hpclm.data.sources import Source
from hpclm.diagnostics import preflight
from hpclm.distributed import bootstrap
from hpclm.distributed.context import DistributedContext
from hpclm.engine import Engine
from hpclm.model import count
from hpclm.node import affinity, hardware
from hpclm.node.notify import Notifier
from hpclm.node.preemption import Preemption
from hpclm.optim.guard import Guard
from hpclm.optim.schedules import shape
from hpclm.parallel.mesh import Mesh
from hpclm.parallel.step_vector import StepVector
from hpclm.rundir.control_files import ControlFiles
from hpclm.rundir.lease import Lease
from hpclm.sinks.process import Sinks
from hpclm.training import messages, out_of_memory, records, setup
from hpclm.training.agreement import Agreement, Trained
from hpclm.training.control import RunControl
from hpclm.training.deadline import Deadline
from hpclm.training.metrics import Meter, Mute, Speed
from hpclm.training.profile import Profile
from hpclm.training.results import Results
from hpclm.training.saver import Saver
from hpclm.training.session import Session
from hpclm.training.tasks import TaskScores

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where this rank computes."""

    device: torch.device
    dtype: torch.dtype
    """Of activations and matrix products."""
    mesh: Mesh


@dataclass(frozen=True)
class Beginning:
    """Where an attempt begins."""

    progress: Progress
    attempt: int | None
    """Its number, on rank 0."""


@contextmanager
def open_session(config: RunConfig, context: DistributedContext, back_to: int | None = None) -> Iterator[Session]:
    """Set a run up on every rank of ``context``; what cannot work is refused before anything is written.

    ``back_to``: the step of a checkpoint to resume from, in place of the newest.
    """
    plan, out = config.plan(context.size), Path(config.out)
    with Preemption() as preemption, ExitStack() as opened:
        notifier = Notifier(config.job.notify, config.name, str(out.absolute()))
        if context.is_main:
            opened.enter_context(notifier)
        context.watchdog.shutdown.notify = notifier.failed
        place = _place(config, context)
        context.watchdog.enter("data")
        source, train, held_out, length = setup.data(config, plan, context, place.mesh.dp.rank, place.device)
        opened.callback(train.close)
        shape(config.optim)  # a schedule that cannot be loaded must not surface only after the warm-up
        if context.is_main:
            messages.hello(config, plan, context, length, len(train.samples))

        context.watchdog.enter("start-up")
        make = engines.named(config, place.device)
        context.run_on_main(lambda: setup.check(config, source, back_to))
        lease, restarted = _enter(config, context, place, opened)
        tasks = TaskScores(config, context, place.device, place.dtype) if config.evaluate.tasks else None
        with out_of_memory.explained(config, context, place.device):
            engine = make(config, place.mesh, place.device, place.dtype)
        store = _store(config, context, source, lease)
        beginning = _begin(config, context, store, engine, length, back_to)
        if context.is_main:
            _notify(notifier, beginning, restarted)

        meter = _meter(config, context, place, length, beginning)
        store.before_publishing = lambda: _write_out(meter, out)
        sinks = opened.enter_context(Sinks(config.log.sinks if context.is_main else [], out))
        opened.enter_context(meter)
        sinks.start()
        known = context.run_on_main(lambda: list(meter.losses.items()))
        meter.losses = {(step, part): loss for (step, part), loss in known}  # the others hear of lists
        meter.scored = set(context.run_on_main(lambda: list(meter.scored)))

        progress = beginning.progress
        switches = ControlFiles(out, config.kill_switch) if context.is_main else None
        vector, trained = StepVector(place.mesh.world, place.device), Trained(progress.seconds)
        agreement = Agreement(context, vector, preemption, store, trained, switches, lease, config.exit_minutes)
        saver = Saver(store, config, progress.step, progress.samples, setup.between_saves(config, source))
        guard, deadline = Guard(config.optim, progress.skipped, progress.health), Deadline(agreement, saver)
        results = Results(agreement, trained, guard, meter, config.scaler.minimum)
        control = RunControl(config, length, engine, agreement, saver, deadline, guard, switches, meter.validation)
        profile = opened.enter_context(Profile(config.profile, out, context.rank, place.device))
        yield Session(
            config, context, plan, length, place.device, engine, train, held_out, guard, control,
            deadline, results, meter, progress, profile, beginning.attempt, sinks, notifier, tasks,
        )  # fmt: skip


def _place(config: RunConfig, context: DistributedContext) -> Place:
    """Take a device and its cores, and set the process groups up."""
    device = hardware.device(config.engine, context.local_rank, context.local_size)
    if config.cluster.bind:
        where = hardware.pci_address(device)
        logger.info("%s", affinity.bind(context.local_rank, context.local_size, where))
    context.init_process_group(device, config.cluster.timeout_minutes, Path(config.out).absolute() / "logs")
    dtype = hardware.compute_type(config.engine, device)
    messages.device(config, device, dtype, context)
    minutes = timedelta(minutes=config.cluster.timeout_minutes)
    backend = "nccl" if device.type == "cuda" else None  # gloo's part in the group of all serves the CPUs
    mesh = Mesh.build(context.rank, context.size, config.parallel, minutes, backend)
    return Place(device, dtype, replace(mesh, nodes=len({context.hosts[rank] for rank in mesh.dp.ranks})))


def _enter(config: RunConfig, context: DistributedContext, place: Place, opened: ExitStack) -> tuple[Lease | None, str]:
    """Take the run directory over, check the nodes, and write logs from here on; rank 0's lease, and why Slurm has started the
    job again, if it has."""
    out, leases = Path(config.out), list[Lease]()
    context.run_on_main(lambda: leases.append(setup.occupy(out, opened)))
    preflight.check(context, place.device, config, out, room=setup.checkpoint_bytes(config))
    setup.log_files(out, context, opened)
    restarted = records.tell_restart(out, context) if context.is_main else ""
    stacks = context.run_on_main(lambda: time.strftime("stacks-%Y%m%d-%H%M%S"))
    context.watchdog.write_to(out, stacks, config.parallel.pipeline)
    messages.kernels(config, place.device)
    messages.attention(config, place.device)
    return (leases[0] if leases else None), restarted


def _store(config: RunConfig, context: DistributedContext, source: Source, lease: Lease | None) -> CheckpointStore:
    """The run's checkpoints."""
    kept = setup.retention(config, setup.between_saves(config, source))
    about = fingerprint(config, source), context, lease, setup.made(config, context)
    return CheckpointStore(Path(config.out) / "checkpoints", kept, *about)


def _begin(
    config: RunConfig,
    context: DistributedContext,
    store: CheckpointStore,
    engine: Engine,
    length: Length,
    back_to: int | None,
) -> Beginning:
    """Load the state to resume from, and record the attempt."""
    out = Path(config.out)
    gone_back = context.run_on_main(lambda: setup.go_back(out, back_to))
    progress = setup.begin(setup.start(store, engine, config, context), length)
    context.run_on_main(lambda: records.check_progress(out, progress.step))
    attempt = None
    if context.is_main:
        attempt = records.start(out, config, context, progress.step, length.steps, gone_back)
    logger.info("run directory %s, %s", out, f"resumes from step {progress.step}" if progress.step else "a new run")
    return Beginning(progress, attempt)


def _notify(notifier: Notifier, beginning: Beginning, restarted: str) -> None:
    """Tell people, if they asked for it, that the run continues."""
    notifier.about = {"attempt": beginning.attempt, **bootstrap.job()}
    if beginning.attempt is not None and beginning.attempt > 1:
        resumed = f"attempt {beginning.attempt} resumes from step {beginning.progress.step}"
        notifier.send("restarted", resumed + (f"; {restarted}" if restarted else ""), seconds=0)


def _meter(
    config: RunConfig,
    context: DistributedContext,
    place: Place,
    length: Length,
    beginning: Beginning,
) -> Meter:
    """What writes metrics, on rank 0."""
    if not context.is_main:
        return Mute()
    begun = beginning.progress.step, beginning.progress.samples
    fast = speed(config, context.size, place.device, place.dtype)
    return Meter(Path(config.out), config.log, begun, length.steps, fast)


def _write_out(meter: Meter, out: Path) -> None:
    """Bring what the log and the metrics say to the disk, before a checkpoint that is newer."""
    meter.flush()
    records.sync(out)


def speed(config: RunConfig, processes: int, device: torch.device, dtype: torch.dtype) -> Speed:
    """What turns samples and seconds into tokens a second, MFU and HFU, of all processes together."""
    peak = hardware.peak_flops(device, dtype)
    again = count.recompute_flops(config.model, config.engine.recompute)
    return Speed(config.model.context, count.flops_per_token(config.model), peak and peak * processes, again)

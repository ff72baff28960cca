"""Start a run's processes on this machine: one for each GPU, or on a machine without GPUs as many as are asked for."""

import secrets
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpclm.cluster import environment, gpus
from hpclm.config import JobConfig, RunConfig
from hpclm.errors import ConfigError
from hpclm.job.foreground import launch
from hpclm.job.supervise import Manner, Process

SIGNALS: dict[int, int] = {signal.SIGHUP: signal.SIGTERM}
"""A closed terminal warns a run as anything else that ends it does."""
IGNORED = ("modules", "conda", "setup", "container")
"""Settings of a job that only its script can follow."""


def run(config: RunConfig, path: Path, command: Sequence[str] = (), program: Sequence[str] = ()) -> int:
    """Train here with the settings at ``path`` (those of ``config``), in the foreground; gives the exit code.

    ``command`` is what the person typed, for the ledger; ``program`` what runs instead of training. ConfigError when the machine has not enough GPUs.
    """
    env = environment.inherited() | config.job.env
    found = 0 if config.engine.device == "cpu" else gpus.count(env)
    count = how_many(config, found)
    notes = [shared_out(config, count, found, environment.cores()), *unused(config.job, "local")]
    started = processes(program or train(path), count, env, Path(config.out) / "logs")
    return launch(config, "local", started, 1, count, Manner(SIGNALS), notes, command)


def check(config: RunConfig) -> None:
    """ConfigError where the settings want a GPU and this machine has none."""
    engine = config.engine
    wrong = list(engine.problems_without_gpu())
    if wrong and (engine.device == "cpu" or not gpus.count(environment.inherited() | config.job.env)):
        raise ConfigError(wrong)


def train(path: Path) -> tuple[str, ...]:
    """The command of every process of a run."""
    return (sys.executable, "-u", "-m", "hpclm.train", str(path.absolute()))


def how_many(config: RunConfig, found: int) -> int:
    """Processes to start on a machine where ``found`` GPUs are to be used; ConfigError when those are too few."""
    nodes, each = config.job.nodes, config.job.gpus
    count = nodes * each
    if found and count > found:
        raise ConfigError(
            f"job.nodes={nodes} x job.gpus={each} = {count} processes, but this machine has {found} "
            f"GPU{'s' * (found != 1)}; give job.nodes=1 job.gpus={found}, engine.device=cpu to train on the CPU, or "
            f"job.cluster=slurm or a job.hostfile for more machines"
        )
    return count


def shared_out(config: RunConfig, count: int, found: int, cores: int) -> str:
    """A sentence on what the processes run on."""
    nodes, each = config.job.nodes, config.job.gpus
    many = f"{count} process{'es' * (count != 1)}"
    if found:
        idle = f"; {found - count} of {found} GPUs stay idle (job.gpus={found} uses all)" if count < found else ""
        return f"{many} on this machine, one GPU each{idle}"
    why = "engine.device=cpu" if config.engine.device == "cpu" else "no GPU here"
    return (
        f"{why}: job.nodes={nodes} x job.gpus={each} = {many} of this machine, on its {cores} CPU "
        f"core{'s' * (cores != 1)}, {threads(count, cores)} for each"
    )


def unused(job: JobConfig, cluster: str) -> Iterator[str]:
    """A sentence on settings that are not followed where no script is made."""
    names = [f"job.{name}" for name in IGNORED if getattr(job, name)]
    if names:
        yield f"{', '.join(names)} is for jobs' scripts and not followed with job.cluster={cluster}: set it up in your shell"


def threads(count: int, cores: int) -> int:
    """Threads of each of ``count`` processes that share ``cores`` cores."""
    return max(1, cores // count)


def processes(command: Sequence[str], count: int, env: Mapping[str, str], logs: Path) -> list[Process]:
    """``count`` processes that run ``command`` and find each other; OMP_NUM_THREADS shares the cores unless ``env`` has it."""
    launch_id = secrets.token_hex(8)
    shared = {"OMP_NUM_THREADS": str(threads(count, environment.cores()))} | dict(env)

    def its_own(rank: int) -> dict[str, str]:
        numbers = dict(RANK=rank, WORLD_SIZE=count, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=count, RENDEZVOUS=launch_id)
        return shared | {f"HPCLM_{name}": str(value) for name, value in numbers.items()}

    return [
        Process(f"rank {rank}", tuple(command), its_own(rank), logs / f"rank-{rank:05d}.log" if rank else None)
        for rank in range(count)
    ]

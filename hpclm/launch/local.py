"""Start a run's ranks on this machine through torchrun's agent: one for each GPU, or as many as requested on a CPU."""

from collections.abc import Iterator, Mapping

from hpclm.base.errors import ConfigError
from hpclm.base.terminal import many
from hpclm.config import JobConfig, RunConfig
from hpclm.distributed import network
from hpclm.launch import foreground
from hpclm.launch.foreground import Launch
from hpclm.node import environment, gpus, threads

IN_SCRIPTS = ("modules", "venv", "conda", "setup", "container", "runtime", "mounts", "snapshot", "template")
"""Settings that only have an effect in a job script."""
IN_QUEUES = ("time", "partition", "mem", "options", "requeue")
"""Settings that only have an effect where a scheduler starts the job."""
IGNORED = {
    "local": (*IN_SCRIPTS, *IN_QUEUES, "exclude", "nodelist", "cpus_per_task"),
    "mpirun": (*IN_SCRIPTS, *IN_QUEUES, "cpus_per_task", "restarts"),
    "interactive": (*IN_SCRIPTS, *IN_QUEUES, "exclude", "nodelist", "restarts"),
}
"""Way to start a run without a job script -> the settings of job.* that it ignores."""


def run(launch: Launch) -> int:
    """Train on this machine, in the foreground; returns the exit code. ConfigError if the machine has too few GPUs."""
    config = launch.config
    env = environment.inherited() | config.job.env
    available = gpus_for(config, env)
    count = process_count(config, available)
    notes = [placement(config, count, available, threads.usable()), *unused(config.job, "local")]
    begun = foreground.begin(launch, "local", (1, count), notes)
    env.setdefault("OMP_NUM_THREADS", str(max(1, threads.usable() // count)))

    def start() -> int:
        environment.replace(env | begun.outcome.variables)
        from hpclm.launch import torchrun  # with PyTorch

        return torchrun.run_here(launch.program(), count, config.job.restarts)

    return begun.contained(start)


def gpus_for(config: RunConfig, env: Mapping[str, str]) -> int:
    """The number of GPUs that ranks with the environment ``env`` can use here; 0 with engine.device=cpu."""
    return 0 if config.engine.device == "cpu" else gpus.count(env)


def check_this_machine(config: RunConfig) -> None:
    """ConfigError if this machine lacks a GPU or a network interface that the settings need."""
    engine = config.engine
    env = environment.inherited() | config.job.env
    if config.job.nodes * config.job.gpus > 1:
        network.check_interface(config.cluster.interface, env)
    wrong = list(engine.problems_without_gpu())
    if wrong and (engine.device == "cpu" or not gpus.count(env)):
        raise ConfigError(wrong)


def process_count(config: RunConfig, available: int) -> int:
    """The number of ranks on a machine with ``available`` GPUs; ConfigError if the GPUs are too few."""
    nodes = config.job.nodes
    per_node = config.job.gpus
    count = nodes * per_node
    if available and count > available:
        raise ConfigError(
            f"job.nodes={nodes} x job.gpus={per_node} = {count} processes, but this machine has "
            f"{many(available, 'GPU')}; give job.nodes=1 job.gpus={available}, engine.device=cpu to train on the CPU, or "
            f"job.cluster=slurm or a job.hostfile for more machines"
        )
    return count


def placement(config: RunConfig, count: int, available: int, cores: int) -> str:
    """A note on the devices of the ranks."""
    nodes = config.job.nodes
    per_node = config.job.gpus
    processes = many(count, "process")
    if available:
        text = f"{processes} on this machine, one GPU each"
        if available > count:
            text += f"; {available - count} of {available} GPUs stay idle (job.gpus={available} uses all)"
        return text
    why = "engine.device=cpu" if config.engine.device == "cpu" else "no GPU here"
    return (
        f"{why}: job.nodes={nodes} x job.gpus={per_node} = {processes} of this machine, on its "
        f"{many(cores, 'CPU core')}, {max(1, cores // count)} for each"
    )


def unused(job: JobConfig, cluster: str) -> Iterator[str]:
    """A note on settings that have no effect without a job script."""
    ignored = [*IGNORED[cluster]]
    if cluster == "mpirun" and not job.hostfile:
        ignored += ["exclude", "nodelist"]
    names = [f"job.{name}" for name in ignored if getattr(job, name) != getattr(JobConfig(), name)]
    if names:
        have = "have" if len(names) > 1 else "has"
        why = f"with job.cluster={cluster}, which has neither a queue nor a job script"
        yield f"{', '.join(names)} {have} no effect {why}: set your shell up before"

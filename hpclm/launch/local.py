"""Start a run's ranks on this machine through torchrun's agent: one for each GPU, or as many as requested on a CPU."""

from collections.abc import Iterator

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
"""The settings of job.* that each way to start without a job script does not follow."""


def run(launch: Launch) -> int:
    """Train here, in the foreground; the exit code. ConfigError if the machine has too few GPUs."""
    config = launch.config
    env = environment.inherited() | config.job.env
    available = 0 if config.engine.device == "cpu" else gpus.count(env)
    count = process_count(config, available)
    notes = [placement(config, count, available, threads.usable()), *unused(config.job, "local")]
    begun = foreground.begin(launch, "local", (1, count), notes)
    env |= begun.outcome.variables
    env.setdefault("OMP_NUM_THREADS", str(max(1, threads.usable() // count)))

    def start() -> int:
        environment.replace(env)
        from hpclm.launch import torchrun  # with PyTorch

        return torchrun.run_here(launch.program(), count, config.job.restarts)

    return begun.contained(start)


def check_this_machine(config: RunConfig) -> None:
    """ConfigError if the settings need a GPU, or a network interface, and this machine has none."""
    engine = config.engine
    env = environment.inherited() | config.job.env
    if config.job.nodes * config.job.gpus > 1:
        network.check_interface(config.cluster.interface, env)
    wrong = list(engine.problems_without_gpu())
    if wrong and (engine.device == "cpu" or not gpus.count(env)):
        raise ConfigError(wrong)


def process_count(config: RunConfig, available: int) -> int:
    """The number of ranks on a machine with ``available`` GPUs; ConfigError if those are too few."""
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
        idle = max(0, available - count)
        note = f"; {idle} of {available} GPUs stay idle (job.gpus={available} uses all)" if idle else ""
        return f"{processes} on this machine, one GPU each{note}"
    why = "engine.device=cpu" if config.engine.device == "cpu" else "no GPU here"
    return (
        f"{why}: job.nodes={nodes} x job.gpus={per_node} = {processes} of this machine, on its "
        f"{many(cores, 'CPU core')}, {max(1, cores // count)} for each"
    )


def unused(job: JobConfig, cluster: str) -> Iterator[str]:
    """A note on settings that have no effect without a job script."""
    ignored = IGNORED[cluster] if job.hostfile or cluster != "mpirun" else (*IGNORED[cluster], "exclude", "nodelist")
    names = [f"job.{name}" for name in ignored if getattr(job, name) != getattr(JobConfig(), name)]
    if names:
        yield f"{', '.join(names)} {'have' if len(names) > 1 else 'has'} no effect with job.cluster={cluster}, which has neither a queue nor a job script: set your shell up before"

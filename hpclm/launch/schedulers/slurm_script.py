"""The script of a Slurm job: a template of slurm/ with the job's options and set-up.

A template also works by hand. Its #SBATCH lines are defaults that the job's options replace, and the job's set-up and
arguments replace the line that begins with ``# SET-UP``; nothing else changes.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpclm import files, shipped
from hpclm.config import JobConfig, RunConfig
from hpclm.config.job import TEMPLATES
from hpclm.errors import ConfigError, unread
from hpclm.launch.schedulers import slurm_commands as slurm
from hpclm.launch.schedulers.slurm_commands import Options
from hpclm.node import processes
from hpclm.node import slurm as variables
from hpclm.node.processes import NoAnswerError

MARK = "# SET-UP"
MAX_TEMPLATE_BYTES = 1 << 20  # bytes of a template
MEMORY_AND_CORES = {"mem-per-gpu", "mem-per-cpu", "cpus-per-gpu", "exclusive"}
SAME_NAMES = ("time", "partition", "exclude", "nodelist", "mem")
GPU_OPTIONS = {"gres", "gpus-per-node", "gpus-per-socket"}
NODES_SECONDS = 5.0  # for scontrol to show all nodes
GPUS = re.compile(r"\bgpu(?::[^:,(]+)?:(\d+)", re.IGNORECASE)
BARE = re.compile(r"[A-Za-z0-9_./:=,@%+^-]*")
DIRECTIVE = re.compile(r"#SBATCH\s+--([A-Za-z-]+)(?:[=\s]+(.*))?")


def render(config: RunConfig, path: Path, setup: Sequence[str]) -> str:
    """The script of the job that trains with the settings at ``path``, OUT/config.yaml, after the lines of shell ``setup``;
    ConfigError if bash cannot parse it."""
    source = template(config.job)
    setup = [*_variables(config.job), *setup]
    text = "\n".join(_filled(_lines(source), options_of(config, path.parent), setup)) + "\n"
    code, _, errors = processes.ask(["bash", "-n"], 30.0, text=text)
    if code or errors.strip():  # an unterminated here-document is only a warning, and would swallow the rest
        raise ConfigError(f"bash cannot read the script made from {source} and job.setup: {errors.strip()}")
    return text


def _variables(job: JobConfig) -> Iterator[str]:
    """Lines of shell that change the variables by which Slurm's commands in the job go."""
    yield "unset SLURM_CLUSTERS SLURM_JWT"  # they ask the job's own cluster, as any user of the node
    if job.template not in TEMPLATES:  # whose steps would take the job's own --export
        yield "export SLURM_EXPORT_ENV=ALL SRUN_EXPORT_ENV=ALL"


def template(job: JobConfig) -> Path:
    """The path of the template that ``job`` names."""
    name = "container" if job.container and job.template == "srun" else job.template
    if job.restarts and name in TEMPLATES and name != "torchrun":
        raise ConfigError(f"job.restarts={job.restarts} needs job.template=torchrun, not {name}")
    if name not in TEMPLATES:
        return files.readable(Path(name), "job.template")
    templates = shipped.folder("slurm")
    path = templates / f"{name}.sbatch"
    if not path.is_file():
        raise ConfigError(
            f"job.template={name}: {templates} is not installed here; give the path of a template of your own"
        )
    return path


def _lines(path: Path) -> list[str]:
    """The template's lines; ConfigError if it is not a valid template."""
    try:
        lines = files.read_text(path, MAX_TEMPLATE_BYTES).split("\n")
    except UnicodeDecodeError:
        raise ConfigError(f"template {path} is not UTF-8 text") from None
    except OSError as error:
        raise unread(error, f"template {path}") from None
    marks = [number for number, line in enumerate(lines, 1) if line.startswith(MARK)]
    late = [n for n, line in enumerate(lines, 1) if line.startswith("#SBATCH") and marks and n > marks[0]]
    wrong = []
    if lines[0] != "#!/bin/bash":
        wrong.append('its first line must be "#!/bin/bash", without options or Windows line endings')
    if len(marks) != 1:
        wrong.append(
            f'it has {len(marks)} lines that begin with "{MARK}"; one must, where the set-up and arguments of the job go'
        )
    if late:
        wrong.append(f"#SBATCH in line {late[0]} comes after the set-up, where Slurm does not see it")
    if not any('"$@"' in line for line in lines):
        wrong.append('it does not use "$@", the arguments of hpclm.train')
    if any(re.match(r"#SBATCH\s+(hetjob|packjob)\b", line) for line in lines):
        wrong.append("it asks for a heterogeneous job (#SBATCH hetjob), of which a run would use one component only")
    if wrong:
        raise ConfigError([f"template {path}: {problem}" for problem in wrong])
    return lines[:-1] if lines[-1] == "" else lines


def _filled(lines: list[str], asked: Options, setup: Sequence[str]) -> Iterator[str]:
    """The template's lines with the job's options after the last #SBATCH line, and its set-up at the mark."""
    mark = next(number for number, line in enumerate(lines) if line.startswith(MARK))
    last = max((number for number, line in enumerate(lines) if line.startswith("#SBATCH")), default=mark - 1)
    asked = dict(asked)
    for number, line in enumerate(lines):
        match = DIRECTIVE.match(line)
        if number == mark:
            yield f"{MARK} by hpclm submit"
            yield from setup
        elif not (match and match[1] in asked):
            yield line
        elif match[1] == "signal" and asked["signal"] and (match[2] or "").strip("\"'").startswith("B:"):
            asked["signal"] = f"B:{asked['signal']}"  # to the script, which forwards it
        if number == last:
            yield from (directive(option, value) for option, value in asked.items() if value is not None)


def options_of(config: RunConfig, out: Path) -> Options:
    """The options of the job that trains ``config`` in the run directory ``out``, an absolute path."""
    job = config.job
    options: Options = {
        "nodes": str(job.nodes),
        "ntasks-per-node": str(job.gpus),
        "cpus-per-task": str(job.cpus_per_task) if job.cpus_per_task else None,
        **{name: getattr(job, name) for name in SAME_NAMES},
    }
    options = {option: value for option, value in options.items() if value is not None}
    if config.engine.device != "cpu" and not _asks_for_gpus(job):
        options["gpus-per-node"] = str(job.gpus)
        kinds = node_kinds(job)
        refuse_without_gpus(job, kinds)
        if not MEMORY_AND_CORES & job.options.keys():
            options = {**of_nodes(job, kinds), **options}
    options["output"] = pattern(out / "logs") + "/job-%j.log"
    options["open-mode"] = "append"
    options |= {"requeue": "", "no-requeue": None} if job.requeue else {"requeue": None, "no-requeue": ""}
    options["signal"] = f"USR2@{job.warn_seconds}" if job.warn_seconds else None
    return options | {"job-name": name(out.name)} | job.options


def _asks_for_gpus(job: JobConfig) -> bool:
    """Whether an option of ``job`` asks for its GPUs; ConfigError if it asks for more or fewer than it has processes."""
    counts = {option: _gpus_in(option, job.options[option]) for option in sorted(GPU_OPTIONS & job.options.keys())}
    for option, count in counts.items():
        if count not in (None, 0, job.gpus):
            raise ConfigError(
                f"job.options.{option}={job.options[option]} asks for {count} GPUs of each node, but job.gpus={job.gpus}, one process "
                f"each; set job.gpus={count} (--gpus {count}), or change job.options.{option}"
            )
    return any(count != 0 for count in counts.values())


def _gpus_in(option: str, value: str) -> int | None:
    """GPUs of each node in an option of sbatch; None where they are none of Slurm's (gres=none), parts of one, or counted otherwise."""
    if option == "gpus-per-socket":
        return None
    items = [re.sub(r"^(gres[/:])", "", item.strip()).split(":") for item in value.split(",")]
    if option == "gpus-per-node":
        items = [["gpu", *item] for item in items]
    kinds = {item[0].lower() for item in items}
    if kinds & {"none", "mps", "shard"}:
        return None
    counts = [item[-1] if len(item) > 1 else "1" for item in items if item[0].lower() == "gpu"]
    return sum(int(count) if count.isdecimal() else 1 for count in counts)


def name(text: str) -> str:
    """``text`` as a job name that Slurm and shells print safely: letters and digits of any script, and ``._-``."""
    return re.sub(r"[^\w.-]+", "_", text).lstrip("-")[:100] or "hpclm"


def pattern(path: Path) -> str:
    """``path`` in the syntax of Slurm's file names, without replacement symbols."""
    text = str(path)
    if not text.isprintable() or re.search(r"\\|%[jtAa]", text):
        raise ConfigError(
            f"run directory {text!r}: Slurm and submitit take no backslash, control character, %j, %t, %A or %a there; "
            "choose another out="
        )
    return text.replace("%", "%%")


def directive(option: str, value: str) -> str:
    """One #SBATCH line, for Slurm's own parser: in double quotes, \\ escapes a quote or itself."""
    if not value:
        return f"#SBATCH --{option}"
    if not BARE.fullmatch(value):
        value = '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    return f"#SBATCH --{option}={value}"


def node_kinds(job: JobConfig) -> str:
    """A line with cores, megabytes and generic resources for each kind of node that ``job`` may get, without what a node keeps for the
    system, which only scontrol says; "" if it does not answer."""
    env = slurm.env_for(slurm.clusters(job.options))
    try:
        _, answer, _ = slurm.ask(["scontrol", "show", "node", "--oneliner"], NODES_SECONDS, env)
    except NoAnswerError:
        return ""
    kinds, chosen = dict[str, None](), set((job.partition or "").split(","))
    for line in answer.splitlines():
        node = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if "CPUTot" in node and (not job.partition or chosen & set(node.get("Partitions", "").split(","))):
            memory = variables.number(node, "RealMemory") - variables.number(node, "MemSpecLimit")
            kinds[f"{node.get('CPUEfctv', node['CPUTot'])}|{memory}|{node.get('Gres')}\n"] = None
    return "".join(kinds)


def refuse_without_gpus(job: JobConfig, kinds: str) -> None:
    """ConfigError if no node has GPUs and Slurm would not notice: without ``gpu`` in GresTypes it ignores --gpus-per-node."""
    env = slurm.env_for(slurm.clusters(job.options))
    if (
        not kinds.strip()
        or "gpu" in kinds.lower()
        or "gpu" in slurm.setting("GresTypes", default="gpu", env=env).lower()
    ):
        return
    raise ConfigError(
        f"job.gpus={job.gpus}, but Slurm lists no GPUs on the nodes of {job.partition or 'this cluster'}: engine.device=cpu "
        "trains on the CPU; if the nodes have GPUs that Slurm does not manage, set job.options.gres=none"
    )


def of_nodes(job: JobConfig, kinds: str) -> dict[str, str]:
    """Options of sbatch for cores and memory where ``job`` has none: its GPUs' share of a node, by Slurm's own figures.

    Without a request many clusters give a process one core and a few hundred MB. {} where ``kinds`` has no nodes with
    GPUs.
    """
    nodes = []
    for cores, megabytes, resources in (line.split("|") for line in kinds.splitlines()):
        if (gpus := sum(map(int, GPUS.findall(resources)))) >= job.gpus:
            nodes.append((int(cores), int(megabytes), gpus))
    options = {}
    if nodes and job.cpus_per_task is None:
        options["cpus-per-task"] = str(max(1, min(cores // gpus for cores, _, gpus in nodes)))
    if nodes and job.mem is None:
        whole = all(gpus == job.gpus for *_, gpus in nodes)
        options["mem"] = "0" if whole else f"{min(memory * job.gpus // gpus for _, memory, gpus in nodes)}M"
    return options

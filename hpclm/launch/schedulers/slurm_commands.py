"""Slurm's commands. Every call has a time limit, and its answer may be garbage.

Only squeue and scontrol are asked: sacct needs a database that many clusters lack.
"""

import os
import re
import shlex
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from hpclm.base.errors import HpclmError
from hpclm.node import environment, processes, slurm
from hpclm.node.job import Job
from hpclm.node.processes import OURS, Env, NoAnswerError

FORMAT = "%i|%T|%M|%L|%S|%D|%N|%r|%o"
SQUEUE = ["squeue", "-h", "-r", "-a", "-t", "all", "-o", FORMAT]
UNANSWERED = re.compile(
    "unable to contact|connection|timed out|socket|communication|try again|temporarily|could not make sense",
    re.IGNORECASE,
)
"""Errors of commands if slurmctld did not answer; it may have acted all the same."""
FAULTY = re.compile(r"DOWN|DRAIN|FAIL|NOT_RESPONDING|REBOOT|POWER", re.IGNORECASE)
"""States of a node that has a problem."""


Options = dict[str, str | None]
"""Options of sbatch: long name -> value; "" for a flag; None removes one from a template."""


def states(
    ids: Collection[str], users: Collection[int] = (), seconds: float = 10, env: Env = os.environ
) -> dict[str, Job]:
    """The jobs with these ``ids`` that Slurm still knows, for some minutes after their end. NoAnswerError if it does not answer.

    ``users``: owners of the jobs, so that squeue does not list every job of a large cluster.
    """
    if not ids:
        return {}
    only = ["-u", ",".join(map(str, users))] if users and len(ids) > 1 else ["-j", ",".join(sorted(ids))]
    code, answer, error = ask([*SQUEUE, *only], seconds, env)
    if code and "Invalid job id" in error:
        return {}
    if code:
        raise NoAnswerError(_of_squeue(code, error))
    lines = [line for _, line in by_cluster(answer)]
    jobs = [state for line in lines if (state := _state(line))]
    if lines and not jobs:
        raise NoAnswerError(f"squeue's answer cannot be parsed: {lines[0][:60]!r}")
    return {state.id: state for state in jobs if state.id in ids or state.id.partition("_")[0] in ids}


def options_in(script: str) -> Options:
    """The options that a script sets, by their long names."""
    lines = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE)
    return {name: "".join(shlex.split(value)) for name, value in lines}


def clusters(options: Mapping[str, str | None] = {}, env: Env = os.environ) -> str:
    """The clusters to which sbatch may send a job with these options: "a,b"; empty: the one that it is called on."""
    names = (slurm.JOB, slurm.CLUSTERS_OF_SBATCH, slurm.CLUSTERS)
    allowed = environment.of_a_job(options, {name: env[name] for name in names if name in env})
    return options.get("clusters") or allowed.get(slurm.CLUSTERS_OF_SBATCH) or allowed.get(slurm.CLUSTERS) or ""


def env_for(names: str, env: Env = os.environ) -> dict[str, str]:
    """The environment for Slurm's commands to ask these clusters; empty: the one that they are called on."""
    chosen = {name: value for name, value in env.items() if name != slurm.CLUSTERS}
    if names:
        chosen[slurm.CLUSTERS] = names
    return chosen


def by_cluster(answer: str) -> Iterator[tuple[str, str]]:
    """The lines of squeue's answer, each with its cluster from the heading before; empty without headings."""
    cluster = ""
    for line in answer.splitlines():
        heading = re.fullmatch(r"CLUSTER: (\S+)\s*", line)
        if heading:
            cluster = heading[1]
        elif line.strip():
            yield cluster, line


def steps(job: str, seconds: float = 10, env: Env = os.environ) -> list[str]:
    """Names of a job's running steps."""
    code, answer, error = ask(["squeue", "-h", "-s", "-j", job, "-o", "%i|%j"], seconds, env)
    if code:
        raise NoAnswerError(_of_squeue(code, error))
    rows = [line.strip().partition("|") for line in answer.splitlines()]
    return [name for step, _, name in rows if re.fullmatch(r".*\.\d+", step)]


def show(job: str, seconds: float = 10, env: Env = os.environ) -> dict[str, str]:
    """The fields that scontrol shows of a job; {} if it does not know it. NoAnswerError as in ``states``."""
    code, answer, error = ask(["scontrol", "show", "job", job, "--oneliner"], seconds, env)
    if code and UNANSWERED.search(error):
        raise NoAnswerError(f"scontrol: {_last_line(error)}")
    return _fields(answer) if not code else {}


def shown(job: str, seconds: float = 10, env: Env = os.environ) -> dict[str, str]:
    """``show``, but {} without an answer."""
    try:
        return show(job, seconds, env)
    except NoAnswerError:
        return {}


def default_time(partition: str = "", seconds: float = 10, env: Env = os.environ) -> tuple[str, str]:
    """A partition, the one named or the cluster's default, and the time limit of its jobs that ask for none; empty where unknown.

    Of several partitions, of which a job takes any, the first counts. NoAnswerError as in ``states``.
    """
    name = partition.partition(",")[0]
    code, answer, _ = ask(["scontrol", "show", "partition", *filter(None, [name]), "--oneliner"], seconds, env)
    for shown in map(_fields, answer.splitlines() if not code else []):
        if name or shown.get("Default") == "YES":
            times = [time for time in (shown.get("DefaultTime"), shown.get("MaxTime")) if time and time != "NONE"]
            return shown.get("PartitionName", name), times[0] if times else ""
    return name, ""


def setting(name: str, default: str, seconds: float = 5, env: Env = os.environ) -> str:
    """A setting of slurm.conf, as scontrol shows it; ``default`` if it does not."""
    try:
        _, answer, _ = ask(["scontrol", "show", "config"], seconds, env)
    except NoAnswerError:
        return default
    match = re.search(rf"^{name} *= (.*)$", answer, re.MULTILINE)
    return match[1].strip() if match else default


def troubles(hosts: Sequence[str], seconds: float = 5, env: Env = os.environ) -> list[str]:
    """The problems of those nodes that have one, asked once for all: ``node2 is DOWN (Not responding [root@...])``."""
    names = ",".join(host.partition(".")[0] for host in hosts)
    try:
        code, answer, _ = ask(["scontrol", "show", "node", "--oneliner", names], seconds, env) if hosts else (1, "", "")
    except NoAnswerError:
        return []
    nodes = [_fields(line) for line in answer.splitlines()] if not code else []
    return [
        f"{node['NodeName']} is {node['State']}" + (f" ({node['Reason']})" if "Reason" in node else "")
        for node in nodes
        if "NodeName" in node and FAULTY.search(node.get("State", ""))
    ]


def update(job: str, env: Env = os.environ, **fields: str | int) -> bool:
    """Change a job: ``update("12", requeue=0)``; whether that worked."""
    words = [f"{name}={value}" for name, value in fields.items()]
    return retry(["scontrol", "update", f"jobid={job}", *words], env) == ""


def requeue(job: str, env: Env = os.environ) -> bool:
    """Requeue a running job; whether it is requeued, by this call or by Slurm itself."""
    wrong = retry(["scontrol", "requeue", job], env)
    return wrong == "" or "pending execution" in wrong


def send(job: str, name: str, whole: bool = False, env: Env = os.environ) -> bool:
    """Send the signal ``name`` to a job's steps, or to the ``whole`` job with its script; whether the job still existed."""
    return _gone_or(retry(["scancel", *(["--full"] if whole else []), "-s", name, job], env))


def signal_process(job: str, node: str, pid: int, name: str, seconds: float = 10, env: Env = os.environ) -> bool:
    """Send the signal ``name`` to one process of hpclm in a running job, by an overlapping job step."""
    overlapping = ["--overlap", "-N1", "-n1", "--mem=0", "--gres=none", "--quiet"]
    step = ["srun", f"--jobid={job}", f"--nodelist={node}", *overlapping]
    act = f"tr '\\0' '\\n' < /proc/{int(pid)}/cmdline | grep -Eqx '{OURS}' && kill -s {name} {int(pid)}"
    outside = {key: value for key, value in env.items() if not re.match("SLURM_(?!CONF$|CLUSTERS$)|SRUN_", key)}
    try:
        return ask([*step, "--chdir=/", "/bin/sh", "-c", act], seconds, outside)[0] == 0
    except NoAnswerError:
        return False


def cancel(job: str, env: Env = os.environ) -> bool:
    """scancel a job: TERM to its processes, KILL some seconds later; whether the job still existed."""
    return _gone_or(retry(["scancel", job], env))


def retry(words: list[str], env: Env = os.environ, tries: int = 3, seconds: float = 10, pause: float = 1) -> str:
    """Run a command of Slurm, again if it does not answer; returns its error, or "". NoAnswerError if it never answers."""
    for attempt in range(tries):
        time.sleep(pause if attempt else 0)
        try:
            code, _, error = ask(words, seconds, env)
        except NoAnswerError as missing:
            failure = missing
            continue
        if not code or not UNANSWERED.search(error):
            return "" if not code else _last_line(error) or f"exit code {code}"
        failure = NoAnswerError(f"{words[0]}: {_last_line(error)}")
    raise failure


def ask(words: list[str], seconds: float, env: Env = os.environ) -> tuple[int, str, str]:
    """``processes.ask`` for a command of Slurm."""
    return processes.finish(start(words, env), seconds)


def start(words: list[str], env: Env = os.environ) -> subprocess.Popen[bytes]:
    """``processes.start`` for a command of Slurm."""
    # SQUEUE_PARTITION, SCANCEL_INTERACTIVE and the like are meant for the user's own commands
    clean = {name: value for name, value in env.items() if not re.match("(SQUEUE|SCANCEL|SCONTROL)_", name)}
    return processes.start(words, {**clean, "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"})


def _state(line: str) -> Job | None:
    parts = line.strip().split("|", 7)
    if len(parts) != 8 or not re.fullmatch(r"\d+(_\d+|\+\d+)?", parts[0]) or not re.fullmatch("[A-Z_]+", parts[1]):
        return None
    job, name, elapsed, left, start, nodes, nodelist, rest = parts
    reason, _, path = rest.removesuffix("|(null)").partition("|/")
    script = path and f"/{path}"
    count = int(nodes) if nodes.isdecimal() else 0
    return Job(job, name, elapsed, left, start, count, nodelist, reason, script)


def _fields(line: str) -> dict[str, str]:
    """The fields ``Name=value`` of a line of scontrol; values may contain spaces."""
    return dict(re.findall(r"(\S+?)=(.*?)(?=\s+[A-Za-z/:]+=|\s*$)", line))


def _gone_or(wrong: str) -> bool:
    """True without an error, False if the job is already over; HpclmError for any other error."""
    if re.search("Invalid job id|already (completing|completed)|Job/step already", wrong, re.IGNORECASE):
        return False
    if wrong:
        raise HpclmError(f"Slurm refused: {wrong}")
    return True


def _of_squeue(code: int, error: str) -> str:
    return f"squeue: {_last_line(error).removeprefix('squeue: ') or f'exit code {code}'}"


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")

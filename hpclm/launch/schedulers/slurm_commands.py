"""Call Slurm's commands. Every call has a time limit, and its answer may be garbage.

Only squeue and scontrol are asked, because sacct needs a database that many clusters lack.
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
"""Errors of commands to which slurmctld did not answer. It may have done what they asked."""
FAULTY = re.compile(r"DOWN|DRAIN|FAIL|NOT_RESPONDING|REBOOT|POWER", re.IGNORECASE)
"""States of a node that has a problem."""
Options = dict[str, str | None]
"""Options of sbatch: long name -> value. "" is for a flag; None removes an option from a template."""


def states(
    ids: Collection[str], users: Collection[int] = (), seconds: float = 10, env: Env = os.environ
) -> dict[str, Job]:
    """The jobs with these ``ids`` that Slurm knows, until some minutes after their end. NoAnswerError if it does not answer.

    ``users``: owners of the jobs, so that squeue does not list every job of a large cluster.
    """
    if not ids:
        return {}
    only = ["-j", ",".join(sorted(ids))]
    if users and len(ids) > 1:
        only = ["-u", ",".join(map(str, users))]
    code, answer, error = ask([*SQUEUE, *only], seconds, env)
    if code and "Invalid job id" in error:
        return {}
    if code:
        raise NoAnswerError(_of_squeue(code, error))
    lines = [line for _, line in by_cluster(answer)]
    jobs = list(filter(None, map(_state, lines)))
    if lines and not jobs:
        raise NoAnswerError(f"squeue's answer cannot be parsed: {lines[0][:60]!r}")
    return {state.id: state for state in jobs if state.id in ids or state.id.partition("_")[0] in ids}


def options_in(script: str) -> Options:
    """The options that a script sets, by their long names."""
    lines = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE)
    return {name: "".join(shlex.split(value)) for name, value in lines}


def clusters(options: Mapping[str, str | None] = {}, env: Env = os.environ) -> str:
    """The clusters to which sbatch may send a job with these options, as "a,b"; empty for this machine's cluster."""
    names = (slurm.JOB, slurm.CLUSTERS_OF_SBATCH, slurm.CLUSTERS)
    allowed = environment.of_a_job(options, {name: env[name] for name in names if name in env})
    return options.get("clusters") or allowed.get(slurm.CLUSTERS_OF_SBATCH) or allowed.get(slurm.CLUSTERS) or ""


def env_for(names: str, env: Env = os.environ) -> dict[str, str]:
    """The environment that makes Slurm's commands ask the clusters ``names``; without names, this machine's cluster."""
    chosen = {name: value for name, value in env.items() if name != slurm.CLUSTERS}
    if names:
        chosen[slurm.CLUSTERS] = names
    return chosen


def by_cluster(answer: str) -> Iterator[tuple[str, str]]:
    """(cluster, line) for the lines of squeue's answer. The cluster is that of the heading above; empty without headings."""
    cluster = ""
    for line in answer.splitlines():
        heading = re.fullmatch(r"CLUSTER: (\S+)\s*", line)
        if heading:
            cluster = heading[1]
        elif line.strip():
            yield cluster, line


def steps(job: str, seconds: float = 10, env: Env = os.environ) -> list[str]:
    """The names of a job's running steps."""
    code, answer, error = ask(["squeue", "-h", "-s", "-j", job, "-o", "%i|%j"], seconds, env)
    if code:
        raise NoAnswerError(_of_squeue(code, error))
    rows = [line.strip().partition("|") for line in answer.splitlines()]
    return [name for step, _, name in rows if re.fullmatch(r".*\.\d+", step)]


def show(job: str, seconds: float = 10, env: Env = os.environ) -> dict[str, str]:
    """The fields that scontrol shows for a job; {} for an unknown job. NoAnswerError if Slurm does not answer."""
    code, answer, error = ask(["scontrol", "show", "job", job, "--oneliner"], seconds, env)
    if code and UNANSWERED.search(error):
        raise NoAnswerError(f"scontrol: {_last_line(error)}")
    return {} if code else _fields(answer)


def shown(job: str, seconds: float = 10, env: Env = os.environ) -> dict[str, str]:
    """The same as ``show``, but {} if Slurm does not answer."""
    try:
        return show(job, seconds, env)
    except NoAnswerError:
        return {}


def default_time(partition: str = "", seconds: float = 10, env: Env = os.environ) -> tuple[str, str]:
    """The partition of a job, and its time limit for jobs that request none; each is empty if unknown.

    ``partition``: of several names, the first counts; empty for the default partition. NoAnswerError if Slurm does not answer.
    """
    name = partition.partition(",")[0]
    code, answer, _ = ask(["scontrol", "show", "partition", *filter(None, [name]), "--oneliner"], seconds, env)
    if code == 0:
        for shown in map(_fields, answer.splitlines()):
            if name or shown.get("Default") == "YES":
                times = (shown.get("DefaultTime"), shown.get("MaxTime"))
                limit = next((time for time in times if time and time != "NONE"), "")
                return shown.get("PartitionName", name), limit
    return name, ""


def setting(name: str, default: str, seconds: float = 5, env: Env = os.environ) -> str:
    """The value of a setting of slurm.conf in scontrol's answer; ``default`` if it is not there."""
    try:
        _, answer, _ = ask(["scontrol", "show", "config"], seconds, env)
    except NoAnswerError:
        return default
    match = re.search(rf"^{name} *= (.*)$", answer, re.MULTILINE)
    return match[1].strip() if match else default


def troubles(hosts: Sequence[str], seconds: float = 5, env: Env = os.environ) -> list[str]:
    """A text for each of the nodes ``hosts`` that has a problem: ``node2 is DOWN (Not responding [root@...])``."""
    if not hosts:
        return []
    names = ",".join(host.partition(".")[0] for host in hosts)
    try:
        code, answer, _ = ask(["scontrol", "show", "node", "--oneliner", names], seconds, env)
    except NoAnswerError:
        return []
    found = list[str]()
    if code == 0:
        for node in map(_fields, answer.splitlines()):
            if "NodeName" in node and FAULTY.search(node.get("State", "")):
                reason = f" ({node['Reason']})" if "Reason" in node else ""
                found.append(f"{node['NodeName']} is {node['State']}{reason}")
    return found


def update(job: str, env: Env = os.environ, **fields: str | int) -> bool:
    """Change fields of a job, as in ``update("12", requeue=0)``; returns whether that worked."""
    words = [f"{name}={value}" for name, value in fields.items()]
    return retry(["scontrol", "update", f"jobid={job}", *words], env) == ""


def requeue(job: str, env: Env = os.environ) -> bool:
    """Requeue a running job; returns whether it is requeued, by this call or by Slurm itself."""
    wrong = retry(["scontrol", "requeue", job], env)
    return wrong == "" or "pending execution" in wrong


def send(job: str, name: str, whole: bool = False, env: Env = os.environ) -> bool:
    """Send the signal ``name`` to a job's steps or, if ``whole``, also to its script; returns whether the job still existed."""
    words = ["scancel", "-s", name, job]
    if whole:
        words.insert(1, "--full")
    return _still_existed(retry(words, env))


def signal_process(job: str, node: str, pid: int, name: str, seconds: float = 10, env: Env = os.environ) -> bool:
    """Send the signal ``name`` to a process of hpclm in a running job, through an overlapping job step; returns whether that worked."""
    overlapping = ["--overlap", "-N1", "-n1", "--mem=0", "--gres=none", "--quiet"]
    step = ["srun", f"--jobid={job}", f"--nodelist={node}", *overlapping]
    act = f"tr '\\0' '\\n' < /proc/{int(pid)}/cmdline | grep -Eqx '{OURS}' && kill -s {name} {int(pid)}"
    outside = {key: value for key, value in env.items() if not re.match("SLURM_(?!CONF$|CLUSTERS$)|SRUN_", key)}
    try:
        return ask([*step, "--chdir=/", "/bin/sh", "-c", act], seconds, outside)[0] == 0
    except NoAnswerError:
        return False


def cancel(job: str, env: Env = os.environ) -> bool:
    """Cancel a job: TERM to its processes, KILL some seconds later. Returns whether the job still existed."""
    return _still_existed(retry(["scancel", job], env))


def retry(words: list[str], env: Env = os.environ, tries: int = 3, seconds: float = 10, pause: float = 1) -> str:
    """Run a command of Slurm, up to ``tries`` times until it answers; returns its error, or "". NoAnswerError if it never answers."""
    for left in reversed(range(tries)):
        try:
            code, _, error = ask(words, seconds, env)
            if code == 0:
                return ""
            if not UNANSWERED.search(error):
                return _last_line(error) or f"exit code {code}"
            failure = NoAnswerError(f"{words[0]}: {_last_line(error)}")
        except NoAnswerError as missing:
            failure = missing
        if left:
            time.sleep(pause)
    raise failure


def ask(words: list[str], seconds: float, env: Env = os.environ) -> tuple[int, str, str]:
    """Run a command of Slurm; see ``processes.ask``."""
    return processes.finish(start(words, env), seconds)


def start(words: list[str], env: Env = os.environ) -> subprocess.Popen[bytes]:
    """Start a command of Slurm; see ``processes.start``."""
    # SQUEUE_PARTITION, SCANCEL_INTERACTIVE and the like are for the user's own commands
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


def _still_existed(wrong: str) -> bool:
    """Whether the job of a command with the error ``wrong`` still existed; HpclmError for other errors."""
    if re.search("Invalid job id|already (completing|completed)|Job/step already", wrong, re.IGNORECASE):
        return False
    if wrong:
        raise HpclmError(f"Slurm refused: {wrong}")
    return True


def _of_squeue(code: int, error: str) -> str:
    return f"squeue: {_last_line(error).removeprefix('squeue: ') or f'exit code {code}'}"


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")

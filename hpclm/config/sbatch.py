"""The options of sbatch: those with a setting, those that a job cannot have, and those that job.options passes on."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

GPUS_PER_NODE = "set job.gpus, which is per node"
PROCESSES = "processes are job.nodes x job.gpus (--nodes, --gpus)"
ONE_JOB = "one job trains a run, on nodes of one kind"
LOG = "the log is in logs/ of the run directory, which out= sets"
LEAVE_OUT = "leave it out"


class Option(NamedTuple):
    """One option of sbatch."""

    name: str
    short: str = ""
    setting: str = ""
    """The setting of ``job`` with the same value; empty: job.options.NAME."""
    flag: bool = False
    """Whether it takes no value."""
    refused: str = ""
    """What to do instead of setting the option in job.options; empty if it is allowed there."""
    offered: bool = False
    """Whether ``hpclm submit`` has an option of this name."""
    harmless: bool = False
    """Whether it cannot run code, so that it is allowed in a settings file that others could have written."""
    requests: str = ""
    """gpus; or share, for the cores or memory that belong to GPUs."""

    @property
    def key(self) -> str:
        """The setting that holds its value."""
        return "job." + (self.setting or f"options.{self.name}")

    @property
    def instead(self) -> str:
        """Why job.options cannot have it; empty if it can."""
        if self.setting and not self.refused:
            return f"set {self.key}"
        return self.refused


def _named(names: str, **facts: bool | str) -> Iterator[Option]:
    """An option for each name; NAME:X has the short option -X."""
    for name, _, short in (word.partition(":") for word in names.split()):
        yield Option(name, short, **facts)  # type: ignore[arg-type]


def _table(*groups: Iterable[Option]) -> dict[str, Option]:
    return {option.name: option for group in groups for option in group}


OPTIONS = _table(
    # settings of hpclm
    [
        Option("nodes", "N", setting="nodes", offered=True),
        Option("time", "t", setting="time", offered=True),
        Option("partition", "p", setting="partition", offered=True),
        Option("account", "A", offered=True, harmless=True),
        Option("qos", "q", offered=True, harmless=True),
        Option("constraint", "C", offered=True, harmless=True),
        Option("exclude", "x", setting="exclude", offered=True),
        Option("nodelist", "w", setting="nodelist", offered=True),
        Option("mem", setting="mem", offered=True),
        Option("cpus-per-task", "c", setting="cpus_per_task", offered=True),
        Option("job-name", "J", offered=True, harmless=True),
        Option("dependency", "d", offered=True, harmless=True),
    ],
    # options that are settings in another form
    _named("nodefile:F", refused="set job.nodelist"),
    _named("gpus:G gpus-per-task", refused=GPUS_PER_NODE),
    _named("ntasks:n ntasks-per-node ntasks-per-gpu ntasks-per-core ntasks-per-socket", refused=PROCESSES),
    _named("requeue no-requeue", flag=True, refused="set job.requeue"),
    _named("signal", refused="set job.warn_seconds"),
    _named("wrap", refused="set job.setup"),
    # options that would break a job of hpclm
    _named("no-kill:k", flag=True, refused="a lost node ends the job, and Slurm starts it again"),
    _named("output:o error:e", refused=LOG),
    _named("hetjob het-group packjob pack-group", refused=ONE_JOB),
    _named("open-mode", refused="logs are always appended to, so that a requeue does not erase them"),
    _named("array:a", refused="a run is one job; --sweep submits several runs"),
    _named("input:i", refused="a job reads no input"),
    _named("hold-input help:h usage version:V parsable test-only wait:W quiet:Q", flag=True, refused=LEAVE_OUT),
    # options for job.options
    _named("gres", harmless=True, requests="gpus"),
    _named("gpus-per-node gpus-per-socket", requests="gpus"),
    _named("cpus-per-gpu mem-per-cpu mem-per-gpu", requests="share"),
    _named("exclusive", flag=True, requests="share"),
    _named("reservation", harmless=True),
    _named(
        "acctg-freq batch bb bbf begin:b chdir:D cluster-constraint clusters:M comment container container-id core-spec:S cores-per-socket"
        " cpu-freq deadline delay-boot distribution:m export export-file extra extra-node-info:B gid gpu-bind gpu-freq gres-flags hint"
        " licenses:L mail-type mail-user mcs-label mem-bind mincpus network nice prefer priority profile propagate resv-ports segment"
        " sockets-per-node switches thread-spec threads-per-core time-min tmp tres-bind tres-per-task uid wait-all-nodes wckey"
    ),
    _named("contiguous get-user-env hold:H ignore-pbs kill-on-invalid-dep overcommit:O oversubscribe:s", flag=True),
    _named("reboot spread-job stepmgr use-min-nodes verbose:v", flag=True),
)
"""Every option, by its long name."""
OPTIONAL_VALUE = ("nice", "propagate")
"""Options that take a value but do not need it."""
_BY_SHORT = {option.short: option for option in OPTIONS.values() if option.short}


def option_named(word: str) -> Option | None:
    """The option --NAME or -X; None if sbatch has no such option."""
    if word.startswith("--"):
        return OPTIONS.get(word.removeprefix("--"))
    return _BY_SHORT.get(word.removeprefix("-"))


def advice(word: str, value: str) -> str:
    """Advice for --NAME or -X with this ``value``; empty if sbatch does not have the option."""
    option = option_named(word)
    if option is None:
        return ""
    count = value.rpartition(":")[2]
    if option.name in ("gres", "gpus-per-node") and count.isdecimal():
        return f"use --gpus {count} (GPUs of each node)"
    if option.instead:
        return option.instead
    given = option.name
    if not option.flag:
        given += f"={value or '...'}"
    return f"it is an option of sbatch: hpclm submit --sbatch {given}"


def requesting(what: str) -> set[str]:
    """The options that request ``what``, gpus or share."""
    return {option.name for option in OPTIONS.values() if option.requests == what}

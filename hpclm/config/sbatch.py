"""Options of sbatch that people give to hpclm, and what to give instead."""

from hpclm.config.job import INSTEAD

FLAGS = frozenset(
    [
        "contiguous",
        "exclusive",
        "get-user-env",
        "hetjob",
        "kill-on-invalid-dep",
        "oversubscribe",
        "overcommit",
        "reboot",
        "spread-job",
        "use-min-nodes",
    ]
)
"""Options of sbatch without a value, or with an optional one."""
VALUED = frozenset(
    [
        "acctg-freq",
        "begin",
        "burst-buffer",
        "chdir",
        "cluster-constraint",
        "clusters",
        "comment",
        "core-spec",
        "cores-per-socket",
        "cpu-freq",
        "cpus-per-gpu",
        "deadline",
        "delay-boot",
        "distribution",
        "export",
        "export-file",
        "extra-node-info",
        "gpu-bind",
        "gpu-freq",
        "gpus-per-node",
        "gpus-per-socket",
        "gres",
        "gres-flags",
        "licenses",
        "mail-type",
        "mail-user",
        "mcs-label",
        "mem-bind",
        "mem-per-cpu",
        "mem-per-gpu",
        "mincpus",
        "nice",
        "ntasks-per-core",
        "ntasks-per-socket",
        "prefer",
        "priority",
        "propagate",
        "reservation",
        "resv-ports",
        "sockets-per-node",
        "switches",
        "thread-spec",
        "threads-per-core",
        "time-min",
        "tres-bind",
        "tres-per-task",
        "wait-all-nodes",
        "wckey",
    ]
)
SHORT = dict(
    a="array", b="begin", B="extra-node-info", D="chdir", e="error", F="nodefile", G="gpus", L="licenses", M="clusters",
    m="distribution", n="ntasks", O="overcommit", o="output", s="oversubscribe", S="core-spec", W="wait",
)  # fmt: skip
PER_NODE = ("gres", "gpus-per-node")


def instead(option: str, value: str) -> str | None:
    """What to give for an ``option`` of sbatch, with its dashes and without its ``value``; None if sbatch has no such option."""
    name = option.lstrip("-") if option.startswith("--") else SHORT.get(option[1:], "")
    if name in PER_NODE and (count := value.rpartition(":")[2]).isdecimal():
        return f"use --gpus {count} (GPUs of each node)"
    if name in INSTEAD:
        return INSTEAD[name]
    if name not in FLAGS | VALUED:
        return None
    given = f"{name}={value or '...'}" if name in VALUED else name
    return f"it is an option of sbatch: hpclm submit --sbatch {given}"

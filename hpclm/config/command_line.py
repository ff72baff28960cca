"""What was meant by words of a command line that are neither key=value nor a settings file, and by options of sbatch."""

import re
from collections.abc import Sequence

from hpclm.config.fields import type_of
from hpclm.config.job import INSTEAD

KEY = re.compile(r"[A-Za-z_][\w.-]*")
UNIT = re.compile(r"([KMGT])(i?B)?", re.IGNORECASE)
FLAGS = re.compile("contiguous|exclusive|kill-on-invalid-dep|overcommit|oversubscribe|reboot|spread-job")
"""Options of sbatch without a value."""
VALUED = re.compile(
    "account|begin|chdir|clusters|comment|constraint|cpus-per-gpu|dependency|distribution|export|gpus-per-node|gres|job-name|licenses|mail-(type|user)|mem-per-(cpu|gpu)"
    "|nice|priority|qos|reservation|switches|time-min|wckey"
)
SHORT = dict(D="chdir", e="error", G="gpus", m="distribution", n="ntasks", o="output")
PER_NODE = ("gres", "gpus-per-node")


def mistakes(stray: Sequence[str], typed: Sequence[str]) -> list[str]:
    """What is wrong with the ``stray`` words of the command line ``typed``, which name no settings file; empty if it is unclear."""
    explained: set[str] = set()
    problems = []
    for index, word in enumerate(typed):
        before, after = typed[index - 1] if index else "", typed[index + 1] if index + 1 < len(typed) else "…"
        setting, _, value = word.partition("=")
        if word in explained:
            continue
        if setting == "" and KEY.fullmatch(before) and "=" in word:
            problems.append(f"write {before}={value or after}, without spaces")
            explained |= {before} if value else {before, after}
        elif word.endswith("=") and KEY.fullmatch(setting) and after in stray:
            problems.append(f"write {word}{after}, without a space")
            explained.add(after)
        elif UNIT.fullmatch(word) and re.search(r"(^|=)\d+$", before):
            option = f"{typed[index - 2]} " if before.isdigit() and index > 1 else ""
            problems.append(f"write {option}{before}{word[0].upper()}, in one word")
        elif word in stray and type_of(word) is not None and not after.startswith("="):
            problems.append(f"{word} has no value: {word}=…")
    return problems


def sbatch_option(option: str, value: str) -> str | None:
    """What to give for an ``option`` of sbatch, with its dashes and without its ``value``; None if it is not one."""
    name = option.lstrip("-") if option.startswith("--") else SHORT.get(option[1:], "")
    if name in PER_NODE and (count := value.rpartition(":")[2]).isdecimal():
        return f"use --gpus {count} (GPUs of each node)"
    if name in INSTEAD:
        return INSTEAD[name]
    if VALUED.fullmatch(name):
        name = f"{name}={value or '...'}"
    elif not FLAGS.fullmatch(name):
        return None
    return f"it is an option of sbatch: hpclm submit --sbatch {name}"

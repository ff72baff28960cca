"""A run's config.yaml: all settings, resolved, under a first line that names the version of hpclm that wrote it."""

import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from hpclm import __version__
from hpclm.config import reading
from hpclm.config.fields import path_separator
from hpclm.config.reading import Content
from hpclm.config.schema import RunConfig
from hpclm.errors import ConfigError

FIRST = f"# Every setting of a run of hpclm {__version__}, resolved: a site file is not read again for it; ~ and $NAME are expanded in paths.\n"
# older versions did not name themselves
COUNT = "# {} settings\n"
"""The second line, which distinguishes a file that has lost some from one of a version that had fewer."""
_FIRST = re.compile(r"# Every setting of a run(?: of hpclm (\S+))?, resolved:")
_COUNT = re.compile(r"[^\n]*\n# (\d+) settings\n")
_LAST = ("cluster", "verify_every")  # of the files before settings were counted
_EXPANDS = "$NAME"  # earlier versions took ~ and $ in paths for what they are
_FOLLOW = "hpclm evaluate RUN --tasks A,B --follow scores each checkpoint beside the run"
REMOVED: dict[str, tuple[Any, str]] = {
    "checkpoint.files": ("rank", ""),
    "cluster.bind": (False, "srun --cpu-bind and mpirun --bind-to bind processes to cores"),
    "cluster.hang": ("requeue", ""),
    "cluster.slow": (1.5, ""),
    "data.extra_ids": (0, ""),
    "engine.anomaly": (False, "hpclm submit --debug names the operation that made a gradient NaN"),
    "engine.matmul": ("auto", ""),
    "engine.overlap": (True, "set engine.extra.zero_optimization.overlap_comm"),
    "evaluate.tasks": ([], _FOLLOW),
    "evaluate.tasks_every": (0, _FOLLOW),
    **{f"evaluate.tasks_{name}": (None, _FOLLOW) for name in ("path", "samples", "shots")},
    "job.spares": (0, ""),
    "log.style": ("hpclm", ""),
    "optim.nonfinite": ("skip", "to stop at the first step that is not finite, set optim.nonfinite_limit=1"),
    "optim.period_growth": (1.0, ""),
    "optim.period_shrink": (0.1, ""),
    "profile.ranks": ([0], ""),
    "scaler.at_minimum": ("stay", "optim.nonfinite_limit stops a run that overflows at scaler.minimum"),
}
"""Settings that no longer exist, the values with which a config.yaml may still have them (what hpclm does now), and what to do
instead of other values."""
HARMLESS = ("cluster.bind",)
"""Those of them that a settings file may have with any value, since no result depends on them."""
OPTIONS = (
    *("account", "begin", "clusters", "comment", "constraint", "cpus-per-gpu", "dependency", "distribution", "export"),
    *(
        "gpus-per-node",
        "gres",
        "licenses",
        "mail-type",
        "mail-user",
        "mem-per-cpu",
        "mem-per-gpu",
        "nice",
        "priority",
        "qos",
    ),
    *("reservation", "switches", "time-min", "wckey"),
)
"""Options of sbatch with a value that may be written as settings: job.account for job.options.account."""
RENAMED = {
    "cluster.prove": "cluster.self_check",
    "job.name": "job.options.job-name",
    **{f"job.{option.replace('-', '_')}": f"job.options.{option}" for option in OPTIONS},
}
"""Other names of settings: those of earlier versions, and options of sbatch as if they were settings."""
REQUESTS = (
    "job.options.job-name",
    *(f"job.options.{name}" for name in ("account", "constraint", "dependency", "gres", "qos", "reservation")),
)
"""Options of sbatch that run no code, whoever wrote the settings file."""
NAME = "config.yaml"
HISTORY = "config-history"
"""The folder of its earlier versions."""
FORMER: dict[str, tuple[Any, tuple[str, ...]]] = {"data.split_by": ("documents", ("data.prefix", "data.blend"))}
"""What runs did before a setting existed, where that is not its default, and the settings one of which it needs to have an effect."""
BESIDE = ("attempts.jsonl", "jobs.jsonl", "checkpoints.saved")
"""Files next to the config.yaml of a run that has started."""


def is_of_run(file: Path) -> bool:
    """Whether ``file`` is the config.yaml of a run that has started."""
    return file.name == NAME and any((file.parent / name).exists() for name in BESIDE)


def read_settings(path: Path, of_run: bool = False) -> tuple[Content, bool]:
    """The content of a settings file, and whether a run has written it, so that it is complete; ConfigError if it is not YAML.

    ConfigError for a run's config.yaml (``of_run``, or by the files beside it) that has lost a setting, which would silently be
    replaced by the default. A setting that did not exist when the file was written is what runs did then: as a rule, its default.
    """
    of_run = of_run or is_of_run(path)
    way_out = (
        f"a run's config.yaml holds all of its settings. Copy the newest complete version from {path.parent / HISTORY} there, or "
        f"repeat the command of the first attempt (see attempts.jsonl and jobs.jsonl), which writes the file again"
    )
    try:
        content = reading.content(path, "settings file")
    except ConfigError as error:
        raise ConfigError(f"{error}; {way_out}" if of_run else error.problems) from None
    written = _FIRST.match(content.text)
    lacking = _missing(content.tree) if written or of_run else []
    if lacking and not (written and _is_complete(content, written[1])):
        more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
        raise ConfigError(f"{path} lacks {', '.join(lacking[:5])}{more}; {way_out}")
    if written and _EXPANDS not in content.text.partition("\n")[0]:
        content = replace(content, tree=_literal(content.tree))
    if written or of_run:
        content = replace(content, tree=_with_former(content.tree))
    return content, written is not None


def _is_complete(content: Content, version: str | None) -> bool:
    """Whether the config.yaml that hpclm ``version`` wrote still has all of its settings: as many as it says, or, where it does not say,
    the last one."""
    if counted := _COUNT.match(content.text):
        return count(content.tree) >= int(counted[1])
    section, name = _LAST
    return version != __version__ or (content.text.endswith("\n") and name in (content.tree.get(section) or {}))


def count(tree: dict[Any, Any]) -> int:
    """The number of settings in the sections and at the top level of ``tree``."""
    return sum(len(value) if isinstance(value, dict) else 1 for value in tree.values())


def _with_former(tree: dict[Any, Any]) -> dict[Any, Any]:
    """``tree``, with what runs did before a setting existed that it lacks."""

    def section(key: str) -> dict[Any, Any]:
        inner = tree.get(key.partition(".")[0])
        return inner if isinstance(inner, dict) else {}

    def value(key: str) -> Any:
        return section(key).get(key.partition(".")[2])

    for key, (former, needed) in FORMER.items():
        name, _, field = key.partition(".")
        if field not in section(key) and any(map(value, needed)):
            keys = {inner: inner for inner in tree}  # that know their lines
            tree = {**tree, keys[name]: {**section(key), field: former}}
    return tree


def _literal(tree: dict[Any, Any], section: str = "") -> dict[Any, Any]:
    """The settings of a file in whose paths nothing is expanded, as they are read now."""
    literal: dict[Any, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and not section:
            literal[name] = _literal(value, f"{name}.")
        elif path_separator(f"{section}{name}") is None:
            literal[name] = value
        else:
            listed = isinstance(value, list)
            literal[name] = [_unexpanded(part) for part in value] if listed else _unexpanded(value)
    return literal


def _unexpanded(path: Any) -> Any:
    """A path, whose ${ is escaped for OmegaConf already."""
    if not isinstance(path, str):
        return path
    return ("./" if path.startswith("~") else "") + re.sub(r"\$(?=[A-Za-z_])", r"\\$", path)


def is_run(folder: Path) -> bool:
    """Whether ``folder`` is a run directory with its settings."""
    return folder.is_dir() and (folder / NAME).is_file()


def _missing(tree: dict[Any, Any]) -> list[str]:
    """Settings that ``tree`` lacks."""
    lacking, former = [], {name: old.rpartition(".")[2] for old, name in RENAMED.items()}
    for field in fields(RunConfig):
        if not is_dataclass(field.type):
            lacking += [field.name] * (field.name not in tree)
        else:
            section = tree.get(field.name)
            names = section if isinstance(section, dict) else {}
            settings = {f"{field.name}.{inner.name}": inner.name for inner in fields(field.type)}
            lacking += [key for key, name in settings.items() if name not in names and former.get(key) not in names]
    return lacking

"""A run's config.yaml: all settings, resolved, under a first line that names the version of hpclm that wrote it."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hpclm import __version__
from hpclm.config import reading
from hpclm.config.job import JobConfig
from hpclm.config.reading import Content
from hpclm.config.sbatch import OPTIONS
from hpclm.config.schema import RunConfig
from hpclm.errors import ConfigError

FIRST = f"# Every setting of a run of hpclm {__version__}, resolved: a site file is not read again for it; ~ and $NAME are expanded in paths.\n"
COUNT = "# {} settings\n"
"""The second line, which tells a file that has lost some settings from one of a version that had fewer."""
_FIRST = re.compile(r"# Every setting of a run of hpclm \S+, resolved:")
_COUNT = re.compile(r"[^\n]*\n# (\d+) settings\n")
RENAMED = {
    "job.name": "job.options.job-name",
    **{
        f"job.{option.name.replace('-', '_')}": option.key
        for option in OPTIONS.values()
        if not (option.instead or option.flag or hasattr(JobConfig, option.name))
    },
}
"""Options of sbatch as if they were settings: job.account for job.options.account."""
REQUESTS = tuple(option.key for option in OPTIONS.values() if option.harmless)
"""Options of sbatch that run no code, whoever wrote the settings file."""
NAME = "config.yaml"
HISTORY = "config-history"
"""The folder of its earlier versions."""
BESIDE = ("events.jsonl", "checkpoints.saved")
"""Files next to the config.yaml of a run that has started."""


def is_of_run(file: Path) -> bool:
    """Whether ``file`` is the config.yaml of a run that has started."""
    return file.name == NAME and any((file.parent / name).exists() for name in BESIDE)


def read_settings(path: Path, of_run: bool = False) -> tuple[Content, bool]:
    """The content of a settings file, and whether a run has written it, so that it is complete; ConfigError if it is not YAML.

    ConfigError for a run's config.yaml (``of_run``, or by the files beside it) that has lost a setting, which would silently be
    replaced by the default. A setting that did not exist when the file was written has its default.
    """
    of_run = of_run or is_of_run(path)
    way_out = (
        f"a run's config.yaml holds all of its settings. Copy the newest complete version from {path.parent / HISTORY} there, or "
        f"repeat the command of the first attempt (see events.jsonl), which writes the file again"
    )
    try:
        content = reading.content(path, "settings file")
    except ConfigError as error:
        raise ConfigError(f"{error}; {way_out}" if of_run else error.problems) from None
    written = _FIRST.match(content.text)
    lacking = _missing(content.tree) if written or of_run else []
    counted = _COUNT.match(content.text)
    if lacking and not (counted and count(content.tree) >= int(counted[1]) and content.text.endswith("\n")):
        more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
        raise ConfigError(f"{path} lacks {', '.join(lacking[:5])}{more}; {way_out}")
    return content, written is not None


def count(tree: dict[Any, Any]) -> int:
    """The number of settings in the sections and at the top level of ``tree``."""
    return sum(len(value) if isinstance(value, dict) else 1 for value in tree.values())


def is_run(folder: Path) -> bool:
    """Whether ``folder`` is a run directory with its settings."""
    return folder.is_dir() and (folder / NAME).is_file()


def _missing(tree: dict[Any, Any]) -> list[str]:
    """Settings that ``tree`` lacks."""
    lacking = []
    for field in fields(RunConfig):
        if not is_dataclass(field.type):
            lacking += [field.name] * (field.name not in tree)
        else:
            section = tree.get(field.name)
            names = section if isinstance(section, dict) else {}
            lacking += [f"{field.name}.{inner.name}" for inner in fields(field.type) if inner.name not in names]
    return lacking

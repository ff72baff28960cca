"""A run's config.yaml: all settings, resolved, under a first line that names the version of hpclm that wrote it."""

import re
from pathlib import Path

from hpclm import __version__
from hpclm.base.errors import ConfigError
from hpclm.config import reading
from hpclm.config.fields import keys, split_key
from hpclm.config.reading import Content
from hpclm.config.sbatch import OPTIONS
from hpclm.config.settings import Setting, of_file

FIRST = f"# Every setting of a run of hpclm {__version__}, resolved: a site file is not read again for it; ~ and $NAME are expanded in paths.\n"
COUNT = "# {} settings\n"
"""The second line, which tells a file that has lost some settings from one of a version that had fewer."""
_FIRST = re.compile(r"# Every setting of a run of hpclm \S+, resolved:")
_COUNT = re.compile(r"[^\n]*\n# (\d+) settings\n")
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


def read_settings(path: Path, problems: list[str], of_run: bool = False) -> tuple[list[Setting], Content, bool]:
    """The settings of a file, its content, and whether a run has written it, so that it is complete; ConfigError if it is not YAML.

    Keys that appear twice and the like are added to ``problems``. ConfigError for a run's config.yaml (``of_run``, or by
    the files beside it) that has lost a setting, which would silently be replaced by the default. A setting that did not exist
    when the file was written has its default.
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
    settings = of_file(content, problems)
    written = _FIRST.match(content.text)
    present = {split_key(setting.key)[0] for setting in settings}
    lacking = [key for key in keys() if key not in present] if written or of_run else []
    counted = _COUNT.match(content.text)
    if lacking and not (counted and len(present) >= int(counted[1]) and content.text.endswith("\n")):
        more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
        raise ConfigError(f"{path} lacks {', '.join(lacking[:5])}{more}; {way_out}")
    return settings, content, written is not None


def is_run(folder: Path) -> bool:
    """Whether ``folder`` is a run directory with its settings."""
    return folder.is_dir() and (folder / NAME).is_file()

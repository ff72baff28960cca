"""A run's config.yaml: all settings, resolved. Its first line names the version of hpclm that wrote it."""

import re
from pathlib import Path

from hpclm import __version__
from hpclm.base.errors import ConfigError
from hpclm.config import reading
from hpclm.config.fields import keys, split_key
from hpclm.config.reading import Content
from hpclm.config.sbatch import OPTIONS
from hpclm.config.settings import Setting, of_file

FIRST = f"# Every setting of a run of hpclm {__version__}, resolved: site files are already applied, and not read again; ~ and $NAME are expanded in paths.\n"
COUNT = "# {} settings\n"
"""The second line. It distinguishes a file that has lost settings from a file of a version with fewer settings."""
_FIRST = re.compile(r"# Every setting of a run of hpclm \S+, resolved:")
_COUNT = re.compile(r"[^\n]*\n# (\d+) settings\n")
REQUESTS = tuple(option.key for option in OPTIONS.values() if option.harmless)
"""Options of sbatch that cannot run code. A settings file that other users can write may set them."""
NAME = "config.yaml"
HISTORY = "config-history"
"""The folder with earlier versions of config.yaml."""
BESIDE = ("events.jsonl", "checkpoints.saved")
"""Files next to the config.yaml of a run that has started."""


def is_of_run(file: Path) -> bool:
    """Whether ``file`` is the config.yaml of a run that has started."""
    return file.name == NAME and any((file.parent / name).exists() for name in BESIDE)


def read_settings(path: Path, problems: list[str], of_run: bool = False) -> tuple[list[Setting], Content, bool]:
    """The settings of a file, its content, and whether a run has written it, which makes it complete.

    ConfigError if the file is not YAML. ``problems`` gets repeated keys and other mistakes. ``of_run``: whether the file is a run's
    config.yaml; otherwise the files beside it decide. ConfigError if a run's config.yaml has lost a setting, which would silently get
    its default. Settings that are newer than the file get their defaults.
    """
    of_run = of_run or is_of_run(path)
    way_out = (
        f"a run's config.yaml holds all of its settings. Copy the newest complete version from {path.parent / HISTORY} there, or "
        f"repeat the command of the first attempt (see events.jsonl), which writes the file again"
    )
    try:
        content = reading.content(path, "settings file")
    except ConfigError as error:
        if not of_run:
            raise
        raise ConfigError(f"{error}; {way_out}") from None
    settings = of_file(content, problems)
    written = _FIRST.match(content.text)
    present = {split_key(setting.key)[0] for setting in settings}
    lacking = [key for key in keys() if key not in present]
    counted = _COUNT.match(content.text)
    is_whole = counted and len(present) >= int(counted[1]) and content.text.endswith("\n")
    if lacking and not is_whole and (written or of_run):
        more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""
        raise ConfigError(f"{path} lacks {', '.join(lacking[:5])}{more}; {way_out}")
    return settings, content, written is not None


def is_run(folder: Path) -> bool:
    """Whether ``folder`` has a config.yaml, as every run directory does."""
    return folder.is_dir() and (folder / NAME).is_file()

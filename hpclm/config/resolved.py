"""A run's config.yaml: all settings, between a first and a last line that show that the file is complete."""

import hashlib
import re
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hpclm import files
from hpclm.config import reading
from hpclm.config.reading import Content
from hpclm.config.schema import RunConfig
from hpclm.errors import ConfigError

FIRST_OF_OLD = "# Every setting of a run, resolved: a site file is not read again for this one.\n"
FIRST = FIRST_OF_OLD.replace(".\n", ". The last line counts them.\n")
LAST = re.compile(r"^# End of the (\d{1,6}) settings\.\n", re.MULTILINE)
NAMES_OF_OLD = "e5e09dcf0a571d49a3332685cf3dc68b"
"""blake2b of the names of all settings in a config.yaml of the last version that wrote no last line."""
REMOVED = {"checkpoint.files": "rank", "job.spares": 0, "log.style": "hpclm"}
"""Settings that no longer exist, and the values with which a config.yaml may still have them: what hpclm does now."""
NAME = "config.yaml"
HISTORY = "config-history"
"""The folder of its earlier versions."""
BESIDE = ("attempts.jsonl", "jobs.jsonl", "checkpoints.saved")
"""Files next to the config.yaml of a run that has started."""


def framed(tree: dict[str, Any], text: str) -> str:
    """``text``, the YAML of ``tree``, with first and last line."""
    return f"{FIRST}{text}# End of the {_count(tree)} settings.\n"


def content(path: Path) -> Content:
    """The content of a settings file; ConfigError if it is not YAML, and for a run's config.yaml with what to do about that."""
    try:
        return reading.content(path, "settings file")
    except ConfigError as error:
        raise ConfigError(f"{error}; {way_out(path)}" if _of_run(path) else error.problems) from None


def is_whole(path: Path, content: Content) -> bool:
    """True for a run's complete config.yaml, False for any other settings file.

    ConfigError for an incomplete config.yaml: missing settings would silently be replaced by defaults.
    """
    if not content.text.startswith((FIRST, FIRST_OF_OLD)):
        cut = content.text != "" and FIRST.startswith(content.text)
        if cut or (_of_run(path) and missing(content.tree)):
            raise ConfigError(f"{path} is truncated, or was not written by hpclm; {way_out(path)}")
        return False
    if last := LAST.search(content.text):
        lost, some = int(last[1]) - _count(content.tree), missing(content.tree)[:5]
        if lost > 0:
            named = f", such as {', '.join(some)}" if some else ""
            raise ConfigError(f"{path} lacks {lost} of its {last[1]} settings{named}; {way_out(path)}")
    elif content.text.startswith(FIRST) or not content.text.endswith("\n") or _digest(content.tree) != NAMES_OF_OLD:
        raise ConfigError(f"{path} is truncated: its last lines are missing; {way_out(path)}")
    return True


def way_out(path: Path) -> str:
    """What to do about an incomplete config.yaml."""
    kept = _newest_kept(path.parent / HISTORY)
    copy = f" (the last one that was used or replaced is {kept}: copy it there)" if kept else ""
    return (
        f"otherwise the run would continue with defaults for missing settings. Restore the file{copy}, or repeat the command of the "
        f"first attempt (see attempts.jsonl and jobs.jsonl in {path.parent}), which writes it again"
    )


def _newest_kept(folder: Path) -> Path | None:
    """The newest whole version of a config.yaml in its history; None without one."""
    with suppress(OSError):
        for version in sorted(folder.glob("*.yaml"), reverse=True):
            text = files.read_text(version, errors="replace")
            if text.startswith((FIRST, FIRST_OF_OLD)) and LAST.search(text):
                return version
    return None


def is_run(folder: Path) -> bool:
    """Whether ``folder`` is a run directory with its settings."""
    return folder.is_dir() and (folder / NAME).is_file()


def _of_run(path: Path) -> bool:
    """Whether it is the config.yaml of a run that has started."""
    return path.name == NAME and any((path.parent / name).exists() for name in BESIDE)


def missing(tree: dict[Any, Any]) -> list[str]:
    """Settings that ``tree`` lacks."""
    found = []
    for field in fields(RunConfig):
        if not is_dataclass(field.type):
            found += [field.name] * (field.name not in tree)
        else:
            held = tree.get(field.name)
            inner = held if isinstance(held, dict) else {}
            found += [f"{field.name}.{each.name}" for each in fields(field.type) if each.name not in inner]
    return found


def _count(tree: dict[Any, Any]) -> int:
    return len(_names(tree))


def _digest(tree: dict[Any, Any]) -> str:
    return hashlib.blake2b("\n".join(sorted(_names(tree))).encode(), digest_size=16).hexdigest()


def _names(tree: dict[Any, Any]) -> list[str]:
    """The settings that ``tree`` holds."""
    sections = {field.name for field in fields(RunConfig) if is_dataclass(field.type)}
    found = []
    for key, value in tree.items():
        inner = key in sections and isinstance(value, dict)
        found += [f"{key}.{name}" for name in value] if inner else [str(key)]
    return found

"""Read settings from layers: defaults, a site file, a settings file, key=value words. One RunConfig, or every problem at once.

Later layers override earlier ones, key by key. Mappings (job.env, job.options) are merged name by name; {} empties them.
"""

import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from hpclm import files, shipped
from hpclm.config import length, reading, resolved
from hpclm.config.assign import Assignment, Unreadable, build, literal
from hpclm.config.fields import as_yaml, required, type_of
from hpclm.config.job import TEMPLATES
from hpclm.config.schema import RunConfig
from hpclm.config.words import mistakes
from hpclm.errors import ConfigError

SITE_SECTIONS = ("job", "cluster")
NAMES_CODE = ("model.block", "data.source", "data.tokenizer", "optim.schedule", "engine.name", "log.sinks")
"""Settings that may name a user's own class or function, as module:name."""
RUNS_CODE = ("setup", "env", "options", "template", "venv", "conda", "modules", "container", "mounts", "hostfile")
"""Settings of job that determine which programs run."""


def from_cli(words: list[str], site: Path | None = None, typed: Sequence[str] = ()) -> RunConfig:
    """The settings of ``[FILE] key=value ...``, on top of those of the file ``site``; or ConfigError.

    ``typed``: the whole command line, if there is more to it, to say what a stray word was meant to be.
    """
    overrides = [word for word in words if is_override(word)]
    paths = [word for word in words if not is_override(word)]
    strange = [path for path in paths if not Path(path).exists()]
    if strange and (wrong := [*mistakes(strange, typed or words)]):
        raise ConfigError(wrong)
    if len(paths) > 1:
        raise ConfigError(f"give one settings file, not {len(paths)}: {', '.join(paths)}")
    return load(paths[0] if paths else None, overrides, site)


def load(
    path: str | Path | None = None, overrides: list[str] | tuple[str, ...] = (), site: Path | None = None
) -> RunConfig:
    """The settings of the file ``path``, or of the run in that folder, with ``overrides`` ("key=value") on top; or ConfigError.

    ``site`` is a file of job and cluster settings below them. It is not read if ``path`` is a run's config.yaml, which already
    includes it. A settings file that others can write may not name code.
    """
    problems: list[str] = []
    assignments: list[Assignment] = []
    whole = False
    given = _parsed(overrides, problems)
    run = path if path is not None and resolved.is_run(Path(path)) else None
    if path is not None:
        path = files.readable(_existing(path), "settings file")
        content = resolved.content(path)
        whole = resolved.is_whole(path, content)
        assignments += _leaves(content, path)
        if run is not None:  # which may have been moved
            assignments.append(("out", literal(str(run)), "command line"))
        problems += _untrusted(assignments + given, path, content.exposed)
    if site is not None and not whole:
        assignments = _from_site(site, problems) + assignments
    config = build(assignments + given, problems)
    if not whole and not (path is not None and _tries(given)):
        _refuse_short(config)
    return config


def _tries(given: list[Assignment]) -> bool:
    """Whether a command line sets only a budget, as to try a file's settings for some steps: that is worth no more than a warning."""
    named = {key for key, _, _ in given}
    return any(key.startswith("budget.") for key in named) and not named & {"optim.warmup", "optim.wsd_decay"}


def _refuse_short(run: RunConfig) -> None:
    """ConfigError if the budget is too short for the warm-up or wsd's decay that is given with it."""
    short = length.planned_inside_warmup(run)
    if short and run.optim.schedule_length is None:
        raise ConfigError(f"{short}; shorten the warm-up, or extend the budget. To stop early once, set stop_at")


def of_run(folder: Path, overrides: list[str]) -> RunConfig:
    """The settings of the run in ``folder`` with ``overrides`` on top, without its job settings: for verbs that only read its
    model. ConfigError if it is not a run directory."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{folder} is not a run directory: {_lacks(folder)}")
    problems: list[str] = []
    content = resolved.content(path)
    if not resolved.is_whole(path, content) and resolved.missing(content.tree):
        raise ConfigError(f"{path} was not written by hpclm as a run's config.yaml; {resolved.way_out(path)}")
    assignments = [entry for entry in _leaves(content, path) if not entry[0].startswith("job.")]
    assignments += _parsed(overrides, problems)
    problems += _untrusted(assignments, path, content.exposed)
    return build(assignments, problems)


def _lacks(folder: Path) -> str:
    """Why ``folder``, without a config.yaml, is none."""
    if folder.is_dir():
        return "it has no config.yaml"
    return "it is a file" if folder.exists() else f"it does not exist; looked in {Path.cwd()}"


def flat_of_run(folder: Path) -> dict[str, Any]:
    """The settings of the run in ``folder`` as section.name: value, as they stand in its config.yaml; ConfigError without it."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{folder} is not a run directory: {_lacks(folder)}")
    return {key: value for key, value, _ in _leaves(resolved.content(path), path)}


def dump(config: RunConfig, path: Path) -> None:
    """Write all of ``config`` to ``path`` as YAML for ``load``, atomically."""
    files.write_text(path, dumped(config))


def dumped(config: RunConfig) -> str:
    """The text that ``dump`` writes."""
    tree = {key: value if key == "job" else literal(value) for key, value in asdict(config).items()}
    tree["batch"]["micro_size"] = config.batch.micro_size or "auto"
    return resolved.framed(tree, "".join(_lines(tree)))


def _lines(tree: dict[str, Any]) -> Iterator[str]:
    """All settings, each on one line, so that a lost line is a lost setting, which is noticed."""
    for name, value in tree.items():
        if is_dataclass(type_of(name)):
            yield f"{name}:\n"
            yield from (f"  {key}: {as_yaml(inner)}\n" for key, inner in value.items())
        else:
            yield f"{name}: {as_yaml(value)}\n"


def is_override(word: str) -> bool:
    """Whether a command-line word is key=value rather than a file name."""
    return re.match(r"[A-Za-z_][\w.-]*\s*=", word) is not None


def named(words: list[str]) -> list[str]:
    """The settings that the key=value words of a command line set."""
    return [key for key, _, _ in _parsed([word for word in words if is_override(word)], [])]


def _parsed(overrides: list[str] | tuple[str, ...], problems: list[str]) -> list[Assignment]:
    """The assignments of key=value words."""
    found: list[Assignment] = []
    for word in overrides:
        key, sign, text = word.partition("=")
        if sign:
            found += _flat(key.strip(), _value(key.strip(), text), "command line")
        else:
            problems.append(f"{word!r} is not key=value")
    return found


def _value(key: str, text: str) -> Any:
    """The value of a key=value word: verbatim for text settings, YAML for all others."""
    wanted = type_of(key)
    if wanted is str or (required(wanted) is str and text not in ("null", "")):
        return text
    try:
        value = reading.value(text)
    except yaml.constructor.ConstructorError as error:  # what reading.Loader forbids
        return Unreadable(text, f": {error.problem}")
    except yaml.YAMLError:
        return Unreadable(text, "")
    return [str(v) for v in value] if wanted == list[str] and isinstance(value, list) else value


def _existing(path: str | Path) -> str | Path:
    """``path``, or if there is no such file the preset of that name, which may be written with or without configs/ and .yaml."""
    presets, wanted = shipped.folder("configs"), Path(path)
    if resolved.is_run(wanted):
        return wanted / resolved.NAME
    if (wanted.exists() and not wanted.is_dir()) or not presets.is_dir():
        return path
    named = len(wanted.parts) == 1 or (len(wanted.parts) == 2 and wanted.parts[0] == "configs")
    for candidate in (presets / wanted.name, presets / f"{wanted.name}.yaml"):
        if named and candidate.is_file():
            return candidate
    if wanted.exists():
        return path
    names = sorted(p.name for p in presets.glob("*.yaml"))
    meant = {}
    with suppress(OSError):
        meant = {each.stem: str(each) for each in wanted.parent.glob("*.yaml")}
    meant |= {Path(name).stem: name for name in names}
    near = [meant[stem] for stem in get_close_matches(wanted.stem, meant, n=1)]
    suggestion = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"settings file {path} does not exist; configs/ has {', '.join(names)}.{suggestion}")


def _from_site(path: Path, problems: list[str]) -> list[Assignment]:
    content = reading.content(files.readable(path, "site file"), "site file")
    if path.stat().st_mode & stat.S_IWOTH:  # the site's administrators, or a group, may own and write it
        problems.append(f"site file {path} is writable by everyone, so anyone could run code in your name; chmod o-w")
    found = []
    for key, value, origin in _leaves(content, path):
        section = key.split(".")[0]
        if section in SITE_SECTIONS or type_of(section) is None:
            found.append((key, value, origin))
        else:
            problems.append(f"{key} cannot be set in a site file, only {' and '.join(SITE_SECTIONS)} ({origin})")
    return found


def _leaves(content: reading.Content, path: Path) -> list[Assignment]:
    found = [entry for key, value in content.tree.items() for entry in _flat(str(key), value, str(path))]
    return [entry for entry in found if resolved.REMOVED.get(entry[0], entry) != entry[1]]


def _flat(key: str, value: Any, origin: str) -> Iterator[Assignment]:
    """The settings in a nested mapping; a mapping that is the value of one field is kept whole."""
    wanted = type_of(key)
    section = wanted is None or is_dataclass(wanted)
    if isinstance(value, dict) and section and (value or wanted is not None):
        for name, inner in value.items():
            yield from _flat(f"{key}.{name}", inner, origin)
    else:
        yield key, value, origin


def _untrusted(assignments: list[Assignment], path: Path, exposed: str | None) -> Iterator[str]:
    """Settings that name code and come from the file ``path``, if others could have written it (``exposed`` says how)."""
    last = {entry[0]: entry for entry in assignments}
    for key, value, origin in last.values() if exposed else ():
        if origin == str(path) and _names_code(key, value):
            yield (
                f"{key}={value!r} in {path} would run code in your name, and {exposed}. Once you know that code, give the "
                "setting on the command line, or copy the file to one of your own"
            )


def _names_code(key: str, value: Any) -> bool:
    if key == "evaluate.tasks_path":  # a task file may name Python functions
        return bool(value)
    if key in NAMES_CODE:
        names = value if isinstance(value, list) else [value]  # ${...} may insert another setting's value
        return any(isinstance(name, str) and (":" in name or "${" in name) for name in names)
    section, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    return section == "job" and name in RUNS_CODE and bool(value) and not (name == "template" and value in TEMPLATES)

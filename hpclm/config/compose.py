"""Read settings from layers: defaults, a site file, a settings file, key=value arguments. One RunConfig, or every problem at once.

Later layers override earlier ones, key by key. Mappings (job.env, job.options) are merged name by name; {} empties them.
"""

import logging
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, is_dataclass
from difflib import get_close_matches
from os.path import lexists
from pathlib import Path
from typing import Any

import yaml

from hpclm import files, folders, own_code, paths, shipped
from hpclm.config import length, reading, run_file
from hpclm.config.fields import as_yaml, path_separator, required, type_of
from hpclm.config.hints import mistakes
from hpclm.config.merge import Setting, literal, merge, shown_setting
from hpclm.config.schema import RunConfig
from hpclm.errors import ConfigError

log = logging.getLogger(__name__)

SITE_SECTIONS = ("job", "cluster")
LENGTHS = ("budget.steps", "budget.samples", "budget.tokens", "budget.epochs")
NAMES_CODE = (
    "model.block",
    "data.source",
    "data.tokenizer",
    "optim.name",
    "optim.schedule",
    "engine.name",
    "log.sinks",
    "job.cluster",
)
"""Settings that may name a user's own class or function, as module:name."""
RUNS_CODE = ("setup", "env", "options", "venv", "conda", "modules", "container", "mounts", "hostfile")
"""Settings of job that determine which programs run."""


def from_cli(arguments: list[str], site: Path | None = None, typed: Sequence[str] = ()) -> RunConfig:
    """The settings of ``[FILE] key=value ...``, on top of those of the file ``site``; or ConfigError.

    ``typed``: the whole command line, if there is more to it, to say what a stray word was meant to be.
    """
    overrides = [word for word in arguments if is_override(word)]
    named = [paths.expanded(word) for word in arguments if not is_override(word)]
    absent = [path for path in named if not Path(path).exists()]
    if absent and (wrong := mistakes(absent, typed or arguments)):
        raise ConfigError(wrong)
    if len(named) > 1:
        raise ConfigError(f"give one settings file, not {len(named)}: {', '.join(named)}; changes are key=value")
    run = load(named[0] if named else None, overrides, site)
    if named and not any(key.strip() == "out" for key, _, _ in (word.partition("=") for word in overrides)):
        _refuse_moved(Path(named[0]), run.out)
    return run


def load(path: str | Path | None = None, overrides: Sequence[str] = (), site: Path | None = None) -> RunConfig:
    """The settings of the file ``path``, or of the run in that folder, with ``overrides`` ("key=value") on top; or ConfigError.

    ``site`` is a file of job and cluster settings below them. It is not read if ``path`` is a run's config.yaml, which already
    includes it. A settings file that others can write may not name code.
    """
    problems: list[str] = []
    settings: list[Setting] = []
    given = _parsed(overrides, problems)
    resolved = False
    if path is not None:
        file = files.readable(_settings_file(path), "settings file")
        content, resolved = run_file.read_settings(file)
        settings = _leaves(content, file)
        if run_file.is_run(Path(path)):  # which may have been moved
            settings.append(Setting("out", paths.literal(path), "command line"))
        problems += _untrusted(settings + given, file, content.exposed)
    if site is not None and not resolved:
        settings = _from_site(site, problems) + settings
    run = merge(_without_other_lengths(settings, given) + given, problems)
    names = {setting.key for setting in given}
    # a budget on the command line tries a file's settings for some steps: worth no more than a warning
    tries = any(key.startswith("budget.") for key in names) and not names & {"optim.warmup", "optim.wsd_decay"}
    # lexists: of a folder that cannot be read, the start says so
    if not resolved and not (path is not None and tries) and not lexists(Path(run.out) / run_file.NAME):
        short = length.inside_warmup(run, length.run_length(run, None))
        if short and run.optim.schedule_length is None:
            raise ConfigError(f"{short}; shorten the warm-up, or extend the budget. To stop early once, set stop_at")
    return run


def _refuse_moved(file: Path, out: str) -> None:
    """ConfigError if ``file`` is the config.yaml of a run that has been moved or copied since, so that ``out`` is another folder."""
    folder = file.absolute().parent
    if not run_file.is_of_run(file) or Path(out).resolve() == folder.resolve():
        return
    raise ConfigError(
        f"{file} belongs to the run in {folder}, but its out={out} is {Path(out).absolute()}: the run has been moved or copied, or out is "
        f"relative to another folder. Give the folder, {paths.literal(folder)}, in place of its config.yaml to continue this run, or "
        f"out=... to train elsewhere"
    )


def changed(run: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """``run`` with ``overrides`` ("key=value") on top; or ConfigError."""
    problems: list[str] = []
    settings = [setting for key, value in tree(run).items() for setting in _flat(key, value, "settings")]
    given = _parsed(overrides, problems)
    return merge(_without_other_lengths(settings, given) + given, problems)


def _without_other_lengths(inherited: list[Setting], given: list[Setting]) -> list[Setting]:
    """``inherited``, without its length of training if ``given`` has one in any unit."""
    typed = any(setting.key in LENGTHS and setting.value is not None for setting in given)
    return [setting for setting in inherited if not (typed and setting.key in LENGTHS)]


def of_run(folder: Path, overrides: Sequence[str], version: str = run_file.NAME) -> RunConfig:
    """The settings of the run in ``folder`` with ``overrides`` on top, without its job settings: for verbs that only read its
    model, as they stand in ``version`` of its config.yaml. ConfigError if it is not a run directory."""
    path, content = _of_folder(folder, version)
    problems: list[str] = []
    settings = [setting for setting in _leaves(content, path) if not setting.key.startswith("job.")]
    settings += _parsed(overrides, problems)
    problems += _untrusted(settings, path, content.exposed)
    return merge(settings, problems)


def flat_of_run(folder: Path, version: str = run_file.NAME) -> dict[str, Any]:
    """The settings of the run in ``folder`` as section.name: value, as they stand in ``version`` of its config.yaml; ConfigError
    without it."""
    path, content = _of_folder(folder, version)
    return {setting.key: reading.plain(setting.value) for setting in _leaves(content, path)}


def _of_folder(folder: Path, version: str = run_file.NAME) -> tuple[Path, reading.Content]:
    """A run's config.yaml and its content; ConfigError if ``folder`` is not a run directory."""
    path = folder / version
    if not path.is_file():
        reason = "it is a file" if folder.exists() else f"it does not exist; looked in {Path.cwd()}"
        reason = "it has no config.yaml" if folder.is_dir() else reason
        raise ConfigError(f"{folder} is not a run directory: {folders.exported_model(folder) or reason}")
    return path, run_file.read_settings(path, of_run=True)[0]


def missing_code(run: RunConfig) -> list[str]:
    """What settings name of the user's own code and does not exist, as far as that is known before it is imported."""
    problems: list[str] = []
    for key in NAMES_CODE:
        section, _, field = key.partition(".")
        value = getattr(getattr(run, section), field)
        for name in value if isinstance(value, list) else [value]:
            problems += filter(None, [own_code.missing(key, name or "")])
    return problems


def dump(config: RunConfig, path: Path) -> None:
    """Write all of ``config`` to ``path`` as YAML for ``load``, atomically."""
    files.write_text(path, dumped(config))


def dumped(config: RunConfig) -> str:
    """The text that ``dump`` writes, a line for each setting."""
    settings = tree(config)
    lines = [run_file.FIRST, run_file.COUNT.format(run_file.count(settings))]
    for name, value in settings.items():
        if is_dataclass(type_of(name)):
            lines += [f"{name}:\n", *(f"  {key}: {as_yaml(inner)}\n" for key, inner in value.items())]
        else:
            lines.append(f"{name}: {as_yaml(value)}\n")
    return "".join(lines)


def tree(config: RunConfig) -> dict[str, Any]:
    """The settings as they are written in a file."""
    tree = {
        name: {key: _as_read(f"{name}.{key}", inner) for key, inner in value.items()}
        if isinstance(value, dict)
        else _as_read(name, value)
        for name, value in asdict(config).items()
    }
    tree["batch"]["micro_size"] = config.batch.micro_size or "auto"
    return tree


def _as_read(key: str, value: Any) -> Any:
    """The value of a setting as text that is read as it."""
    if path_separator(key) is None:
        return value if key.startswith("job.") else literal(value)
    return [_as_read(key, part) for part in value] if isinstance(value, list) else value and paths.literal(value)


def is_override(word: str) -> bool:
    """Whether a command-line word is key=value rather than a file name."""
    return re.match(r"[A-Za-z_][\w.-]*\s*=", word) is not None


def named(arguments: list[str]) -> list[str]:
    """The settings that the key=value arguments of a command line set."""
    return [setting.key for setting in _parsed([word for word in arguments if is_override(word)], [])]


def _parsed(overrides: Sequence[str], problems: list[str]) -> list[Setting]:
    """The settings of key=value arguments; what is wrong with others is added to ``problems``."""
    settings: list[Setting] = []
    for word in overrides:
        key, sign, text = word.partition("=")
        typed, key = key.strip(), run_file.RENAMED.get(key.strip(), key.strip())
        if not sign:
            problems.append(f"{word!r} is not key=value")
            continue
        try:
            settings_of_word = _renamed(_flat(key, _value(key, text), "command line"))
            if typed != key:
                settings_of_word = [setting._replace(typed=typed) for setting in settings_of_word]
            problems += [f"{problem} (command line)" for problem in _repeated(settings_of_word)]
            settings += settings_of_word
        except yaml.YAMLError as error:
            reason = f": {error.problem}" if isinstance(error, yaml.constructor.ConstructorError) else ""
            without_value = shown_setting(key, text) == key
            problems.append(
                f"{shown_setting(key, text)} is not a YAML value{'' if without_value else reason} (command line)"
            )
    return settings


def _value(key: str, text: str) -> Any:
    """The value of a key=value word: verbatim for text settings, YAML for all others."""
    kind = type_of(key)
    if kind is str or (required(kind) is str and text not in ("null", "")):
        return text
    return reading.typed(text)


def _settings_file(path: str | Path) -> Path:
    """``path``, or if there is no such file the preset of that name, which may be written with or without configs/ and .yaml."""
    presets, file = shipped.presets(), Path(path)
    if run_file.is_run(file):
        return file / run_file.NAME
    if file.exists() and not file.is_dir():
        return file
    name = file.as_posix().removeprefix("configs/").removesuffix(".yaml")
    if name in presets:
        return presets[name]
    if model := folders.exported_model(file):
        raise ConfigError(f"{file} is not a run directory: {model}")
    if file.exists():
        return file
    beside = {other.stem: str(other) for other in file.parent.glob("*.yaml")} if file.parent.is_dir() else {}
    candidates = beside | {preset.rpartition("/")[2]: preset for preset in presets}
    near = [candidates[stem] for stem in get_close_matches(file.stem, candidates, n=1)]
    runs = {str(run.relative_to("runs")): str(run) for run in Path("runs").glob("*") if run_file.is_run(run)}
    near = near or [runs[name] for name in get_close_matches(name, runs, n=1)]
    near = [str(run) for run in [Path("runs", path)] if run_file.is_run(run)] or near
    suggestion = f". Did you mean {near[0]!r}?" if near else "."
    raise ConfigError(
        f"{path} does not exist: no settings file, run directory or preset has this name{suggestion} Presets are {', '.join(presets)}"
    )


def _from_site(path: Path, problems: list[str]) -> list[Setting]:
    """The settings of a site file, which may only describe the cluster."""
    content = reading.content(files.readable(path, "site file"), "site file")
    if path.stat().st_mode & stat.S_IWOTH:  # the site's administrators, or a group, may own and write it
        problems.append(f"site file {path} is writable by everyone, so anyone could run code in your name; chmod o-w")
    allowed = []
    for setting in _leaves(content, path):
        section = setting.key.split(".")[0]
        if section in SITE_SECTIONS or type_of(section) is None:
            allowed.append(setting)
        else:
            problems.append(f"{setting.key} cannot be set in a site file, only {' and '.join(SITE_SECTIONS)} ({path})")
    return allowed


def _leaves(content: reading.Content, path: Path) -> list[Setting]:
    """The settings of a file; ConfigError for one that it has twice."""
    leaves = _renamed(
        setting for key, value in content.tree.items() for setting in _flat(key, value, str(path), key.line)
    )
    if repeated := list(_repeated(leaves)):
        raise ConfigError(f"{problem} ({path})" for problem in repeated)
    return leaves


def _repeated(settings: Iterable[Setting]) -> Iterator[str]:
    """A problem for every setting that one file has twice, such as model.layers beside model: {layers: ...}."""
    before: dict[str, tuple[int, str]] = {}
    for setting in settings:
        for key, line in _lines(setting.key, setting.value, setting.line or 0):
            typed = setting.typed or key
            if key in before:
                first, name = before[key]
                names = f", as {name} and as {typed}" if name != typed else f", as {typed}" if typed != key else ""
                yield f"{key} is set twice{names}{reading.in_lines(first, line)}; leave one out"
            before[key] = line, typed


def _lines(key: str, value: Any, line: int) -> Iterator[tuple[str, int]]:
    """The dotted key and the line of every entry of a setting that is a mapping, or else of the setting."""
    if not isinstance(value, dict) or not value:
        yield key, line
        return
    for name, inner in value.items():
        yield from _lines(f"{key}.{name}", inner, name.line)


def _renamed(settings: Iterable[Setting]) -> list[Setting]:
    """The settings, options of sbatch by their place in job.options and last, since a mapping that they are in may be emptied first."""
    settings = list(settings)
    renamed = [setting for setting in settings if setting.key in run_file.RENAMED and setting.value is not None]
    return [setting for setting in settings if setting.key not in run_file.RENAMED] + [
        setting._replace(key=run_file.RENAMED[setting.key], typed=setting.key) for setting in renamed
    ]


def _flat(key: str, value: Any, origin: str, line: int | None = None) -> Iterator[Setting]:
    """The settings in a nested mapping; a mapping that is the value of one field is kept whole. ``line``: of the file."""
    kind = type_of(key)
    section = kind is None or is_dataclass(kind)
    if isinstance(value, dict) and section and (value or kind is not None):
        for name, inner in value.items():
            yield from _flat(f"{key}.{name}", inner, origin, getattr(name, "line", None))
    else:
        yield Setting(key, value, origin, line)


def _untrusted(settings: list[Setting], path: Path, exposed: str | None) -> Iterator[str]:
    """Settings that name code and come from the file ``path``, if others could have written it (``exposed`` says how)."""
    last = {setting.key: setting for setting in settings}
    for key, value, origin, *_ in last.values() if exposed else ():
        if origin == str(path) and _names_code(key, value):
            yield (
                f"{key}={value!r} in {path} would run code in your name, and {exposed}. Once you know that code, give the "
                "setting on the command line, or copy the file to one of your own"
            )


def _names_code(key: str, value: Any) -> bool:
    """Whether a setting determines which code or which program runs."""
    if key in NAMES_CODE:
        names = value if isinstance(value, list) else [value]  # ${...} may insert another setting's value
        return any(isinstance(name, str) and (":" in name or "${" in name) for name in names)
    if key in run_file.REQUESTS:
        return False
    section, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    return section == "job" and name in RUNS_CODE and bool(value)

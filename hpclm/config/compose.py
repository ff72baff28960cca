"""Read settings from layers: defaults, a site file, a settings file, key=value arguments. One RunConfig, or every problem at once.

Later layers override earlier ones, key by key. Mappings (job.env, job.options) are merged name by name; {} empties them.
"""

import stat
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from operator import attrgetter
from os.path import lexists
from pathlib import Path
from typing import Any

import yaml

from hpclm.base import files, folders, own_code, paths, shipped
from hpclm.base.errors import ConfigError
from hpclm.config import length, reading, run_file
from hpclm.config.fields import as_yaml, keys, nested, path_separator, split_key, type_of
from hpclm.config.hints import mistakes
from hpclm.config.job import JobConfig
from hpclm.config.merge import inserts_settings, literal, merge
from hpclm.config.schema import RunConfig
from hpclm.config.section import all_fields, leaves
from hpclm.config.setting import declared
from hpclm.config.settings import Setting, is_override, of_file, of_words

SITE_SECTIONS = ("job", "cluster")
LENGTHS = ("budget.steps", "budget.samples", "budget.tokens", "budget.epochs")
NAMES_CODE = tuple(key for key, entry in all_fields(RunConfig) if declared(entry).names is not None)
"""Settings that may name a user's own class or function, as module:name."""
RUNS_CODE = tuple(entry.name for _, entry in all_fields(JobConfig) if declared(entry).runs_code)
"""Settings of job that determine which programs run."""


def from_cli(arguments: list[str], site: Path | None = None, typed: Sequence[str] = ()) -> RunConfig:
    """The settings of ``[FILE] key=value ...``, on top of those of the file ``site``; or ConfigError.

    ``typed``: the whole command line, to explain a stray word.
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
    given = of_words(overrides, problems)
    resolved = False
    if path is not None:
        file = files.readable(_settings_file(path), "settings file")
        settings, content, resolved = run_file.read_settings(file, problems)
        if run_file.is_run(Path(path)):  # which may have been moved
            settings += of_words([f"out={paths.literal(path)}"], problems)
        problems += _untrusted(settings + given, file, content.exposed)
    if site is not None and not resolved:
        settings = _from_site(site, problems) + settings
    run = merge([*settings, *_without_other_lengths(given), *given], problems)
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
    given = of_words(overrides, problems)
    return merge([*_without_other_lengths(given), *given], problems, run)


def _without_other_lengths(given: Sequence[Setting]) -> list[Setting]:
    """Settings that take away an inherited length of training if ``given`` has one in any unit."""
    if any(setting.key in LENGTHS and not reading.is_null(setting.node) for setting in given):
        return of_words([f"{key}=null" for key in LENGTHS], [])
    return []


def of_run(folder: Path, overrides: Sequence[str], version: str = run_file.NAME) -> RunConfig:
    """The settings of the run in ``folder`` with ``overrides`` on top, without its job settings: for commands that only read
    its model. ConfigError if it is not a run directory. ``version``: config.yaml, or an earlier version of it."""
    problems: list[str] = []
    path, settings, content = _of_folder(folder, version, problems)
    settings = [setting for setting in settings if not setting.key.startswith("job.")]
    settings += of_words(overrides, problems)
    problems += _untrusted(settings, path, content.exposed)
    return merge(settings, problems)


def flat_of_run(folder: Path, version: str = run_file.NAME) -> dict[str, Any]:
    """The settings of the run in ``folder`` as section.name: value; ConfigError if it is not a run directory.

    ``version``: config.yaml, or an earlier version of it."""
    problems: list[str] = []
    settings = _of_folder(folder, version, problems)[1]
    if problems:
        raise ConfigError(problems)
    flat: dict[str, Any] = {}
    for setting in settings:
        field, name = split_key(setting.key)
        value = reading.plain(setting.node)
        flat[field] = value if name is None else {**flat.get(field, {}), name: value}
    return flat


def _of_folder(folder: Path, version: str, problems: list[str]) -> tuple[Path, list[Setting], reading.Content]:
    """A run's config.yaml, its settings and its content; ConfigError if ``folder`` is not a run directory."""
    path = folder / version
    if not path.is_file():
        reason = "it is a file" if folder.exists() else f"it does not exist; looked in {Path.cwd()}"
        reason = "it has no config.yaml" if folder.is_dir() else reason
        raise ConfigError(f"{folder} is not a run directory: {folders.exported_model(folder) or reason}")
    settings, content, _ = run_file.read_settings(path, problems, of_run=True)
    return path, settings, content


def missing_code(run: RunConfig) -> list[str]:
    """Problems for the user's code that settings name and that does not exist; nothing is imported."""
    problems: list[str] = []
    for key in NAMES_CODE:
        value = attrgetter(key)(run)
        for name in value if isinstance(value, list) else [value]:
            problems += filter(None, [own_code.missing(key, name or "")])
    return problems


def dump(config: RunConfig, path: Path) -> None:
    """Write all of ``config`` to ``path`` as YAML for ``load``, atomically."""
    files.write_text(path, dumped(config))


def dumped(config: RunConfig) -> str:
    """The text that ``dump`` writes, a line for each setting."""
    return "".join([run_file.FIRST, run_file.COUNT.format(len(keys())), *_lines(tree(config))])


def _lines(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """A line for each setting, those of a section below its name."""
    indent = "  " * prefix.count(".")
    for name, value in tree.items():
        if is_dataclass(type_of(f"{prefix}{name}")):
            yield f"{indent}{name}:\n"
            yield from _lines(value, f"{prefix}{name}.")
        else:
            yield f"{indent}{name}: {as_yaml(value)}\n"


def tree(config: RunConfig) -> dict[str, Any]:
    """The settings as they are written in a file."""
    return nested(written(config))


def written(config: RunConfig) -> dict[str, Any]:
    """The settings by dotted key, as they are written in a file."""
    return {key: _as_read(key, value) for key, value in leaves(config)}


def _as_read(key: str, value: Any) -> Any:
    """The value of a setting as text that is read as it."""
    if key == "batch.micro_size":
        return value or "auto"
    if path_separator(key) is None:
        return literal(value) if inserts_settings(key) else value
    if isinstance(value, list):
        return [paths.literal(part) for part in value]
    return value and paths.literal(value)


def named(arguments: list[str]) -> list[str]:
    """The settings that the key=value arguments of a command line set."""
    return [setting.key for setting in of_words([word for word in arguments if is_override(word)], [])]


def _settings_file(path: str | Path) -> Path:
    """``path`` if it exists, or else the preset of that name, with or without configs/ and .yaml."""
    presets = shipped.presets()
    file = Path(path)
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
    for setting in of_file(content, problems):
        section = setting.key.split(".")[0]
        if section in SITE_SECTIONS or type_of(section) is None:
            allowed.append(setting)
        else:
            only = " and ".join(SITE_SECTIONS)
            problems.append(f"{setting.key} cannot be set in a site file, only {only}{reading.where(setting.at)}")
    return allowed


def _untrusted(settings: list[Setting], path: Path, exposed: str | None) -> Iterator[str]:
    """Settings that name code and come from the file ``path``, if others could have written it (``exposed`` says how)."""
    last: dict[str, Setting] = {}
    for setting in settings:
        emptied = isinstance(setting.node, yaml.MappingNode)
        last = {key: before for key, before in last.items() if not (emptied and key.startswith(f"{setting.key}."))}
        last[setting.key] = setting
    for key, setting in last.items() if exposed else ():
        value = reading.plain(setting.node)
        if setting.at.start_mark.name == str(path) and _names_code(key, value):
            yield (
                f"{key}={value!r} in {reading.place(setting.at)} would run code in your name, and {exposed}. After you have read that code, "
                "give the setting on the command line, or copy it to your own file"
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

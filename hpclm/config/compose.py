"""Read settings from layers: defaults, a site file, a settings file, key=value arguments. The result is a RunConfig, or an error with
every problem.

Later layers override earlier ones, key by key. Mappings (job.env, job.options) are merged name by name; {} empties them.
"""

import logging
import stat
from collections.abc import Iterable, Iterator, Sequence
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
from hpclm.config.checks import as_list, mapped_texts
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

log = logging.getLogger(__name__)


def from_cli(arguments: list[str], site: Path | None = None, typed: Sequence[str] = ()) -> RunConfig:
    """The settings of ``[FILE] key=value ...`` on top of those of the file ``site``; ConfigError if any is invalid.

    ``typed``: the whole command line, to explain a stray word.
    """
    overrides = [word for word in arguments if is_override(word)]
    named = [paths.expanded(word) for word in arguments if not is_override(word)]
    absent = [path for path in named if not Path(path).exists()]
    if absent:
        wrong = mistakes(absent, typed or arguments)
        if wrong:
            raise ConfigError(wrong)
    if len(named) > 1:
        raise ConfigError(f"give one settings file, not {len(named)}: {', '.join(named)}; changes are key=value")
    file = next(iter(named), None)
    run = load(file, overrides, site)
    sets_out = any(word.partition("=")[0].strip() == "out" for word in overrides)
    if file and not sets_out:
        _refuse_moved(Path(file), run.out)
    elsewhere = file and sets_out and Path(file).resolve() != Path(run.out).resolve()
    if elsewhere and (Path(str(file)) / "checkpoints").is_dir() and not run.checkpoint.init_from:
        log.warning("only the settings of %s are used; checkpoint.init_from=%s begins with its weights too", file, file)
    return run


def load(path: str | Path | None = None, overrides: Sequence[str] = (), site: Path | None = None) -> RunConfig:
    """The settings of the file ``path``, or of the run in that folder, with ``overrides`` ("key=value") on top.

    ``site``: a file of job and cluster settings, which ``path`` and ``overrides`` override. It is not read if ``path`` is a run's
    config.yaml, which already includes it. ConfigError if any setting is invalid, or if a file that others can write names code.
    """
    problems: list[str] = []
    settings: list[Setting] = []
    given = of_words(overrides, problems)
    resolved = False
    if path is not None:
        file = files.readable(_settings_file(path), "settings file")
        settings, content, resolved = run_file.read_settings(file, problems)
        if run_file.is_run(Path(path)):  # a run that may have been moved
            settings += of_words([f"out={paths.literal(path)}"], problems)
        problems += _untrusted(settings + given, file, content.exposed)
    if site is not None and not resolved:
        settings = _from_site(site, problems) + settings
    run = merge([*settings, *_without_other_lengths(given), *given], problems)
    names = {setting.key for setting in given}
    # a budget on the command line is often a short trial of a file's settings, so a short one is a warning and not an error
    tries = any(key.startswith("budget.") for key in names) and not names & {"optim.warmup", "optim.wsd_decay"}
    # lexists: if the folder cannot be read, the start of the run reports it
    if not resolved and not (path is not None and tries) and not lexists(Path(run.out) / run_file.NAME):
        short = length.inside_warmup(run, length.run_length(run, None))
        if short and run.optim.schedule_length is None:
            raise ConfigError(f"{short}; shorten the warm-up, or extend the budget. To stop early once, set stop_at")
    return run


def _refuse_moved(file: Path, out: str) -> None:
    """ConfigError if ``file`` is a run's config.yaml but ``out`` is another folder, because the run has been moved or copied."""
    folder = file.absolute().parent
    if not run_file.is_of_run(file) or Path(out).resolve() == folder.resolve():
        return
    raise ConfigError(
        f"{file} belongs to the run in {folder}, but its out={out} is {Path(out).absolute()}: the run has been moved or copied, or out is "
        f"relative to another folder. Give the folder, {paths.literal(folder)}, in place of its config.yaml to continue this run, or "
        f"out=... to train elsewhere"
    )


def changed(run: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """``run`` with ``overrides`` ("key=value") on top; ConfigError if any is invalid."""
    problems: list[str] = []
    given = of_words(overrides, problems)
    return merge([*_without_other_lengths(given), *given], problems, run)


def _without_other_lengths(given: Sequence[Setting]) -> list[Setting]:
    """Settings that remove any inherited length of training, if ``given`` has a length in any unit."""
    if any(setting.key in LENGTHS and not reading.is_null(setting.node) for setting in given):
        return of_words([f"{key}=null" for key in LENGTHS], [])
    return []


def of_run(folder: Path, overrides: Sequence[str], version: str = run_file.NAME) -> RunConfig:
    """The settings of the run in ``folder`` with ``overrides`` on top; ConfigError if it is not a run directory.

    ``version``: config.yaml, or an earlier version of it.
    """
    problems: list[str] = []
    path, settings, content = _of_folder(folder, version, problems)
    settings = [setting for setting in settings if not setting.key.startswith("job.")]
    settings += of_words(overrides, problems)
    problems += _untrusted(settings, path, content.exposed)
    return merge(settings, problems)


def flat_of_run(folder: Path, version: str = run_file.NAME) -> dict[str, Any]:
    """The settings of the run in ``folder`` by dotted key; see of_run."""
    problems: list[str] = []
    settings = _of_folder(folder, version, problems)[1]
    if problems:
        raise ConfigError(problems)
    flat: dict[str, Any] = {}
    for setting in settings:
        field, name = split_key(setting.key)
        value = reading.plain(setting.node)
        if name is not None:
            value = {**flat.get(field, {}), name: value}
        flat[field] = value
    return flat


def _of_folder(folder: Path, version: str, problems: list[str]) -> tuple[Path, list[Setting], reading.Content]:
    """The path of a run's config.yaml, its settings and its content; ConfigError if ``folder`` is not a run directory."""
    path = folder / version
    if not path.is_file():
        raise ConfigError(f"{folder} is not a run directory: {folders.exported_model(folder) or _why_no_run(folder)}")
    settings, content, _ = run_file.read_settings(path, problems, of_run=True)
    return path, settings, content


def _why_no_run(folder: Path) -> str:
    if folder.is_dir():
        return "it has no config.yaml"
    return "it is a file" if folder.exists() else f"it does not exist; looked in {Path.cwd()}"


def missing_code(run: RunConfig) -> list[str]:
    """A problem for each class or function of the user that a setting names but that does not exist. Imports nothing."""
    names = [(key, name) for key in NAMES_CODE for name in as_list(attrgetter(key)(run)) if name]
    return list(filter(None, (own_code.missing(key, name) for key, name in names)))


def dump(config: RunConfig, path: Path) -> None:
    """Write ``config`` to ``path``, atomically, as YAML that ``load`` reads."""
    files.write_text(path, dumped(config))


def dumped(config: RunConfig) -> str:
    """The text that ``dump`` writes: one line per setting."""
    return "".join([run_file.FIRST, run_file.COUNT.format(len(keys())), *_lines(tree(config))])


def _lines(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in tree.items():
        if is_dataclass(type_of(f"{prefix}{name}")):
            yield f"{indent}{name}:\n"
            yield from _lines(value, f"{prefix}{name}.")
        else:
            yield f"{indent}{name}: {as_yaml(value)}\n"


def tree(config: RunConfig) -> dict[str, Any]:
    """The settings in nested mappings, with values as a file has them."""
    return nested(written(config))


def written(config: RunConfig) -> dict[str, Any]:
    """The settings by dotted key, with values as a file has them."""
    return {key: _in_file(key, value) for key, value in leaves(config)}


def _in_file(key: str, value: Any) -> Any:
    if key == "batch.micro_size":
        return value or "auto"
    if path_separator(key) is None:
        return literal(value) if inserts_settings(key) else value
    return mapped_texts(value, paths.literal)


def keys_set(arguments: list[str]) -> list[str]:
    """The keys of the settings that the key=value arguments of a command line set."""
    return [setting.key for setting in of_words([word for word in arguments if is_override(word)], [])]


def _settings_file(path: str | Path) -> Path:
    """``path`` if it exists, or else the preset ``path``, with or without configs/ and .yaml; ConfigError if there is neither."""
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
    near = _similar(file, name, presets)
    suggestion = near and f" Did you mean {near!r}?"
    raise ConfigError(
        f"{path} does not exist: no settings file, run directory or preset has this name.{suggestion} Presets are {', '.join(presets)}"
    )


def _similar(file: Path, name: str, presets: Iterable[str]) -> str:
    """The settings file, preset or run with the name most like ``file``; empty if all names differ."""
    if run_file.is_run(Path("runs", file)):
        return str(Path("runs", file))
    beside = {other.stem: str(other) for other in file.parent.glob("*.yaml")}
    candidates = beside | {preset.rpartition("/")[2]: preset for preset in presets}
    runs = {run.name: str(run) for run in Path("runs").glob("*") if run_file.is_run(run)}
    near = [candidates[stem] for stem in get_close_matches(file.stem, candidates, n=1)]
    near += [runs[run] for run in get_close_matches(name, runs, n=1)]
    return next(iter(near), "")


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
    """A problem for each setting from ``path`` that names code. ``exposed``: how others could have written the file, if they could."""
    if not exposed:
        return
    last: dict[str, Setting] = {}
    for setting in settings:
        emptied = isinstance(setting.node, yaml.MappingNode)
        last = {key: before for key, before in last.items() if not (emptied and key.startswith(f"{setting.key}."))}
        last[setting.key] = setting
    for key, setting in last.items():
        value = reading.plain(setting.node)
        if setting.at.start_mark.name == str(path) and _names_code(key, value):
            yield (
                f"{key}={value!r} in {reading.place(setting.at)} would run code in your name, and {exposed}. After you have read that code, "
                "give the setting on the command line, or copy it to your own file"
            )


def _names_code(key: str, value: Any) -> bool:
    if key in NAMES_CODE:
        names = [name for name in as_list(value) if isinstance(name, str)]
        return any(":" in name or "${" in name for name in names)  # ${...} may insert another setting's value
    if key in run_file.REQUESTS:
        return False
    section, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    return section == "job" and name in RUNS_CODE and bool(value)

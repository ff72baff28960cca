"""Defaults, then a site file, a settings file and key=value words: one RunConfig, or every problem at once.

The only file that speaks omegaconf. Each leaf is assigned on its own, so that a wrong one does not hide the next. A later
layer goes before an earlier one; mappings (job.env, job.options) are joined name by name, and {} empties them.
"""

import re
import types
import typing
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from hpclm import files
from hpclm.config import reading
from hpclm.config.schema import RunConfig
from hpclm.errors import ConfigError
from hpclm.registry import hint

Assignment = tuple[str, Any, str]  # dotted key, value, where it was written

OF_SITE = ("job", "cluster")
"""Sections that a site file may have."""
RESOLVED = "# Every setting of a run, resolved: a site file is not read again for this one.\n"


def from_cli(words: list[str], site: Path | None = None) -> RunConfig:
    """``[FILE] key=value ...``: the settings they describe, on top of those of the file ``site``, or ConfigError."""
    overrides = [word for word in words if is_override(word)]
    paths = [word for word in words if not is_override(word)]
    if len(paths) > 1:
        raise ConfigError(f"give one settings file, not {len(paths)}: {', '.join(paths)}")
    return load(paths[0] if paths else None, overrides, site)


def load(
    path: str | Path | None = None, overrides: list[str] | tuple[str, ...] = (), site: Path | None = None
) -> RunConfig:
    """The settings of the file at ``path`` with ``overrides`` ("key=value") on top, or ConfigError.

    ``site`` is a file of job and cluster settings that lies below them, unless ``path`` is a run's config.yaml, in which
    it has been applied already.
    """
    problems: list[str] = []
    assignments: list[Assignment] = []
    if path is not None:
        path = files.readable(_existing(path), "settings file")
        assignments += _from_file(path, "settings file")
    if site is not None and not (path and _is_resolved(Path(path))):
        assignments = _from_site(site, problems) + assignments
    for word in overrides:
        key, sign, text = word.partition("=")
        if sign:
            assignments += _flat(key.strip(), _parse(key.strip(), text, problems), "command line")
        else:
            problems.append(f"{word!r} is not key=value")
    return _build(assignments, problems)


def dump(config: RunConfig, path: Path) -> None:
    """Write the whole of ``config`` to ``path`` as YAML that ``load`` reads back; never half a file."""
    files.write_text(path, dumped(config))


def dumped(config: RunConfig) -> str:
    """The text that ``dump`` writes."""
    tree = {key: value if key == "job" else _literal(_lists(value)) for key, value in asdict(config).items()}
    return RESOLVED + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=10**6)


def is_override(word: str) -> bool:
    """Whether a command-line word is key=value rather than a file name."""
    return re.match(r"[A-Za-z_][\w.-]*\s*=", word) is not None


def _existing(path: str | Path) -> str | Path:
    """``path``, or the shipped settings file of that name when there is none here."""
    shipped = Path(__file__).parents[2] / "configs"
    if Path(path).exists() or not shipped.is_dir():
        return path
    for candidate in (shipped / Path(path).name, shipped / f"{path}.yaml"):
        if Path(path).name == str(path) and candidate.is_file():
            return candidate
    names = sorted(p.name for p in shipped.glob("*.yaml"))
    raise ConfigError(
        f"settings file {path} does not exist; configs/ has {', '.join(names)}.{hint(Path(path).name, names + [Path(n).stem for n in names])}"
    )


def _is_resolved(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(RESOLVED)) == RESOLVED.encode()


def _from_site(path: Path, problems: list[str]) -> list[Assignment]:
    found = []
    for key, value, origin in _from_file(files.readable(path, "site file"), "site file"):
        section = key.split(".")[0]
        if section in OF_SITE or _type(section) is None:
            found.append((key, value, origin))
        else:
            problems.append(
                f"{key} does not describe a cluster; a site file has {' and '.join(OF_SITE)} only ({origin})"
            )
    return found


def _from_file(path: Path, what: str) -> list[Assignment]:
    tree = reading.mapping(path, what)
    return [entry for key, value in tree.items() for entry in _flat(str(key), value, str(path))]


def _flat(key: str, value: Any, origin: str) -> Iterator[Assignment]:
    """Leaves of a nested mapping; a mapping that belongs to one field stays whole."""
    if isinstance(value, dict) and (value or is_dataclass(_type(key))) and not _is_leaf(key):
        for name, inner in value.items():
            yield from _flat(f"{key}.{name}", inner, origin)
    else:
        yield key, value, origin


def _parse(key: str, text: str, problems: list[str]) -> Any:
    """The value a person typed: as it stands for a field of text, as YAML for any other."""
    wanted = _type(key)
    if wanted is str or (_optional(wanted) is str and text not in ("null", "")):
        return text
    try:
        value = reading.value(text)
    except yaml.YAMLError:
        problems.append(f"{key}={text!r} (command line) is not a YAML value")
        return None
    return [str(v) for v in value] if wanted == list[str] and isinstance(value, list) else value


def _build(assignments: list[Assignment], problems: list[str]) -> RunConfig:
    tree = OmegaConf.structured(RunConfig)
    OmegaConf.set_readonly(tree, False)
    broken = []
    for key, value, origin in assignments:
        wrong = _assign(tree, key, value)
        if wrong:
            broken += [key] if _type(key) else []
            problems.append(f"{wrong} ({origin})")
    sections: dict[str, Any] = {}
    for field in fields(RunConfig):
        try:
            sections[field.name] = _value(field.type, tree[field.name])
        except ConfigError as error:
            problems += error.problems
        except OmegaConfBaseException as error:
            problems.append(f"{field.name}: {str(error).splitlines()[0]}")
    if not problems:
        return RunConfig(**sections)
    try:
        RunConfig(**sections)
    except ConfigError as error:  # what only follows from a key reported above would mislead
        problems += [p for p in error.problems if p not in problems and not any(key in p for key in broken)]
    raise ConfigError(problems)


def _assign(tree: Any, key: str, value: Any) -> str | None:
    """Set one leaf; what is wrong with it, or None."""
    wanted = _type(key)
    if wanted is None:
        return f"unknown setting {key}{hint_for(key)}"
    if is_dataclass(wanted):
        return f"{key} is a section; set its fields, such as {key}.{fields(wanted)[0].name}=…"
    if value is None and _optional(wanted) is wanted:
        return f"{key} must be {type_words(wanted)}, not empty"
    if wanted in (int, float, str) and isinstance(value, (list, dict)):
        return f"{key}={value!r} must be {type_words(wanted)}"
    if _optional(wanted) is str and isinstance(value, bool):
        return f"{key} must be {type_words(wanted)}; YAML takes this word for {str(value).lower()}, so put quotes around it"
    field, name = _field(key)
    if typing.get_origin(_type(field)) is dict:
        return _join(tree, field, {name: value} if name else value)
    if key.startswith("job."):
        value = _literal(value)
    if _optional(wanted) is int and isinstance(value, (float, str)):
        value = _whole(value)  # 1e6 and 1_000_000 are numbers to a person
    if _optional(wanted) in (int, float) and isinstance(value, bool):
        return f"{key}={value!r} must be {type_words(wanted)}"
    section, _, _ = key.rpartition(".")
    OmegaConf.set_readonly(OmegaConf.select(tree, section) if section else tree, False)
    before = OmegaConf.select(tree, key)
    try:
        OmegaConf.update(tree, key, value, merge=False)
        _plain(wanted, OmegaConf.select(tree, key))
    except InterpolationResolutionError as error:
        OmegaConf.update(tree, key, before, merge=False)
        return f"{key}={value!r}: {str(error).splitlines()[0]}"
    except (OmegaConfBaseException, ValueError):
        OmegaConf.update(tree, key, before, merge=False)
        near = hint(str(value), [str(choice) for choice in typing.get_args(wanted)])
        return f"{key}={value!r} must be {type_words(wanted)}{'.' * bool(near)}{near}"
    return None


def _join(tree: Any, key: str, value: Any) -> str | None:
    """Add names to the mapping ``key``; an empty one empties it. What is wrong with it, or None."""
    kinds = (str, int, float)
    if not isinstance(value, dict):
        return f"{key}={value!r} must be {type_words(_type(key))}"
    if key == "engine.extra":
        value = dict(_extra("", value))
    wrong = [name for name, text in value.items() if isinstance(text, bool) or not isinstance(text, kinds)]
    if wrong:
        return f"{key}.{wrong[0]}={value[wrong[0]]!r} must be text; put quotes around it"
    OmegaConf.set_readonly(OmegaConf.select(tree, key.rpartition(".")[0]), False)
    before = OmegaConf.to_container(OmegaConf.select(tree, key), resolve=True) if value else {}
    added = {str(name): str(text) for name, text in value.items()}
    OmegaConf.update(tree, key, _literal({**typing.cast(dict, before), **added}), merge=False)
    return None


def _extra(prefix: str, tree: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """A tree of an engine's own settings as dotted names, each with the text of its value."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _extra(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else as_yaml(value)


def _field(key: str) -> tuple[str, str | None]:
    """The field that a dotted key is of, and the name inside it where the field is a mapping."""
    section, _, rest = key.partition(".")
    field, _, name = rest.partition(".")
    return (f"{section}.{field}", name) if name else (key, None)


def _literal(value: Any) -> Any:
    """``value``, in which ${...} stands for itself: a shell or a program reads it, not these settings."""
    if isinstance(value, dict):
        return {name: _literal(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_literal(inner) for inner in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _lists(value: Any) -> Any:
    """``value`` with lists for tuples."""
    if isinstance(value, dict):
        return {name: _lists(inner) for name, inner in value.items()}
    return [_lists(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _whole(value: float | str) -> Any:
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if number.is_integer() else value


def _value(wanted: Any, node: Any) -> Any:
    """What a node of the tree holds, as the schema's own type; runs the section's checks."""
    if is_dataclass(wanted):
        return typing.cast(Any, wanted)(**{f.name: _plain(f.type, node[f.name]) for f in fields(wanted)})
    return _plain(wanted, node)


def _plain(wanted: Any, value: Any) -> Any:
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    inner = _optional(wanted)
    if typing.get_origin(inner) is tuple and value is not None:
        kinds = typing.get_args(inner)
        if len(value) != len(kinds):
            raise ValueError(f"wants {len(kinds)} values")
        return tuple(kind(v) for kind, v in zip(kinds, value, strict=True))
    return value


def _type(key: str) -> Any:
    """Declared type of a dotted key; None when the schema has no such key."""
    kind: Any = RunConfig
    for part in key.split("."):
        if typing.get_origin(kind) is dict:  # what is left of the key is a name, with whatever dots it has
            return typing.get_args(kind)[1]
        if not is_dataclass(kind):
            return None
        found = {f.name: f.type for f in fields(kind)}
        if part not in found:
            return None
        kind = found[part]
    return kind


def _is_leaf(key: str) -> bool:
    wanted = _type(key)
    return wanted is not None and not is_dataclass(wanted)


def _optional(wanted: Any) -> Any:
    """``X`` of ``X | None``; any other type as it is."""
    if isinstance(wanted, types.UnionType) or typing.get_origin(wanted) is typing.Union:  # Literal | None is the latter
        return next(kind for kind in typing.get_args(wanted) if kind is not types.NoneType)
    return wanted


def type_words(wanted: Any) -> str:
    """A type in a person's words."""
    inner = _optional(wanted)
    optional = " or null" if inner is not wanted else ""
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if typing.get_origin(inner) is typing.Literal:
        return f"one of {', '.join(map(str, typing.get_args(inner)))}{optional}"
    if typing.get_origin(inner) is tuple:
        kinds = typing.get_args(inner)
        return f"a list of {len(kinds)} numbers{optional}"
    if typing.get_origin(inner) is list:
        return f"a list of text{optional}"
    if typing.get_origin(inner) is dict:
        return f"a mapping of names to text{optional}"
    return names.get(inner, str(inner)) + optional


def keys() -> list[str]:
    """Every setting's dotted key, in the order of the schema."""
    found = []
    for field in fields(RunConfig):
        kind: Any = field.type
        found += [f"{field.name}.{f.name}" for f in fields(kind)] if is_dataclass(kind) else [field.name]
    return found


def hint_for(key: str) -> str:
    """The way out of an unknown key."""
    known = keys()
    suggestion = hint(key, known)
    if not suggestion:
        last = key.split(".")[-1]
        same = [k for k in known if k.split(".")[-1] == last]
        suggestion = f" Did you mean {same[0]!r}?" if same else hint(last, [k.split(".")[-1] for k in known])
    return f".{suggestion or ' See hpclm config --reference for all of them.'}"


def as_yaml(value: Any) -> str:
    """One value as it would stand in a settings file."""
    plain = list(value) if isinstance(value, tuple) else value
    return (
        yaml.safe_dump(plain, default_flow_style=True, allow_unicode=True, width=10**6).removesuffix("\n...\n").strip()
    )

"""The tables of elsewhere.yaml: names of settings, options and commands in other projects, and their counterparts here."""

import re
import shlex
import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hpclm.base import files
from hpclm.config.fields import required, type_of

SEE = "hpclm docs migrating lists other projects' options"
MISSING = "..."
"""The text in place of an unknown value."""
MEGATRON = "Megatron-LM, Megatron-DeepSpeed"
NANOGPT = "nanoGPT"
LEFT_OUT = "leave it out"
_SETTING = re.compile(r"([a-z]\w*(?:\.[a-z]\w*)*)(?:\[(\d)\])?=(.*)")
Row = str | dict[str, str]
"""An answer, or an answer for each value."""


class Answer(NamedTuple):
    """The counterpart of another project's name."""

    settings: tuple[str, ...]
    """Words key=value; empty if ``reason`` is set."""
    reason: str
    """A sentence that explains why settings do not replace the name; else empty."""

    @property
    def text(self) -> str:
        """The settings or the reason."""
        return self.reason or typed(self.settings)


@lru_cache(maxsize=1)
def tables() -> dict[str, Any]:
    """The content of elsewhere.yaml."""
    content: dict[str, Any] = yaml.safe_load(files.read_text(Path(__file__).with_name("elsewhere.yaml")))
    return content


def normal(name: str) -> str:
    """A name in lower case, without leading dashes, and with _ for each - and dot: fp16_enabled for fp16.enabled."""
    return re.sub("[-.]", "_", name.lstrip("-").lower())


@lru_cache(maxsize=1)
def _rows() -> dict[str, dict[str, Row]]:
    """Normal name -> project -> its row."""
    rows: dict[str, dict[str, Row]] = defaultdict(dict)
    for project, table in tables()["projects"].items():
        for names, row in table.items():
            for name in names.split():
                rows[normal(name)].setdefault(project, row)
    return dict(rows)


def names() -> list[str]:
    """Every name that has a row."""
    return sorted(_rows())


def answers(name: str, values: Sequence[str] = ()) -> dict[Answer, list[str]]:
    """The answers for exactly this name with these values, each with the projects that give it; empty for an unknown name."""
    found: dict[Answer, list[str]] = defaultdict(list)
    for project, row in _rows().get(normal(name), {}).items():
        found[_answer(row, values)].append(project)
    complete = {answer: projects for answer, projects in found.items() if MISSING not in answer.text}
    return complete or found


def answer_of(project: str, name: str, values: Sequence[str]) -> Answer | None:
    """The answer for a name of one project; None if its table does not have it."""
    row = _rows().get(normal(name), {}).get(project)
    return None if row is None else _answer(row, values)


def explained(name: str, values: Sequence[str] = ()) -> str:
    """The answers for a name, with the projects if they differ; empty without one."""
    return listed(answers(name, values))


def listed(found: Mapping[Answer, Sequence[str]]) -> str:
    """The answers, with the projects that give them if there are several."""
    if len(found) == 1:
        return next(iter(found)).text
    return "; ".join(f"{answer.text} ({', '.join(projects)})" for answer, projects in found.items())


def _answer(row: Row, values: Sequence[str]) -> Answer:
    text = _for_values(row, values)
    words = text.split()
    if not all(_SETTING.fullmatch(word) for word in words):
        return Answer((), text.replace("`", ""))
    takes_value = any(word.endswith("=") for word in words)
    if isinstance(row, str) and not takes_value and [value.lower() for value in values[:1]] == ["false"]:
        return Answer((), LEFT_OUT)
    return Answer(tuple(_with_values(word, values) for word in words), "")


def _for_values(row: Row, values: Sequence[str]) -> str:
    if isinstance(row, str):
        return row
    if len(values) > 1 and "several" in row:
        return row["several"]
    by_value = {value.lower(): text for value, text in row.items()}
    value = next(iter(values), "").lower()
    if value in by_value or "one" in row:
        return by_value.get(value, row.get("one", ""))
    first = next(text for text in row.values() if _SETTING.match(text))
    return first.split()[0].partition("=")[0] + f"={MISSING}"


def _with_values(word: str, values: Sequence[str]) -> str:
    key, _, fixed = word.partition("=")
    return word if fixed else f"{key}={written(key, values)}"


def written(key: str, values: Sequence[str]) -> str:
    """The value of the setting ``key`` for the values of an option: [0.9,0.98] for a list, the first value for any other setting."""
    value = next(iter(values), MISSING)
    kind = required(type_of(key))
    if value == MISSING or value.startswith("[") or not (kind == list[str] or typing.get_origin(kind) is tuple):
        return value
    elements = re.split(r"[,\s]+", " ".join(values).strip("()"))
    return f"[{','.join(elements)}]"


def merged(settings: Iterable[str]) -> dict[str, str]:
    """key=value words as a mapping; the elements of a list, key[0]=value, become one list."""
    values: dict[str, str] = {}
    lists: dict[str, list[str]] = {}
    for setting in settings:
        key, index, value = typing.cast(re.Match[str], _SETTING.fullmatch(setting)).groups()
        if index is None:
            values[key] = value
            continue
        size = len(typing.get_args(required(type_of(key))))
        elements = lists.setdefault(key, values.get(key, ",".join([MISSING] * size)).strip("[]").split(","))
        elements[int(index)] = value
        values[key] = f"[{','.join(elements)}]"
    return values


def keys(settings: Iterable[str]) -> list[str]:
    """The keys of key=value words."""
    return [*merged(settings)]


def typed(settings: Iterable[str]) -> str:
    """Settings as key=value words for a shell."""
    return " ".join(f"{key}={shlex.quote(value)}" for key, value in merged(settings).items())


def command_meant(word: str) -> str:
    """The command that does what ``word``, a word from elsewhere, means; empty if unknown."""
    return next((text for words, text in tables()["commands"].items() if word.lower() in words.split()), "")


def option_meant(command: str, option: str) -> str:
    """The counterpart of an ``option`` that a command of hpclm does not have: another option, key=, or a sentence; empty if unknown."""
    named = option.replace("_", "-")
    tables_here = (rows for commands, rows in tables()["options"].items() if command in commands.split())
    return next((str(text) for rows in tables_here for options, text in rows.items() if named in options.split()), "")


def page(text: str) -> str:
    """The text of docs/migrating.md with the table of each project below its heading."""
    parts = re.split(r"(?m)^(?=## )", text)
    return "".join(_section(part) for part in parts)


def _section(part: str) -> str:
    title = part.partition("\n")[0].removeprefix("## ")
    if title not in tables()["projects"]:
        return part
    before = part.partition("| there |")[0]
    return f"{before}| there | here |\n|---|---|\n" + "".join(_lines(tables()["projects"][title])) + "\n"


def _lines(table: dict[str, Row]) -> Iterator[str]:
    cells: dict[str, list[str]] = defaultdict(list)
    for options, row in table.items():
        by_value = {"": row} if isinstance(row, str) else row
        for value, text in by_value.items():
            after = {"": "", "one": " …", "several": " … …"}.get(value, f" {value}")
            cells[_cell(text)] += [f"`{option}{after}`" for option in options.split()]
    for here, there in cells.items():
        yield f"| {', '.join(there)} | {here} |\n"


def _cell(text: str) -> str:
    if not all(_SETTING.fullmatch(word) for word in text.split()):
        return " ".join(text.split())
    return ", ".join(f"`{_shown(word)}`" for word in text.split())


def _shown(word: str) -> str:
    key, _, value = word.partition("=")
    return f"{key}={shlex.quote(value)}" if value else key.partition("[")[0]

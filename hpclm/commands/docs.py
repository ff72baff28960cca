"""``hpclm docs``: the pages of the documentation and the explanations of settings, without a network."""

import dataclasses
import pydoc
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from hpclm import cli, files, shipped, terminal
from hpclm.commands.config import all_settings, default
from hpclm.config import RunConfig, fields, hints
from hpclm.errors import ConfigError
from hpclm.parser import Parser, completed
from hpclm.registry import hint
from hpclm.terminal import say

WIDTH = 100  # columns of an explanation, at most
MOST = 5  # pages that are named for a text


def main(argv: list[str]) -> int:
    """``hpclm docs``."""
    text = _text(parser().parse_args(argv).topic)
    if sys.stdout.isatty() and text.count("\n") >= shutil.get_terminal_size().lines:
        pydoc.pager(terminal.plain(text))
    else:
        say(text, end="")
    return 0


def parser() -> Parser:
    """The parser of ``hpclm docs``."""
    options = Parser(
        prog="hpclm docs",
        description="Show a page of the documentation, or what a setting is. Without TOPIC, list the pages.",
    )
    topic = "a page (reliability), a setting (optim.lr) or a section of settings (optim., log)"
    completed(options.add_argument("topic", nargs="?", metavar="TOPIC", help=topic), "topics")
    return options


def topics() -> list[str]:
    """Everything that has a page or an explanation."""
    return [*_pages(), *fields.keys()]


def _pages() -> dict[str, Path]:
    return {name: path for name, path in shipped.pages().items() if not name.startswith("index")}


def _text(topic: str | None) -> str:
    pages = _pages()
    if topic is None:
        titles = [(name, files.read_text(path).partition("\n")[0].lstrip("# ")) for name, path in pages.items()]
        sections = ", ".join(
            field.name for field in dataclasses.fields(RunConfig) if dataclasses.is_dataclass(field.type)
        )
        more = f"hpclm docs SECTION. explains the settings of a section, hpclm docs optim.lr one. Sections: {sections}."
        return "\n".join([*terminal.columns(titles), "", textwrap.fill(more, WIDTH), ""])
    name = topic.removeprefix("docs/").partition("#")[0].removesuffix(".md").lower()
    if page := next((path for each, path in pages.items() if name in (each, each.rpartition("/")[2])), None):
        return files.read_text(page)
    key = topic.partition("=")[0]
    if explained := list(_explained(key)):
        return "\n\n".join(explained) + "\n"
    if topic in cli.VERBS:
        raise ConfigError(f"no page is called {topic!r}; hpclm help {topic} shows the options of this verb")
    text = re.compile(rf"(?<![a-z]){re.escape(topic)}", re.IGNORECASE)
    counts = {each: len(text.findall(files.read_text(path))) for each, path in pages.items()}
    most = sorted(filter(counts.get, counts), key=counts.__getitem__, reverse=True)[:MOST]
    near, meant = "" if most else hint(name, pages), hints.meant(key, fields.keys())
    if meant and not near:
        near = f" {meant}" if hints.is_reason(meant) else f" Here it is {meant.partition('=')[0]}."
    where = f"pages with this text: {', '.join(most)}" if most else "hpclm docs lists the pages"
    raise ConfigError(f"no page or setting is called {topic!r}; {where}.{near}")


def _explained(key: str) -> Iterator[str]:
    """The setting ``key``, or those of the section ``key``, with or without its dot."""
    section = f"{key.removesuffix('.')}."
    for name, field, text in all_settings():
        if name == fields.split_key(key)[0] or name.startswith(section):
            indented = textwrap.indent(textwrap.fill(text, WIDTH - 4, break_on_hyphens=False), "    ")
            yield f"{name}\n    {fields.type_text(field.type)}; default: {default(field)}\n{indented}"

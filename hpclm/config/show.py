"""Print settings with what each one does: the resolved ones, or the reference page of all of them."""

import argparse
import ast
import inspect
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from hpclm import cli
from hpclm.config import compose, schema
from hpclm.config.compose import type_words
from hpclm.config.schema import RunConfig

REFERENCE_HEAD = """# All settings

Made by `hpclm config --reference`; do not edit. A settings file holds what differs from these defaults, the command
line takes `section.name=value`, and `hpclm config FILE section.name=value` prints what a run would use.
"""


def main(argv: list[str]) -> int:
    """``hpclm config``: print the resolved settings, or the reference page."""
    parser = argparse.ArgumentParser(prog="hpclm config", description=__doc__)
    parser.add_argument("settings", nargs="*", metavar="FILE | key=value", help="one settings file, and overrides")
    parser.add_argument("--reference", action="store_true", help="print the page of all settings instead (Markdown)")
    parser.add_argument("--changed", action="store_true", help="print only what differs from the defaults")
    args = parser.parse_args(argv)
    print(reference() if args.reference else explained(cli.settings(args.settings), args.changed), end="")
    return 0


def explained(config: RunConfig, changed_only: bool = False) -> str:
    """``config`` as YAML, each field under its explanation."""
    lines: list[str] = []
    for field, section, text in _sections(config):
        if not is_dataclass(section):
            lines += _entry(field, section, text, "", changed_only)
            continue
        inside = [
            line
            for inner in fields(section)
            for line in _entry(inner, getattr(section, inner.name), docs(type(section))[inner.name], "  ", changed_only)
        ]
        if inside:
            lines += ["", f"# {text}", f"{field.name}:", *inside]
    return "\n".join(lines).lstrip("\n") + "\n"


def reference() -> str:
    """The page of all settings, in Markdown."""
    parts = [REFERENCE_HEAD, "## Top level\n", _table("", RunConfig)]
    for field in fields(RunConfig):
        if is_dataclass(field.type):
            kind = typing.cast(type, field.type)
            parts += [f"\n## {field.name}\n\n{inspect.getdoc(kind)}\n", _table(field.name + ".", kind)]
    return "\n".join(parts) + "\n"


def docs(section: type) -> dict[str, str]:
    """Field name -> the string that stands under the field in the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
            found[field.target.id] = " ".join(ast.literal_eval(after.value).split())
    return found


def _sections(config: RunConfig) -> Iterator[tuple[Field, Any, str]]:
    for field in fields(config):
        value = getattr(config, field.name)
        text = (inspect.getdoc(type(value)) or "") if is_dataclass(value) else docs(schema.RunConfig)[field.name]
        yield field, value, text


def _entry(field: Field, value: Any, text: str, indent: str, changed_only: bool) -> list[str]:
    if changed_only and value == _default(field):
        return []
    comment = textwrap.wrap(text, 108, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
    return [*comment, f"{indent}{field.name}: {compose.as_yaml(value)}"]


def _default(field: Field) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _table(prefix: str, section: type) -> str:
    rows = ["| setting | type | default | what it does |", "|---|---|---|---|"]
    for field in fields(section):
        if not is_dataclass(field.type):
            what = docs(section)[field.name].replace("|", "\\|")
            rows.append(
                f"| `{prefix}{field.name}` | {type_words(field.type)} | `{compose.as_yaml(_default(field))}` | {what} |"
            )
    return "\n".join(rows)

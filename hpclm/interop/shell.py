"""Reads the options of the training command in a shell script without running it; substitutes literal assignments."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import NamedTuple

# brackets and braces may contain others, one level deep
VARIABLE = r"\$\(\(.*?\)\)|\$\((?:[^()]|\([^()]*\))*+\)|`[^`]*`|\$\{(?:[^{}]|\{[^{}]*\})*+\}|\$\w+|\$[@*#?$]"
NAMED = re.compile(r"\$\{?(\w+)(?:\[[@*]\])?(?::?-(.*?))?\}?", re.DOTALL)
WHOLE_ARRAY = re.compile(r'"(\$\{\w+\[@\]\})"')
QUOTED = r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\."
PIECE = re.compile(rf"{QUOTED}|{VARIABLE}", re.DOTALL)
PART = re.compile(rf"(?:{VARIABLE}|\S)+", re.DOTALL)
ARRAY = rf"[A-Za-z_]\w*\+?=\((?:{QUOTED}|{VARIABLE}|\#[^\n]*|[^)'\"\\#])*+\)"
TOKEN = re.compile(
    r"(?P<comment>(?<![^\s;])\#[^\n]*)|(?P<end>\n|;|&&?|\|\|?|\d?[<>]+&?\d?)"
    rf"|(?P<word>{ARRAY}|(?:{QUOTED}|{VARIABLE}|[^\s;&|()<>'\"\\`])+)|(?P<bracket>[()])|.",
    re.DOTALL,
)
COMMENT = re.compile(rf"({QUOTED})|(?<!\S)\#[^\n]*", re.DOTALL)
HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1[^\n]*\n.*?\n\s*\2(?=\n|$)", re.DOTALL)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
BEGINS = ("if", "for", "while", "until", "case", "select")
ENDS = ("fi", "done", "esac")
BEFORE_COMMANDS = "then else elif do { } ! time exec nohup export declare readonly local"
Variables = Mapping[str, Sequence[str]]
"""The values of each variable: several of an array."""


class Flag(NamedTuple):
    """An option of a command with its values; an unknown value still has its $."""

    name: str
    values: tuple[str, ...]

    @property
    def text(self) -> str:
        """The option as it was typed."""
        return " ".join([self.name, *self.values])

    @property
    def known(self) -> bool:
        """Whether all values are literal."""
        return not any(re.search(VARIABLE, value) for value in self.values)


def flags(script: str) -> list[Flag]:
    """The options of the command with the most options in a script, after the name of its Python file if any."""
    *commands, assigned = _commands(HERE_DOCUMENT.sub("\n", script).replace("\\\n", " "))
    of_python = [words for words in commands if any(word.endswith(".py") for word in words)]
    candidates = [_of_words(words) for words in of_python or [*commands, assigned]]
    return max(candidates, key=lambda found: sum(flag.name.startswith("--") for flag in found), default=[])


def _of_words(words: Sequence[str]) -> list[Flag]:
    """The options among the words of a command."""
    program = next((at + 1 for at, word in enumerate(words) if word.endswith(".py")), 0)
    found: list[list[str]] = []
    for word in words[program:]:
        if word.startswith("--"):
            name, sign, value = word.partition("=")
            found.append([name])
            if sign:
                found[-1].append(value)
        elif re.fullmatch(VARIABLE, word) and not (found and len(found[-1]) == 1 and found[-1][0].startswith("--")):
            found.append([word])  # perhaps more options
        elif found:
            found[-1].append(word)
    return [Flag(name, tuple(values)) for name, *values in found]


def _commands(script: str) -> Iterator[list[str]]:
    """The words of each command, and of each text that may be a command: a quoted text or the value of a variable.

    The last item has the words of all assignments.
    """
    variables: dict[str, list[str]] = {}
    depth = 0
    everything: list[str] = []
    for words in _statements(script):
        depth += (words[0] in BEGINS) - (words[0] in ENDS)
        while words and words[0] in BEFORE_COMMANDS.split():
            words = words[1:]
        assignments = list(takewhile(bool, map(ASSIGNMENT.fullmatch, words)))
        for name, more, text in (match.groups() for match in assignments if match):
            is_array = text.startswith("(")
            values = _split(text.strip("()") if is_array else text, variables)
            if not is_array:
                values = [" ".join(values)]
            if depth:
                values = [f"${name}"]
            elif more:
                values = [*variables.get(name, []), *values]
                if not is_array:
                    values = ["".join(values)]
            variables[name] = values
            parts = [part for value in values for part in _split(value)]
            everything += parts
            yield parts
        if words[len(assignments) :]:
            command = _split(" ".join(words[len(assignments) :]), variables)
            yield command
            yield from (_split(word) for word in command if " --" in word)
    yield everything


def _statements(script: str) -> Iterator[list[str]]:
    """The words of each statement, with their quotes and variables; NAME=( ... ) is one word."""
    words: list[str] = []
    for token in TOKEN.finditer(script + "\n"):
        if token["word"]:
            words.append(token["word"])
        elif words and (token["end"] or token["bracket"]):
            yield words
            words = []


def _split(text: str, variables: Variables = MappingProxyType({})) -> list[str]:
    """The words of a text that a shell would parse, with ``variables`` substituted."""

    def substituted(match: re.Match[str]) -> str:
        piece = match[0]
        if piece[0] in "'\\":
            return piece
        if piece[0] != '"':
            return shlex.join(PART.findall(" ".join(_values(piece, variables))))
        return re.sub(
            VARIABLE, lambda inner: re.sub(r'([\\"])', r"\\\1", " ".join(_values(inner[0], variables))), piece
        )

    text = WHOLE_ARRAY.sub(lambda match: shlex.join(_values(match[1], variables)), text)
    text = COMMENT.sub(lambda match: match[1] or "", text)
    try:
        return shlex.split(PIECE.sub(substituted, text))
    except ValueError:
        return text.split()


def _values(variable: str, variables: Variables) -> Sequence[str]:
    """The values of $NAME or ${NAME:-default}; the text itself if they are unknown."""
    match = NAMED.fullmatch(variable)
    if match is None:
        return [variable]
    name, default = match.groups()
    return variables.get(name, [variable if default is None else default])

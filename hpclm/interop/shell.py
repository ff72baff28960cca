"""Reads the options of the training command in a shell script without running it; substitutes literal assignments."""

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

VARIABLE = r"\$\(\(.*?\)\)|\$\([^()]*\)|`[^`]*`|\$\{[^}]*\}|\$\w+|\$[@*#?]"
PART = rf"(?:{VARIABLE}|\S)+"
TOKEN = re.compile(
    r"(?P<space>[ \t]+)|(?P<end>\n|;|&&?|\|\|?|\d?[<>]+&?\d?|[()])|(?P<comment>(?<![^\s;])\#[^\n]*)"
    r"|'(?P<single>[^']*)'|\"(?P<double>(?:\\.|[^\"\\])*)\"|\\(?P<escaped>.)"
    rf"|(?P<variable>{VARIABLE})|(?P<plain>[^\s;&|()<>'\"\\$`]+|.)",
    re.DOTALL,
)
HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1[^\n]*\n.*?\n\s*\2(?=\n|$)", re.DOTALL)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
NAMED = re.compile(r"\$\{?(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}?")
BEGINS = ("if", "for", "while", "until", "case", "select")
ENDS = ("fi", "done", "esac")
BEFORE_COMMANDS = "then else elif do { } ! time exec nohup export declare readonly local"
Piece = tuple[str, str]
"""The quoting of a part of a word, and its text."""


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
    for words, array in _statements(script):
        first = _plain(words[0])
        depth += (first in BEGINS) - (first in ENDS)
        while words and _plain(words[0]) in BEFORE_COMMANDS.split():
            words = words[1:]
        assigned = [ASSIGNMENT.fullmatch(_plain(word)) for word in words]
        if not words or not assigned[0]:
            command = [part for word in words for part in _expanded(word, variables)]
            yield command
            yield from (_split(word) for word in command if " --" in word)
            continue
        if array:
            assigned = assigned[:1]
        for word, match in zip(words, assigned, strict=False):
            if match is None:
                break
            name, more, rest = match.groups()
            value = [("plain", rest), *word[1:]]
            if array:
                values = [part for one in words[1:] for part in _expanded(one, variables)]
            else:
                values = [_text(value, variables)]
            if depth:
                values = [f"${name}"]
            elif more:
                values = [*variables.get(name, []), *values]
                if not array:
                    values = ["".join(values)]
            variables[name] = values
            everything += [part for text in values for part in _split(text)]
            pieces = [_split(text) if " " in text else [text] for text in values]
            yield [part for piece in pieces for part in piece]
    yield everything


def _statements(script: str) -> Iterator[tuple[list[list[Piece]], bool]]:
    """The words of each statement, each as a list of pieces; and whether it is NAME=( ... )."""
    words: list[list[Piece]] = []
    pieces: list[Piece] = []
    inside = False
    array = False
    for match in TOKEN.finditer(script + "\n"):
        kind = str(match.lastgroup)
        text = match[kind]
        if kind not in ("space", "end", "comment"):
            pieces.append((kind, text))
            continue
        if pieces:
            words.append(pieces)
            pieces = []
        if kind != "end":
            continue
        if text == "(" and words and _plain(words[-1]).endswith("="):
            inside = array = True
        elif inside:
            inside = text != ")"
        else:
            if words:
                yield words, array
            words = []
            array = False


def _plain(word: Sequence[Piece]) -> str:
    """The beginning of a word before any quotes and variables."""
    return word[0][1] if word and word[0][0] == "plain" else ""


def _expanded(word: Sequence[Piece], variables: dict[str, list[str]]) -> list[str]:
    """The words that result from a word once its variables are substituted."""
    words = [""]
    for kind, text in word:
        if kind == "variable":
            parts = [part for value in _value(text, variables) for part in re.findall(PART, value)]
        elif kind == "double" and re.fullmatch(r"\$\{\w+\[@\]\}", text):
            parts = _value(text, variables)
        else:
            parts = [_text([(kind, text)], variables)]
        words[-1] += "".join(parts[:1])
        words += parts[1:]
    quoted = any(kind in ("single", "double") for kind, _ in word)
    return [] if words == [""] and not quoted else words


def _text(word: Sequence[Piece], variables: dict[str, list[str]]) -> str:
    """A word as one text, as in an assignment."""
    texts = []
    for kind, text in word:
        if kind in ("double", "variable"):
            text = re.sub(VARIABLE, lambda match: " ".join(_value(match[0], variables)), text)
        if kind == "double":
            text = re.sub(r'\\([\\"$`])', r"\1", text)
        texts.append(text)
    return "".join(texts)


def _value(variable: str, variables: dict[str, list[str]]) -> list[str]:
    """The values of $NAME or ${NAME:-default}; the text itself if they are unknown."""
    match = NAMED.fullmatch(variable)
    if match is None:
        return [variable]
    name, default = match.groups()
    return variables.get(name, [variable if default is None else default])


def _split(text: str) -> list[str]:
    """The words of a text that a shell would parse again."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()

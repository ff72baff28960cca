"""Continues or answers lines typed in a terminal with a run's model."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace

from hpclm.base import terminal
from hpclm.base.registry import hint
from hpclm.base.terminal import say
from hpclm.inference.completion import Completer
from hpclm.inference.generation_settings import Limits, Sampling

Render = Callable[[list[dict[str, str]]], str]
COMMANDS = {"/help": "show this", "/clear": "begin a new text or conversation", "/exit": "exit, as Ctrl-D does"}
"""Commands, typed alone on a line."""


def converse(completer: Completer, text: str, limits: Limits, sampling: Sampling) -> None:
    """Continue ``text``, then the text plus each typed line, until the input ends."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        say("An empty line continues the text, /help lists commands, Ctrl-C stops, Ctrl-D exits.", file=sys.stderr)
    turn = 0
    if text:
        text += _streamed(completer, text, limits, sampling)
        turn = 1
    while True:
        if at_terminal:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        command = line.rstrip()
        if not line or command == "/exit":
            return
        if command == "/clear":
            text = ""
            continue
        if re.fullmatch(r"/\w+", command):
            say(_reply(command, ("an empty line", "continue the text")), file=sys.stderr)
            continue
        text += line.rstrip("\n")
        text += _streamed(completer, text, limits, replace(sampling, first=turn))
        turn += 1


def chat(completer: Completer, render: Render, limits: Limits, sampling: Sampling) -> None:
    """Answer each typed line as the assistant, in a conversation that goes on until the input ends. ``render``: the text of the messages.

    The oldest turns are left out when the text would exceed the model's context.
    """
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        say("Each line is your turn, /help lists commands, Ctrl-C stops an answer, Ctrl-D exits.", file=sys.stderr)
    room = completer.model.config.context - limits.tokens
    messages: list[dict[str, str]] = []
    turn = 0
    while True:
        if at_terminal:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        command = line.strip()
        if not line or command == "/exit":
            return
        if command == "/clear":
            messages = []
        elif re.fullmatch(r"/\w+", command):
            say(_reply(command), file=sys.stderr)
        elif command:
            messages.append({"role": "user", "content": command})
            while len(messages) > 1 and len(completer.text.start(render(messages))) > room:
                del messages[:2]
            answer = _streamed(completer, render(messages), limits, replace(sampling, first=turn))
            messages.append({"role": "assistant", "content": answer.strip()})
            turn += 1


def _reply(command: str, *more: tuple[str, str]) -> str:
    """The list of commands, or an error for an unknown one."""
    if command == "/help":
        return "\n".join(terminal.columns([*COMMANDS.items(), *more]))
    return f"unknown command {command}; /help lists the commands. Put a space before it if it is text.{hint(command, [*COMMANDS])}"


def _streamed(completer: Completer, text: str, limits: Limits, sampling: Sampling) -> str:
    """Print the continuation of ``text`` as it comes; returns it, complete or up to Ctrl-C."""
    shown = ""
    # text that may become a stop string, or the rest of a character, is not shown yet
    back = max((len(stop) for stop in limits.stop), default=1) - 1

    def show(_: int, so_far: str) -> None:
        nonlocal shown
        whole = so_far.rstrip("\ufffd")
        ready = whole[: len(whole) - back] if back else whole
        if len(ready) > len(shown):
            say(ready[len(shown) :], end="", flush=True)
            shown = ready

    try:
        done = completer.complete([text], limits, sampling, show)[0].text
        say(done[len(shown) :], flush=True)
        return done
    except KeyboardInterrupt:
        say()
        return shown

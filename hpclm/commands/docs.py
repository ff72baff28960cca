"""``hpclm docs``: show pages of the documentation and explanations of settings, without a network."""

import pydoc
import shutil
import sys

from hpclm import cli
from hpclm.base import terminal
from hpclm.base.terminal import say
from hpclm.documentation.topics import text_on
from hpclm.parser import Parser, completed


def main(topics: list[str]) -> int:
    """Print the text on ``topics``, in a pager if it is long."""
    text = text_on(topics, cli.VERBS)
    if sys.stdout.isatty() and text.count("\n") >= shutil.get_terminal_size().lines:
        pydoc.pager(terminal.plain(text))
    else:
        say(text, end="")
    return 0


def parser() -> Parser:
    """The parser of ``hpclm docs``."""
    options = Parser(
        prog="hpclm docs",
        description="Show a page of the documentation, the explanation of a setting, or the pages that contain your words, best first. "
        "Without TOPIC, list the pages.",
    )
    topic = "a page (reliability), a setting (optim.lr), a section of settings (optim., log), or any words (loss scale)"
    completed(options.add_argument("topics", nargs="*", metavar="TOPIC", help=topic), "topics")
    return options

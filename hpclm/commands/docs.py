"""``hpclm docs``: the pages of the documentation and the explanations of settings, without a network."""

import pydoc
import shutil
import sys

from hpclm import cli, terminal
from hpclm.config.documentation import text_on
from hpclm.parser import Parser, completed
from hpclm.terminal import say


def main(argv: list[str]) -> int:
    """``hpclm docs``."""
    text = text_on(parser().parse_args(argv).topic, cli.VERBS)
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

"""``hpclm config``: print the settings of a run with their documentation, or the reference page of all settings."""

import argparse

from hpclm.base.errors import ExitCode
from hpclm.base.terminal import say
from hpclm.documentation.topics import explained, reference
from hpclm.parser import Parser
from hpclm.preprocess import command_line


def main(
    settings: list[str], reference_page: bool, changed: bool, from_megatron: list[str] | None, typed: list[str]
) -> int:
    """Print the resolved settings, the reference page, or the settings of another project's run."""
    if reference_page:
        say(reference(), end="")
        return 0
    if from_megatron is not None:
        from hpclm.interop import settings_file  # loads PyTorch

        text, complete = settings_file.translated(from_megatron)
        say(text, end="")
        return ExitCode.DONE if complete else ExitCode.INVALID
    run, _ = command_line.planned(settings, typed)
    say(explained(run, changed), end="")
    return 0


def parser() -> Parser:
    """The parser of ``hpclm config``."""
    options = Parser(
        prog="hpclm config",
        description="Print the settings of a run with an explanation of each, or the reference of all settings.",
    )
    options.add_settings("one settings file, and overrides", files=True)
    page = "print the page of all settings instead (Markdown)"
    options.add_argument("--reference", dest="reference_page", action="store_true", help=page)
    options.add_argument("--changed", action="store_true", help="print only what differs from the defaults")
    options.add_argument(
        "--from-megatron",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT | OPTION ...",
        help="print a settings file for the options of Megatron in a script, which is read and never run, or for nanoGPT's configuration "
        "(.py); 64 if an option that changes results has no counterpart",
    )
    return options

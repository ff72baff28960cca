"""``hpclm config``: print the settings of a run, or the reference of all settings."""

from hpclm import cli
from hpclm.config import show
from hpclm.terminal import say


def main(argv: list[str]) -> int:
    """``hpclm config``: print the resolved settings, or the reference page."""
    parser = cli.Parser(
        prog="hpclm config",
        description="Print the settings of a run with an explanation of each, or the reference of all settings.",
    )
    parser.add_argument("settings", nargs="*", metavar="FILE | key=value", help="one settings file, and overrides")
    parser.add_argument("--reference", action="store_true", help="print the page of all settings instead (Markdown)")
    parser.add_argument("--changed", action="store_true", help="print only what differs from the defaults")
    args = parser.parse_args(argv)
    say(show.reference() if args.reference else show.explained(cli.settings(args.settings), args.changed), end="")
    return 0

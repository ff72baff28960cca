"""``hpclm completion``: print a script for completion in bash or zsh."""

from hpclm import __version__, cli
from hpclm.base.terminal import say
from hpclm.completion import PREAMBLES, script
from hpclm.documentation.topics import topics
from hpclm.parser import Parser, completed


def main(shell: str) -> int:
    """Print the script for ``shell``."""
    say(script(shell, _all_commands(), topics()), end="")
    return 0


def parser() -> Parser:
    """The parser of ``hpclm completion``."""
    options = Parser(
        prog="hpclm completion",
        description='Print a script for completion. bash: eval "$(hpclm completion bash)" in ~/.bashrc. '
        "zsh: the same with zsh, after compinit, in ~/.zshrc.",
    )
    options.add_argument("shell", choices=list(PREAMBLES), help="bash or zsh")
    return options


def _all_commands() -> Parser:
    whole = Parser(prog="hpclm")
    whole.add_argument("--version", action="version", version=__version__)
    commands = whole.add_subparsers()
    commands.add_parser("help", help="show the options of a command").add_argument("verb", choices=list(cli.VERBS))
    parsers = {verb: cli.parser(verb) for verb in cli.VERBS}
    parsers["resume"] = _of_resume()
    parsers["request"] = _of_request()
    for verb, text in cli.VERBS.items():
        commands.add_parser(verb, help=text, parents=[parsers[verb]], add_help=False)
    return whole


def _of_resume() -> Parser:
    run = Parser(prog="hpclm resume")
    run.add_run()
    return Parser(parents=[run, cli.parser("submit")], add_help=False, conflict_handler="resolve", prog="hpclm resume")


def _of_request() -> Parser:
    """The parser of runs and a request. Shells complete both everywhere, because any word may be the last run."""
    whole = Parser(prog="hpclm request")
    completed(whole.add_argument("run", nargs="+"), "requests")
    whole.add_runs_folder()
    whole.add_wait("how long to wait for it")
    return whole

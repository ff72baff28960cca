"""What ``hpclm save-now`` and ``hpclm stop`` have in common: a request to each of several runs, and waiting for all of them."""

import time
from collections.abc import Callable
from pathlib import Path

from hpclm import cli
from hpclm.commands import arguments
from hpclm.rundir import control_files
from hpclm.rundir import runs as folders
from hpclm.terminal import say


def main(verb: str, description: str, done: Callable[[Path], str], argv: list[str]) -> int:
    """``hpclm VERB``, where ``done`` says what a run has done once it has complied."""
    parser = arguments.parser(
        verb,
        description,
        epilog="exit code: 0 · 1 if a run does not comply · 64 if a run is not training",
        run=arguments.SEVERAL,
        nargs="+",
        wait="how long to wait until it is done",
    )
    args = parser.parse_args(argv)
    chosen = folders.choose(args.run, args.runs)
    each, asked = cli.Each(len(chosen)), dict[Path, Path]()
    for out in chosen:
        with each:
            asked[out] = control_files.request(verb, out)
    until = time.monotonic() + args.wait
    for out, path in asked.items():
        with each:
            if control_files.followed(path, until):
                say(done(out), flush=True)
    return each.code

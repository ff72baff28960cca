"""The verbs ``hpclm save-now`` and ``hpclm stop``: a request to each of several runs, and waiting for all of them."""

import time
from pathlib import Path

from hpclm import cli, files
from hpclm.rundir import control_files
from hpclm.rundir import runs as folders
from hpclm.terminal import say


def save_now(argv: list[str]) -> int:
    """``hpclm save-now``: have runs save after the current step, and continue."""
    return _request(
        "save-now", "Have runs save after the current step, and continue.", "saving; see: hpclm checkpoints", argv
    )


def stop(argv: list[str]) -> int:
    """``hpclm stop``: have runs save after the current step, and exit."""
    description = (
        "Have runs save after the current step, and exit with code 0, so that Slurm does not start them again. Works from any "
        "machine that sees the run directory; 'hpclm cancel' also ends runs that wait or hang. 'hpclm resume' continues them."
    )
    return _request("stop", description, "saved and ended; continue with: hpclm resume", argv)


def _request(verb: str, description: str, done: str, argv: list[str]) -> int:
    """The verb ``verb``; ``done`` is said of a run that has complied, before its name."""
    parser = cli.run_parser(
        verb,
        description,
        epilog="exit code: 0 · 1 if a run does not comply · 64 if a run is not training",
        run=cli.SEVERAL,
        nargs="+",
        wait="how long to wait for it",
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
                say(f"{done} {files.typed(out)}", flush=True)
    return each.code

"""The verbs ``hpclm save-now`` and ``hpclm stop``: a request to each of several runs, and waiting for all of them."""

import argparse
import time
from pathlib import Path

from hpclm import cli, files
from hpclm.rundir import control_files
from hpclm.rundir import runs as folders
from hpclm.terminal import say


def save_now(argv: list[str]) -> int:
    """``hpclm save-now``."""
    return _request("save-now", save_now_parser().parse_args(argv), "saving; see: hpclm checkpoints")


def save_now_parser() -> argparse.ArgumentParser:
    """The parser of ``hpclm save-now``."""
    return _parser("save-now", "Have runs save after the current step, and continue.")


def stop(argv: list[str]) -> int:
    """``hpclm stop``."""
    return _request("stop", stop_parser().parse_args(argv), "saved and ended; continue with: hpclm resume")


def stop_parser() -> argparse.ArgumentParser:
    """The parser of ``hpclm stop``."""
    return _parser(
        "stop",
        "Have runs save after the current step, and exit with code 0, so that Slurm does not start them again. Works from any "
        "machine that sees the run directory; 'hpclm cancel' also ends runs that wait or hang. 'hpclm resume' continues them.",
    )


def _parser(verb: str, description: str) -> argparse.ArgumentParser:
    return cli.run_parser(
        verb,
        description,
        epilog="exit code: 0 · 1 if a run does not comply · 64 if a run is not training",
        run=cli.SEVERAL,
        nargs="+",
        wait="how long to wait for it",
    )


def _request(verb: str, args: argparse.Namespace, done: str) -> int:
    """The verb ``verb``; ``done`` is said of a run that has complied, before its name."""
    chosen = folders.choose(args.run, args.runs)
    each, asked = cli.PerRunErrors(len(chosen)), dict[Path, Path]()
    for out in chosen:
        with each:
            asked[out] = control_files.request(verb, out)
    until = time.monotonic() + args.wait
    for out, path in asked.items():
        with each:
            if control_files.followed(path, until):
                say(f"{done} {files.typed(out)}", flush=True)
    return each.code

"""Give a run that trains an order, by a file in its directory, and wait until it has followed it."""

import argparse
import os
import shlex
import time
from pathlib import Path

from hpclm.errors import HpclmError
from hpclm.job import runs as folders
from hpclm.job.standing import look

PATIENCE = 5.0  # seconds squeue may take
LOOK = 0.3  # seconds between looks whether the order was followed


def parser(verb: str, description: str) -> argparse.ArgumentParser:
    """The command line of a verb that gives an order."""
    made = argparse.ArgumentParser(prog=f"hpclm {verb}", description=description)
    made.add_argument("run", help="run directory, or its name below --runs")
    made.add_argument(
        "--wait", type=float, default=300, metavar="SECONDS", help="how long to wait until it is done (default: 300)"
    )
    made.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="where runs are (default: runs)"
    )
    return made


def give(verb: str, run: str, below: Path, seconds: float) -> bool:
    """Leave the order in the run's directory and wait until it is gone; False where the run does not train.

    HpclmError when it is not followed within ``seconds``; it stands then, and is followed at the next step.
    """
    out = folders.resolve(run, below)
    standing = look([folders.read(out)], PATIENCE)[0]
    if standing.name not in ("running", "starting"):
        print(f"{out} does not train: {standing.name}{f', {standing.ending}' if standing.ending else ''}")
        return False
    path = out / verb
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        raise HpclmError(f"{path} cannot be written: {error.strerror}") from None
    until = time.monotonic() + seconds
    while path.exists():
        if time.monotonic() > until:
            raise HpclmError(
                f"{out} has not followed after {seconds:g} s; the order stands, and is followed after the step it is in. "
                f"Look with hpclm status {shlex.quote(str(out))}; rm {shlex.quote(str(path))} takes it back"
            )
        time.sleep(LOOK)
    return True

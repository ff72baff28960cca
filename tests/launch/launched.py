"""Launchers of stand-in ranks (tests/job/stand_in.py), and what is left of them."""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.runs import PATIENCE, ROOT, until


def words(how, out, settings, *acts):
    """The command of a launcher (local, mpirun, interactive) of stand-in ranks."""
    return [sys.executable, "-m", "tests.launch.stand_in", "launch", how, str(out), settings, *acts]


def start(how, out, settings, *acts, **more):
    options = {"cwd": ROOT, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words(how, out, settings, *acts), text=True, **{**options, **more})


def launched(how, out, settings, *acts, **more):
    """Exit code, output and errors of a launcher that ends by itself."""
    process = start(how, out, settings, *acts, **more)
    told, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, told, errors


def ready(out, count):
    """Waits for all ranks; their process numbers, each as its own node counts them."""
    files = [out / f"ready-{rank}" for rank in range(count)]
    until(lambda: all(file.exists() and file.read_text() for file in files), what="the start of all ranks")
    return [int(file.read_text()) for file in files]


def left(out):
    """Processes of this machine, and of nodes on it, that have the folder among their words."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(out).encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def warned(out, count):
    """Waits until all ranks have been warned; they go on "saving" until ``save`` is called."""
    until(lambda: all(signals(out, count)), what="a signal to every rank")


def save(out):
    """Lets the ranks that were warned end."""
    (out / "saved").touch()


def job_log(out):
    """What the launcher and the ranks have logged."""
    [log] = (out / "logs").glob("job-*.log")
    return log.read_text()


def signals(out, count):
    """What each rank was sent."""
    files = [out / f"signals-{rank}" for rank in range(count)]
    return [file.read_text().split() if file.exists() else [] for file in files]

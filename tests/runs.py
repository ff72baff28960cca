"""Start hpclm as a person does, and read what it leaves."""

import json
import os
import random
import re
import secrets
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATIENCE = 600.0  # seconds: a test waits no longer, on a machine however busy, for what takes a second on a quiet one


def hpclm(*words, check=None, **kwargs):
    """Run ``hpclm WORDS`` in a new process; ``check`` is the exit code it must end with."""
    command = [sys.executable, "-m", "hpclm", *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, cwd=kwargs.pop("cwd", ROOT), **kwargs
    )
    assert check is None or done.returncode == check, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def command_of(module):
    """A pattern of the command lines with which hpclm starts ``module``."""
    return rf"^\S*python\S* .*\b{re.escape(module)} "


def shown_on(terminal):
    """What programs print on a pseudo-terminal, until all of them have closed it."""
    shown = b""
    with suppress(OSError):
        while data := os.read(terminal, 65536):
            shown += data
    return shown


def losses(out):
    """step -> loss in hex, from metrics.jsonl; every step once."""
    rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    found = {row["step"]: (row["loss"] or 0.0).hex() for row in steps}
    assert len(found) == len(steps)
    return found


def launch(size):
    """What torchrun tells all ranks of a launch on this machine; rank 0 opens the store."""
    return {
        "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "OMP_NUM_THREADS": 1,
    }


def variables(rank, launched):
    """The environment of one of them."""
    numbers = {**launched, "RANK": rank, "LOCAL_RANK": rank}
    return os.environ | {name: str(value) for name, value in numbers.items()}


class Ranks:
    """The processes of one run on this machine, each started as torchrun starts it; rank 0 has the store."""

    def __init__(self, size, words, only=None, **env):
        own, self.processes = {**launch(size), **env}, {}
        for rank in range(size) if only is None else only:
            self.processes[rank] = subprocess.Popen(
                [sys.executable, "-m", "hpclm", "train", *map(str, words)],
                env=variables(rank, own),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
            process.communicate()

    def wait(self):
        """Exit code and output of every rank."""
        until = time.monotonic() + PATIENCE
        found = {}
        for rank, process in self.processes.items():
            output, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
            found[rank] = (process.returncode, output)
        return found

    def wait_for(self, out, step):
        """Wait until metrics.jsonl has ``step``; no rank that runs now may end before."""
        running = {rank: process for rank, process in self.processes.items() if process.poll() is None}

        def happened():
            ended = [rank for rank, process in running.items() if process.poll() is not None]
            assert not ended or has_step(out, step), f"rank {ended[0]} ended: {running[ended[0]].communicate()}"
            return has_step(out, step)

        until(happened, f"step {step}")


def until(happened, what="it", alive=None):
    """Wait until ``happened()``, while the process ``alive``, if one is given, must not end."""
    end = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < end, f"{what} did not happen within {PATIENCE:.0f} s"
        assert alive is None or alive.poll() is None, f"the process ended before {what}"
        time.sleep(0.02)


def has_step(out, step):
    """Whether metrics.jsonl has ``step``."""
    return any(f'"step": {step},' in line for line in lines(Path(out) / "metrics.jsonl"))


def exit_code(words):
    """What ``hpclm WORDS``, here and now, ends with; 2 if the options themselves are wrong."""
    from hpclm import cli

    try:
        return cli.main(words)
    except SystemExit as ended:
        return ended.code


def free_port():
    """A port that is free, and not of those that connections are given: none of another test takes it before it is used."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def lines(path):
    """Lines of a file that may not be there yet."""
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def figures(out, *keys):
    """Rows of those numbers from metrics.jsonl, in order."""
    rows = [json.loads(line) for line in lines(Path(out) / "metrics.jsonl")]
    return [[row[key] for key in keys] for row in rows if all(key in row for key in keys)]

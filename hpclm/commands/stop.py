"""``hpclm stop``: have runs save after the current step, and exit."""

from hpclm import files
from hpclm.commands import requests


def main(argv: list[str]) -> int:
    """``hpclm stop``."""
    return requests.main(
        "stop",
        "Have runs save after the current step, and exit with code 0, so that Slurm does not start them again. Works from any "
        "machine that sees the run directory; 'hpclm cancel' also ends runs that wait or hang. 'hpclm resume' continues them.",
        lambda out: f"saved and ended; continue with: hpclm resume {files.typed(out)}",
        argv,
    )

"""``hpclm save-now``: have runs save after the current step, and continue."""

from hpclm import files
from hpclm.commands import requests


def main(argv: list[str]) -> int:
    """``hpclm save-now``."""
    return requests.main(
        "save-now",
        "Have runs save after the current step, and continue.",
        lambda out: f"saving; see: hpclm checkpoints {files.typed(out)}",
        argv,
    )

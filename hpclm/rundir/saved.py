"""The newest checkpoint of a run, by the names in its folder: a checkpoint gets its name when it is complete."""

import os
import re
import stat
from contextlib import suppress
from pathlib import Path

MANIFEST = "MANIFEST.json"
_STEP = re.compile("step-[0-9]+")


def survey(folder: Path | str) -> tuple[tuple[int, float] | None, int]:
    """The newest checkpoint in ``folder`` (its step, and when it was made in seconds since 1970; None without one), and how many
    were set aside as bad."""
    names: list[str] = []
    with suppress(OSError):
        names = os.listdir(folder)  # noqa: PTH208 - a tenth of the time
    bad = sum(name.startswith(".bad-") for name in names)
    for step, name in sorted(((int(n[5:]), n) for n in names if _STEP.fullmatch(n)), reverse=True):
        with suppress(OSError):
            manifest = os.stat(f"{folder}/{name}/{MANIFEST}")  # noqa: PTH116
            if stat.S_ISREG(manifest.st_mode):
                return (step, manifest.st_mtime), bad
    return None, bad


def unsaved(out: Path | str) -> str:
    """Of a run that ends without saving: what it loses."""
    newest, _ = survey(f"{out}/checkpoints")
    return f"not saved since step {newest[0]}" if newest else "nothing saved"

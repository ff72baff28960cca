"""Whether every node sees the run directory, can write there, and has room."""

import json
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PATIENCE = 5.0  # seconds that a shared file system may take to show one node what another wrote


def mark(out: Path, name: str, content: str) -> None:
    """Write a small file to the run directory and make it lasting; OSError when that fails."""
    with (out / name).open("x", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def seen(out: Path, name: str, content: str, patience: float = PATIENCE) -> bool:
    """Whether the file that another process marked is here, with what it wrote."""
    until = time.monotonic() + patience
    while True:
        with suppress(OSError):
            if (out / name).read_text(encoding="utf-8") == content:
                return True
        if time.monotonic() > until:
            return False
        time.sleep(0.1)


def look(out: Path, token: str, node: int) -> dict[str, object]:
    """What node number ``node`` finds in the run directory where the first rank has left ``token``."""
    began = time.monotonic()
    try:
        mark(out, marker(token, node), json.dumps(node))
        free = shutil.disk_usage(out).free
    except OSError as error:
        return {"error": f"{error.strerror} (errno {error.errno})"}
    return {"free": free, "same": seen(out, marker(token), token), "seconds": round(time.monotonic() - began, 3)}


def marker(token: str, node: int | None = None) -> str:
    """Name of the file that the first rank leaves, or of node number ``node``'s."""
    return f".preflight-{token}" + ("" if node is None else f"-{node}")


def unmark(out: Path, token: str, nodes: Iterable[int]) -> None:
    """Remove what this process can see of the files of one check."""
    for name in (marker(token), *(marker(token, node) for node in nodes)):
        with suppress(OSError):
            (out / name).unlink()

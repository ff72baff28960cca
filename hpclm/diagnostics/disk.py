"""Whether every node sees the same run directory, can write there, and has room."""

import json
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hpclm import files
from hpclm.node import processes

PATIENCE = 5.0  # seconds that a shared file system may take to show one node what another wrote


def mark(out: Path, name: str, content: str) -> None:
    """Write a small file to the run directory and sync it."""
    with os.fdopen(files.opened(out / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def seen(out: Path, name: str, content: str, patience: float = PATIENCE) -> bool:
    """Whether the file that another process wrote with ``mark`` is visible here."""

    def arrived() -> bool:
        with suppress(OSError):
            return files.read_text(out / name, errors="replace") == content
        return False

    return processes.wait_until(arrived, patience, pause=0.1)


def look(out: Path, token: str, node: int) -> dict[str, object]:
    """What node number ``node`` finds in the run directory, where rank 0 has written ``token``."""
    began = time.monotonic()
    try:
        mark(out, marker(token, node), json.dumps(node))
        free = shutil.disk_usage(out).free
    except OSError as error:
        return {"error": f"{error.strerror} (errno {error.errno})"}
    return {"free": free, "same": seen(out, marker(token), token), "seconds": round(time.monotonic() - began, 3)}


def marker(token: str, node: int | None = None) -> str:
    """Name of the file that rank 0 writes, or node number ``node``."""
    return f".preflight-{token}" + ("" if node is None else f"-{node}")


def unmark(out: Path, token: str, nodes: Iterable[int]) -> None:
    """Remove the files of one check, as far as they are visible here."""
    for name in (marker(token), *(marker(token, node) for node in nodes)):
        with suppress(OSError):
            (out / name).unlink()

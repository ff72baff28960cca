"""PyTorch's flight recorder: the last collectives of each process, which a hang's report keeps in the run directory.

It is on for NCCL unless its variables say otherwise. PyTorch writes it if a collective times out; the watchdog, which
detects a hang earlier, writes it by ``dump``. The dumps are PyTorch's pickles; they are never read here.
"""

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from hpclm import files

EVENTS = 2000  # collectives that each process keeps; some kB each
PATIENCE = 1.0  # seconds for a dump: the hang report must not wait for a stuck driver
SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
FOLDER, PREFIX = "flight-recorder", "rank_"


def settings(logs: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Variables that switch the recorder on, without those that ``env`` has under their present or earlier names.

    If a collective times out, PyTorch then writes to ``logs``, not to its default, a predictable name in /tmp.
    """
    wanted = {SIZE: str(EVENTS), FILE: str(logs / "nccl-timeout-rank_"), ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1"}
    return {names[0]: value for names, value in wanted.items() if not any(name in env for name in names)}


def switch_on(logs: Path) -> None:
    """Record this process's NCCL collectives; called before the process group is made."""
    os.environ.update(settings(logs, os.environ))


def dump(folder: Path, rank: int, source: Callable[[], bytes] | None = None) -> Path | None:
    """Write the record of this process into ``folder``, readable by its owner only; the file, or None if there is no
    record.

    ``source`` returns the record; default: PyTorch's function, which not every build has.
    """
    read = source or _source()
    if read is None:
        return None
    found: list[bytes] = []

    def act() -> None:
        with suppress(RuntimeError):
            found.append(read())

    thread = threading.Thread(target=act, name="hpclm-flight-recorder", daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if not found or not found[0]:
        return None
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{PREFIX}{rank}"
    path.unlink(missing_ok=True)
    with os.fdopen(files.appending(path, 0o600), "ab") as file:
        file.write(found[0])
    return path


def how_to_read(folder: Path) -> str:
    """How to read the dumps in ``folder``, for the hang report; empty if there are none."""
    if not folder.is_dir() or not any(folder.glob(f"{PREFIX}*")):
        return ""
    return f"each rank's last collectives: torchfrtrace --prefix {PREFIX} {files.typed(folder)}"


def _source() -> Callable[[], bytes] | None:
    """PyTorch's function that returns the record, if the recorder is on; otherwise None."""
    if not any(os.environ.get(name, "0") not in ("", "0") for name in SIZE):
        return None
    try:
        from torch._C import _distributed_c10d as c10d
    except ImportError:
        return None
    read = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)
    # its own stacks would have the hung process import modules for a second or two; the report has the stacks of all threads
    return partial(read, includeStackTraces=False) if read else None

"""What torch.compile has made, kept in the run directory: an attempt on other nodes need not compile again.

One file, which rank 0 writes. Each node keeps its own cache of many small files, as PyTorch does, so that a shared file system
does not have to.
"""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpclm import files

log = logging.getLogger(__name__)
NAME = "compiled.bin"
MOST = 1 << 30  # bytes; usually some megabytes


def load(out: Path) -> None:
    """Give PyTorch what an earlier attempt has compiled, if there is anything and it suits this PyTorch and GPU."""
    with suppress(FileNotFoundError):
        content = files.read_bytes(out / NAME, MOST)
        with suppress(Exception):  # a damaged file, or one of another version: compiled again
            if artifacts().load_cache_artifacts(content):
                log.info("torch.compile: using what an earlier attempt has compiled (%s)", NAME)


def save(out: Path) -> None:
    """Keep what this process has compiled; without it the next attempt only starts more slowly."""
    with suppress(Exception):
        made = artifacts().save_cache_artifacts()
        if made is not None:
            files.write_bytes(out / NAME, made[0])


def artifacts() -> Any:
    """PyTorch's functions for that."""
    import torch

    return torch.compiler

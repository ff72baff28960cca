"""The one file of gpu_proof.sh that is to be taken away: logs, metrics, figures and versions, at most 15 MB."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

NAME = "gpu-proof.tar.gz"
LIMIT = 15 * 1000 * 1000
"""Bytes of the archive."""
MAX_FILE_BYTES = 64 * 2**20
"""Bytes of a file that is read to see whether it fits."""
PATTERNS = (
    *("summary.txt", "report.md", "results.json", "facts.json", "versions.txt", "*.json", "*.log"),
    *("runs/*/*.yaml", "runs/*/*.json", "runs/*/*.jsonl", "runs/*/logs/*"),
)
"""Files of the output folder, the most telling first: what does not fit is left out from the end."""


def renew(out: Path, folder: Path) -> Path:
    """Write the archive of what is in ``out`` into ``folder``, in place of an older one; it is never half written."""
    left_out, parts = [], list[tuple[str, bytes]]()
    packed = 0
    for path in chosen(out):
        with suppress(OSError):  # a stage may be renaming it
            if path.stat().st_size > MAX_FILE_BYTES:
                left_out.append(path)
                continue
            data = path.read_bytes()
            size = len(compressed([("", data)]))
            if packed + size > LIMIT - 2**16:
                left_out.append(path)
                continue
            packed += size
            parts.append((str(path.relative_to(out)), data))
    names = "".join(f"{path.relative_to(out)}\n" for path in left_out)
    content = compressed([*parts, *([("left-out.txt", names.encode())] if left_out else [])])
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{NAME}.new"
    new.write_bytes(content)
    new.replace(folder / NAME)
    return folder / NAME


def chosen(out: Path) -> Iterator[Path]:
    """The files to take, each once, in the order of PATTERNS."""
    seen = set[Path]()
    for pattern in PATTERNS:
        for path in sorted(out.glob(pattern)):
            if path not in seen and path.is_file():
                seen.add(path)
                yield path


def compressed(parts: list[tuple[str, bytes]]) -> bytes:
    """A .tar.gz of these names and contents."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as archive:
        for name, data in parts:
            entry = tarfile.TarInfo(f"gpu-proof/{name}")
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()

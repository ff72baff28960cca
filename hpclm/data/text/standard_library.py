"""A small corpus that every machine has: the sources of Python's standard library, one JSONL document for each file."""

import json
import random
import sysconfig
from pathlib import Path

from hpclm import files
from hpclm.errors import ConfigError

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "pydoc_data"}


def write(output: Path, library: Path | None = None) -> str:
    """Write the corpus; a sentence about its size. ``library``: its folder, by default that of the running Python."""
    library = library or Path(sysconfig.get_paths()["stdlib"])
    sources = [path for path in sorted(library.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(library).parts)]
    random.Random(0).shuffle(sources)  # files of a folder are alike, and the end of the corpus is for validation
    documents = []
    for path in sources:
        try:
            text = files.read_text(path).strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text:
            documents.append(json.dumps({"text": text, "source": str(path.relative_to(library))}))
    if not documents:
        raise ConfigError(f"no Python sources in {library}; install the standard library's sources")
    files.writable_folder(output.parent, "output folder")
    files.write_text(output, "\n".join(documents) + "\n")
    return f"{output}: {len(documents):,} documents, {output.stat().st_size / 1e6:.1f} MB, from {library}"

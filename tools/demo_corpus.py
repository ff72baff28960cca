"""Make a small corpus that every machine has: the sources of Python's standard library, a JSONL document a file.

python tools/demo_corpus.py OUTPUT.jsonl
"""

import argparse
import json
import random
import sysconfig
from pathlib import Path

from hpclm import cli, files
from hpclm.errors import ConfigError

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "pydoc_data"}


def main(argv: list[str]) -> int:
    """Write the corpus and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    args = parser.parse_args(argv)
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [path for path in sorted(library.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(library).parts)]
    random.Random(0).shuffle(sources)  # neighbours in a folder resemble each other; validation wants a fair share
    documents = []
    for path in sources:
        try:
            text = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text:
            documents.append(json.dumps({"text": text, "source": str(path.relative_to(library))}))
    if not documents:
        raise ConfigError(f"no Python sources in {library}; install the standard library's sources")
    files.writable_folder(args.output.parent, "output folder")
    files.write_text(args.output, "\n".join(documents) + "\n")
    print(f"{args.output}: {len(documents):,} documents, {args.output.stat().st_size / 1e6:.1f} MB, from {library}")
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run(main))

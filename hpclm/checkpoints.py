"""The verb ``hpclm checkpoints``: what a run has saved, and whether it still is what was saved."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpclm import cli
from hpclm.errors import ConfigError, NoCheckpointError
from hpclm.job import runs as folders


def main(argv: list[str]) -> int:
    """``hpclm checkpoints``."""
    parser = argparse.ArgumentParser(
        prog="hpclm checkpoints",
        description="List a run's checkpoints, oldest first, and hold their files against sizes and hashes.",
        epilog="exit code: 0 · 66 when the run has saved, and nothing good is left of it",
    )
    parser.add_argument("run", help="run directory, or its name below --runs")
    parser.add_argument("--no-verify", action="store_true", help="only look at names and sizes, which is quick")
    parser.add_argument("--json", action="store_true", help="print a JSON object a line")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="where runs are (default: runs)"
    )
    args = parser.parse_args(argv)
    folder = folders.resolve(args.run, args.runs) / "checkpoints"
    if not folder.is_dir():
        wrong = "is a file and must be a folder" if folder.exists() else "does not exist: the run has saved nothing yet"
        raise ConfigError(f"{folder} {wrong}")
    found = []
    for row in rows(folder, verify=not args.no_verify):
        found.append(row)
        print(json.dumps(row) if args.json else line(row), flush=True)
    if not any(row["state"] in ("good", "complete") for row in found):
        raise NoCheckpointError(f"no good checkpoint in {folder}")
    return 0


def rows(folder: Path, verify: bool) -> Iterator[dict[str, Any]]:
    """What is known of each checkpoint in ``folder``, and of those that were set aside."""
    from tqdm import tqdm

    from hpclm.checkpoint import manifest as manifests
    from hpclm.checkpoint import shelf
    from hpclm.checkpoint.manifest import BadCheckpoint

    for step in shelf.steps(folder):
        row: dict[str, Any] = {"name": step.name, "state": "complete", "reason": ""}
        try:
            manifest = manifests.read(step)
            made = manifest.made
            row |= {"step": manifest.progress["step"], "bytes": manifest.size, "files": len(manifest.files)}
            row |= {"validation_loss": manifest.validation, "time": made.get("time"), "seconds": made.get("seconds")}
            row |= {"engine": made.get("engine"), "processes": made.get("processes")}
            row |= {"why": manifest.why}
            manifests.check_sizes(step, manifest)
            if verify:
                for name in tqdm(manifest.files, desc=step.name, unit="file", disable=None, leave=False):
                    manifests.verify(step, manifest, [name])
                row["state"] = "good"
        except BadCheckpoint as reason:
            row |= {"state": "bad", "reason": str(reason)}
        except (OSError, ConfigError) as error:
            row |= {"state": "unreadable", "reason": str(error)}
        yield row
    for bad in sorted(folder.glob(".bad-*")):
        note = bad / "REASON.txt"
        yield {
            "name": bad.name,
            "state": "set aside",
            "reason": note.read_text(errors="replace").strip() if note.is_file() else "",
        }


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    if "bytes" not in row:
        return f"{row['name']:<22}{row['state']:<11}{row['reason']}"
    loss = f"validation loss {row['validation_loss']:.4f}" if row["validation_loss"] is not None else ""
    what = f"{row['bytes'] / 1e6:,.1f} MB in {row['files']} file{'s' * (row['files'] != 1)}"
    who = f"{row['engine']} on {row['processes']} process{'es' * (row['processes'] != 1)}"
    left = f"saved as {row['why']} said" if row["why"] else ""
    parts = [what, f"{row['time']}", who, loss, left, row["reason"]]
    return f"{row['name']:<22}{row['state']:<11}{'  '.join(part for part in parts if part)}"


if __name__ == "__main__":
    raise SystemExit(cli.run(main))

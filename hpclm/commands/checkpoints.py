"""``hpclm checkpoints``: list a run's checkpoints, and verify them."""

import json
from pathlib import Path

from hpclm.base.errors import ConfigError, ExitCode
from hpclm.base.terminal import say
from hpclm.checkpoint import listing
from hpclm.parser import Parser, exit_codes
from hpclm.rundir import runs


def main(run: str, runs_folder: Path, no_verify: bool, as_json: bool) -> int:
    """Print a line for each checkpoint, and how to go back to one."""
    folder = runs.resolve(run, runs_folder) / "checkpoints"
    if not folder.is_dir():
        wrong = "is a file and must be a folder" if folder.exists() else "does not exist: the run has saved nothing yet"
        raise ConfigError(f"{folder} {wrong}")
    listed = []
    trunk = runs.read_run(folder.parent).trunk
    if trunk and not as_json:
        say(f"branch of {trunk.described()}")
    for row in listing.rows(folder, verify=not no_verify):
        listed.append(row)
        say(json.dumps(row) if as_json else listing.line(row), flush=True)
    way_back = listing.to_go_back(folder, listed)
    if way_back and not as_json:
        say(way_back)
    listing.check_usable(folder, listed)
    return 0


def parser() -> Parser:
    """The parser of ``hpclm checkpoints``."""
    options = Parser(
        prog="hpclm checkpoints",
        description="List a run's checkpoints, oldest first, and verify the sizes and hashes of their files, and that all values "
        "are finite.",
        epilog=exit_codes(
            {
                ExitCode.DONE: "some are good, or none has been saved",
                ExitCode.NO_CHECKPOINT: "the run has saved, but no good checkpoint is left",
            }
        ),
    )
    options.add_run()
    options.add_argument("--no-verify", action="store_true", help="check only names and sizes, which is quick")
    options.add_json("print one JSON object per line")
    return options

"""``hpclm report``: write a page and images about one run, or a comparison of several."""

from pathlib import Path

from hpclm.base import paths
from hpclm.base.terminal import say
from hpclm.inference.samples import samples_of_runs
from hpclm.parser import SEVERAL, Parser
from hpclm.reporting.page import NAME, write
from hpclm.rundir import runs as folders


def main(run: list[str], runs_folder: Path, output: Path | None, samples: str | None, no_png: bool) -> int:
    """Write the page and its images, and print their paths."""
    chosen = folders.choose(run, runs_folder)
    if output is None:
        in_run_folder = len(chosen) == 1 and not folders.other_owner(chosen[0])
        output = chosen[0] if in_run_folder else Path(NAME)
    for path in write(chosen, output, not no_png, samples, samples_of_runs):
        say(str(path))
    return 0


def parser() -> Parser:
    """The parser of ``hpclm report``."""
    options = Parser(
        prog="hpclm report",
        description="Write one HTML page about a run: where it came from, its curves, every attempt and what ended it; or a comparison "
        "of several runs, the best first, with the settings that differ. It needs no network, and no other file.",
    )
    options.add_run(SEVERAL, nargs="+")
    options.add_argument(
        "-o",
        "--output",
        type=paths.option_path,
        metavar="PATH",
        help="a page, FILE.html, or a folder for the page and its images (default: RUN; for several runs, or another user's run: "
        "report.html here)",
    )
    options.add_argument(
        "--samples",
        metavar="PROMPT",
        help="show how the models continue this text: some checkpoints of one run, or the newest checkpoint of each of several",
    )
    options.add_argument("--no-png", action="store_true", help="write no images")
    return options

"""``hpclm report``: write a page and images about one run, or a comparison of several."""

from pathlib import Path

from hpclm.base import paths
from hpclm.base.errors import UsageError
from hpclm.base.terminal import say
from hpclm.inference.samples import samples_of_runs
from hpclm.parser import SEVERAL, Parser
from hpclm.reporting.page import PAGE, write
from hpclm.rundir import runs as folders


def main(run: list[str], runs_folder: Path, output: Path | None, samples: str | None, no_png: bool) -> int:
    """Write the page and its images, and print their paths."""
    if output and output.suffix != PAGE:
        raise UsageError(f"--output {output} must end with {PAGE}")
    chosen = folders.choose(run, runs_folder)
    in_run_folder = len(chosen) == 1 and not folders.other_owner(chosen[0])
    images = not no_png and (in_run_folder or output is not None)  # outside a run directory, write the page only
    if output is None:
        output = chosen[0] / "report.html" if in_run_folder else Path("report.html")
    for path in write(chosen, output, images, samples, samples_of_runs):
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
        metavar="FILE",
        help="the page (default: RUN/report.html; for several runs, or another user's run: report.html here, without images)",
    )
    options.add_argument(
        "--samples",
        metavar="PROMPT",
        help="show how the models continue this text: some checkpoints of one run, or the newest checkpoint of each of several",
    )
    options.add_argument("--no-png", action="store_true", help="write the page only, no images beside it")
    return options

"""The arguments that commands about runs have in common."""

import argparse
from pathlib import Path

ONE = "run directory, or its name below --runs"
SEVERAL = "run directories, their names below --runs, or patterns of these: 'sweep-*'"


def parser(
    verb: str, description: str, epilog: str | None = None, run: str = ONE, nargs: str | None = None, wait: str = ""
) -> argparse.ArgumentParser:
    """RUN, --runs and, if ``wait`` describes it, --wait."""
    made = argparse.ArgumentParser(prog=f"hpclm {verb}", description=description, epilog=epilog)
    made.add_argument("run", nargs=nargs, help=run)
    if wait:
        made.add_argument("--wait", type=float, default=300, metavar="SECONDS", help=f"{wait} (default: 300)")
    add_runs(made)
    return made


def add_runs(made: argparse.ArgumentParser) -> None:
    """The option --runs."""
    made.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="where runs are (default: runs)"
    )


def located(run: Path, runs: Path) -> Path:
    """``run``, or if there is no such folder the one of that name below ``runs``, for verbs that read a run's model."""
    return runs / run if not run.exists() and (runs / run).is_dir() else run

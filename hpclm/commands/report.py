"""The verb ``hpclm report``: curves and attempts of one run, or of several side by side, as a page and as images."""

import re
from pathlib import Path

from hpclm import cli, files
from hpclm.config import compose
from hpclm.errors import ConfigError, unwritten
from hpclm.rundir import runs as folders
from hpclm.terminal import say


def main(argv: list[str]) -> int:
    """``hpclm report``."""
    parser = cli.run_parser(
        "report",
        "Write one HTML page that says what became of runs: loss, speed, memory, every attempt and what ended it, "
        "and for several runs the settings in which they differ. It needs no network, and no other file.",
        run=cli.SEVERAL,
        nargs="+",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the page (default: RUN/report.html; of several, or of another user's, report.html here)",
    )
    parser.add_argument("--no-png", action="store_true", help="write the page only, no images beside it")
    args = parser.parse_args(argv)
    chosen = folders.choose(args.run, args.runs)
    own = len(chosen) == 1 and not folders.other_owner(chosen[0])
    output = args.output or (chosen[0] / "report.html" if own else Path("report.html"))
    if output.suffix != ".html":
        raise ConfigError(f"--output {output} must end with .html")
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.parent}")
    for path in write(chosen, output, not args.no_png):
        say(str(path))
    return 0


def write(chosen: list[Path], output: Path, images: bool) -> list[Path]:
    """Write the report of the runs ``chosen``; the files it consists of."""
    from hpclm.reporting import figures, history, page

    names = _names(chosen)
    runs = {name: history.read(out) for name, out in zip(names, chosen, strict=True)}
    drawn = figures.figures(runs)
    drawings = {name: figures.svg(figure) for name, figure in drawn.items()}
    settings = {name: _settings(out) for name, out in zip(names, chosen, strict=True)}
    title = names[0] if len(names) == 1 else f"{len(names)} runs: {', '.join(names)}"
    written = {output: page.page(title, runs, drawings, settings).encode(errors="replace")}
    if images:
        for name, figure in drawn.items():
            label = re.sub("[ /_]", "-", name)
            written[output.with_name(f"{output.stem}-{label}.png")] = figures.png(figure)
    for path, content in written.items():
        try:
            files.write_bytes(path, content)
        except OSError as error:
            raise unwritten(error, path, "choose another --output") from None
    return list(written)


def _settings(out: Path) -> dict[str, object]:
    try:
        return compose.flat_of_run(out)
    except ConfigError:  # it was never started, or its settings are damaged: the rest is worth a page
        return {}


def _names(chosen: list[Path]) -> list[str]:
    """A name for each run: its folder's, with those above it where that is not enough to tell them apart."""
    paths = [path.resolve() for path in chosen]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names

"""The verb ``hpclm report``: one run, or several compared, as a page and as images."""

import re
import sys
from dataclasses import replace
from pathlib import Path

from hpclm import files, paths
from hpclm.errors import ConfigError, HpclmError, unwritten
from hpclm.parser import SEVERAL, Parser
from hpclm.rundir import runs as folders
from hpclm.terminal import say

MAX_CHECKPOINTS = 4  # checkpoints of a run whose samples are shown


def main(argv: list[str]) -> int:
    """``hpclm report``."""
    args = parser().parse_args(argv)
    chosen = folders.choose(args.run, args.runs)
    own = len(chosen) == 1 and not folders.other_owner(chosen[0])
    output = args.output or (chosen[0] / "report.html" if own else Path("report.html"))
    for path in write(chosen, output, not args.no_png, args.samples):
        say(str(path))
    return 0


def parser() -> Parser:
    """The parser of ``hpclm report``."""
    options = Parser(
        prog="hpclm report",
        description="Write one HTML page about a run: where it came from, its curves, every attempt and what ended it; or a comparison "
        "of several runs, the best first, with the settings in which they differ. It needs no network, and no other file.",
    )
    options.add_run(SEVERAL, nargs="+")
    options.add_runs_folder()
    options.add_argument(
        "-o",
        "--output",
        type=paths.option_path,
        metavar="FILE",
        help="the page (default: RUN/report.html; of several, or of another user's, report.html here)",
    )
    options.add_argument(
        "--samples",
        metavar="PROMPT",
        help="show how models continue this text: that of some checkpoints of one run, or the newest of each of several",
    )
    options.add_argument("--no-png", action="store_true", help="write the page only, no images beside it")
    return options


def write(chosen: list[Path], output: Path, images: bool, prompt: str | None = None) -> list[Path]:
    """Write the report of the runs ``chosen``, with what their models make of ``prompt``; the files it consists of."""
    from hpclm.reporting import figures, history, page, provenance

    if output.suffix != ".html":
        raise ConfigError(f"output {output} must end with .html")
    if not output.parent.is_dir():
        raise ConfigError(f"output {output}: there is no folder {output.parent}")
    named = dict(zip(_names(chosen), chosen, strict=True))
    if prompt is not None and len(named) == 1:
        from hpclm.inference import run_settings

        run_settings.saved_steps(chosen[0])
        run_settings.check(chosen[0], [], reads_text=True)
    runs = {name: history.read(out) for name, out in named.items()}
    content = page.Content(runs, {name: provenance.settings(out) for name, out in named.items()})
    if prompt is not None:
        content = replace(content, prompt=prompt, samples=_samples(named, prompt))
    written = {output: page.page(content).encode(errors="replace")}
    if images:
        for name, figure in figures.figures(runs).items():
            label = re.sub("[ /_]", "-", name)
            written[output.with_name(f"{output.stem}-{label}.png")] = figures.png(figure)
    for path, data in written.items():
        try:
            files.write_bytes(path, data)
        except OSError as error:
            raise unwritten(error, path, "choose another output") from None
    return list(written)


def _samples(named: dict[str, Path], prompt: str) -> dict[str, dict[int, str]]:
    """What models of each run write; a run without a usable model does not keep the others from the page."""
    from hpclm.inference.completion import samples

    written = dict[str, dict[int, str]]()
    for name, out in named.items():
        try:
            written[name] = samples(out, prompt, 1 if len(named) > 1 else MAX_CHECKPOINTS)
        except HpclmError as error:
            if len(named) == 1:
                raise
            say(f"no sample of {name}: {error}", file=sys.stderr)
    return written


def _names(chosen: list[Path]) -> list[str]:
    """A name for each run: its folder's, with those above it where that is not enough to tell them apart."""
    paths = [path.resolve() for path in chosen]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names

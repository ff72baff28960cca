"""``hpclm selftest``: test whether the user's own code learns the same in every layout of processes."""

import json
from dataclasses import asdict

from hpclm.base.errors import ExitCode
from hpclm.base.progress import ProgressBar
from hpclm.base.terminal import say
from hpclm.parser import Parser, exit_codes
from hpclm.trials.verdict import SETTINGS, LayoutVerdict, conclusion, lines


def main(name: str, settings: list[str], kind: str | None, only: list[str], as_json: bool) -> int:
    """Train the toy in every layout, and print the verdicts."""
    from hpclm.trials.run import selftest  # with PyTorch

    shown = list[str]()
    with ProgressBar(None, desc="", unit=" layouts", leave=False) as bar:

        def tell(verdict: LayoutVerdict) -> None:
            if not as_json:
                bar.clear()
                say("\n".join(lines(verdict, shown)), flush=True)
            shown.append(verdict.cause)
            bar.update()

        result = selftest(name, kind, settings, only, tell)
    if as_json:
        say(json.dumps(asdict(result) | {"agrees": result.agrees}))
    else:
        say(conclusion(result))
    return ExitCode.DONE if result.agrees else ExitCode.INVALID


def parser() -> Parser:
    """The parser of ``hpclm selftest``."""
    options = Parser(
        prog="hpclm selftest",
        description="Train a toy for a few steps on the CPU with your block, optimizer, data source, schedule, engine, tokenizer or "
        "sink: in one process, on tensor, pipeline and data ranks, with ZeRO 1 and fsdp2, and killed and resumed. Says which layouts agree, "
        "and where one does not, which weight differs, by how much, and the usual cause.",
        epilog=exit_codes(
            {
                ExitCode.DONE: "all layouts agree, or are refused by name",
                ExitCode.INVALID: "a layout differs, or the code cannot be used",
            }
        ),
    )
    options.add_argument(
        "name", metavar="MODULE:NAME", help="mine:Block is the class Block of mine.py, in a folder of PYTHONPATH"
    )
    options.add_settings("settings of the toy: model.hidden=64")
    options.add_argument("--kind", choices=SETTINGS, help="kind of code, if the code itself does not show it")
    options.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="LAYOUT",
        help="try this layout alone, such as 'tensor 2'; may be repeated",
    )
    options.add_json("print the result as JSON")
    return options

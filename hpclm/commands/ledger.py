"""``hpclm ledger``: which samples and documents each step of a run has read."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpclm.base import log, paths, terminal
from hpclm.base.errors import ConfigError, UsageError
from hpclm.base.progress import Bar
from hpclm.base.terminal import many, say
from hpclm.parser import Parser, whole
from hpclm.rundir import runs

if TYPE_CHECKING:
    from hpclm.data.indexed import IndexedDataset
    from hpclm.ledger.history import Span
    from hpclm.ledger.reads import Ledger


def main(
    run: str,
    runs_folder: Path,
    step: int | None,
    document: list[str] | None,
    text: Path | None,
    verify: bool,
    as_json: bool,
) -> int:
    """Print what was asked for; by default, the attempts of the run."""
    if sum([document is not None, text is not None, verify or step is not None]) > 1:
        raise UsageError("choose one of --document, --text, and --at or --verify")
    if verify and as_json:
        raise UsageError("--verify has no --json: its exit code is the answer, 0 or 64")
    log.setup()  # an index that must be made first takes a while
    from hpclm.ledger.reads import Ledger

    ledger = Ledger(runs.resolve(run, runs_folder))
    if step is not None:
        ledger.of_step(step)
    if verify:
        return _verify(ledger, step)
    if step is not None:
        _print(_of_step(ledger, step), as_json)
    elif document is not None:
        for dataset, number in [_named(ledger, name) for name in document]:
            _document(ledger, dataset, number, as_json)
    elif text is not None:
        for dataset, number in ledger.with_text(text):
            _document(ledger, dataset, number, as_json)
    else:
        _print((_span(ledger, span) for span in ledger.spans), as_json)
    return 0


def _span(ledger: "Ledger", span: "Span") -> dict[str, Any]:
    samples = ledger.counter(span).all_samples()
    undone = range(max(span.kept + 1, span.first), span.last + 1)
    return {
        "run": str(span.out),
        "attempt": span.attempt,
        "steps": f"{span.first}-{span.last}",
        "undone": f"{undone.start}-{undone.stop - 1}" if undone else "",
        "samples": f"{samples.start}-{samples.stop - 1}",
        "ordered for": span.planned,
        "settings": span.config,
    }


def _of_step(ledger: "Ledger", step: int) -> Iterator[dict[str, Any]]:
    for span in ledger.of_step(step):
        for part in ledger.parts(span, step):
            yield {
                "attempt": span.attempt,
                "undone": step > span.kept,
                "sample": part.sample,
                "dataset": part.dataset,
                "document": part.document,
                "offset": part.offset,
                "tokens": part.tokens,
            }


def _named(ledger: "Ledger", name: str) -> tuple["IndexedDataset", int]:
    """The dataset and the number in [PREFIX:]NUMBER."""
    prefix, _, number = name.rpartition(":")
    if not number.isdecimal():
        raise UsageError(f"--document {name}: give the number of a document from 0 on, or PREFIX:NUMBER")
    return ledger.dataset(prefix or None), int(number)


def _document(ledger: "Ledger", dataset: "IndexedDataset", number: int, as_json: bool) -> None:
    """Print the steps that read a document."""
    rows = []
    for reads in ledger.document(dataset, number):
        for step, samples in zip(reads.steps.tolist(), reads.samples.tolist(), strict=True):
            span = reads.span
            rows.append(
                {
                    "step": step,
                    "samples": samples,
                    "run": str(span.out),
                    "attempt": span.attempt,
                    "undone": step > span.kept,
                }
            )
    begin, end = dataset.document_tokens(number)
    kept = [row["step"] for row in rows if not row["undone"]]
    before = ledger.checkpoint_before(min(kept)) if kept else None
    if as_json:
        about = {"dataset": str(dataset.prefix), "document": number, "tokens": end - begin}
        say(json.dumps(about | {"reads": rows, "checkpoint_before": before and str(before)}))
        return
    named = f"document {number} of {dataset.prefix}, {many(end - begin, 'token')},"
    if not rows:
        say(f"{named} has been read by no step")
        return
    _print(iter(rows), as_json)
    steps = len({row["step"] for row in rows})
    say(f"{named} has been read by {many(steps, 'step')}, in {many(sum(row['samples'] for row in rows), 'sample')}")
    if not kept:
        say("all of these steps were undone: later attempts went on from checkpoints of earlier steps")
    elif before:
        say(f"the newest checkpoint before step {min(kept)}: {before}")
    else:
        say(f"there is no checkpoint of a step before {min(kept)}")


def _verify(ledger: "Ledger", step: int | None) -> int:
    """Compute the sums again; ConfigError names the steps whose sum differs."""
    checked = list(Bar(ledger.verify(step), unit="step", disable=None, leave=False))
    if not checked:
        raise ConfigError(f"{ledger.out} has no row of such a step: steps of its trunk are verified there")
    wrong = [row for row in checked if row.recorded not in (None, row.computed)]
    unknown = sum(row.recorded is None for row in checked)
    if wrong:
        steps = terminal.ranges(row.step for row in wrong)
        raise ConfigError(f"{many(len(wrong), 'step')} read other tokens than the datasets have now: {steps}")
    say(f"{many(len(checked) - unknown, 'step')} verified: their samples have the hashes of metrics.jsonl")
    if unknown:
        say(f"{many(unknown, 'step')} recorded no sum")
    return 0


def _print(rows: Iterator[dict[str, Any]], as_json: bool) -> None:
    """Print a table, or one JSON object per line."""
    if as_json:
        for row in rows:
            say(json.dumps(row))
        return
    every = [row for row in rows]
    if every:
        cells = [[_cell(value) for value in row.values()] for row in every]
        say("\n".join(terminal.columns([[name.upper() for name in every[0]], *cells])))


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    return "" if value is None else terminal.line(value)


def parser() -> Parser:
    """The parser of ``hpclm ledger``."""
    options = Parser(
        prog="hpclm ledger",
        description="Show which samples and documents each step of a run has read, from its settings, its events and the order of the "
        "samples. Without options: the steps of each attempt. A document counts as read if one of its tokens was an input or a label.",
    )
    options.add_run()
    add = options.add_argument
    add("--at", dest="step", type=whole(1), metavar="N", help="show the documents that step N read")
    text = "show the steps that read the documents D of the dataset PREFIX, numbered from 0, and the newest checkpoint before each"
    add("--document", type=paths.option, nargs="+", metavar="[PREFIX:]D", help=text)
    text = "the same for the document with the text of FILE; needs hpclm data index PREFIX"
    add("--text", type=paths.option_path, metavar="FILE", help=text)
    text = "read the samples of all steps of the run that were not undone, or of --at, again, and compare their hashes with metrics.jsonl"
    add("--verify", action="store_true", help=text)
    options.add_json("print JSON, one object per line")
    return options

"""``hpclm data``: inspect, verify, hash, merge and convert datasets."""

import argparse
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpclm import terminal
from hpclm.errors import ConfigError
from hpclm.terminal import say

DTYPES = ["uint8", "int8", "int16", "uint16", "int32", "int64", "uint32", "uint64"]


def main(argv: list[str]) -> int:
    """``hpclm data``: one of the five commands."""
    args = _arguments(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # documents are in scripts that a terminal may not know
    args.command(args)
    return 0


def inspect(args: argparse.Namespace) -> None:
    """Print what is in a dataset."""
    from hpclm.data.disk import inspect
    from hpclm.data.disk.indexed import IndexedDataset
    from hpclm.data.disk.verify import verify

    dataset = IndexedDataset(prefix(args.prefix))
    found = inspect.report(dataset, args.documents, args.tokenizer, args.tokenizer_files)
    if args.histogram:
        histogram(found, args.histogram)
    if args.verify:
        size = found["tokenizer"]["size"] if found["tokenizer"] and args.vocab_size is None else args.vocab_size
        found["verified"] = verify(dataset, size)
    say(json.dumps(found, ensure_ascii=False, indent=1) if args.json else inspect.words(found))
    if args.verify and not args.json:
        print(f"\n{_verified(found['verified'])}")


def histogram(found: dict[str, Any], path: Path) -> None:
    """Write the document lengths of a report as a picture; ConfigError if the format is unknown or it cannot be written."""
    from hpclm import files
    from hpclm.data.disk.lengths import Bin, name
    from hpclm.reporting import figures

    title = f"{Path(found['prefix']).name}: {found['documents']:,} documents, {found['tokens']:,} tokens"
    bins = [Bin(*bin) for bin in found["histogram"]]
    picture = figures.histogram([name(bin) for bin in bins], [bin.count for bin in bins], title)
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"--histogram {path} must end in .svg or .png")
    content = figures.png(picture) if path.suffix == ".png" else figures.svg(picture, path.stem).encode()
    try:
        files.write_bytes(path, content)
    except OSError as error:
        raise ConfigError(f"--histogram {path} cannot be written: {error.strerror}") from None


def verify(args: argparse.Namespace) -> None:
    """Verify datasets."""
    from hpclm.data.disk.indexed import IndexedDataset
    from hpclm.data.disk.verify import verify

    _for_each(args.prefix, lambda name: _verified(verify(IndexedDataset(name), args.vocab_size)))


def hash(args: argparse.Namespace) -> None:
    """Record the content hashes of datasets."""
    from hpclm.data.disk.indexed import IndexedDataset
    from hpclm.data.disk.verify import add_hashes

    def add(name: str) -> str:
        found, new, zeros = add_hashes(IndexedDataset(name), args.overwrite, args.vocab_size)
        if not new:
            return "; ".join(filter(None, [f"content hash {found.bin}, as its note says", zeros.told()]))
        now = f"the files as they are now have the content hash {found.bin}, noted in {name}.json"
        before = "their lengths, index and token ids are valid; what else was damaged before cannot be known"
        return "; ".join(filter(None, [now, before, zeros.told()]))

    _for_each(args.prefix, add)


def _for_each(names: Sequence[str], act: Callable[[str], str]) -> None:
    """Print what ``act`` returns for each dataset; problems of all of them are raised at the end."""
    problems = []
    for name in prefixes(names):
        try:
            say(f"{name}: {act(name)}")
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def merge(args: argparse.Namespace) -> None:
    """Concatenate datasets."""
    from hpclm.data.disk.merge import merge

    options = {"layout": args.layout, "dtype": args.dtype, "lossy": args.lossy, "overwrite": args.overwrite}
    args.out = args.out.removesuffix(".bin").removesuffix(".idx")
    made = merge(args.out, prefixes(args.prefix), compare=not args.no_note, **options)
    say(
        f"{args.out}: {made.document_count:,} documents, {made.token_count:,} tokens as {made.dtype.name}, {made.layout}"
    )


def convert(args: argparse.Namespace) -> None:
    """Write a dataset in another layout or type."""
    args.prefix, args.no_note = [args.prefix], False
    merge(args)


def prefix(name: str) -> str:
    """The dataset that ``name`` refers to, possibly by one of its files."""
    stem, _, end = name.rpartition(".")
    return stem if end in ("bin", "idx", "json") and not Path(f"{name}.idx").exists() else name


def prefixes(names: Sequence[str]) -> list[str]:
    """The datasets that ``names`` mean; one of which several files are named counts once."""
    found: list[str] = []
    for name in names:
        meant = prefix(name)
        if meant == name or meant not in found:
            found.append(meant)
    return found


def _verified(found: dict) -> str:
    below = f", all below {found['vocab_size']:,}" if found["vocab_size"] is not None else ""
    highest = "" if found["highest_token"] is None else f", the highest {found['highest_token']:,}"
    hashed = f"when hpclm data hash recorded it at {found['content_added']}" if found["content_added"] else "written"
    content = (
        f"the content is as it was {hashed} (hash {found['content'][:8]}…)"
        if found["content"]
        else "its note has no content hash, so tokens that were changed into others are not found: hpclm data hash adds one"
    )
    return (
        f"verified: {found['sequences']:,} sequences in {found['documents']:,} documents, "
        f"{found['tokens']:,} tokens{highest}{below}; {content}{'; ' if found['zeros'] else ''}{found['zeros'] or ''}"
    )


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = terminal.ArgumentParser(
        prog="hpclm data", description="Inspect, verify, hash, merge and convert datasets.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, does: object, what: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.", allow_abbrev=False)
        sub.set_defaults(command=does)
        return sub

    look = command("inspect", inspect, "show what is in a dataset: counts, lengths, tokenizer, first documents")
    look.add_argument("prefix", metavar="PREFIX", help="path of the dataset, without .bin or .idx")
    look.add_argument("--documents", type=_count, default=3, metavar="N", help="show the first N documents; default: 3")
    look.add_argument("--histogram", type=Path, metavar="FILE", help="plot the document lengths as .svg or .png")
    look.add_argument("--verify", action="store_true", help="read every token too, as 'hpclm data verify' does")
    look.add_argument("--json", action="store_true", help="print JSON")
    look.add_argument(
        "--tokenizer", metavar="KIND", help="tokenizer to decode text with; default: the one recorded with the dataset"
    )
    look.add_argument("--tokenizer-files", nargs="+", default=[], metavar="FILE", help="in the kind's order")

    check = command("verify", verify, "read datasets completely and report what is wrong, and where")
    check.add_argument("prefix", nargs="+", metavar="PREFIX", help="paths of datasets, or of their files")
    note = command(
        "hash",
        hash,
        "record content hashes of datasets as they are now, so that corruption can be detected later; or compare with recorded ones",
    )
    note.add_argument("prefix", nargs="+", metavar="PREFIX", help="paths of datasets, or of their files")
    note.add_argument("--overwrite", action="store_true", help="replace recorded hashes by those of the current files")
    for sub in (look, check, note):
        sub.add_argument(
            "--vocab-size",
            type=_count,
            metavar="N",
            help="every token must be below N; default: the recorded vocabulary size",
        )

    join = command("merge", merge, "concatenate datasets")
    join.add_argument("out", metavar="OUT", help="path of the dataset to write")
    join.add_argument("prefix", nargs="+", metavar="PREFIX", help="paths of datasets, or of their files, in order")
    join.add_argument("--no-note", action="store_true", help="do not compare the tokenizers they were made with")
    turn = command("convert", convert, "write a dataset in another layout or type; reads all layouts")
    turn.add_argument("prefix", metavar="IN", type=prefix, help="path of a dataset: Megatron's, fairseq's, or TNTIDX")
    turn.add_argument("out", metavar="OUT", help="path of the dataset to write")
    for sub in (join, turn):
        sub.add_argument(
            "--layout",
            choices=["megatron", "fairseq"],
            required=sub is turn,
            help="default of merge: the datasets' own",
        )
        sub.add_argument(
            "--dtype", choices=DTYPES, help="type of the tokens; default: the narrowest that holds all of them"
        )
        sub.add_argument("--lossy", action="store_true", help="drop what the layout cannot represent")
        sub.add_argument("--overwrite", action="store_true", help="replace a dataset of that name")
    args = parser.parse_args(argv)
    if getattr(args, "vocab_size", None) is not None and args.command is inspect and not args.verify:
        parser.error("--vocab-size goes with --verify")
    if getattr(args, "tokenizer_files", None) and not args.tokenizer:
        parser.error("--tokenizer-files goes with --tokenizer")
    return args


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return int(text)

"""Look at datasets, check them, join them, and turn them into others: hpclm data, or python -m hpclm.data."""

import argparse
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hpclm import cli
from hpclm.errors import ConfigError

DTYPES = ["uint8", "int8", "int16", "uint16", "int32", "int64", "uint32", "uint64"]


def main(argv: list[str]) -> int:
    """``hpclm data``: one of the four commands."""
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
        inspect.draw(found, args.histogram)
    if args.verify:
        size = found["tokenizer"]["size"] if found["tokenizer"] and args.vocab_size is None else args.vocab_size
        found["verified"] = verify(dataset, size)
    print(json.dumps(found, ensure_ascii=False, indent=1) if args.json else inspect.words(found))
    if args.verify and not args.json:
        print(f"\n{_verified(found['verified'])}")


def verify(args: argparse.Namespace) -> None:
    """Read datasets whole; all that is wrong is said at the end."""
    from hpclm.data.disk.indexed import IndexedDataset
    from hpclm.data.disk.verify import verify

    problems = []
    for name in prefixes(args.prefix):
        try:
            print(f"{name}: {_verified(verify(IndexedDataset(name), args.vocab_size))}")
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def merge(args: argparse.Namespace) -> None:
    """Join datasets."""
    from hpclm.data.disk.merge import merge

    options = {"layout": args.layout, "dtype": args.dtype, "lossy": args.lossy, "overwrite": args.overwrite}
    args.out = args.out.removesuffix(".bin").removesuffix(".idx")
    made = merge(args.out, prefixes(args.prefix), compare=not args.no_note, **options)
    print(
        f"{args.out}: {made.document_count:,} documents, {made.token_count:,} tokens as {made.dtype.name}, {made.layout}"
    )


def convert(args: argparse.Namespace) -> None:
    """Write one dataset in another way."""
    args.prefix, args.no_note = [args.prefix], False
    merge(args)


def prefix(name: str) -> str:
    """The dataset that ``name`` means, which may be one of its files."""
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
    return (
        f"verified: {found['sequences']:,} sequences in {found['documents']:,} documents, "
        f"{found['tokens']:,} tokens{highest}{below}"
    )


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hpclm data", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, does: object, what: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.", allow_abbrev=False)
        sub.set_defaults(command=does)
        return sub

    look = command("inspect", inspect, "show what is in a dataset: counts, lengths, tokenizer, first documents")
    look.add_argument("prefix", metavar="PREFIX", help="path of the dataset, without .bin or .idx")
    look.add_argument("--documents", type=_count, default=3, metavar="N", help="show the first N; default: 3")
    look.add_argument("--histogram", type=Path, metavar="FILE", help="draw the documents' lengths as .svg or .html")
    look.add_argument("--verify", action="store_true", help="read every token too, as 'hpclm data verify' does")
    look.add_argument("--json", action="store_true", help="print JSON")
    look.add_argument(
        "--tokenizer", metavar="KIND", help="show text with this one; default: the one in the dataset's note"
    )
    look.add_argument("--tokenizer-files", nargs="+", default=[], metavar="FILE", help="in the kind's order")

    check = command("verify", verify, "read datasets whole and say what is wrong with them, and where")
    check.add_argument("prefix", nargs="+", metavar="PREFIX", help="paths of datasets, or of their files")
    for sub in (look, check):
        sub.add_argument(
            "--vocab-size", type=_count, metavar="N", help="every token must be below N; default: what the note says"
        )

    join = command("merge", merge, "lay datasets end to end as one")
    join.add_argument("out", metavar="OUT", help="path of the dataset to write")
    join.add_argument(
        "prefix", nargs="+", metavar="PREFIX", help="paths of datasets, or of their files, in their order"
    )
    join.add_argument("--no-note", action="store_true", help="do not compare the tokenizers they were made with")
    turn = command("convert", convert, "write a dataset in another layout or type; reads every layout there is")
    turn.add_argument("prefix", metavar="IN", type=prefix, help="path of a dataset: Megatron's, fairseq's, or TNTIDX")
    turn.add_argument("out", metavar="OUT", help="path of the dataset to write")
    for sub in (join, turn):
        sub.add_argument(
            "--layout",
            choices=["megatron", "fairseq"],
            required=sub is turn,
            help="default of merge: the datasets' own",
        )
        sub.add_argument("--dtype", choices=DTYPES, help="of the tokens; default: the narrowest that holds theirs")
        sub.add_argument("--lossy", action="store_true", help="let go of what the layout cannot hold")
        sub.add_argument("--overwrite", action="store_true", help="replace a dataset of that name")
    args = parser.parse_args(argv)
    if getattr(args, "vocab_size", None) is not None and args.command is inspect and not args.verify:
        parser.error("--vocab-size goes with --verify")
    if getattr(args, "tokenizer_files", None) and not args.tokenizer:
        parser.error("--tokenizer-files goes with --tokenizer")
    return args


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(cli.run(main))

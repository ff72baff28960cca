"""``hpclm data``: inspect, verify, hash, merge and convert datasets."""

import argparse
import io
import json
import sys
from collections.abc import Callable, Sequence

from hpclm import paths
from hpclm.errors import ConfigError
from hpclm.parser import Parser
from hpclm.terminal import many, say

DTYPES = ["uint8", "int8", "int16", "uint16", "int32", "int64", "uint32", "uint64"]


def main(argv: list[str]) -> int:
    """``hpclm data``: one of the five commands."""
    options = parser()
    args = options.parse_args(argv)
    if getattr(args, "tokenizer_files", None) and not args.tokenizer:
        options.error("--tokenizer-files goes with --tokenizer")
    if (picture := getattr(args, "histogram", None)) and picture.suffix not in (".svg", ".png"):
        options.error(f"--histogram {picture} must end in .svg or .png")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # documents are in scripts that a terminal may not know
    args.command(args)
    return 0


def inspect(args: argparse.Namespace) -> None:
    """Print what is in a dataset."""
    from hpclm.data.indexed import IndexedDataset
    from hpclm.datasets.inspect import as_text, histogram, report
    from hpclm.datasets.verify import prefix

    contents = report(IndexedDataset(prefix(args.prefix)), args.documents, args.tokenizer, args.tokenizer_files)
    if args.histogram:
        histogram(contents, args.histogram)
    say(json.dumps(contents, ensure_ascii=False, indent=1) if args.json else as_text(contents))


def verify(args: argparse.Namespace) -> None:
    """Verify datasets."""
    from hpclm.data.indexed import IndexedDataset
    from hpclm.datasets.verify import described, verify

    def verified(name: str) -> str:
        dataset = IndexedDataset(name)
        return described(dataset, verify(dataset, args.vocab_size))

    _for_each(args.prefix, verified)


def hash(args: argparse.Namespace) -> None:
    """Record the content hashes of datasets."""
    from hpclm.data.indexed import IndexedDataset
    from hpclm.datasets.verify import add_hashes

    def add(name: str) -> str:
        content, added = add_hashes(IndexedDataset(name), args.overwrite)
        if not added:
            return f"content hash {content.bin}, as recorded"
        return f"content hash {content.bin} recorded in {name}.json; it cannot detect earlier damage"

    _for_each(args.prefix, add)


def merge(args: argparse.Namespace) -> None:
    """Concatenate datasets, or write one in another layout or type."""
    from hpclm.datasets.merge import merge
    from hpclm.datasets.verify import prefixes

    out = args.out.removesuffix(".bin").removesuffix(".idx")
    merged = merge(out, prefixes(args.prefix), args.layout, args.dtype, not args.no_note, args.overwrite)
    counts = f"{many(merged.document_count, 'document')}, {many(merged.token_count, 'token')}"
    say(f"{out}: {counts} as {merged.dtype.name}, {merged.layout}")


def _for_each(names: Sequence[str], act: Callable[[str], str]) -> None:
    """Print what ``act`` returns for each dataset; problems of all of them are raised at the end."""
    from hpclm.datasets.verify import prefixes

    problems = []
    for name in prefixes(names):
        try:
            say(f"{name}: {act(name)}")
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


def parser() -> Parser:
    """The parser of ``hpclm data``."""
    options = Parser(
        prog="hpclm data", description="Inspect, verify, hash, merge and convert datasets.", allow_abbrev=False
    )
    commands = options.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: object, does: str) -> Parser:
        sub = commands.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.", allow_abbrev=False)
        sub.set_defaults(command=function)
        return sub

    sub = command("inspect", inspect, "show what is in a dataset: counts, lengths, tokenizer, first documents")
    sub.add_argument("prefix", type=paths.option, metavar="PREFIX", help="path of the dataset, without .bin or .idx")
    sub.add_argument("--documents", type=_count, default=3, metavar="N", help="show the first N documents; default: 3")
    sub.add_argument(
        "--histogram", type=paths.option_path, metavar="FILE", help="plot the document lengths as .svg or .png"
    )
    sub.add_argument("--json", action="store_true", help="print JSON")
    decode = "tokenizer to decode text with; default: the one recorded with the dataset"
    sub.add_argument("--tokenizer", type=paths.option, metavar="KIND", help=decode)
    sub.add_argument(
        "--tokenizer-files", type=paths.option, nargs="+", default=[], metavar="FILE", help="in the kind's order"
    )

    prefixes_help = "paths of datasets, or of their files"
    sub = command("verify", verify, "read datasets completely and report what is wrong, and where")
    sub.add_argument("prefix", type=paths.option, nargs="+", metavar="PREFIX", help=prefixes_help)
    limit = "every token must be below N; default: the recorded vocabulary size"
    sub.add_argument("--vocab-size", type=_count, metavar="N", help=limit)

    sub = command(
        "hash", hash, "record content hashes of datasets, to detect corruption later; or compare recorded ones"
    )
    sub.add_argument("prefix", type=paths.option, nargs="+", metavar="PREFIX", help=prefixes_help)
    sub.add_argument("--overwrite", action="store_true", help="replace recorded hashes by those of the current files")

    sub = command("merge", merge, "concatenate datasets")
    sub.add_argument("out", type=paths.option, metavar="OUT", help="path of the dataset to write")
    sub.add_argument("prefix", type=paths.option, nargs="+", metavar="PREFIX", help=f"{prefixes_help}, in order")
    sub.add_argument("--no-note", action="store_true", help="do not compare the tokenizers they were made with")
    _output_options(sub, required=False)

    sub = command("convert", merge, "write a dataset in another layout or type; reads all layouts")
    sub.add_argument(
        "prefix", type=paths.option, nargs=1, metavar="IN", help="path of a dataset: Megatron's or fairseq's"
    )
    sub.add_argument("out", type=paths.option, metavar="OUT", help="path of the dataset to write")
    sub.set_defaults(no_note=False)
    _output_options(sub, required=True)
    return options


def _output_options(sub: Parser, required: bool) -> None:
    layout = "default of merge: the datasets' own"
    sub.add_argument("--layout", choices=["megatron", "fairseq"], required=required, help=layout)
    dtype = "type of the tokens; default: the narrowest that holds all of them"
    sub.add_argument("--dtype", choices=DTYPES, help=dtype)
    sub.add_argument("--overwrite", action="store_true", help="replace a dataset of that name")


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return int(text)

"""``hpclm data``: inspect, verify, index, merge and convert datasets."""

import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from hpclm.base import paths
from hpclm.base.errors import ConfigError, UsageError
from hpclm.base.terminal import many, say
from hpclm.parser import Parser, whole

DTYPES = ["uint8", "int8", "int16", "uint16", "int32", "int64", "uint32", "uint64"]


def main(command: Callable[..., None], **options: Any) -> int:
    """Run one of the subcommands."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal's encoding may lack characters of documents
    command(**options)
    return 0


def inspect(
    prefix: str,
    documents: int,
    as_json: bool,
    tokenizer: str | None,
    tokenizer_files: list[str],
) -> None:
    """Print the counts, lengths, tokenizer and first documents of a dataset."""
    if tokenizer_files and not tokenizer:
        raise UsageError("--tokenizer-files goes with --tokenizer")
    from hpclm.data.indexed import IndexedDataset
    from hpclm.preprocess import inspect, verify

    contents = inspect.report(IndexedDataset(verify.prefix(prefix)), documents, tokenizer, tokenizer_files)
    say(json.dumps(contents, ensure_ascii=False, indent=1) if as_json else inspect.as_text(contents))


def verify(prefix: list[str], vocab_size: int | None, record: bool) -> None:
    """Print the result of verifying each dataset."""
    from hpclm.data.indexed import IndexedDataset
    from hpclm.preprocess.verify import verification_summary, verify

    def verified(name: str) -> str:
        dataset = IndexedDataset(name)
        return verification_summary(dataset, verify(dataset, vocab_size, record))

    _for_each(prefix, verified)


def merge(
    out: str,
    prefix: list[str],
    layout: Literal["megatron", "fairseq"] | None,
    dtype: str | None,
    overwrite: bool,
    no_note: bool = False,
) -> None:
    """Concatenate datasets, or write one in another layout or type."""
    from hpclm.preprocess.merge import merge
    from hpclm.preprocess.verify import prefixes

    out = out.removesuffix(".bin").removesuffix(".idx")
    merged = merge(out, prefixes(prefix), layout, dtype, not no_note, overwrite)
    counts = f"{many(merged.document_count, 'document')}, {many(merged.token_count, 'token')}"
    say(f"{out}: {counts} as {merged.dtype.name}, {merged.layout}")


def index(prefix: list[str]) -> None:
    """Make the index of the documents of each dataset, and print how long it took."""
    from hpclm.data.indexed import IndexedDataset
    from hpclm.preprocess import document_index

    def made(name: str) -> str:
        began = time.monotonic()
        dataset = IndexedDataset(name)
        document_index.make(dataset)
        return f"{many(dataset.document_count, 'document')} indexed in {time.monotonic() - began:.1f} s"

    _for_each(prefix, made)


def _for_each(names: Sequence[str], act: Callable[[str], str]) -> None:
    """Print the result of ``act`` for each dataset; at the end, ConfigError with the problems of all datasets."""
    from hpclm.preprocess.verify import prefixes

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
        prog="hpclm data",
        intermixed=False,
        description="Inspect, verify, index, merge and convert datasets.",
        allow_abbrev=False,
    )
    commands = options.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: object, does: str) -> Parser:
        sub = commands.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.", allow_abbrev=False)
        sub.set_defaults(command=function)
        return sub

    sub = command("inspect", inspect, "show what is in a dataset: counts, lengths, tokenizer, first documents")
    sub.add_argument("prefix", type=paths.option, metavar="PREFIX", help="path of the dataset, without .bin or .idx")
    sub.add_argument(
        "--documents", type=whole(0), default=3, metavar="N", help="show the first N documents; default: 3"
    )
    sub.add_json("print JSON")
    decode = "tokenizer to decode text with; default: the one recorded with the dataset"
    sub.add_argument("--tokenizer", type=paths.option, metavar="KIND", help=decode)
    sub.add_argument(
        "--tokenizer-files", type=paths.option, nargs="+", default=[], metavar="FILE", help="in the kind's order"
    )

    prefixes_help = "paths of datasets, or of their files"
    sub = command("verify", verify, "read datasets completely, and report each fault and its place")
    sub.add_argument("prefix", type=paths.option, nargs="+", metavar="PREFIX", help=prefixes_help)
    limit = "every token must be below N; default: the recorded vocabulary size"
    sub.add_argument("--vocab-size", type=whole(0), metavar="N", help=limit)
    keep = "store hashes of the files as they are, to detect later changes, instead of comparing them"
    sub.add_argument("--record", action="store_true", help=keep)

    sub = command("index", index, "make the index by which hpclm ledger RUN --text FILE finds a document")
    sub.add_argument("prefix", type=paths.option, nargs="+", metavar="PREFIX", help=prefixes_help)

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
    _output_options(sub, required=True)
    return options


def _output_options(sub: Parser, required: bool) -> None:
    layout = "default of merge: the datasets' own"
    sub.add_argument("--layout", choices=["megatron", "fairseq"], required=required, help=layout)
    dtype = "type of the tokens; default: the narrowest that holds all of them"
    sub.add_argument("--dtype", choices=DTYPES, help=dtype)
    sub.add_argument("--overwrite", action="store_true", help="replace a dataset of that name")

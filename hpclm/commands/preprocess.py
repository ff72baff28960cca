"""``hpclm preprocess``: turn text into a dataset. Also takes the options of Megatron's preprocess_data.py and fairseq-preprocess."""

import argparse
from collections.abc import Iterator, Sequence

from hpclm import log, paths
from hpclm.config.data import TOKENIZERS
from hpclm.datasets import next_command, parts
from hpclm.datasets import options as requests
from hpclm.datasets.encode import tokenizer_of
from hpclm.datasets.inputs import FORMAT, LONGEST_LINE, MAX_LINE_MB
from hpclm.datasets.options import Request, share_of
from hpclm.node import interruption
from hpclm.parser import Parser
from hpclm.terminal import say

# Megatron's --tokenizer-type: our kind, and the options that name its files
MEGATRON_TYPES = {
    "GPT2BPETokenizer": ("gpt2", ("vocab_file", "merge_file")),
    "BertWordPieceLowerCase": ("wordpiece_lower", ("vocab_file",)),
    "BertWordPieceCase": ("wordpiece", ("vocab_file",)),
    "SentencePieceTokenizer": ("sentencepiece", ("tokenizer_model",)),
}
FILE_OPTIONS = ("vocab_file", "merge_file", "tokenizer_model")
FAIRSEQ_ONLY = ("only_source", "trainpref", "validpref", "testpref", "srcdict", "destdir")


def main(argv: list[str]) -> int:
    """``hpclm preprocess``: read the arguments, write the datasets, print the command to run next."""
    log.setup()
    wanted = request(argv)
    tokenizer_of.cache_clear()  # its files may have changed since an earlier call
    with interruption.raising():
        complete = parts.preprocess(wanted)
    if complete:
        say(f"next: {next_command.after(wanted)}")
    return 0


def request(argv: Sequence[str]) -> Request:
    """What the arguments ask for; exits with 2 if they are contradictory. ConfigError for invalid inputs."""
    options = parser()
    args = options.parse_args(argv)
    fairseq = any(getattr(args, name) for name in FAIRSEQ_ONLY)
    model = requests.tokenizer_run(args)
    for mistake in (*_mistakes(args), *_tokenizer(args, fairseq), *(_fairseq_mistakes(args) if fairseq else ())):
        options.error(mistake)
    return requests.request(args, fairseq, model)


def parser() -> Parser:
    """The parser of ``hpclm preprocess``."""
    options = Parser(
        prog="hpclm preprocess",
        description="Convert text into a dataset. With srun or mpirun, each process handles a part of the input.",
        allow_abbrev=False,
    )
    add = options.add_argument_group("input").add_argument
    add(
        "--input",
        type=paths.option,
        nargs="+",
        metavar="FILE",
        help="UTF-8 text or JSONL (also .gz, .zst), .parquet, .arrow, .feather; a folder of them, such as datasets' "
        "save_to_disk writes; a quoted pattern; or - (a pipe)",
    )
    add("--format", choices=["jsonl", "lines", "files"], help=FORMAT)
    # for tools/preprocess_data.py
    add("--plain-text", choices=["lines", "files"], default="files", help=argparse.SUPPRESS)
    keys = "keys, or columns, of the texts; a dataset is written for each; default: text"
    add("--json-keys", "--json-key", "--columns", "--column", nargs="+", metavar="KEY", help=keys)
    add("--longest-line", type=int, default=MAX_LINE_MB, metavar="MB", help=LONGEST_LINE)
    add("--part", metavar="I/N", help="process part I (from 0) of N of the input; the last to finish joins the parts")

    add = options.add_argument_group("conversations").add_argument
    chat = 'JSONL of {"messages": [{"role", "content"}, ...]} or ShareGPT\'s "conversations"; writes P_chat and P_chat_loss'
    add("--chat", type=paths.option, nargs="+", metavar="FILE", help=chat)
    add(
        "--chat-template", type=paths.option, metavar="FILE", help="default: the run's, or the one beside the tokenizer"
    )
    add("--context", type=int, metavar="TOKENS", help="longest conversation; default: the run's model.context")
    too_long = "longer conversations keep their beginning, or are left out; default: cut"
    add("--too-long", choices=["cut", "drop"], help=too_long)

    add = options.add_argument_group("tokenizer").add_argument
    kinds = f"{', '.join(sorted(TOKENIZERS))}, package.module:Name, or a run directory whose tokenizer is used"
    add("--tokenizer", type=paths.option, metavar="KIND", help=kinds)
    add(
        "--tokenizer-files",
        type=paths.option,
        nargs="+",
        default=[],
        metavar="FILE",
        help="its files, in the order of `hpclm docs data`",
    )
    add("--eod", metavar="TOKEN", help="the end-of-document token; default: the tokenizer's own")

    add = options.add_argument_group("documents").add_argument
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    add("--empty", choices=["skip", "keep"], default="skip", help="documents without tokens; default: skip")
    add("--on-error", choices=["stop", "skip"], default="stop", help="what to do with unreadable lines; default: stop")
    add("--split-sentences", action="store_true", help="one sequence per sentence; writes P_text_sentence")
    language = "for --split-sentences, such as de; English rules if sentencex has none, as for zh; default: en"
    add("--language", "--lang", metavar="CODE", help=language)
    add("--keep-newlines", action="store_true", help="sentences keep the white space after them")

    add = options.add_argument_group("output").add_argument
    add(
        "--output-prefix",
        type=paths.option,
        metavar="P",
        help="writes P_text_document.bin, .idx and .json (text: the key)",
    )
    add("--overwrite", action="store_true", help="replace a dataset of that name")
    add(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="encoding processes, no more than there are cores, once the text is seen to take long; default: 1",
    )

    add = options.add_argument_group("Megatron's names").add_argument
    add("--tokenizer-type", choices=list(MEGATRON_TYPES), help="GPT2BPETokenizer is --tokenizer gpt2, and so on")
    add("--vocab-file", "--vocab", type=paths.option, metavar="FILE", help="GPT-2's vocab.json, BERT's vocab.txt")
    add("--merge-file", type=paths.option, metavar="FILE", help="GPT-2's merges.txt")
    add("--tokenizer-model", type=paths.option, metavar="FILE", help="sentencepiece's .model")
    add("--dataset-impl", choices=["mmap"], default="mmap", help="the layout, which all versions of Megatron read")

    add = options.add_argument_group("fairseq-preprocess's names (documents are lines)").add_argument
    add("--only-source", action="store_true", help="one language; needed")
    add("--trainpref", type=paths.option, metavar="FILE", help="writes D/train")
    add("--validpref", type=paths.option_paths, metavar="FILE[,FILE...]", help="writes D/valid, D/valid1, ...")
    add("--testpref", type=paths.option_paths, metavar="FILE[,FILE...]", help="writes D/test, D/test1, ...")
    add("--destdir", type=paths.option, metavar="D", help="folder of the datasets and dict.txt; default: data-bin")
    add(
        "--srcdict", type=paths.option, metavar="FILE", help="a dict.txt; default: count the words of the training text"
    )
    return options


def _mistakes(args: argparse.Namespace) -> Iterator[str]:
    for name in ("workers", "longest_line"):
        if getattr(args, name) < 1:
            yield f"{_flag(name)} {getattr(args, name)} must be at least 1"
    if not args.split_sentences and (args.language or args.keep_newlines):
        yield "--language and --keep-newlines go with --split-sentences"
    if args.part and not share_of(args.part):
        yield f"--part {args.part} must be I/N, part I of N, with I from 0 to N - 1"
    if args.chat:
        given = ("input", "format", "json_keys", "append_eod", "split_sentences", *FAIRSEQ_ONLY)
        if useless := [_flag(name) for name in given if getattr(args, name)]:
            yield f"--chat excludes {' and '.join(useless)}"
        if args.empty == "keep":
            yield "--chat excludes --empty keep: there are no empty conversations"
        if not (args.output_prefix and args.tokenizer_files and (args.context or 0) >= 1):
            yield "--chat needs --output-prefix P, --tokenizer RUN (or json with --tokenizer-files), and --context TOKENS without a RUN"
    elif args.chat_template or args.too_long or args.context:
        yield "--chat-template, --context and --too-long go with --chat"
    elif not any(getattr(args, name) for name in FAIRSEQ_ONLY) and not (args.input and args.output_prefix):
        yield "give --input FILE... and --output-prefix P, or fairseq's --only-source --trainpref F --destdir D"


def _tokenizer(args: argparse.Namespace, fairseq: bool) -> Iterator[str]:
    """Translate Megatron's options into --tokenizer and --tokenizer-files; yields what is wrong with them."""
    if not args.tokenizer_type:
        if any(getattr(args, name) for name in FILE_OPTIONS):
            yield f"{', '.join(map(_flag, FILE_OPTIONS))} go with --tokenizer-type; or give --tokenizer-files"
        if args.tokenizer_files and not args.tokenizer:
            yield "--tokenizer-files go with --tokenizer KIND"
        if not (args.tokenizer or fairseq):
            yield f"give --tokenizer KIND and --tokenizer-files FILE...; kinds: {', '.join(sorted(TOKENIZERS))}"
        return
    if args.tokenizer or args.tokenizer_files:
        yield "--tokenizer-type excludes --tokenizer and --tokenizer-files"
    kind, needed = MEGATRON_TYPES[args.tokenizer_type]
    missing = [_flag(name) for name in needed if not getattr(args, name)]
    if missing:
        yield f"--tokenizer-type {args.tokenizer_type} needs {' and '.join(missing)}"
    useless = [_flag(name) for name in FILE_OPTIONS if getattr(args, name) and name not in needed]
    if useless:
        yield f"{' and '.join(useless)} have no effect with --tokenizer-type {args.tokenizer_type}"
    args.tokenizer, args.tokenizer_files = kind, [getattr(args, name) for name in needed]


def _fairseq_mistakes(args: argparse.Namespace) -> Iterator[str]:
    if not args.only_source:
        yield "hpclm trains language models on one language: give --only-source"
    if args.input or args.output_prefix or args.json_keys or args.format:
        yield "--input, --format, --json-keys and --output-prefix exclude fairseq's --trainpref and --destdir"
    if not (args.trainpref or args.validpref or args.testpref):
        yield "give --trainpref FILE, --validpref FILE[,FILE...] or --testpref FILE[,FILE...]"
    if args.srcdict and args.tokenizer:
        yield "--srcdict has no effect with --tokenizer"
    if not (args.tokenizer or args.srcdict or args.trainpref):
        yield "without --trainpref there is no text to count words in; give --srcdict dict.txt"
    if args.trainpref and "," in args.trainpref:
        yield f"--trainpref {args.trainpref}: fairseq's options allow one training text; concatenate the files first"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

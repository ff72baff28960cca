"""The command line of preprocessing: hpclm's own options, Megatron's and fairseq's."""

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpclm import config, paths
from hpclm.config.data import TOKENIZERS
from hpclm.data import chat_record, tokenizers
from hpclm.data.loss_mask import prefix_of
from hpclm.datasets.chat import Chat, chat_of, with_end
from hpclm.datasets.encode import Job
from hpclm.datasets.inputs import MAX_LINE_MB, MB, Input, Share, find
from hpclm.datasets.run_text import token_text
from hpclm.distributed import bootstrap
from hpclm.errors import ConfigError
from hpclm.parser import Parser

# Megatron's --tokenizer-type: our kind, and the options that name its files
MEGATRON_TYPES = {
    "GPT2BPETokenizer": ("gpt2", ("vocab_file", "merge_file")),
    "BertWordPieceLowerCase": ("wordpiece_lower", ("vocab_file",)),
    "BertWordPieceCase": ("wordpiece", ("vocab_file",)),
    "SentencePieceTokenizer": ("sentencepiece", ("tokenizer_model",)),
}
FILE_OPTIONS = ("vocab_file", "merge_file", "tokenizer_model")
# what Megatron's --lang calls languages (NLTK's names)
LANGUAGES = dict(
    czech="cs", danish="da", dutch="nl", english="en", estonian="et", finnish="fi", french="fr", german="de", greek="el",
    italian="it", norwegian="no", polish="pl", portuguese="pt", russian="ru", slovene="sl", spanish="es", swedish="sv",
    turkish="tr",
)  # fmt: skip
FAIRSEQ_ONLY = ("only_source", "trainpref", "validpref", "testpref", "srcdict", "destdir")
LONGEST_LINE = f"refuse a longer line, or with --format files a longer file; default: {MAX_LINE_MB} MB"


@dataclass(frozen=True)
class InputCorpus:
    """The inputs of one dataset, or of one per key."""

    inputs: tuple[Input, ...]
    prefixes: tuple[Path, ...]

    @property
    def names(self) -> str:
        """The names of its inputs, for messages."""
        return ", ".join(source.name for source in self.inputs)


@dataclass(frozen=True)
class Dictionary:
    """fairseq's dict.txt: copied from ``given``, or counted in ``corpus``."""

    path: Path
    corpus: InputCorpus
    given: Path | None


@dataclass(frozen=True)
class Request:
    """The parsed command line."""

    corpora: tuple[InputCorpus, ...]
    job: Job
    share: Share
    workers: int
    overwrite: bool
    longest_line: int
    """Bytes of text."""
    dictionary: Dictionary | None = None
    model: str | None = None
    """The run directory whose tokenizer is used."""


def parse(argv: list[str]) -> Request:
    """Parse the arguments; exits with 2 if they are contradictory. ConfigError for invalid inputs."""
    options = parser()
    args = options.parse_args(argv)
    fairseq = any(getattr(args, name) for name in FAIRSEQ_ONLY)
    model = args.tokenizer if args.tokenizer and Path(args.tokenizer).is_dir() else None
    if model and not args.tokenizer_files:
        _of_run(model, args)
    for mistake in (*_mistakes(args), *_tokenizer(args, fairseq), *(_fairseq_mistakes(args) if fairseq else ())):
        options.error(mistake)
    share = _share(args.part)
    corpora, dictionary = _fairseq(args, share) if fairseq else ((_corpus(args, share),), None)
    language = args.language or "en"
    if language not in LANGUAGES and not re.fullmatch("[a-z]{2,3}", language):
        raise ConfigError(f"--language {language!r} is not a language code, such as en or de")
    job = Job(
        tokenizer="fairseq" if dictionary else args.tokenizer,
        files=(str(dictionary.path),) if dictionary else tuple(args.tokenizer_files),
        eod=args.eod,
        keys=tuple(args.json_keys or ["text"]),
        append_eod=args.append_eod,
        empty=args.empty,
        on_error=args.on_error,
        language=LANGUAGES.get(language, language) if args.split_sentences else None,
        keep_newlines=args.keep_newlines,
        layout="fairseq" if dictionary else "megatron",
        chat=_chat(args, model) if args.chat else None,
    )
    return Request(corpora, job, share, args.workers, args.overwrite, args.longest_line * MB, dictionary, model)


def _of_run(model: str, args: argparse.Namespace) -> None:
    """Take tokenizer and context of the run ``model``, such as hpclm convert makes it."""
    if not Path(model, "config.yaml").exists() and Path(model, "tokenizer.json").exists():
        raise ConfigError(
            f"--tokenizer {model}: import this folder first (hpclm convert {model} RUN), and name the run directory"
        )
    run = config.of_run(Path(model), [])
    try:
        _, args.tokenizer, args.tokenizer_files, end = tokenizers.build_of_run(run.data)
    except ConfigError as error:
        raise ConfigError(f"--tokenizer {model}: {error}") from None
    args.eod = args.eod or end
    args.context = args.context or (run.model.context if args.chat else None)


def _chat(args: argparse.Namespace, model: str | None) -> Chat:
    """How conversations become text; ``model``: the run whose tokenizer is used."""
    tuned = chat_record.of_run(Path(model)) if model else None
    chat = chat_of(args.tokenizer_files[0], args.chat_template, args.context, args.too_long or "cut", tuned)

    def end() -> str | None:
        tokenizer = tokenizers.build(args.tokenizer, args.tokenizer_files, args.eod)
        return token_text(tokenizer, tokenizer.eod)

    return with_end(chat, end)


def _mistakes(args: argparse.Namespace) -> Iterator[str]:
    for name in ("workers", "longest_line"):
        if getattr(args, name) < 1:
            yield f"{_flag(name)} {getattr(args, name)} must be at least 1"
    if not args.split_sentences and (args.language or args.keep_newlines):
        yield "--language and --keep-newlines go with --split-sentences"
    if args.part and not _part(args.part):
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


def _corpus(args: argparse.Namespace, share: Share) -> InputCorpus:
    """The inputs, and a dataset for each key; of conversations, their tokens and their loss mask."""
    keys = args.json_keys or ["text"]
    inputs = find(args.chat, "jsonl") if args.chat else find(args.input, args.format, keys)
    option = f"--json-keys {' '.join(keys)}"
    if len(set(keys)) < len(keys):
        raise ConfigError(f"{option} contains a key twice")
    plain = [source.name for source in inputs if source.format != "jsonl"]
    if args.json_keys and len(plain) == len(inputs):
        raise ConfigError(f"{option} has no effect: no input is JSONL")
    if len(keys) > 1 and plain:
        raise ConfigError(f"{option} needs JSONL, but {plain[0]} is plain text: preprocess it separately")
    if share.parts > 1 and any(source.path == "-" for source in inputs):
        raise ConfigError(f"--input - cannot be divided over {share.parts} processes; give files, or start one process")
    if args.chat:
        prefix = Path(f"{args.output_prefix}_chat")
        return InputCorpus(tuple(inputs), (prefix, prefix_of(prefix)))
    level = "sentence" if args.split_sentences else "document"
    return InputCorpus(tuple(inputs), tuple(Path(f"{args.output_prefix}_{key}_{level}") for key in keys))


def _fairseq(args: argparse.Namespace, share: Share) -> tuple[tuple[InputCorpus, ...], Dictionary | None]:
    """The datasets of fairseq's options, and their dictionary, unless another tokenizer is given."""
    if share.parts > 1:
        raise ConfigError(f"fairseq's options run in one process, not {share.parts}; give --workers to use more cores")
    folder = Path(args.destdir or "data-bin")
    corpora = []
    for split in ("train", "valid", "test"):
        for i, file in enumerate(filter(None, (getattr(args, f"{split}pref") or "").split(","))):
            inputs = find([file], None)
            if any(source.format != "lines" for source in inputs):
                raise ConfigError(
                    f"{file} holds JSON lines, but fairseq's options read plain ones; give --input {file}"
                )
            corpora.append(InputCorpus(tuple(inputs), (folder / f"{split}{i or ''}",)))
    given = Path(args.srcdict) if args.srcdict else None
    return tuple(corpora), None if args.tokenizer else Dictionary(folder / "dict.txt", corpora[0], given)


def _share(part: str | None) -> Share:
    """The part of the inputs for this process, from --part or its rank."""
    if part is None:
        world = bootstrap.detect()
        return Share(world.rank, world.size)
    return _part(part) or Share()


def _part(text: str) -> Share | None:
    """--part I/N; None if it is not valid."""
    numbers = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    return Share(int(numbers[1]), int(numbers[2])) if numbers and int(numbers[1]) < int(numbers[2]) else None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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
    documents = (
        "documents: JSON objects, lines or files; default: jsonl for .jsonl, .ndjson, .json and tables, otherwise lines"
    )
    add("--format", choices=["jsonl", "lines", "files"], help=documents)
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
    add("--workers", type=int, default=1, metavar="N", help="encoding processes, one core each; default: 1")

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

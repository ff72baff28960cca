"""``hpclm preprocess``: turn text into a dataset. Also takes the options of Megatron's preprocess_data.py and fairseq-preprocess."""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hpclm.base import log, paths
from hpclm.base.errors import UsageError
from hpclm.base.terminal import say
from hpclm.config.data import TOKENIZERS
from hpclm.node import interruption
from hpclm.parser import Parser, whole
from hpclm.preprocess import next_command, parts
from hpclm.preprocess.encode import tokenizer_of
from hpclm.preprocess.inputs import FORMAT, LONGEST_LINE, MAX_LINE_MB
from hpclm.preprocess.options import PreprocessOptions, PreprocessRequest, share_of, with_tokenizer_of
from hpclm.preprocess.options import request as build_request

# Megatron's --tokenizer-type -> hpclm's kind, and the options that name its files
MEGATRON_TYPES = {
    "GPT2BPETokenizer": ("gpt2", ("vocab_file", "merge_file")),
    "BertWordPieceLowerCase": ("wordpiece_lower", ("vocab_file",)),
    "BertWordPieceCase": ("wordpiece", ("vocab_file",)),
    "SentencePieceTokenizer": ("sentencepiece", ("tokenizer_model",)),
}


def main(**values: Any) -> int:
    """Write the datasets, and print the command to run next."""
    log.setup()
    asked = request(**values)
    tokenizer_of.cache_clear()  # its files may have changed since an earlier call
    with interruption.raising():
        complete = parts.preprocess(asked)
    if complete:
        say(f"next: {next_command.after(asked)}")
    return 0


def request(
    tokenizer_type: str | None,
    vocab_file: str | None,
    merge_file: str | None,
    tokenizer_model: str | None,
    dataset_impl: str,
    **given: Any,
) -> PreprocessRequest:
    """The datasets to write; UsageError for options that exclude each other, ConfigError for invalid inputs."""
    options = PreprocessOptions(**given)
    model = options.model
    if model and not options.tokenizer_files:
        options = with_tokenizer_of(model, options)
    files = {"vocab_file": vocab_file, "merge_file": merge_file, "tokenizer_model": tokenizer_model}
    mistakes = [*_mistakes(options), *_tokenizer_mistakes(options, tokenizer_type, files)]
    if tokenizer_type:
        kind, names = MEGATRON_TYPES[tokenizer_type]
        options = replace(options, tokenizer=kind, tokenizer_files=[files[name] or "" for name in names])
    mistakes += _fairseq_mistakes(options)
    if mistakes:
        raise UsageError(mistakes[0])
    return build_request(options, model)


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
    add("--longest-line", type=whole(1), default=MAX_LINE_MB, metavar="MB", help=LONGEST_LINE)
    add("--part", metavar="I/N", help="process part I (from 0) of N of the input; the last to finish joins the parts")

    add = options.add_argument_group("conversations").add_argument
    chat = 'JSONL of {"messages": [{"role", "content"}, ...]} or ShareGPT\'s "conversations"; writes P_chat and P_chat_loss'
    add("--chat", type=paths.option, nargs="+", metavar="FILE", help=chat)
    add(
        "--chat-template", type=paths.option, metavar="FILE", help="default: the run's, or the one beside the tokenizer"
    )
    add("--context", type=whole(1), metavar="TOKENS", help="longest conversation; default: the run's model.context")
    too_long = "longer conversations keep their beginning, or are left out; default: cut"
    add("--too-long", choices=["cut", "drop"], help=too_long)

    add = options.add_argument_group("tokenizer").add_argument
    kinds = f"{', '.join(sorted(TOKENIZERS))}, package.module:Name, or a run directory, to use its tokenizer"
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
        type=whole(1),
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


def _mistakes(options: PreprocessOptions) -> Iterator[str]:
    if not options.split_sentences and (options.language or options.keep_newlines):
        yield "--language and --keep-newlines go with --split-sentences"
    if options.part and not share_of(options.part):
        yield f"--part {options.part} must be I/N, part I of N, with I from 0 to N - 1"
    if options.chat:
        excluded = ("input", "format", "json_keys", "append_eod", "split_sentences")
        given = [name for name in excluded if getattr(options, name)]
        if given or options.fairseq:
            yield f"--chat excludes {' and '.join(map(_flag, (*given, *options.fairseq)))}"
        if options.empty == "keep":
            yield "--chat excludes --empty keep: conversations are never empty"
        if not (options.output_prefix and options.tokenizer_files and options.context):
            yield "--chat needs --output-prefix P, --tokenizer RUN (or json with --tokenizer-files), and --context TOKENS without a RUN"
    elif options.chat_template or options.too_long or options.context:
        yield "--chat-template, --context and --too-long go with --chat"
    elif not options.fairseq and not (options.input and options.output_prefix):
        yield "give --input FILE... and --output-prefix P, or fairseq's --only-source --trainpref F --destdir D"


def _tokenizer_mistakes(
    options: PreprocessOptions, megatron_type: str | None, files: Mapping[str, str | None]
) -> Iterator[str]:
    """Mistakes in hpclm's options for the tokenizer, or in Megatron's options: a type and its ``files``."""
    given = [name for name, file in files.items() if file]
    if not megatron_type:
        if given:
            yield f"{', '.join(map(_flag, files))} go with --tokenizer-type; or give --tokenizer-files"
        if options.tokenizer_files and not options.tokenizer:
            yield "--tokenizer-files go with --tokenizer KIND"
        if not (options.tokenizer or options.fairseq):
            yield f"give --tokenizer KIND and --tokenizer-files FILE...; kinds: {', '.join(sorted(TOKENIZERS))}"
        return
    if options.tokenizer or options.tokenizer_files:
        yield "--tokenizer-type excludes --tokenizer and --tokenizer-files"
    _, needed = MEGATRON_TYPES[megatron_type]
    if missing := [name for name in needed if name not in given]:
        yield f"--tokenizer-type {megatron_type} needs {' and '.join(map(_flag, missing))}"
    if useless := [name for name in given if name not in needed]:
        yield f"{' and '.join(map(_flag, useless))} have no effect with --tokenizer-type {megatron_type}"


def _fairseq_mistakes(options: PreprocessOptions) -> Iterator[str]:
    if not options.fairseq:
        return
    if not options.only_source:
        yield "hpclm trains language models on one language: give --only-source"
    if options.input or options.output_prefix or options.json_keys or options.format:
        yield "--input, --format, --json-keys and --output-prefix exclude fairseq's --trainpref and --destdir"
    if not (options.trainpref or options.validpref or options.testpref):
        yield "give --trainpref FILE, --validpref FILE[,FILE...] or --testpref FILE[,FILE...]"
    if options.srcdict and options.tokenizer:
        yield "--srcdict has no effect with --tokenizer"
    if not (options.tokenizer or options.srcdict or options.trainpref):
        yield "words are counted in the text of --trainpref, which is missing; give --srcdict dict.txt"
    if options.trainpref and "," in options.trainpref:
        yield f"--trainpref {options.trainpref}: fairseq's options allow one training text; concatenate the files first"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

"""What preprocessing is asked for: datasets, their inputs, and how their text becomes tokens."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpclm import config
from hpclm.data import chat_record, tokenizers
from hpclm.data.loss_mask import prefix_of
from hpclm.datasets.chat import READ, Chat, chat_of, with_end
from hpclm.datasets.encode import Job
from hpclm.datasets.inputs import MAX_LINE_MB, MB, Input, Share, find, refuse_repeated
from hpclm.datasets.run_text import token_text
from hpclm.distributed import bootstrap
from hpclm.errors import ConfigError

# what Megatron's --lang calls languages (NLTK's names)
LANGUAGES = dict(
    czech="cs", danish="da", dutch="nl", english="en", estonian="et", finnish="fi", french="fr", german="de", greek="el",
    italian="it", norwegian="no", polish="pl", portuguese="pt", russian="ru", slovene="sl", spanish="es", swedish="sv",
    turkish="tr",
)  # fmt: skip


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
    """What to write, and how."""

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


def tokenizer_run(args: argparse.Namespace) -> str | None:
    """The run directory that --tokenizer names, if it does. Without files its tokenizer and context become those of ``args``."""
    model: str | None = args.tokenizer if args.tokenizer and Path(args.tokenizer).is_dir() else None
    if model and not args.tokenizer_files:
        _of_run(model, args)
    return model


def request(args: argparse.Namespace, fairseq: bool, model: str | None) -> Request:
    """What ``args``, of the parser of hpclm preprocess, ask for; ConfigError for invalid inputs.

    ``fairseq``: whether they are fairseq's; ``model``: as of ``tokenizer_run``.
    """
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


def text_request(
    path: Path,
    name: str,
    tokenizer: str,
    files: Sequence[str] = (),
    eod: str | None = None,
) -> Request:
    """The text at ``path`` as the dataset ``name``, in this process, with the end of each document marked."""
    corpus = InputCorpus(tuple(find([str(path)], None, ["text"], "files")), (Path(f"{name}_text_document"),))
    job = Job(
        tokenizer=tokenizer,
        files=tuple(files),
        eod=eod,
        keys=("text",),
        append_eod=True,
        empty="skip",
        on_error="stop",
        language=None,
        keep_newlines=False,
        layout="megatron",
        chat=None,
    )
    return Request((corpus,), job, Share(0, 1), workers=1, overwrite=False, longest_line=MAX_LINE_MB * MB)


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


def _corpus(args: argparse.Namespace, share: Share) -> InputCorpus:
    """The inputs, and a dataset for each key; of conversations, their tokens and their loss mask."""
    keys = args.json_keys or ["text"]
    inputs = find(args.chat, "jsonl", READ) if args.chat else find(args.input, args.format, keys, args.plain_text)
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
        files = filter(None, (getattr(args, f"{split}pref") or "").split(","))
        found = [find([file], None, plain="lines") for file in files]
        refuse_repeated(inputs := [source for sources in found for source in sources])
        if stray := next((source.name for source in inputs if source.format != "lines"), None):
            raise ConfigError(f"{stray} holds JSON lines, but fairseq's options read plain ones; give --input {stray}")
        corpora += [InputCorpus(tuple(sources), (folder / f"{split}{i or ''}",)) for i, sources in enumerate(found)]
    given = Path(args.srcdict) if args.srcdict else None
    return tuple(corpora), None if args.tokenizer else Dictionary(folder / "dict.txt", corpora[0], given)


def _share(part: str | None) -> Share:
    """The part of the inputs for this process, from --part or its rank."""
    if part is None:
        world = bootstrap.detect()
        return Share(world.rank, world.size)
    return share_of(part) or Share()


def share_of(text: str) -> Share | None:
    """--part I/N; None if it is not valid."""
    numbers = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    return Share(int(numbers[1]), int(numbers[2])) if numbers and int(numbers[1]) < int(numbers[2]) else None

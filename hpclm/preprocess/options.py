"""The options of hpclm preprocess, and the resulting request: datasets, their inputs, and how to tokenize their text."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.data import tokenizer_folder, tokenizers
from hpclm.data.loss_mask import prefix_of
from hpclm.data.tokenizer_writer import token_text
from hpclm.distributed import bootstrap
from hpclm.preprocess.chat import READ, Chat, chat_of, with_end
from hpclm.preprocess.encode import EncodeJob
from hpclm.preprocess.inputs import MAX_LINE_MB, MB, Input, Share, find, refuse_repeated
from hpclm.preprocess.kinds import Format, PlainFormat

# the languages of Megatron's --lang, by NLTK's names
LANGUAGES = dict(
    czech="cs", danish="da", dutch="nl", english="en", estonian="et", finnish="fi", french="fr", german="de", greek="el",
    italian="it", norwegian="no", polish="pl", portuguese="pt", russian="ru", slovene="sl", spanish="es", swedish="sv",
    turkish="tr",
)  # fmt: skip


@dataclass(frozen=True)
class InputCorpus:
    """The inputs of a dataset, or of the datasets for several keys."""

    inputs: tuple[Input, ...]
    prefixes: tuple[Path, ...]

    @property
    def names(self) -> str:
        """The names of the inputs, for messages."""
        return ", ".join(source.name for source in self.inputs)


@dataclass(frozen=True)
class Dictionary:
    """fairseq's dict.txt: copied from ``given``, or counted in ``corpus``."""

    path: Path
    corpus: InputCorpus
    given: Path | None


@dataclass(frozen=True)
class PreprocessRequest:
    """The datasets to write, and how."""

    corpora: tuple[InputCorpus, ...]
    job: EncodeJob
    share: Share
    workers: int
    overwrite: bool
    longest_line: int
    """Bytes of text."""
    dictionary: Dictionary | None = None
    model: str | None = None
    """The run directory that supplies the tokenizer."""


@dataclass(frozen=True)
class PreprocessOptions:
    """The options of hpclm preprocess, with hpclm's names for the tokenizer."""

    input: list[str] | None
    format: Format | None
    plain_text: PlainFormat
    json_keys: Sequence[str] | None
    longest_line: int
    """MB."""
    part: str | None
    """I/N."""
    chat: list[str] | None
    chat_template: str | None
    context: int | None
    too_long: Literal["cut", "drop"] | None
    tokenizer: str | None
    """A kind of tokenizer, or a run directory."""
    tokenizer_files: list[str]
    eod: str | None
    append_eod: bool
    empty: Literal["skip", "keep"]
    on_error: Literal["stop", "skip"]
    split_sentences: bool
    language: str | None
    keep_newlines: bool
    output_prefix: str | None
    overwrite: bool
    workers: int
    only_source: bool
    trainpref: str | None
    validpref: str | None
    testpref: str | None
    destdir: str | None
    srcdict: str | None

    @property
    def fairseq(self) -> Mapping[str, object]:
        """The given options among those named as in fairseq."""
        names = ("only_source", "trainpref", "validpref", "testpref", "srcdict", "destdir")
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    @property
    def model(self) -> str | None:
        """The run directory that supplies the tokenizer, if --tokenizer names one."""
        return self.tokenizer if self.tokenizer and Path(self.tokenizer).is_dir() else None


def request(options: PreprocessOptions, model: str | None) -> PreprocessRequest:
    """The request for ``options``; ConfigError for invalid inputs. ``model``: the run that supplies the tokenizer."""
    share = _share(options.part)
    if options.fairseq:
        corpora, dictionary = _fairseq(options, share)
    else:
        corpora = (_corpus(options, share),)
        dictionary = None
    language = options.language or "en"
    if language not in LANGUAGES and not re.fullmatch("[a-z]{2,3}", language):
        raise ConfigError(f"--language {language!r} is not a language code, such as en or de")
    job = EncodeJob(
        tokenizer=options.tokenizer or "",
        files=tuple(options.tokenizer_files),
        eod=options.eod,
        keys=tuple(options.json_keys or ["text"]),
        append_eod=options.append_eod,
        empty=options.empty,
        on_error=options.on_error,
        keep_newlines=options.keep_newlines,
    )
    if options.split_sentences:
        job = replace(job, language=LANGUAGES.get(language, language))
    if options.chat:
        job = replace(job, chat=_chat(options))
    if dictionary:
        job = replace(job, tokenizer="fairseq", files=(str(dictionary.path),), layout="fairseq")
    return PreprocessRequest(
        corpora, job, share, options.workers, options.overwrite, options.longest_line * MB, dictionary, model
    )


def text_request(
    path: Path, name: str, tokenizer: str, files: Sequence[str] = (), eod: str | None = None, rows_of: str = ""
) -> PreprocessRequest:
    """The request that tokenizes the text at ``path`` into the dataset ``name``, in this process, with the end of each document marked.
    ``rows_of``: see Input."""
    inputs = [replace(source, rows_of=rows_of) for source in find([str(path)], None, ["text"], "files")]
    corpus = InputCorpus(tuple(inputs), (Path(f"{name}_text_document"),))
    job = EncodeJob(tokenizer=tokenizer, files=tuple(files), eod=eod, append_eod=True)
    return PreprocessRequest((corpus,), job, Share(0, 1), workers=1, overwrite=False, longest_line=MAX_LINE_MB * MB)


def with_tokenizer_of(model: str, options: PreprocessOptions) -> PreprocessOptions:
    """``options`` with the tokenizer and context of the run ``model``, which hpclm convert may have created."""
    if not Path(model, "config.yaml").exists() and Path(model, "tokenizer.json").exists():
        raise ConfigError(
            f"--tokenizer {model}: import this folder first (hpclm convert {model} RUN), and name the run directory"
        )
    run = config.of_run(Path(model), [])
    try:
        folder = tokenizer_folder.of_run(Path(model), run.data)
        folder.build()
    except ConfigError as error:
        raise ConfigError(f"--tokenizer {model}: {error}") from None
    context = options.context
    if options.chat and not context:
        context = run.model.context
    return replace(
        options,
        tokenizer=folder.kind,
        tokenizer_files=list(folder.files),
        eod=options.eod or folder.eod,
        context=context,
    )


def _chat(options: PreprocessOptions) -> Chat:
    """The chat settings."""
    chat = chat_of(options.tokenizer_files[0], options.chat_template, options.context or 0, options.too_long or "cut")

    def end() -> str | None:
        tokenizer = tokenizers.build_tokenizer(options.tokenizer or "", options.tokenizer_files, options.eod)
        return token_text(tokenizer, tokenizer.eod)

    return with_end(chat, end)


def _corpus(options: PreprocessOptions, share: Share) -> InputCorpus:
    """The inputs, and the datasets to write: one for each key. Conversations get two, for tokens and for the loss mask."""
    keys = options.json_keys or ["text"]
    if options.chat:
        inputs = find(options.chat, "jsonl", READ)
    else:
        inputs = find(options.input or [], options.format, keys, options.plain_text)
    option = f"--json-keys {' '.join(keys)}"
    if len(set(keys)) < len(keys):
        raise ConfigError(f"{option} contains a key twice")
    plain = [source.name for source in inputs if source.format != "jsonl"]
    if options.json_keys and len(plain) == len(inputs):
        raise ConfigError(f"{option} has no effect: no input is JSONL")
    if len(keys) > 1 and plain:
        raise ConfigError(f"{option} needs JSONL, but {plain[0]} is plain text: preprocess it separately")
    if share.parts > 1 and any(source.path == "-" for source in inputs):
        raise ConfigError(f"--input - cannot be divided over {share.parts} processes; give files, or start one process")
    if options.chat:
        prefix = Path(f"{options.output_prefix}_chat")
        return InputCorpus(tuple(inputs), (prefix, prefix_of(prefix)))
    level = "sentence" if options.split_sentences else "document"
    return InputCorpus(tuple(inputs), tuple(Path(f"{options.output_prefix}_{key}_{level}") for key in keys))


def _fairseq(options: PreprocessOptions, share: Share) -> tuple[tuple[InputCorpus, ...], Dictionary | None]:
    """The datasets that fairseq's options describe, and their dictionary, which is None if a tokenizer is given."""
    if share.parts > 1:
        raise ConfigError(f"fairseq's options run in one process, not {share.parts}; give --workers to use more cores")
    folder = Path(options.destdir or "data-bin")
    corpora = []
    for split in ("train", "valid", "test"):
        files = filter(None, (getattr(options, f"{split}pref") or "").split(","))
        found = [find([file], None, plain="lines") for file in files]
        inputs = [source for sources in found for source in sources]
        refuse_repeated(inputs)
        stray = next((source.name for source in inputs if source.format != "lines"), None)
        if stray:
            raise ConfigError(
                f"{stray} holds JSON lines, but fairseq's options read plain text; give --input {stray} instead"
            )
        corpora += [InputCorpus(tuple(sources), (folder / f"{split}{i or ''}",)) for i, sources in enumerate(found)]
    if options.tokenizer:
        return tuple(corpora), None
    given = Path(options.srcdict) if options.srcdict else None
    return tuple(corpora), Dictionary(folder / "dict.txt", corpora[0], given)


def _share(part: str | None) -> Share:
    """The part of the inputs for this process, from --part or its rank."""
    if part is None:
        world = bootstrap.detect()
        return Share(world.rank, world.size)
    return share_of(part) or Share()


def share_of(text: str) -> Share | None:
    """Parse --part I/N; None if it is not valid."""
    numbers = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if numbers and int(numbers[1]) < int(numbers[2]):
        return Share(int(numbers[1]), int(numbers[2]))
    return None

"""Encode a chunk of text as tokens of a dataset; runs in worker processes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpclm.base.errors import ConfigError
from hpclm.config.data import TOKENIZERS
from hpclm.data import tokenizers
from hpclm.data.indexed import token_dtype
from hpclm.data.loss_mask import DTYPE
from hpclm.preprocess.chat import Chat, learned_ends, read_conversation, rendered
from hpclm.preprocess.counts import Counts
from hpclm.preprocess.inputs import CONTEXT, InputChunk, MayCut
from hpclm.preprocess.lines import UnreadableLineError, read_line

Record = TypeVar("Record")

SHOWN = 5  # unreadable lines described per chunk
END_OF_DOCUMENT = "the end-of-document token"  # its name if the tokenizer gives none
LONG_TOKEN = 16  # bytes of text on average; longer tokens cause a warning
OnError = Literal["stop", "skip"]


@dataclass(frozen=True)
class EncodeJob:
    """Everything that determines the tokens of a text; the same in every process."""

    tokenizer: str
    files: tuple[str, ...]
    eod: str | None = None
    """The end-of-document token's text; None: the tokenizer's default."""
    keys: tuple[str, ...] = ("text",)
    """Keys of the texts in a JSON object; each becomes a dataset."""
    append_eod: bool = False
    empty: Literal["skip", "keep"] = "skip"
    """Handling of documents without tokens."""
    on_error: OnError = "stop"
    """Handling of unreadable lines."""
    language: str | None = None
    """Split documents into sentences of this language."""
    keep_newlines: bool = False
    """Keep the white space after sentences."""
    layout: Literal["megatron", "fairseq"] = "megatron"
    chat: Chat | None = None
    """Lines are conversations, which become two datasets: their tokens and their loss mask."""

    def dtype(self, column: int) -> np.dtype:
        """Type of the tokens of a dataset."""
        return DTYPE if self.chat and column else token_dtype(tokenizer_of(self).size)


class Column(NamedTuple):
    """The encoded documents of one key."""

    tokens: NDArray
    """[t] all sequences, concatenated, in the dataset's type."""
    sizes: NDArray[np.int64]
    """[s] tokens in each sequence."""
    documents: NDArray[np.int64]
    """[k] sequences in each document."""
    counts: Counts = Counts()
    is_piece: bool = False
    """Whether this is one sequence of a document that other pieces continue."""
    closes: bool = True
    """Whether the document ends with this piece."""


class Encoded(NamedTuple):
    """The result of encoding a chunk."""

    columns: list[Column]
    """One column for each key."""
    consumed: int
    """Bytes of the input, see InputChunk."""
    described: list[str]
    """Descriptions of the first unreadable lines: location and problem."""


@cache
def tokenizer_of(job: EncodeJob) -> tokenizers.Tokenizer:
    """The tokenizer of a job, built once per process."""
    return tokenizers.build_tokenizer(job.tokenizer, list(job.files), job.eod)


def encode(chunk: InputChunk, job: EncodeJob) -> Encoded:
    """Encode a chunk and discard its text; ConfigError with file and line if the text cannot be encoded."""
    if job.chat:
        conversations, errors = _records(chunk, partial(_conversation, job=job, chat=job.chat), job.on_error)
    else:
        texts, errors = read_texts(chunk, job.keys, job.on_error)
    described = [f"{chunk.location(number)}{error}" for number, error in errors[:SHOWN]]
    chunk.lines.clear()  # the lines may be gigabytes
    if job.chat:
        columns = _conversations(conversations, job, job.chat)
    else:
        make = partial(_piece, chunk=chunk) if chunk.is_piece and not errors else _column
        columns = [make(documents, job, chunk.source.name) for documents in texts]
    unreadable = Counts(unreadable=Counter(error.reason for _, error in errors))
    columns = [column._replace(counts=column.counts + unreadable) for column in columns]
    return Encoded(columns, chunk.consumed, described)


def read_texts(
    chunk: InputChunk, keys: tuple[str, ...], on_error: OnError | None = None
) -> tuple[list[list[str]], list[tuple[int, UnreadableLineError]]]:
    """The texts of a chunk, a list for each key, and its unreadable lines; ConfigError for unreadable lines unless ``on_error`` is "skip".

    ``on_error``: None if the command has no --on-error.
    """
    begin = 0
    if chunk.source.format == "files":
        begin = chunk.begin
    read = partial(read_line, format=chunk.source.format, keys=keys, begin=begin)
    records, errors = _records(chunk, read, on_error)
    return [[record[i] for record in records if record] for i in range(len(keys))], errors


def _records(
    chunk: InputChunk, read: Callable[[bytes], Record], on_error: OnError | None
) -> tuple[list[Record], list[tuple[int, UnreadableLineError]]]:
    """The results of ``read`` for each line, and the lines for which it raises an error; ConfigError as in ``read_texts``."""
    records = []
    errors = []
    for number, line in enumerate(chunk.lines):
        try:
            records.append(read(line))
        except UnreadableLineError as error:
            if on_error != "skip":
                problem = f"{chunk.location(number)}{error}"
                if on_error:
                    problem += "; hpclm preprocess --on-error skip omits such lines"
                raise ConfigError(problem) from None
            errors.append((number, error))
    return records, errors


class Conversation(NamedTuple):
    """The tokens of a conversation."""

    tokens: NDArray
    """[t]"""
    counts: NDArray
    """[t] whether each token counts in the loss."""
    spanning: bool
    """Whether a token spans a prompt and its answer."""
    ends: frozenset[str]
    """The counted tokens that end answers."""


def _conversation(line: bytes, job: EncodeJob, chat: Chat) -> list[Conversation]:
    """The conversation of a line, or one for each of its answers (see ``rendered``); none for a blank line. UnreadableLineError for an
    invalid line."""
    messages = read_conversation(line)
    if not messages:
        return []
    tokenizer: Any = tokenizer_of(job)  # built from a tokenizer.json
    found = []
    for text, spans in rendered(messages, chat, tokenizer.special):
        marked = tokenizer.marked(text, spans)
        ends = learned_ends(text, spans, tokenizer.added)
        found.append(Conversation(marked.ids, marked.counts, marked.spanning, ends))
    return found


def _conversations(given: list[list[Conversation]], job: EncodeJob, chat: Chat) -> list[Column]:
    """The tokens of conversations, and their loss mask."""
    longest = chat.context + 1
    read = [conversation for line in given for conversation in line]
    short = [conversation for conversation in read if len(conversation.tokens) <= longest]
    cut = len(read) - len(short)
    dropped = 0
    if chat.too_long == "drop":
        dropped = cut
        cut = 0
        read = short
    pairs = [(conversation.tokens[:longest], conversation.counts[:longest]) for conversation in read]
    kept = [pair for pair in pairs if pair[1][1:].any()]  # no token predicts the first one
    dropped += len(pairs) - len(kept)
    sizes = np.fromiter((len(ids) for ids, _ in kept), np.int64, len(kept))
    joined = [np.concatenate(column).astype(job.dtype(i)) for i, column in enumerate(zip(*kept, strict=True))]
    joined = joined or [np.empty(0, job.dtype(i)) for i in range(2)]
    documents = np.ones(len(kept), np.int64)
    counts = Counts(
        cut=cut,
        dropped=dropped,
        endless=sum(not conversation.ends for conversation in read),
        spanning=sum(conversation.spanning for conversation in read),
        ends=Counter(end for conversation in read for end in conversation.ends),
    )
    return [Column(column, sizes, documents, counts) for column in joined]


def _column(texts: list[str], job: EncodeJob, name: str) -> Column:
    """Encode ``texts``, one for each document, from the input ``name``."""
    tokenizer = tokenizer_of(job)
    sequences = texts
    per_document = np.ones(len(texts), np.int64)
    if job.language is not None:
        split = [sentences(text, job.language) for text in texts]
        sequences = [sentence for parts in split for sentence in parts]
        if not job.keep_newlines:
            sequences = [sentence.rstrip() for sentence in sequences]
        per_document = np.fromiter(map(len, split), np.int64, len(split))
    ids, sizes = tokenizer.encode_batch(sequences)
    ids = _checked(ids, job, name)
    bounds = np.concatenate(([0], np.cumsum(per_document)))
    documents = np.diff(np.concatenate(([0], np.cumsum(sizes > 0)))[bounds])  # sequences with tokens
    sizes = sizes[sizes > 0]
    full = documents > 0
    skipped = 0
    if job.empty == "skip":
        skipped = int(np.count_nonzero(~full))
        documents = documents[full]
    counts = _counts(ids, texts, job) + Counts(skipped=skipped)
    if job.append_eod and len(sizes):
        last = np.cumsum(documents)[documents > 0] - 1
        ids = np.insert(ids, np.cumsum(sizes)[last], tokenizers.end(tokenizer))
        sizes[last] += 1
    return Column(ids, sizes, documents, counts)


def _counts(ids: NDArray, texts: list[str], job: EncodeJob) -> Counts:
    """The counts of ``texts``, which have the tokens ``ids``."""
    names, loses_lines = _special(job)
    found = ids[np.isin(ids, [*names])] if names else ids[:0]
    values, often = np.unique(found, return_counts=True)
    return Counts(
        text_bytes=sum(len(text.encode()) for text in texts),
        line_ends=sum(text.count("\n") for text in texts) if loses_lines else 0,
        special=Counter({names[id]: count for id, count in zip(values.tolist(), often.tolist(), strict=True)}),
    )


@cache
def _special(job: EncodeJob) -> tuple[dict[int, str], bool]:
    """Ids that are not text, with their names, and whether the tokens of a text do not restore its line ends."""
    tokenizer = tokenizer_of(job)
    names = dict(getattr(tokenizer, "special_ids", {}))
    if tokenizer.eod is not None and job.append_eod:
        names.setdefault(tokenizer.eod, END_OF_DOCUMENT)
    else:  # the texts may bring their own, or the tokenizer adds one
        names.pop(tokenizer.eod, None)
    own = job.tokenizer not in TOKENIZERS  # its decode() may refuse what it has not encoded
    return names, not own and "\n" not in tokenizer.decode(tokenizer.encode("a\nb"))


def may_cut(job: EncodeJob) -> MayCut | None:
    """Returns a function that tells where a document may be divided into pieces that together have the document's tokens.

    None if documents must not be divided. A user's own tokenizer is an example: its tokens may depend on the whole text.
    """
    tokenizer = tokenizer_of(job)
    if job.language is not None or job.tokenizer not in TOKENIZERS or tokenizer.ends_itself:
        return None

    def may_cut(before: bytes, after: bytes) -> bool:
        """Whether ``after`` has the same tokens after a short context as after all of ``before``, which must end with a token."""
        left, context, right = (text.decode(errors="ignore") for text in (before, before[-CONTEXT:], after))
        ids, sizes = tokenizer.encode_batch([left + right, left, context + right, context])
        whole, first, continued, begun = np.split(ids, np.cumsum(sizes)[:-1])
        return np.array_equal(continued[: len(begun)], begun) and np.array_equal(
            whole, np.concatenate((first, continued[len(begun) :]))
        )

    return may_cut


def _piece(texts: list[str], job: EncodeJob, name: str, chunk: InputChunk) -> Column:
    """``_column`` for a piece of a document."""
    tokenizer = tokenizer_of(job)
    context = chunk.context.decode(errors="ignore")
    ids, sizes = tokenizer.encode_batch([context + texts[0], context])
    begun = int(sizes[1])
    ids, again = ids[: sizes[0]], ids[sizes[0] :]
    if not np.array_equal(ids[:begun], again):
        raise ConfigError(
            f"{name}: the {job.tokenizer} tokenizer gives parts of this text other tokens than the whole; give --format lines"
        )
    ids = _checked(ids[begun:], job, name)
    counts = _counts(ids, texts, job)
    return Column(ids, np.array([ids.size]), np.array([1]), counts, is_piece=True, closes=chunk.closes)


def _checked(ids: NDArray, job: EncodeJob, name: str) -> NDArray:
    """``ids`` in the dataset's type; ConfigError for ids outside the tokenizer's range."""
    size = tokenizer_of(job).size
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise ConfigError(
            f"the {job.tokenizer} tokenizer returned ids {ids.min()} to {ids.max()} in {name}, but its size is {size}"
        )
    return ids.astype(token_dtype(size), copy=False)


def sentences(text: str, language: str) -> list[str]:
    """The sentences of ``text``, each including the white space after it; at least one."""
    from sentencex import get_sentence_boundaries

    starts = []
    for boundary in get_sentence_boundaries(language, text):
        piece = text[boundary["start_index"] : boundary["end_index"]]
        if piece.strip():
            starts.append(boundary["end_index"] - len(piece.lstrip()))
    bounds = [0, *starts[1:], len(text)]
    return [text[begin:end] for begin, end in pairwise(bounds)]

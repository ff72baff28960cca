"""What a sentencepiece model is made of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Parameters:
    """The parameters of a sentencepiece model."""

    kind: str
    """bpe, unigram, word or char."""
    pieces: tuple[tuple[str, float], ...]
    """Text and score of every piece, by id. A BPE first merges the pairs that form the piece with the highest score."""
    types: tuple[int, ...]
    """ModelProto.SentencePiece.Type of every piece, by id."""
    unknown: int
    """Id of <unk>."""
    charsmap: bytes
    """Compiled normalisation rules; empty without any."""
    prefix: bool
    """Whether a space is prepended to a text."""
    squeezed: bool
    """Whether spaces are stripped from both ends, and repeated ones merged."""
    bytes: bool
    """Whether unknown characters become byte pieces."""
    plain: bool
    """Whether other libraries can represent the model: it has no user-defined pieces, which are never split, and treats spaces as usual."""

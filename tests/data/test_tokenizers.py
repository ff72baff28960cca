"""Tokenizers of one's own, fingerprints, and which tokenizer a run has."""

import hashlib

import numpy as np
import pytest

from hpclm.base.errors import ConfigError
from hpclm.data import tokenizers

BYTES = {"kind": "bytes", "files": {}, "size": 257, "eod": 256}


class Own:
    """A tokenizer of one's own; each entry is a character."""

    size, eod = 128, 3

    def __init__(self, files):
        self.fingerprint = tokenizers.fingerprint("own", files, self.size, self.eod)

    def encode(self, text):
        return [ord(letter) for letter in text]

    def encode_batch(self, texts):
        return tokenizers.flat([self.encode(text) for text in texts])

    def decode(self, ids):
        return "".join(map(chr, ids))


class Lacking:
    size, fingerprint = 2, {}

    def __init__(self, files):
        """It encodes, and has no end."""

    def encode(self, text):
        return [0]

    encode_batch = decode = encode


class Drawing(Own):
    def encode(self, text):
        return [int(i) for i in np.random.default_rng().integers(0, 100, 50)]


class NoFiles(Own):
    def __init__(self):
        """It takes no files."""


@pytest.mark.parametrize(
    "name, said",
    [
        ("Lacking", "lacks eod; hpclm/data/tokenizers.py lists the requirements"),
        ("Drawing", "gives other ids each time it encodes a text"),
        ("NoFiles", "cannot be called with files"),
    ],
)
def test_a_class_that_is_no_tokenizer_is_refused(name, said):
    with pytest.raises(ConfigError, match=f"tokenizer '?{__name__}:{name}'? {said}"):
        tokenizers.build_tokenizer(f"{__name__}:{name}", [])


def test_a_tokenizer_that_cannot_encode_english_is_not_taken_for_one_that_draws():
    own = Own([])
    assert not tokenizers.draws_at_random(own)
    own.encode = lambda text: 1 // 0
    assert not tokenizers.draws_at_random(own)


def test_lists_of_ids_become_one_array_and_their_lengths():
    ids, lengths = tokenizers.flat([[1, 2], [], [3]])
    assert (
        ids.tolist() == [1, 2, 3]
        and lengths.tolist() == [2, 0, 1]
        and (ids.dtype, lengths.dtype) == (np.int32, np.int64)
    )


def test_a_fingerprint_has_a_hash_of_each_file_and_the_end_that_was_chosen(tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "vocab").write_text(folder)
    paths = [str(tmp_path / folder / "vocab") for folder in "ab"]
    hashes = [hashlib.blake2b(text, digest_size=16).hexdigest() for text in (b"a", b"b")]
    made = tokenizers.fingerprint("json", paths, 9, 8)
    assert made == {"kind": "json", "files": {"vocab": hashes[0], "vocab'": hashes[1]}, "size": 9, "eod": 8}
    assert tokenizers.fingerprint("json", paths, 9, 8, "<e>")["options"] == {"eod": "<e>"}
    said = f"json tokenizer (vocab {hashes[0][:8]}, vocab' {hashes[1][:8]}; 9 entries)"
    assert tokenizers.describe(made) == said and tokenizers.describe(BYTES) == "bytes tokenizer (257 entries)"
    renamed = {**made, "files": {"x": hashes[1], "y": hashes[0]}}
    assert tokenizers.mismatch(made, renamed) is None
    found = tokenizers.mismatch({**made, "eod": None}, {**renamed, "files": {}})
    assert found.endswith("they differ in eod None against 8, the content of the files") and found.startswith(
        f"made with the {said}, given"
    )


def test_without_an_end_of_documents_there_is_a_way_to_name_one():
    own = Own([])
    assert tokenizers.end(own) == 3
    own.eod = None
    with pytest.raises(
        ConfigError, match=r"the own tokenizer \(128 entries\) has no end-of-document token; set data.eod"
    ):
        tokenizers.end(own)

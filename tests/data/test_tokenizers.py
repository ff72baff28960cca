"""Tokenizers of one's own, fingerprints, and which tokenizer a run has."""

import hashlib
import json

import numpy as np
import pytest

from hpclm.base.errors import ConfigError
from hpclm.config import DataConfig
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


@pytest.fixture
def dataset(tmp_path):
    """The prefix of a dataset with this note."""

    def made(**note):
        (tmp_path / "d.json").write_text(json.dumps({"tokenizer": BYTES, "tokenizer_files": [], **note}))
        return str(tmp_path / "d")

    return made


def test_a_run_has_the_tokenizer_of_its_settings_or_of_its_dataset(dataset, tmp_path):
    (tmp_path / "t").write_text("x")
    data = DataConfig(source="indexed", prefix=dataset(tokenizer_files=[str(tmp_path / "t")]))
    assert tokenizers.files_of_run(data) == [str(tmp_path / "t")]
    data = DataConfig(source="indexed", prefix=dataset())
    assert tokenizers.build_of_run(data)[1:] == ("bytes", [], None) and tokenizers.of_run(data).size == 257
    named = DataConfig(source="indexed", prefix=dataset(), tokenizer="json", tokenizer_files=["/nowhere"])
    assert tokenizers.files_of_run(named) == ["/nowhere"] and tokenizers.files_of_run(DataConfig()) == []
    halves = DataConfig(source="indexed", tokenizer="gpt2", tokenizer_files=[str(tmp_path / "t"), "/nowhere"])
    for lacking in (named, halves):
        with pytest.raises(ConfigError):
            tokenizers.check_of_run(lacking)


@pytest.mark.parametrize(
    "note, said",
    [
        ({"tokenizer": {**BYTES, "size": 300}}, "the tokenizer of dataset .*/d has changed: .*size 300 against 257"),
        (
            {"tokenizer": {**BYTES, "kind": "mine:T"}},
            "names the user-defined tokenizer 'mine:T'; if you trust it, set data.tok",
        ),
        (
            {"tokenizer": {**BYTES, "options": {"x": 1}}},
            "has options {'x': 1}; this version of hpclm supports only 'eod'",
        ),
    ],
)
def test_a_dataset_without_a_usable_tokenizer_is_refused(note, said, dataset):
    with pytest.raises(ConfigError, match=said):
        tokenizers.of_run(DataConfig(source="indexed", prefix=dataset(**note)))


def test_a_run_on_synthetic_data_has_no_tokenizer():
    with pytest.raises(ConfigError, match=r"trained on synthetic data \(data.source\), so it has no tokenizer"):
        tokenizers.of_run(DataConfig(source="synthetic"))


def test_a_dataset_that_names_no_files_of_its_tokenizer_is_refused(dataset, tmp_path):
    prefix = dataset()
    (tmp_path / "d.json").write_text(json.dumps({"tokenizer": BYTES}))
    with pytest.raises(ConfigError, match=f"{prefix}.json names no tokenizer_files; set data.tokenizer"):
        tokenizers.of_run(DataConfig(source="indexed", prefix=prefix))
    (tmp_path / "d.json").write_text(json.dumps({"content": {}}))  # of another project
    with pytest.raises(ConfigError, match=r"neither the run nor its dataset names a tokenizer; set data.tokenizer and"):
        tokenizers.of_run(DataConfig(source="indexed", prefix=prefix))

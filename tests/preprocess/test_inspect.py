import json

import numpy as np
import pytest

from hpclm import cli
from hpclm.data.indexed import IndexedDataset
from hpclm.preprocess import inspect
from hpclm.preprocess.writer import Writer
from tests.data.layouts import pack
from tests.preprocess.test_merge import TOKENIZER, write

TEXTS = ["Hello", "", "Grüße, 世界 🙂", "x" * 1000]


def of_texts(prefix, texts=TEXTS, **changed):
    return write(prefix, [[list(text.encode())] for text in texts], tokenizer=TOKENIZER | changed)


def inspected(capsys, *words):
    assert cli.main(["data", "inspect", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_it_shows_counts_lengths_tokenizer_and_documents_as_text(tmp_path, capsys):
    out = inspected(capsys, of_texts(tmp_path / "x"), "--documents", 4)
    for line in (
        "layout                megatron, uint16",
        "files                 2,050 bytes of tokens, 122 of index",
        "documents             4",
        "tokens                1,025",
        "tokenizer             bytes tokenizer (257 entries)",
        "min 0 · mean 256.2 · median 5 · p90 1,000 · p99 1,000 · max 1,000 · empty 1",
        "Grüße, 世界 🙂",
        "x" * 300 + " … (cut)",
    ):
        assert line in out
    assert "x" * 301 not in out


def test_it_says_the_same_as_json(tmp_path, capsys):
    found = json.loads(inspected(capsys, of_texts(tmp_path / "x"), "--json", "--documents", 1))
    assert found["document_lengths"] == {
        "min": 0,
        "mean": 256.25,
        "median": 5,
        "p90": 1000,
        "p99": 1000,
        "max": 1000,
        "empty": 1,
    }
    assert (found["documents"], found["sequences"], found["tokens"], found["dtype"]) == (4, 4, 1025, "uint16")
    assert found["first"] == [{"document": 0, "tokens": 5, "text": "Hello", "cut": False}]
    assert found["tokenizer"] == TOKENIZER


def test_documents_of_several_sequences_are_whole(tmp_path, capsys):
    prefix = write(tmp_path / "x", [[[72, 105], [33]], [], [[72]]])
    found = json.loads(inspected(capsys, prefix, "--json"))
    assert [document["text"] for document in found["first"]] == ["Hi!", "", "H"]
    assert found["document_lengths"]["max"] == 3 and found["sequence_lengths"]["max"] == 2
    assert "tokens in a sequence" in inspected(capsys, prefix)


@pytest.mark.parametrize("layout", ["megatron", "fairseq"])
def test_without_a_tokenizer_it_shows_token_ids(layout, tmp_path, capsys):
    prefix = pack(tmp_path / "x", layout, [[7, 8], [9] * 100], [0, 1, 2])
    out = inspected(capsys, prefix)
    assert "tokenizer             unknown" in out and "the dataset does not name one; --tokenizer and" in out
    assert "\n7 8\n" in out and "9 9 … (cut)" in out
    assert "\n\\x07\\x08\n" in inspected(capsys, prefix, "--tokenizer", "bytes")


def test_a_tokenizer_whose_files_are_gone_is_described_and_the_rest_is_shown(tmp_path, capsys):
    prefix = tmp_path / "x"
    with Writer(prefix, "u2") as writer:
        writer.add_document([7, 8])
        fingerprint = {"kind": "whitespace", "files": {"vocab.json": "0123456789abcdef"}, "size": 211, "eod": 3}
        writer.note = {"tokenizer": fingerprint}
    out = inspected(capsys, prefix)
    assert "whitespace tokenizer (vocab.json 01234567; 211 entries)" in out
    assert "x.tokenizer is missing" in out and "\n7 8\n" in out


def test_a_token_outside_the_vocabulary_is_shown_as_ids_and_found_by_verify(tmp_path, capsys):
    prefix = write(tmp_path / "x", [[[72, 300]]])
    assert "\n72 300\n" in inspected(capsys, prefix)
    assert cli.main(["data", "verify", prefix]) == 64
    assert "token 300 at byte 2" in capsys.readouterr().err


def test_control_characters_are_escaped(tmp_path, capsys):
    out = inspected(capsys, of_texts(tmp_path / "x", ["\x1b[2J\tred\r\n"]))
    assert "\\x1b[2J\tred\\x0d\n" in out and "\x1b" not in out


def test_an_empty_dataset_is_shown(tmp_path, capsys):
    out = inspected(capsys, pack(tmp_path / "x", "megatron", [], [0]))
    assert "documents             0" in out


SPREADS = {
    "one length": [7] * 3,
    "all empty": [0, 0],
    "a few": [1, 2, 3],
    "alike": list(range(50, 100)),
    "wide": [0, 1, 5, 10, 20, 50, 100, 10**6],
    "very long": [3, 2**31 - 1],
    "from nothing": [0] * 5 + [1] * 90 + [5000],
}


def test_lengths_are_exact_over_many_blocks(tmp_path):
    rng = np.random.default_rng(1)
    documents = rng.integers(0, 3, 2 * inspect.DOCUMENTS_PER_READ + 9)
    sizes = rng.integers(0, 50, documents.sum())
    with Writer(tmp_path / "x", "u1") as writer:
        writer.extend(np.zeros(sizes.sum(), "u1"), sizes, documents)
    bounds = np.concatenate(([0], np.cumsum(documents)))
    expected = np.diff(np.concatenate(([0], np.cumsum(sizes)))[bounds])
    counts = inspect.counted(inspect.document_lengths(IndexedDataset(tmp_path / "x")))
    assert sorted(counts.elements()) == sorted(expected.tolist())
    summary = inspect.summary(counts)
    assert summary["mean"] == pytest.approx(expected.mean())
    for name, part in inspect.PERCENTILES.items():
        assert summary[name] == np.quantile(expected, part, method="inverted_cdf")

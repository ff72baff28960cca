import struct
from pathlib import Path

import numpy as np
import pytest

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.data.formats import HEADER
from hpclm.data.indexed import SCANNED, IndexedDataset
from hpclm.preprocess.verify import verify
from hpclm.preprocess.writer import Writer
from tests.data.layouts import pack
from tests.preprocess.test_merge import TOKENIZER, write

SENTENCES = [[1, 2], [], [3, 4, 5], [6]]
DOCUMENTS = [0, 1, 1, 4]


def test_a_sound_dataset_is_counted(tmp_path):
    found = verify(IndexedDataset(pack(tmp_path / "x", "megatron", SENTENCES, DOCUMENTS)), 7)
    counts = {"sequences": 4, "documents": 3, "tokens": 6, "highest_token": 6, "vocab_size": 7}
    assert found == counts | {"content": None, "content_added": None, "recorded_now": False}


def test_an_empty_dataset_is_sound(tmp_path):
    assert verify(IndexedDataset(pack(tmp_path / "x", "megatron", [], [0])), 7)["highest_token"] is None


WRONG = {
    "above the vocabulary": ("i4", 3, 7, 7, "token 7 at byte 12 (document 2, sequence 2, offset 1 in it)"),
    "negative": ("i4", 5, -1, None, "token -1 at byte 20 (document 2, sequence 3, offset 0 in it) .* at least 0"),
    "negative, of two bytes": ("i2", 0, -2, 50000, "token -2 at byte 0 (document 0, sequence 0, offset 0 in it)"),
    "beyond every integer": (
        "u8",
        2,
        2**64 - 1,
        100,
        f"token {2**64 - 1} at byte 16 (document 2, sequence 2, offset 0",
    ),
}


@pytest.mark.parametrize("dtype, place, token, vocab_size, message", WRONG.values(), ids=WRONG)
def test_a_token_outside_the_vocabulary_is_found_with_its_place(dtype, place, token, vocab_size, message, tmp_path):
    pack(tmp_path / "x", "megatron", SENTENCES, DOCUMENTS, dtype)
    tokens = np.fromfile(tmp_path / "x.bin", dtype)
    tokens[place] = token
    tokens.tofile(tmp_path / "x.bin")
    with pytest.raises(ConfigError) as error:
        verify(IndexedDataset(tmp_path / "x"), vocab_size)
    said = str(error.value)
    assert all(part in said for part in message.split(" .* ")) and "1 of 6 tokens are outside" in said


def test_the_vocabulary_size_is_the_datasets_unless_another_is_given(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "x", [[[1, 256]], [[257, 300]]]))
    with pytest.raises(ConfigError, match=r"token 257 at byte 4 .* 0 to 256; 2 of 4 tokens"):
        verify(dataset)
    assert verify(dataset, 301)["highest_token"] == 300


def test_the_verb_takes_another_vocabulary_size(tmp_path, capsys):
    pack(tmp_path / "x", "megatron", SENTENCES, DOCUMENTS)
    assert cli.main(["data", "verify", str(tmp_path / "x"), "--vocab-size", "7"]) == 0
    assert cli.main(["data", "verify", str(tmp_path / "x"), "--vocab-size", "6"]) == 64
    assert "token 6 at byte 20" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [{"documents": 3}, {"tokens": 5}, {"tokens": "4"}])
def test_wrong_counts_in_the_json_file_are_reported(wrong, tmp_path):
    with Writer(tmp_path / "x", "u2") as writer:
        writer.add_document([1, 2, 3, 4])
        writer.note = {"tokenizer": TOKENIZER, "documents": 1, "tokens": 4} | wrong
    (key, said), *_ = wrong.items()
    with pytest.raises(ConfigError, match=rf"x\.json belongs to another dataset: .*x\.idx has . {key}, not {said!r}"):
        verify(IndexedDataset(tmp_path / "x"))


def test_a_large_index_is_checked_completely(tmp_path, capsys):
    with Writer(tmp_path / "x", "u1") as writer:
        ones = np.ones(SCANNED + 1, int)
        writer.extend(ones, ones, ones)
    assert cli.main(["data", "verify", str(tmp_path / "x")]) == 0
    with Path(tmp_path / "x.idx").open("r+b") as file:
        file.seek(HEADER.size + 12 * (SCANNED + 1) + 8 * 500_000)
        file.write(struct.pack("<q", 7))
    IndexedDataset(tmp_path / "x")
    capsys.readouterr()
    assert cli.main(["data", "verify", str(tmp_path / "x.idx")]) == 64
    assert "document 499999 goes from sequence 499999 to 7" in capsys.readouterr().err


def test_all_corrupt_datasets_are_named(tmp_path, capsys):
    for name in "abc":
        pack(tmp_path / name, "fairseq", SENTENCES)
    for name in "ac":
        (tmp_path / f"{name}.bin").write_bytes(b"")
    assert cli.main(["data", "verify", *sorted(str(path) for path in tmp_path.iterdir())]) == 64
    said = capsys.readouterr()
    assert said.err.count("is 0 bytes long, but") == 2
    [line] = said.out.splitlines()
    assert line.startswith(
        f"{tmp_path / 'b'}: verified: 4 sequences in 4 documents, 6 tokens, the highest 6; it has no"
    )

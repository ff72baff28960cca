import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpclm.base.errors import ConfigError
from hpclm.data.indexed import IndexedDataset, files, sidecar, token_dtype
from hpclm.preprocess.writer import Writer
from tests.data.layouts import append

REFERENCE = Path(__file__).parents[2].parent / "shared" / "reference"
PEERS = [
    "mcore_docs/docs_text_document",
    "bigscience_docs/docs_text_document",
    "seed2_lines/lines_text_sentence",
    *(f"mcore_builder/{name}" for name in ("uint8", "uint16", "int32", "int64", "merged_int32", "multimodal", "empty")),
    "fairseq_bin/train",
    "fairseq_bin/valid",
]
DOCUMENTS = [[[1, 2, 3]], [[4], [5, 6]], [], [[7, 8]]]
needs_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason="the peers' files are not here")


def write(prefix, documents=DOCUMENTS, dtype="u2", note=None):
    with Writer(prefix, dtype) as writer:
        writer.note = note
        append(writer, documents)
    return prefix


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@needs_reference
@pytest.mark.parametrize("peer", PEERS)
def test_datasets_of_other_projects_are_rewritten_byte_for_byte(peer, tmp_path):
    theirs = IndexedDataset(REFERENCE / peer)
    with Writer(tmp_path / "ours", theirs.dtype, theirs.layout) as writer:
        writer.extend(theirs.flat, theirs.sizes, np.diff(theirs.documents), theirs.modes)
    for ours, original in zip(files(tmp_path / "ours")[:2], files(REFERENCE / peer)[:2], strict=True):
        assert ours.read_bytes() == original.read_bytes()


@needs_reference
@pytest.mark.parametrize("name", ["uint8", "uint16", "int32", "int64", "merged_int32", "multimodal"])
def test_megatrons_own_reader_sees_the_same_sequences(name):
    expected = json.loads((REFERENCE / "mcore_builder/expected.json").read_text())[f"{name}.idx"]
    dataset = IndexedDataset(REFERENCE / "mcore_builder" / name)
    assert [dataset.tokens(i).tolist() for i in range(len(dataset))] == expected["tokens"]
    assert dataset.sizes.tolist() == expected["sequence_lengths"]
    assert dataset.pointers.tolist() == expected["pointers"]
    assert dataset.documents.tolist() == expected["document_indices"]


@needs_reference
def test_fairseqs_sequences_are_its_lines_and_its_documents():
    dataset = IndexedDataset(REFERENCE / "fairseq_bin/train")
    lines = (REFERENCE / "inputs/lines.txt").read_text().splitlines()
    words = (REFERENCE / "fairseq_bin/dict.txt").read_text().splitlines()
    entries = ["<s>", "<pad>", "</s>", "<unk>", *(line.rsplit(" ", 1)[0] for line in words)]
    assert dataset.layout == "fairseq"
    assert [[entries[id] for id in dataset.tokens(i)] for i in range(len(dataset))] == [
        [*line.split(), "</s>"] for line in lines
    ]
    assert dataset.documents.tolist() == list(range(len(lines) + 1))


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "u2", "i4", "i8"])
def test_sequences_documents_and_flat_tokens_come_back(dtype, tmp_path):
    dataset = IndexedDataset(write(tmp_path / "x", dtype=dtype))
    assert dataset.dtype == np.dtype(dtype)
    assert [dataset.tokens(i).tolist() for i in range(len(dataset))] == [[1, 2, 3], [4], [5, 6], [7, 8]]
    assert dataset.documents.tolist() == [0, 1, 3, 3, 4]
    assert dataset.flat.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_the_bytes_are_the_documented_layout(tmp_path):
    write(tmp_path / "x", [[[1, 2], [3]]], "u2")
    index = struct.pack("<9sQBQQ2i2q2q", b"MMIDIDX\0\0", 1, 8, 2, 2, 2, 1, 0, 4, 0, 2)
    assert (tmp_path / "x.idx").read_bytes() == index
    assert (tmp_path / "x.bin").read_bytes() == struct.pack("<3H", 1, 2, 3)


def test_an_empty_dataset_opens(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "x", []))
    assert len(dataset) == 0 and dataset.flat.tolist() == []
    assert (tmp_path / "x.idx").stat().st_size == 42


def test_small_vocabularies_take_two_bytes_a_token():
    assert [token_dtype(size).name for size in (257, 65499, 65500, 250680)] == ["uint16", "uint16", "int32", "int32"]


def test_a_token_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path):
    for tokens in ([1, 65536], [-1]):
        with pytest.raises(ConfigError, match="do not fit in uint16"), Writer(tmp_path / "x", "u2") as writer:
            writer.add_document(tokens)
    assert names(tmp_path) == []


def test_floats_are_no_tokens(tmp_path):
    with pytest.raises(ConfigError, match="cannot store tokens as float32"):
        Writer(tmp_path / "x", "f4")


def test_an_exception_leaves_the_dataset_before_it(tmp_path):
    write(tmp_path / "x", note={"tokenizer": {"size": 9}})
    with pytest.raises(KeyboardInterrupt), Writer(tmp_path / "x", "u2") as writer:
        writer.add_document([9, 9, 9])
        raise KeyboardInterrupt
    assert names(tmp_path) == ["x.bin", "x.idx", "x.json"]
    assert IndexedDataset(tmp_path / "x").flat.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_killed_writer_leaves_nothing_that_opens(tmp_path):
    script = (
        "import os; from hpclm.preprocess.writer import Writer\n"
        "with Writer('x', 'u2') as writer:\n    writer.add_document(range(50000)); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=tmp_path).returncode == 9
    with pytest.raises(ConfigError, match="not exist"):
        IndexedDataset(tmp_path / "x")
    assert not {"x.bin", "x.idx"} & set(names(tmp_path))


def test_a_writer_replaces_tokens_index_and_note_together(tmp_path):
    write(tmp_path / "x", note={"tokenizer": {"size": 9}})
    write(tmp_path / "x", [[[5]]])
    assert IndexedDataset(tmp_path / "x").flat.tolist() == [5]
    assert sidecar(tmp_path / "x").keys() == {"content"}


def test_a_datasets_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o022)
    try:
        write(tmp_path / "x", note={"tokenizer": {"size": 9}})
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}


def test_a_missing_dataset_is_named_with_both_files_and_its_neighbours(tmp_path):
    write(tmp_path / "x_text_document")
    with pytest.raises(ConfigError) as error:
        IndexedDataset(tmp_path / "x")
    for word in ("x.bin", "x.idx", str(tmp_path / "x_text_document")):
        assert word in str(error.value)


INDEX = 34  # where sizes begin; write() makes 4 sequences and 5 document bounds
DAMAGE = {
    "not an index": (lambda raw: b"garbage" + raw[7:], "not an index of tokens: it starts with b'garbage"),
    "shorter than its header": (lambda raw: raw[:20], "is truncated: it has 20 bytes, but its header needs 26"),
    "cut within its counts": (lambda raw: raw[:30], "is truncated: it has 30 bytes, but its header needs 34"),
    "another version": (lambda raw: raw[:9] + struct.pack("<Q", 2) + raw[17:], "version 2"),
    "float tokens": (lambda raw: raw[:17] + b"\x06" + raw[18:], r"dtype code 6 \(float64\)"),
    "narrow float tokens": (lambda raw: raw[:17] + b"\x07" + raw[18:], "dtype code 7 .float32 in Megatron"),
    "tokens of no type": (lambda raw: raw[:17] + b"\x0b" + raw[18:], "dtype code 11; token ids need one of"),
    "a count that lies": (lambda raw: raw[:18] + struct.pack("<Q", 2**60) + raw[26:], f"{2**60} sequences"),
    "cut short": (lambda raw: raw[:-8], "114 bytes long, but 4 sequences and 5 document bounds need 122"),
    "negative size": (
        lambda raw: raw[:INDEX] + struct.pack("<i", -3) + raw[INDEX + 4 :],
        "sequence 0 has a negative size, -3",
    ),
    "sizes and pointers disagree": (
        lambda raw: raw[:INDEX] + struct.pack("<i", 2) + raw[INDEX + 4 :],
        "sequence 1 should start at byte 4 of the tokens",
    ),
    "document bounds start late": (
        lambda raw: raw[: INDEX + 48] + struct.pack("<q", 1) + raw[INDEX + 56 :],
        "must go from 0 to 4",
    ),
    "document bounds end early": (lambda raw: raw[:-8] + struct.pack("<q", 3), "must go from 0 to 4"),
    "document bounds decrease": (
        lambda raw: raw[: INDEX + 56] + struct.pack("<q", 4) + raw[INDEX + 64 :],
        "must not decrease",
    ),
}


@pytest.mark.parametrize("damage, message", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_corrupt_index_does_not_open(damage, message, tmp_path):
    index = Path(f"{write(tmp_path / 'x')}.idx")
    index.write_bytes(damage(index.read_bytes()))
    with pytest.raises(ConfigError, match=message):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize("content", [b"", b"\0" * 15, b"\0" * 18])
def test_tokens_that_do_not_match_the_index_do_not_open(content, tmp_path):
    write(tmp_path / "x")
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(ConfigError, match=f"is {len(content)} bytes long, but .* describes 16"):
        IndexedDataset(tmp_path / "x")


def test_the_fingerprint_changes_with_the_tokens_and_with_the_documents(tmp_path):
    prints = [
        IndexedDataset(write(tmp_path / str(i), documents)).fingerprint
        for i, documents in enumerate([DOCUMENTS, DOCUMENTS, [[[1, 2, 3]], [[4], [5, 6], [7, 8]]], [[[1]], [[2]]]])
    ]
    assert prints[0] == prints[1]
    assert prints[0] != prints[2] != prints[3]
    assert json.loads(json.dumps(prints[0])) == prints[0]


TOKENIZER = '"tokenizer": {"kind": "x", "size": 1, "files": {}}'


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        "[" * 10**5,
        '{"tokenizer": {"kind": "x", "size": 1, "files": {"a": 2}}}',
        '{"tokenizer": 3}',
        '{"tokenizer": {"size": "big"}}',
    ],
)
def test_an_invalid_json_file_is_refused_and_a_missing_one_is_not(text, tmp_path):
    assert sidecar(tmp_path / "x") == {}
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json"):
        sidecar(tmp_path / "x")

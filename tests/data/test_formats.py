import struct
from pathlib import Path

import numpy as np
import pytest

from hpclm.base.errors import ConfigError
from hpclm.data.formats import FAIRSEQ_HEADER, HEADER
from hpclm.data.indexed import SCANNED, IndexedDataset
from tests.data.layouts import CODES, longs, pack

SEQUENCES = [[1, 2, 3], [4], [], [70, 6]]
DOCUMENTS = [0, 1, 3, 3, 4]
LAYOUTS = {
    "megatron": ("megatron", DOCUMENTS),
    "fairseq": ("fairseq", None),
}


def changed(path, offset, value):
    raw = path.read_bytes()
    path.write_bytes(raw[:offset] + value + raw[offset + len(value) :])


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("packed, expected", LAYOUTS.items(), ids=LAYOUTS)
def test_every_layout_gives_the_tokens_that_were_packed(packed, expected, dtype, tmp_path):
    layout, documents = expected
    dataset = IndexedDataset(pack(tmp_path / "x", packed, SEQUENCES, documents, dtype))
    width = np.dtype(dtype).itemsize
    assert (dataset.layout, dataset.dtype.name) == (layout, np.dtype(dtype).name)
    assert [dataset.tokens(i).tolist() for i in range(len(dataset))] == SEQUENCES
    assert dataset.flat.tolist() == [1, 2, 3, 4, 70, 6]
    assert dataset.sizes.tolist() == [3, 1, 0, 2]
    assert dataset.pointers.tolist() == [0, 3 * width, 4 * width, 4 * width]
    assert dataset.documents.tolist() == (documents or [0, 1, 2, 3, 4])
    assert dataset.modes is None


@pytest.mark.parametrize("packed, expected", LAYOUTS.items(), ids=LAYOUTS)
def test_every_layout_may_be_empty(packed, expected, tmp_path):
    dataset = IndexedDataset(pack(tmp_path / "x", packed, [], [0] if expected[1] else None))
    assert (len(dataset), dataset.flat.tolist(), dataset.documents.tolist()) == (0, [], [0])
    assert (tmp_path / "x.bin").stat().st_size == 0


def test_modes_are_read(tmp_path):
    dataset = IndexedDataset(pack(tmp_path / "x", "megatron", SEQUENCES, DOCUMENTS, modes=[0, 1, 2, 0]))
    assert dataset.modes.tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize(
    "lengths", [[1], [1, 0], [2, 0, 0], [5, 0, 9], [3, 0, 0, 0, 0, 0, 0, 0], [0] * 8, [*range(40)]]
)
def test_a_fairseq_index_whose_first_lengths_look_like_a_count_of_documents_stays_one(lengths, tmp_path):
    sequences = [[7] * length for length in lengths]
    dataset = IndexedDataset(pack(tmp_path / "x", "fairseq", sequences))
    assert dataset.layout == "fairseq"
    assert [dataset.tokens(i).tolist() for i in range(len(dataset))] == sequences


def test_no_length_fits_two_layouts():
    for n in range(200):
        fairseq = FAIRSEQ_HEADER.size + 12 * n
        megatron = {HEADER.size + 12 * n + 8 * d + m for d in range(200) for m in (0, n)}
        assert fairseq not in megatron


@pytest.mark.parametrize("kept", range(25, 34 + 12 * 4 + 8 * 5))
def test_a_megatron_index_that_was_cut_is_not_taken_for_fairseqs(kept, tmp_path):
    pack(tmp_path / "x", "megatron", SEQUENCES, DOCUMENTS)
    index = tmp_path / "x.idx"
    index.write_bytes(index.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=r"x\.idx"):
        IndexedDataset(tmp_path / "x")


DAMAGE = {
    "a first start": ("fairseq", 26 + 16, longs(8), "sequence 0 should start at byte 0 of the tokens.* says 8"),
    "a last size": ("fairseq", 26 + 12, struct.pack("<i", -1), "sequence 3 has a negative size, -1"),
}


@pytest.mark.parametrize("packed, offset, value, message", DAMAGE.values(), ids=DAMAGE)
def test_damage_in_other_layouts_is_found_on_opening(packed, offset, value, message, tmp_path):
    pack(tmp_path / "x", packed, SEQUENCES, LAYOUTS[packed][1])
    changed(tmp_path / "x.idx", offset, value)
    with pytest.raises(ConfigError, match=message):
        IndexedDataset(tmp_path / "x")


def test_the_old_layout_is_refused_with_what_to_do(tmp_path):
    pack(tmp_path / "x", "fairseq", SEQUENCES)
    changed(tmp_path / "x.idx", 0, b"TNTIDX\0\0")
    with pytest.raises(ConfigError, match=r"old layout TNTIDX .* preprocess the text again"):
        IndexedDataset(tmp_path / "x")


def test_tokens_that_end_within_one_are_refused(tmp_path):
    pack(tmp_path / "x", "fairseq", [[1], [2]], dtype="u2")
    changed(tmp_path / "x.idx", 26 + 8 + 8, longs(1))
    (tmp_path / "x.bin").write_bytes(bytes(3))
    with pytest.raises(ConfigError, match="not a multiple of 2"):
        IndexedDataset(tmp_path / "x")


def large(prefix):
    """More sequences of one token than opening looks at."""
    n = SCANNED + 5
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 1, n, n + 1)
    columns = [np.ones(n, "<i4"), np.arange(n, dtype="<i8"), np.arange(n + 1, dtype="<i8")]
    Path(f"{prefix}.idx").write_bytes(head + b"".join(column.tobytes() for column in columns))
    Path(f"{prefix}.bin").write_bytes(bytes(n))
    return n


@pytest.mark.parametrize("pointer", [-1, 2**62, SCANNED + 5])
def test_corruption_that_opening_does_not_detect_is_detected_on_use_or_check(pointer, tmp_path):
    n = large(tmp_path / "x")
    changed(tmp_path / "x.idx", 34 + 4 * n + 8 * 777, longs(pointer))
    dataset = IndexedDataset(tmp_path / "x")
    with pytest.raises(ConfigError, match="sequence 777 should start at byte 777"):
        dataset.check()
    with pytest.raises(ConfigError, match="sequence 777 is tokens"):
        dataset.tokens(777)
    assert dataset.tokens(778).tolist() == [0]


@pytest.mark.parametrize("sequence", [0, SCANNED + 4])
def test_both_ends_of_a_large_index_are_checked(sequence, tmp_path):
    n = large(tmp_path / "x")
    changed(tmp_path / "x.idx", 34 + 4 * n + 8 * sequence, longs(3))
    with pytest.raises(ConfigError, match=r"x\.idx"):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize("offset, length", [(0, 1), (40 << 20, 2 << 20), ((100 << 20) - 1, 1)])
def test_the_fingerprint_of_a_long_file_covers_its_ends_and_its_middle(offset, length, tmp_path):
    prefix = tmp_path / "x"
    pack(prefix, "megatron", [[0]], [0, 1], "u1")
    changed(tmp_path / "x.idx", 34, struct.pack("<i", 100 << 20))
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(100 << 20)
    before = IndexedDataset(prefix).fingerprint
    assert IndexedDataset(prefix).fingerprint == before
    with Path(f"{prefix}.bin").open("r+b") as file:
        file.seek(offset)
        file.write(b"\1" * length)
    assert IndexedDataset(prefix).fingerprint != before

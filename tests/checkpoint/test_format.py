"""Files of tensors, block by block."""

import json
import struct
from contextlib import closing

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from hpclm.checkpoint import format as files
from hpclm.checkpoint.format import File
from hpclm.checkpoint.manifest import BadCheckpoint, FileInfo

BLOCK = 64
WRONG = r"^x\.safetensors differs from what was saved \(its hash is wrong\)$"


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "HASH_BLOCK_BYTES", BLOCK)
        yield


def tensors(draw):
    return {
        "scalar": torch.tensor(3.0),
        "none": torch.empty(0, 4),
        "norm": torch.rand(16, generator=draw),  # one block to the byte
        "table": torch.rand(37, 5, generator=draw),
        "half": torch.rand(9, 4, 3, generator=draw).to(torch.bfloat16),
        "count": torch.arange(7),
    }


@pytest.fixture
def written(tmp_path):
    held = tensors(torch.Generator().manual_seed(0))
    return tmp_path / "x.safetensors", held, files.write(tmp_path / "x.safetensors", list(held.items()))


def test_the_library_reads_what_is_written(written):
    path, held, facts = written
    assert path.stat().st_size == facts.size
    found = load_file(path)
    assert found.keys() == held.keys() and all(torch.equal(found[name], tensor) for name, tensor in held.items())


def test_any_block_is_what_was_written(written):
    path, held, facts = written
    file = File(path.parent, path.name, facts)

    @given(st.data())
    def holds(data):
        name = data.draw(st.sampled_from(sorted(held)))
        shape = held[name].shape
        low = [data.draw(st.integers(0, n)) for n in shape]
        high = [data.draw(st.integers(a, n)) for a, n in zip(low, shape, strict=True)]
        inside = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
        assert torch.equal(file.values(name, low, high), held[name][inside])

    holds()
    file.check()
    file.close()


def test_every_flipped_bit_is_found_and_only_by_who_reads_its_block(written):
    path, held, facts = written
    good = path.read_bytes()
    begin = len(good) - sum(t.numel() * t.element_size() for t in held.values())
    row = begin + 4 + 64  # of the table: after the scalar and the norm
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << place % 8]) + good[place + 1 :])
        with pytest.raises(BadCheckpoint, match=WRONG), closing(File(path.parent, path.name, facts)) as file:
            file.check()
        if place >= begin:
            second = row + BLOCK <= place < row + 2 * BLOCK
            with closing(File(path.parent, path.name, facts)) as file:  # bytes 80 to 120, of the block of 64 to 128
                assert second == (not reads(file, "table", [4, 0], [6, 5]))


def reads(file, *where):
    try:
        file.values(*where)
    except BadCheckpoint:
        return False
    return True


@pytest.mark.parametrize("size", [0, 4, 8, 100, -1])
def test_a_shorter_file_is_found_also_if_it_gets_shorter_while_it_is_read(written, size):
    path, _, info = written
    content, file = path.read_bytes(), File(path.parent, path.name, info)
    path.write_bytes(content[:size])
    with pytest.raises(BadCheckpoint), closing(file):
        file.check()
    for told in (info, FileInfo(path.stat().st_size, info.xxh3)):  # whatever the manifest says
        with pytest.raises(BadCheckpoint), closing(File(path.parent, path.name, told)) as file:
            file.check()


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
        [],
    ],
    ids=str,
)
def test_a_header_that_does_not_describe_the_file_is_refused_even_if_its_hash_fits(tmp_path, entry):
    text = json.dumps({"w": entry}).encode()
    head = struct.pack("<Q", len(text)) + text
    (tmp_path / "x").write_bytes(head + bytes(8))
    digests = xxhash.xxh3_64_hexdigest(head) + xxhash.xxh3_64_hexdigest(bytes(8))
    with pytest.raises(BadCheckpoint, match="header"):
        File(tmp_path, "x", FileInfo(len(head) + 8, digests))


@pytest.mark.parametrize(
    "values, finite", [([3e38, 3e38], True), ([1.0, float("inf")], False), ([float("nan"), 1.0], False)]
)
def test_values_are_not_finite_where_one_is_not_but_not_where_only_their_sum_is(tmp_path, values, finite):
    info = files.write(tmp_path / "x", [("n", torch.arange(3)), ("w", torch.tensor(values))])
    with closing(File(tmp_path, "x", info)) as file:
        assert file.check() == ([] if finite else ["w"])


def test_a_file_names_the_tensors_with_values_that_are_not_finite_in_any_block(tmp_path):
    held = {"good": torch.ones(40), "large": torch.full((4,), 3e38), "count": torch.arange(40), "last": torch.ones(40)}
    held["last"][39] = float("nan")  # of the third block
    held["first"] = torch.tensor([float("inf"), *range(39)])
    facts = files.write(tmp_path / "x.safetensors", list(held.items()))
    with closing(File(tmp_path, "x.safetensors", facts)) as file:
        assert file.check() == ["last", "first"]
        with pytest.raises(BadCheckpoint, match="has no tensor other, although the manifest lists it"):
            file.shape("other")
    assert (facts.size - sum(tensor.nbytes for tensor in held.values())) % 8 == 0  # so that values are aligned

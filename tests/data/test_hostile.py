"""Whatever the files hold, a dataset either does not open, with a ConfigError, or lies within them.

HPCLM_FUZZ=200000 runs more examples than the tests do.
"""

import os
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from hpclm.base.errors import ConfigError
from hpclm.data.indexed import IndexedDataset
from hpclm.preprocess import inspect
from hpclm.preprocess.verify import verify
from tests.data.layouts import CODES, longs, pack

EXAMPLES = int(os.environ.get("HPCLM_FUZZ", 1000))
fuzz = settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
fewer = settings(fuzz, max_examples=EXAMPLES // 8)
ODD = [
    0,
    1,
    2,
    3,
    7,
    8,
    255,
    2**15,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**60,
    2**61,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 4,
    2**64 - 1,
]
numbers = st.one_of(st.sampled_from(ODD), st.integers(0, 40), st.integers(0, 2**64 - 1))
LAYOUTS = ["megatron", "fairseq"]


@st.composite
def datasets(draw):
    """What ``pack`` takes."""
    sequences = draw(st.lists(st.lists(st.integers(0, 100), max_size=5), max_size=8))
    inner = draw(st.lists(st.integers(0, len(sequences)), max_size=5))
    documents = [0, *sorted(inner), len(sequences)] if sequences or inner else [0]
    layout, dtype = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(list(CODES)))
    modes = [1] * len(sequences) if layout == "megatron" and draw(st.booleans()) else None
    return layout, sequences, documents, dtype, modes


@st.composite
def harm(draw):
    """A function of the bytes of a file: one lies in a number, flips a bit, cuts or lengthens."""
    kind = draw(st.sampled_from(["number", "number", "number", "bit", "cut", "lengthen", "drop", "splice"]))
    place, value = draw(st.integers(0, 60) | st.integers(0, 2**12)), draw(numbers)
    width, tail = draw(st.sampled_from([1, 4, 8])), draw(st.binary(min_size=1, max_size=30))

    def apply(raw):
        at = place % max(1, len(raw))
        if kind == "number":
            return (raw[:at] + (value % 256**width).to_bytes(width, "little") + raw[at + width :])[: len(raw)]
        if kind == "bit":
            return raw[:at] + bytes([raw[at] ^ 1 << value % 8]) + raw[at + 1 :] if raw else raw
        changes = {"cut": raw[:at], "lengthen": raw + tail, "drop": raw[:at] + raw[at + width :]}
        return changes.get(kind, raw[:at] + tail + raw[at:])

    return apply


def opened(prefix):
    """Whether the dataset opens; all that can be asked of it is asked then."""
    try:
        dataset = IndexedDataset(prefix)
    except ConfigError as error:
        assert str(error)
        event("refused")
        return False
    event(f"opened as {dataset.layout}")
    width, length = dataset.dtype.itemsize, Path(f"{prefix}.bin").stat().st_size
    begins, sizes = dataset.pointers.astype(object), dataset.sizes.astype(object)
    assert all(0 <= begin <= begin + size * width <= length for begin, size in zip(begins, sizes))
    assert len(dataset.documents) == dataset.document_count + 1
    assert [0, *dataset.documents, len(dataset)] == sorted([0, *dataset.documents.tolist(), len(dataset)])
    for ask in (
        lambda: [len(dataset.tokens(i)) for i in range(len(dataset))] == dataset.sizes.tolist(),
        lambda: len(dataset.flat) == length // width,
        lambda: verify(dataset, 90)["tokens"] == length // width,
        lambda: len(inspect.as_text(inspect.report(dataset, 2))) > 0,
    ):
        try:
            assert ask()
        except ConfigError as error:
            assert str(error)
    return True


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile") / "x"


@fuzz
@given(datasets(), st.lists(harm(), max_size=2), st.lists(harm(), max_size=1))
def test_a_corrupted_dataset_is_refused_or_stays_within_its_files(prefix, dataset, to_index, to_tokens):
    layout, sequences, documents, dtype, modes = dataset
    pack(prefix, layout, sequences, documents, dtype, modes)
    for path, changes in ((Path(f"{prefix}.idx"), to_index), (Path(f"{prefix}.bin"), to_tokens)):
        raw = path.read_bytes()
        for change in changes:
            raw = change(raw)
        path.write_bytes(raw)
    opened(prefix)


@fuzz
@given(
    st.sampled_from(LAYOUTS),
    st.integers(0, 4),
    st.integers(0, 4),
    st.lists(st.integers(-2, 6) | st.sampled_from(ODD), min_size=20, max_size=20),
    st.sampled_from(list(CODES.values())),
    st.integers(0, 40),
)
def test_an_index_with_random_numbers_is_refused_or_stays_within_its_files(prefix, layout, n, d, values, code, tokens):
    column = [value - 2**64 if value >= 2**63 else value for value in values]
    sizes = [(value + 2**31) % 2**32 - 2**31 for value in column[:n]]
    counts = [n, d] if layout == "megatron" else [n]
    body = struct.pack(f"<{n}i", *sizes) + longs(*column[n : 2 * n + (d if layout == "megatron" else 0)])
    index = b"MMIDIDX\0\0" + struct.pack("<QB", 1, code) + struct.pack(f"<{len(counts)}Q", *counts) + body
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(bytes(tokens))
    opened(prefix)


@fewer
@given(datasets())
def test_an_intact_dataset_opens(prefix, dataset):
    layout, sequences, documents, dtype, modes = dataset
    assert opened(pack(prefix, layout, sequences, documents, dtype, modes))


@fewer
@given(st.sampled_from([b"", b"MMIDIDX\0\0"]), st.binary(max_size=120), st.binary(max_size=20))
def test_garbage_is_refused_or_stays_within_its_files(prefix, magic, index, tokens):
    Path(f"{prefix}.idx").write_bytes(magic + index)
    Path(f"{prefix}.bin").write_bytes(tokens)
    opened(prefix)

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hpclm.base.errors import ConfigError
from hpclm.base.files import ABANDONED
from hpclm.data.indexed import IndexedDataset
from hpclm.preprocess.writer import Writer
from tests.data.layouts import append

DOCUMENTS = [[[1, 2, 3], [4]], [], [[5, 6]], [[], [7]]]


def one_by_one(prefix, documents):
    with Writer(prefix, "u2") as writer:
        for document in documents:
            append(writer, [document])


def content(prefix):
    return [Path(f"{prefix}.{end}").read_bytes() for end in ("bin", "idx")]


@pytest.mark.parametrize("cut", range(len(DOCUMENTS) + 1))
def test_documents_appended_together_are_the_bytes_of_those_appended_one_by_one(cut, tmp_path):
    one_by_one(tmp_path / "single", DOCUMENTS)
    with Writer(tmp_path / "bulk", "u2") as writer:
        append(writer, DOCUMENTS[:cut])
        append(writer, DOCUMENTS[cut:])
        assert (writer.tokens, writer.sequences, writer.documents) == (7, 5, 4)
    assert content(tmp_path / "bulk") == content(tmp_path / "single")


def test_modes_come_last_in_the_index(tmp_path):
    one_by_one(tmp_path / "plain", DOCUMENTS)
    with Writer(tmp_path / "x", "u2") as writer:
        append(writer, DOCUMENTS[:1], np.array([0, 1]))
        append(writer, DOCUMENTS[1:], np.array([2, 0, 1]))
    assert content(tmp_path / "x")[1] == content(tmp_path / "plain")[1] + bytes([0, 1, 2, 0, 1])


@pytest.mark.parametrize("order", [(None, np.array([1])), (np.array([1]), None)])
def test_modes_are_for_all_sequences_or_for_none(order, tmp_path):
    with pytest.raises(ValueError, match="modes"), Writer(tmp_path / "x", "u2") as writer:
        for modes in order:
            append(writer, [[[1]]], modes)
    assert list(tmp_path.iterdir()) == []


def test_fairseqs_index_has_no_documents(tmp_path):
    with Writer(tmp_path / "x", "u2", "fairseq") as writer:
        append(writer, [[[1, 2]], [[3]], [[]]])
    tokens, index = content(tmp_path / "x")
    assert tokens == struct.pack("<3H", 1, 2, 3)
    assert index == b"MMIDIDX\0\0" + struct.pack("<QBQ3i3q", 1, 8, 3, 2, 1, 0, 0, 4, 6)


@pytest.mark.parametrize("documents", [[[[1], [2]]], [[]]])
def test_fairseqs_layout_refuses_what_it_cannot_store(documents, tmp_path):
    with (
        pytest.raises(ConfigError, match=r"document 0 has [02] sequences; choose --layout megatron"),
        Writer(tmp_path / "x", "u2", "fairseq") as w,
    ):
        append(w, documents)
    assert list(tmp_path.iterdir()) == []


def test_counts_that_do_not_add_up_are_refused(tmp_path):
    with (
        pytest.raises(ValueError, match="sizes add up to 2, but there are 3 tokens"),
        Writer(tmp_path / "x", "u2") as writer,
    ):
        writer.extend(np.arange(3), np.array([2]), np.array([1]))
    assert list(tmp_path.iterdir()) == []


def test_files_of_killed_writers_are_removed_and_those_of_others_are_not(tmp_path):
    script = "import os; from hpclm.preprocess.writer import Writer\nWriter('x', 'u2').__enter__(); os._exit(9)"
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path)
    killed = set(tmp_path.iterdir())
    fresh, old = tmp_path / "x.bin.tmp-other-node-7-ab12cd", tmp_path / "x.idx.tmp-other-node-7-ab12cd-sizes"
    fresh.touch(), old.touch()
    os.utime(old, (time.time() - ABANDONED - 60,) * 2)
    with Writer(tmp_path / "x", "u2") as living:
        living.add_document([1])
        one_by_one(tmp_path / "x", DOCUMENTS)
    assert killed and not killed & set(tmp_path.iterdir())
    assert fresh.exists() and not old.exists()
    assert IndexedDataset(tmp_path / "x").flat.tolist() == [1]


def test_memory_does_not_grow_with_the_documents(tmp_path):
    script = (
        "import resource, numpy as np; from hpclm.preprocess.writer import Writer\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "flat, ones = np.ones(100_000, 'u2'), np.ones(100_000, 'i8')\n"
        "with Writer('x', 'u2') as writer:\n"
        "    writer.extend(flat, ones, ones); before = peak()\n"
        "    for _ in range(30): writer.extend(flat, ones, ones)\n"
        "print(peak() - before)"  # 3 million documents: 36 MB of index
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 30
    assert len(IndexedDataset(tmp_path / "x")) == 3_100_000

import errno
import json
import logging
import os
import subprocess
import sys

import numpy as np
import pytest

from hpclm.config import DataConfig
from hpclm.data.corpus import corpus
from hpclm.data.index_cache import kept
from hpclm.preprocess.writer import Writer


def arrays():
    return {"a": np.arange(10), "b": np.ones((3, 2), np.int32)}


def never():
    raise AssertionError("it was there already")


def entries(folder):
    return sorted(path for path in folder.iterdir() if path.is_dir() and ".tmp-" not in path.name)


def test_an_index_is_built_once_and_then_read(tmp_path):
    first = kept(tmp_path / "new", {"seed": 1}, arrays)
    again = kept(tmp_path / "new", {"seed": 1}, never)
    for found in (first, again):
        assert {name: array.tolist() for name, array in found.items()} == {n: a.tolist() for n, a in arrays().items()}
    assert len(entries(tmp_path / "new")) == 1


def test_another_key_is_another_entry(tmp_path):
    for key in ({"seed": 1}, {"seed": 2}, {"seed": 1, "more": None}):
        kept(tmp_path, key, arrays)
    assert len(entries(tmp_path)) == 3


def truncate(entry):
    with (entry / "a.npy").open("r+b") as file:
        file.truncate(100)


def scramble(entry):
    raw = bytearray((entry / "a.npy").read_bytes())
    raw[130:140] = b"0123456789"
    (entry / "a.npy").write_bytes(raw)


def other_key(entry):
    about = json.loads((entry / "about.json").read_text())
    (entry / "about.json").write_text(json.dumps({**about, "seed": 9}))


DAMAGES = {
    "an array cut short": truncate,
    "an array of the same length": scramble,
    "an array gone": lambda entry: (entry / "a.npy").unlink(),
    "about.json is garbage": lambda entry: (entry / "about.json").write_bytes(b"\0\1{"),
    "about.json is another type": lambda entry: (entry / "about.json").write_text("[]"),
    "about.json gone": lambda entry: (entry / "about.json").unlink(),
    "about.json of another key": other_key,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_corrupt_entry_is_rebuilt(damage, tmp_path):
    kept(tmp_path, {"seed": 1}, arrays)
    damage(entries(tmp_path)[0])
    assert kept(tmp_path, {"seed": 1}, arrays)["a"].tolist() == list(range(10))
    assert kept(tmp_path, {"seed": 1}, never)["a"].tolist() == list(range(10))
    assert len(entries(tmp_path)) == 1


def test_a_folder_that_cannot_be_written_costs_a_warning_and_no_more(tmp_path, caplog):
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        assert kept(tmp_path / "file" / "below", {"seed": 1}, arrays)["a"].tolist() == list(range(10))
    assert "cannot be kept in" in caplog.text


def test_a_full_disk_costs_a_warning_and_nothing_is_built_twice(tmp_path, monkeypatch, caplog):
    built = []

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with caplog.at_level(logging.WARNING):
        assert kept(tmp_path, {"seed": 1}, lambda: built.append(1) or arrays())["a"].tolist() == list(range(10))
    assert built == [1] and "No space left" in caplog.text and entries(tmp_path) == []


def test_an_entry_that_cannot_be_read_now_is_left_alone(tmp_path, monkeypatch, caplog):
    kept(tmp_path, {"seed": 1}, arrays)
    [entry] = entries(tmp_path)
    before = entry.stat().st_ino

    def failing(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(np, "load", failing)
        assert kept(tmp_path, {"seed": 1}, arrays)["a"].tolist() == list(range(10))
    assert "Too many open files" in caplog.text
    assert kept(tmp_path, {"seed": 1}, never) and entry.stat().st_ino == before


def test_of_processes_that_start_together_one_builds_the_index(tmp_path):
    script = (
        "import pathlib, time, numpy as np; from hpclm.data.index_cache import kept\n"
        "def build(): print('built'); time.sleep(1); return {'a': np.arange(10)}\n"
        f"assert kept(pathlib.Path({str(tmp_path)!r}), {{'seed': 1}}, build)['a'].sum() == 45"
    )
    started = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) for _ in range(5)]
    told = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0] * 5
    assert b"".join(told).split() == [b"built"]


def test_without_locks_the_first_to_finish_wins_and_nothing_is_left(tmp_path):
    other = kept(tmp_path, {"seed": 1}, arrays)

    def late():  # what a machine does whose locks the others do not see: it did not find the entry when it began
        return {"a": np.arange(10), "b": np.ones((3, 2), np.int32)}

    [entry] = entries(tmp_path)
    entry.rename(tmp_path / "hidden")

    def meanwhile():
        (tmp_path / "hidden").rename(entry)
        return late()

    assert kept(tmp_path, {"seed": 1}, meanwhile)["a"].tolist() == other["a"].tolist()
    assert entries(tmp_path) == [entry]


def test_unfinished_entries_of_killed_processes_are_not_used_and_are_removed(tmp_path):
    script = (
        "import os, pathlib, numpy as np; from hpclm.data import index_cache\n"
        "pathlib.Path.rename = lambda *_: os._exit(9)\n"  # killed just before the entry gets its name
        f"index_cache.kept(pathlib.Path({str(tmp_path)!r}), {{'seed': 1}}, lambda: {{'a': np.arange(10)}})"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 9
    assert entries(tmp_path) == [] and len(list(tmp_path.glob("*.tmp-*"))) == 1
    kept(tmp_path, {"seed": 1}, arrays)
    assert len(entries(tmp_path)) == 1 and kept(tmp_path, {"seed": 1}, never)
    assert not list(tmp_path.glob("*.tmp-*"))


def dataset(prefix, lengths):
    with Writer(prefix, "i4") as writer:
        for length in lengths:
            writer.add_document(np.arange(length))
    return str(prefix)


def test_an_index_is_kept_under_all_that_it_depends_on(tmp_path):
    prefix = dataset(tmp_path / "x", [20] * 50)
    cache = tmp_path / "cache"

    def entries_after(seed=1, context=8, wanted=10, prefix=prefix, **data):
        corpus(DataConfig(prefix=prefix, index_cache=str(cache), **data), context, seed, 1000).samples("train", wanted)
        return len(entries(cache))

    assert [entries_after(), entries_after()] == [1, 1]
    changes = [dict(seed=2), dict(context=9), dict(wanted=500), dict(split="1,1,1"), dict(order="dse")]
    assert [entries_after(**change) for change in changes] == [2, 3, 4, 5, 6]
    dataset(tmp_path / "x", [10, 30] * 25)  # the same name, the same number of tokens and sequences
    assert entries_after() == 7
    os.utime(tmp_path / "x.idx", ns=(1, 1))
    assert entries_after() == 8
    assert entries_after(split="1,1,1") == 9


def test_small_indices_are_not_kept_unless_a_folder_is_named(tmp_path):
    prefix = dataset(tmp_path / "x", [20] * 50)
    corpus(DataConfig(prefix=prefix), 8, 1, 1000).samples("train", 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx", "x.json"]


def test_large_ones_are_cached_next_to_the_dataset(tmp_path):
    with Writer(tmp_path / "x", "u1") as writer:
        sizes = np.ones(1_100_000, np.int64)
        writer.extend(np.ones(1_100_000, np.uint8), sizes, sizes)
    samples = corpus(DataConfig(prefix=str(tmp_path / "x")), 8, 1, 1000).samples("train", 10)
    [entry] = entries(tmp_path / "x.index")
    assert sorted(path.name for path in entry.iterdir()) == [
        "about.json",
        "documents.npy",
        "samples.npy",
        "shuffle.npy",
    ]
    row = np.empty(9, np.int64)
    samples.read(3, row)
    assert row.tolist() == [1] * 9


def test_a_dataset_that_is_replaced_under_a_run_does_not_spoil_the_entry_of_the_new_one(tmp_path):
    prefix, cache = dataset(tmp_path / "x", [20] * 50), str(tmp_path / "cache")
    settings = DataConfig(prefix=prefix, index_cache=cache, split="1")
    opened = corpus(settings, 8, 1, 1000)
    dataset(tmp_path / "x", [10, 30] * 25)
    of_the_old = opened.samples("train", 10)
    of_the_new = corpus(settings, 8, 1, 1000).samples("train", 10)
    row = np.empty(9, np.int32)
    for samples, longest in ((of_the_old, 20), (of_the_new, 30)):
        for i in range(len(samples)):
            samples.read(i, row)
            assert np.isin(np.diff(row), [1, *range(-longest + 1, 1)]).all() and row.max() < longest

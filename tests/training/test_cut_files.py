"""A file of the data that is cut while a run reads it is named in the log, by the status and on the console."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpclm.node import bus_error
from hpclm.rundir import summary
from tests.datasets.texts import preprocess
from tests.forks import Ranks, steps
from tests.runs import PATIENCE, hpclm


@pytest.fixture
def data(tmp_path, monkeypatch):
    """The prefix of a dataset, in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("".join(f"{number} of many lines\n" for number in range(20_000)))
    lines = ["--format", "lines"]  # whose index is long enough to be cut
    assert preprocess("--input", "a.txt", *lines, "--output-prefix", tmp_path / "d", "--tokenizer", "bytes") == 0
    return tmp_path / "d_text_document"


def cut(path, size=4096):
    """Cut a file, and return its size before."""
    before = path.stat().st_size
    os.truncate(path, size)
    return before


CUT = {
    "tokens": (1, lambda data: Path(f"{data}.bin"), ["data.workers=0"]),
    "tokens, read by a thread": (1, lambda data: Path(f"{data}.bin"), ["data.workers=1"]),
    "index": (1, lambda data: Path(f"{data}.idx"), []),
    "index cache": (
        1,
        lambda data: max((data.parent / "cache").glob("*/*.npy"), key=lambda path: path.stat().st_size),
        [],
    ),
    "tokens, of two ranks": (2, lambda data: Path(f"{data}.bin"), []),
}


@pytest.mark.parametrize("size, path, words", CUT.values(), ids=CUT.keys())
def test_a_run_names_the_file_that_was_cut_and_is_not_started_again(size, path, words, data, tiny, tmp_path):
    of_data = [
        "data.source=indexed",
        f"data.prefix={data}",
        f"data.index_cache={tmp_path / 'cache'}",
        "model.vocab_size=257",
    ]
    of_data += ["budget.steps=1000000", "checkpoint.every=1000000"]
    with Ranks(size, tiny("run", *of_data, *words)) as ranks:
        steps(ranks.processes[0], tmp_path / "run", 3)
        file = path(data)
        before = cut(file, 128)
        codes = {code for code, _ in ranks.wait().values()}
    cause = f"{file} was cut while it was read: it had {before:,} bytes at the start and has 128 now"
    assert codes == {64}
    assert f"{cause}; restore it" in (tmp_path / "run/log.txt").read_text()
    assert cause in summary.read(tmp_path / "run")["ending"]


READER = """
import mmap, os, sys
from pathlib import Path
from hpclm import cli, files

def main(argv):
    [name] = argv
    with open(name, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    files.aside(Path("half")).touch()
    print("begun", flush=True)
    sys.stdin.readline()
    sum(content[i] for i in range(0, len(content), 4096))
    print("read all")
    sys.stdin.readline()
    if len(content) == 8192:
        os.kill(os.getpid(), 7)

cli.VERBS["read"] = ("__main__", "")
sys.exit(cli.main(["read", sys.argv[1]]))
"""


def reader():
    process = subprocess.Popen(
        [sys.executable, "-c", READER, "x.bin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "begun\n"
    return process


def test_any_command_names_the_file_that_was_cut(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.bin").write_bytes(bytes(40_960))
    process = reader()
    cut(Path("x.bin"), 4096)
    _, said = process.communicate("\n", timeout=PATIENCE)
    assert process.returncode == 64
    assert said == (
        f"error: {tmp_path}/x.bin was cut while it was read: it had about 40,960 bytes at the start and has 4,096 now; "
        "restore it, and start again\n"
    )


def test_a_file_that_was_removed_or_grew_is_read_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.bin").write_bytes(bytes(40_960))
    for change in (lambda: os.truncate("x.bin", 50_000), lambda: Path("x.bin").unlink()):
        process = reader()
        change()
        assert process.communicate("\n\n", timeout=PATIENCE) == ("read all\n", "")


def test_another_bus_error_ends_the_process_as_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.bin").write_bytes(bytes(8192))
    process = reader()
    process.communicate("\n\n", timeout=PATIENCE)
    assert process.returncode == -signal.SIGBUS


def test_a_dataset_that_was_cut_before_is_refused_by_name(data):
    cut(Path(f"{data}.bin"))
    assert f"{data}.bin" in hpclm("data", "verify", data, check=64).stderr


def test_the_mapped_files_of_this_process_are_known(tmp_path):
    import numpy as np

    np.save(tmp_path / "x y.npy", np.arange(1000))
    array = np.load(tmp_path / "x y.npy", mmap_mode="r")
    assert {file.path: file.size for file in bus_error.mapped_files()}[str(tmp_path / "x y.npy")] == 12_288 - 4096
    del array

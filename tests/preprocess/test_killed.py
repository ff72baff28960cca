"""Whatever ends preprocessing, and whenever: nothing that opens, nobody left running, and a restart makes it right."""

import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.forks import hpclm
from tests.preprocess.texts import WITH_WORKERS, content
from tests.runs import PATIENCE, until

WORDS = ["--input", "a.txt", "--format", "lines", "--output-prefix", "x", "--tokenizer", "bytes"]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder with a corpus and its dataset, and the seconds that it takes to make."""
    folder = tmp_path_factory.mktemp("original")
    with (folder / "a.txt").open("w") as file:
        file.writelines(f"{i} {'word ' * 15}\n" for i in range(150_000))
    began = time.monotonic()
    subprocess.run([*WITH_WORKERS, *WORDS, "--workers", "2"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder, time.monotonic() - began


@pytest.fixture
def folder(original, tmp_path):
    (tmp_path / "a.txt").symlink_to(original[0] / "a.txt")
    return tmp_path


def start(folder, *words):
    """A process in a new process group."""
    command = [*WITH_WORKERS, *WORDS, "--workers", "2", *words]
    quiet = dict(stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    return subprocess.Popen(command, cwd=folder, start_new_session=True, **quiet)


def alive(group):
    """The members of a process group that are not zombies, as {pid: command line}."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, member = status.read_text().rpartition(")")[2].split()[:3]
            if int(member) == group and state != "Z":
                found[int(status.parent.name)] = (status.parent / "cmdline").read_text()
        except OSError:
            continue
    return found


def gone(group):
    until(lambda: not alive(group), "the end of all processes")
    return True


def started(folder, process):
    """Wait until tokens are written."""
    until(
        lambda: (
            process.poll() is not None or any(path.stat().st_size for path in folder.glob("x_text_document.bin.tmp-*"))
        )
    )


def struck(folder, strike):
    """A process that ``strike(process)`` has met while it wrote tokens, and what it said; one that was quicker does not count."""
    for _ in range(5):
        process = start(folder)
        started(folder, process)
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGSTOP)  # on a busy machine it would be done before it is struck
            strike(process)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)
        said = process.communicate(timeout=PATIENCE)[1]
        if process.returncode:
            return process, said
        for path in folder.glob("x_*"):
            path.unlink()
    raise AssertionError("five times it was done before it was struck")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


ENDS = [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, ""), (signal.SIGHUP, 129, "")]


@pytest.mark.parametrize("sent, code, said", ENDS)
def test_a_signal_ends_it_tidily(sent, code, said, folder):
    def strike(process):
        if sent == signal.SIGINT:  # a terminal's Ctrl-C reaches the workers too
            os.killpg(process.pid, sent)
        else:
            process.send_signal(sent)

    process, heard = struck(folder, strike)
    assert (process.returncode, heard) == (code, said)
    assert gone(process.pid)
    assert names(folder) == ["a.txt"]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(2, 5))])
def test_killed_at_a_random_moment_it_leaves_no_dataset_and_no_workers_and_starts_over(seed, folder, original):
    whole, seconds = original
    process = start(folder)
    time.sleep(random.Random(seed).uniform(0.1, 1.0) * seconds)
    process.kill()
    process.communicate(timeout=PATIENCE)
    assert gone(process.pid)
    if (folder / "x_text_document.idx").exists():  # it was quicker
        assert content(folder / "x_text_document") == content(whole / "x_text_document")
    hpclm("preprocess", *WORDS, "--overwrite", cwd=folder, check=0)
    assert content(folder / "x_text_document") == content(whole / "x_text_document")
    assert names(folder) == ["a.txt", *(f"x_text_document.{end}" for end in ("bin", "idx", "json"))]


def test_a_killed_worker_is_an_error_with_a_message(folder):
    def strike(process):
        workers = [pid for pid, command in alive(process.pid).items() if "spawn_main" in command]
        for worker in workers[:1]:  # none where it was done already
            os.kill(worker, signal.SIGKILL)

    process, said = struck(folder, strike)
    assert "a worker was killed" in said and process.returncode == 1
    assert gone(process.pid)
    assert names(folder) == ["a.txt"]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(2, 6))])
def test_a_worker_killed_at_any_moment_never_leaves_it_waiting(seed, original, folder):
    process = start(folder)
    started(folder, process)
    time.sleep(random.Random(seed).uniform(0, original[1] / 2))
    workers = [pid for pid, command in alive(process.pid).items() if "spawn_main" in command]
    for worker in workers[:1]:  # none where it was done already
        os.kill(worker, signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    assert process.returncode in (0, 1) and gone(process.pid)


@pytest.mark.parametrize("kilobytes", [1, 3000, *(pytest.param(n, marks=pytest.mark.whole) for n in (100, 20_000))])
@pytest.mark.parametrize("words", [[], ["--workers", "2"]], ids=["alone", "workers"])
def test_a_file_size_limit_is_an_error_with_a_message_that_leaves_nothing(kilobytes, words, folder):
    limited = ["bash", "-c", f'ulimit -f {kilobytes}; exec "$@"', "bash", *WITH_WORKERS, *WORDS, *words]
    done = subprocess.run(limited, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: x_text_document") and done.stderr.endswith("; no dataset was written\n")
    assert len(done.stderr.splitlines()) == 1
    assert names(folder) == ["a.txt"]


def test_a_full_disk_is_an_error_with_a_message_that_leaves_nothing(folder):
    disk = folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        done = hpclm("preprocess", *WORDS, "--output-prefix", "disk/x", cwd=folder, check=1)
        assert done.stderr == "error: disk/x_text_document: No space left on device; no dataset was written\n"
        assert names(disk) == []
    finally:
        subprocess.run(["umount", disk], check=True)

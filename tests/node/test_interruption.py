"""A signal ends a command, whatever library it is in, and leaves nothing half-written."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import PATIENCE

SCRIPT = """
import atexit, hashlib, os, shutil, sys
from pathlib import Path
from hpclm import folders
from hpclm import cli, failures, files
from hpclm.node.interruption import prompt_exit


def in_a_library(argv):
    with prompt_exit(), folders.temporary_folder():
        path, folder = files.aside(Path("x.bin")), files.aside(Path("out"))
        folder.mkdir()
        try:
            with path.open("wb"), (folder / "shard").open("wb"):
                print("begun", flush=True)
                hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # a quarter of an hour
        finally:  # where the signal comes just before
            path.unlink()
            shutil.rmtree(folder)


def goes_on(argv):
    with prompt_exit():
        for said in ("begun", "goes on", "and on"):
            try:
                print(said, flush=True)
                sys.stdin.readline()
            except KeyboardInterrupt:
                hashlib.pbkdf2_hmac("sha256", b"", b"", 10**7)  # longer than the watch waits


def forks(argv):
    with prompt_exit():
        ready, begun = os.pipe()
        if not (child := os.fork()):
            os.write(begun, b"1")
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**7)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, 15)
        print("begun", flush=True)
        os.waitpid(child, 0)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**7)


def again(argv):
    with prompt_exit(), prompt_exit():
        in_a_library(argv)


def main(argv):
    atexit.register(hashlib.pbkdf2_hmac, "sha256", b"", b"", 2**31 - 1)  # as libraries that take their time
    print("begun", flush=True)
    sys.stdin.readline()


if sys.argv[1] == "waits":
    cli.VERBS["waits"] = ("__main__", "")
    cli.entry()
sys.exit(failures.run(globals()[sys.argv[1]]))
"""


def started(name):
    command = [sys.executable, "-c", SCRIPT, name]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(Path.cwd())}, **pipes)
    assert process.stdout.readline() == "begun\n"
    return process


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


ENDS = [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, ""), (signal.SIGHUP, 129, "")]


@pytest.mark.parametrize("sent, code, said", ENDS)
@pytest.mark.parametrize("name", ["in_a_library", "again"])
def test_a_signal_ends_a_command_that_is_in_a_call_of_a_library(name, sent, code, said):
    process = started(name)
    process.send_signal(sent)
    assert (process.communicate(timeout=PATIENCE)[1], process.returncode) == (said, code)
    assert not list(Path().iterdir())


@pytest.mark.parametrize("sent, code, said", ENDS)
def test_after_a_signal_nothing_waits_for_libraries_that_take_their_time_to_end(sent, code, said):
    process = started("waits")
    process.send_signal(sent)
    assert (process.communicate(timeout=PATIENCE)[1], process.returncode) == (said, code)


def test_a_command_that_handles_a_signal_itself_goes_on():
    process = started("goes_on")
    for said in ("goes on", "and on"):
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == f"{said}\n"
    assert process.communicate(timeout=PATIENCE) == ("", "") and process.returncode == 0


def test_a_signal_to_a_forked_child_does_not_end_its_parent():
    process = started("forks")
    assert process.communicate(timeout=PATIENCE)[1] == "" and process.returncode == 0

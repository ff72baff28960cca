"""A signal ends a command, whatever library it is in, and leaves nothing half-written."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import PATIENCE

SCRIPT = """
import hashlib, sys
from hpclm.base import folders; from hpclm.node import failures
from hpclm.node import import_errors, interruption


def writes(argv):
    with interruption.raising(), interruption.raising(), folders.temporary_folder() as folder:
        (folder / "half").touch()
        print("begun", flush=True)
        sys.stdin.readline()


def in_a_library(argv):
    with interruption.raising(), interruption.at_once():
        print("begun", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # a quarter of an hour


def imports(argv):
    print("begun", flush=True)
    sys.stdin.readline()


import_errors.report_uncaught()
function = globals()[sys.argv[1]]
sys.exit(function([]) if function is imports else failures.run(function))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
ENDS = [
    *(("writes", INT, 130, "interrupted\n"), ("writes", TERM, 143, ""), ("writes", HUP, 129, "")),
    *(("in_a_library", number, -number, "") for number in (INT, TERM, HUP)),
    ("imports", INT, 130, "interrupted\n"),
]


@pytest.mark.parametrize("doing, sent, code, said", ENDS)
def test_a_signal_ends_a_command_in_one_line_and_leaves_no_file(doing, sent, code, said):
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    env = os.environ | {"TMPDIR": str(Path.cwd())}
    with subprocess.Popen([sys.executable, "-c", SCRIPT, doing], env=env, **pipes) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(sent)
        assert (process.communicate(timeout=PATIENCE)[1], process.returncode) == (said, code)
    assert not list(Path().iterdir())

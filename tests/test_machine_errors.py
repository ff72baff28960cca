"""Errors of the machine say what could not be written, or for what memory was not enough."""

import os
import subprocess
import sys

from tests.runs import ROOT

LIMITED = """
import resource, sys
from hpclm import failures
def verb(_):
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytearray(1 << 31)
sys.exit(failures.run(verb, []))
"""


def python(*words, **options):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words], env=env, stderr=subprocess.PIPE, text=True, **options)


def test_a_full_disk_under_standard_output_is_named(tmp_path):
    with open("/dev/full", "w") as full:
        done = python("-m", "hpclm", "docs", "files", cwd=tmp_path, stdout=full)
    assert done.returncode == 1 and done.stderr.startswith(
        "error: standard output (/dev/full): No space left on device; free space on the disk, then start again"
    )


def test_memory_that_was_not_enough_is_said_with_place_and_limit(tmp_path):
    done = python("-c", LIMITED, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: not enough memory: run in failures.py could not get more; ")
    assert "MiB are in use; the limit of this process is 1,024 MiB (ulimit -v)" in done.stderr

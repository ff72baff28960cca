"""Errors of the machine say what could not be written, or for what memory was not enough."""

import os
import shutil
import subprocess
import sys

import pytest

from tests import runs
from tests.runs import ROOT

LIMITED = """
import resource, sys
from hpclm.node import failures
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


def test_memory_that_was_not_enough_is_said_with_the_limit(tmp_path):
    done = python("-c", LIMITED, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: not enough memory: ")
    assert "MiB are in use; the limit of this process is 1,024 MiB (ulimit -v)" in done.stderr


FILE_SYSTEM = """
#include <dlfcn.h>
#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef NUMBER
int fsync(int handle) {
    struct stat status;
    int (*real)(int) = (int (*)(int)) dlsym(RTLD_NEXT, "fsync");
    if (fstat(handle, &status) || !S_ISDIR(status.st_mode)) return real(handle);
    errno = NUMBER;
    return -1;
}
#else
int flock(int handle, int operation) { for (;;) sleep(1000); }
#endif
"""


@pytest.fixture
def preloaded(tmp_path):
    """Environments of processes whose file systems lack something: folders' fsync fails with an errno; locks never answer."""
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")

    def made(*defined):
        library = tmp_path / "file_system.so"
        words = ["cc", "-D_GNU_SOURCE", *defined, "-shared", "-fPIC", "-x", "c", "-", "-o", library, "-ldl"]
        subprocess.run(words, input=FILE_SYSTEM, text=True, check=True)
        return os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)}

    return made


@pytest.mark.parametrize(
    "number", ["EINVAL", *(pytest.param(n, marks=pytest.mark.whole) for n in ("ENOTSUP", "EBADF"))]
)
def test_a_run_needs_no_fsync_of_folders(preloaded, tiny, number):
    runs.hpclm("train", *tiny("out", "budget.steps=2"), env=preloaded(f"-DNUMBER={number}"), check=0)


@pytest.mark.parametrize("verb", [("submit", "--cluster", "local"), pytest.param(["train"], marks=pytest.mark.whole)])
def test_a_lock_that_is_never_answered_is_named(preloaded, tiny, tmp_path, verb):
    said, words = tmp_path / "said", map(str, (*verb, *tiny("out")))
    with (
        said.open("w") as file,
        subprocess.Popen(
            [sys.executable, "-m", "hpclm", *words], env=preloaded(), cwd=tmp_path, stderr=file, stdout=file
        ) as process,
    ):
        runs.until(lambda: "the file system does not answer" in said.read_text(), "a warning", alive=process)
        process.kill()
    assert (
        f"{tmp_path / 'out'}" in said.read_text() and "choose a folder on a file system with flock" in said.read_text()
    )

"""Disks that are full or fail, at every system call of a save and of a load."""

import shutil

import pytest

from hpclm.checkpoint import directory
from tests import traced
from tests.checkpoint.state import State, store
from tests.checkpoint.victims import resume, save, save_beside, try_to_resume, try_to_save

pytestmark = pytest.mark.skipif(not traced.usable(), reason="strace is not installed, or may not trace here")
FAILING = f"{traced.WRITING},newfstatat,getdents64,read,pread64,preadv,statfs"


def reset(folder, good):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)


@pytest.mark.parametrize(
    "error, beside", [("ENOSPC", True), ("EIO", False), pytest.param("ENOSPC", False, marks=pytest.mark.whole)]
)
def test_a_save_that_fails_at_any_system_call_says_so_and_leaves_the_others_alone(error, beside, good, folder):
    reset(folder, good)
    failed = 0
    calls = traced.WRITING if error == "ENOSPC" else FAILING
    words = {"ENOSPC": "No space left", "EIO": "Input/output error"}[error]
    for call, number, line in traced.points(save_beside if beside else save, folder, 3, calls=calls):
        if str(folder) not in line or (call == "close" and error == "ENOSPC"):
            continue
        reset(folder, good)
        outcome = traced.run(try_to_save, folder, 3, beside, calls=calls, inject=f"{call}:error={error}:when={number}")
        assert outcome.code == 0 and outcome.injected, (line, outcome)
        said, there = outcome.answer
        failed += said is not None
        assert (said is None) == there, (line, outcome)
        assert said is None or (words in said and "\n" not in said and str(folder) in said), (line, said)
        state = State()
        assert store(folder, keep=2).resume(state, "require").step == 4 and state.is_of(4), line
        steps = directory.steps(folder)
        assert len(steps) >= 2 and all(directory.verified(path) for path in steps), line
        left = {p.name for p in folder.iterdir()} - {p.name for p in steps} - {"latest"}
        assert not left, (line, left)
    assert failed >= 10


def test_a_disk_that_fails_at_any_system_call_of_a_load_ends_it_and_sets_nothing_aside(good, folder):
    reset(folder, good)
    for call, number, line in traced.points(resume, folder, calls=traced.READING):
        if str(folder) not in line:
            continue
        reset(folder, good)
        outcome = traced.run(try_to_resume, folder, calls=traced.READING, inject=f"{call}:error=EIO:when={number}")
        assert outcome.code == 0 and outcome.injected, (line, outcome)
        assert {p.name for p in folder.iterdir()} == {"step-00000001", "step-00000002", "latest"}, line
        kind, words = outcome.answer
        if kind != 2:
            assert kind == "HpclmError" and "nput/output error" in words and str(folder) in words, (
                line,
                outcome.answer,
            )
        assert kind != 2 or words is True

"""The same kills for DeepSpeed's own save, to show the difference: prints a table."""

import itertools
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from hpclm.errors import HpclmError
from tests import forks, traced
from tests.checkpoint import deepspeed_victims as deepspeed
from tests.checkpoint import victims
from tests.checkpoint.state import State, saved, store

pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(not traced.usable(), reason="strace is not installed, or may not trace here"),
]
ENDS = ["old", "new", "error", "begins anew", "mixed"]
CALLS = f"{traced.WRITING},writev,sendfile"


class Ours:
    """hpclm's store, with the steps 1 and 2 saved."""

    def __init__(self, folder, tag, size):
        self.folder, self.size, self.meetings = folder, size, meetings(folder)
        self.good = folder.with_name("good")
        saved(self.good, (1, 2), keep=2)

    def victims(self):
        """Work and arguments of each rank that saves step 3."""
        if self.size == 1:
            return [(victims.save, self.folder, 3)]
        meeting = next(self.meetings)
        return [(victims.save_as_rank, self.folder, 3, rank, meeting) for rank in range(self.size)]

    def found(self):
        state = State()
        try:
            step = store(self.folder, keep=2).resume(state, "auto").step
        except HpclmError:
            return "error"
        return {0: "begins anew", 2: "old", 3: "new"}[step] if not step or state.is_of(step) else "mixed"


class Theirs:
    """DeepSpeed's, likewise; ``tag`` is the name under which every step is saved, None for DeepSpeed's own names."""

    def __init__(self, folder, tag, size):
        self.folder, self.tag, self.size, self.meetings = folder, tag, size, meetings(folder)
        self.good = folder.with_name("good")
        forks.load("tests.vendors")
        every = [end.answer for end in together(self.works(deepspeed.save, self.good, tag, (1, 2, 3)))]
        shutil.rmtree(self.good)
        together(self.works(deepspeed.save, self.good, tag, (1, 2)))
        self.states = every

    def works(self, work, *args):
        meeting = next(self.meetings) if self.size > 1 else None
        return [(work, *args, meeting, rank, self.size) for rank in range(self.size)]

    def victims(self):
        return self.works(deepspeed.save, self.folder, self.tag, (3,))

    def found(self):
        """By ``load_checkpoint`` in fresh processes."""
        answers = [end.answer for end in together(self.works(deepspeed.load, self.folder))]
        if any(isinstance(answer, str) for answer in answers):
            return "error"
        if not any(answers):
            return "begins anew"
        steps = {
            next((step for step, state in self.states[rank].items() if state[place] == value), None)
            for rank, answer in enumerate(answers)
            for place, value in enumerate(answer or [None])
        }
        return {(2,): "old", (3,): "new"}.get(tuple(steps), "mixed")


def meetings(folder):
    """Names for files at which ranks meet, each used once."""
    return (folder.with_name(f"meeting-{number}") for number in itertools.count())


def together(works, victim=None, **fault):
    """Run them at once, the victim watched; how each ended."""
    ranks = [
        traced.Traced(*work, **({"calls": CALLS, **fault} if rank == victim else {"calls": None}))
        for rank, work in enumerate(works)
    ]
    try:
        for rank in ranks:
            rank.go()
        return [rank.end(survives=victim is None) for rank in ranks]
    finally:
        for rank in ranks:
            rank.__exit__()


def killed(kind, tag, size):
    """How often what ended how, when the last rank is killed at each of its calls that name a file of the checkpoints."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)) / "c"
    try:
        case, counts, victim = kind(folder, tag, size), Counter(), size - 1
        shutil.copytree(case.good, folder)
        points = traced.named(together(case.victims(), victim)[victim].calls)
        assert case.found() == "new"
        for call, number, line in points:
            if str(folder) not in line:
                continue
            shutil.rmtree(folder)
            shutil.copytree(case.good, folder)
            ends = together(case.victims(), victim, inject=f"{call}:signal=KILL:when={number}")
            assert ends[victim].code == -9, line
            counts[case.found()] += 1
        return counts
    finally:
        shutil.rmtree(folder.parent)


CASES = {
    "hpclm": (Ours, None, 1),
    "hpclm, of two ranks": (Ours, None, 2),
    "DeepSpeed": (Theirs, None, 1),
    "DeepSpeed, of two ranks": (Theirs, None, 2),
    "DeepSpeed, one name again": (Theirs, "last", 1),
    "DeepSpeed, one name again, of two ranks": (Theirs, "last", 2),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_found_after_a_kill_in_a_save(name, capsys):
    counts = killed(*CASES[name])
    with capsys.disabled():
        print(f"\n{name}: killed at {counts.total()} calls; found", end=" ")
        print(", ".join(f"{end} {counts[end]}" for end in ENDS))
    assert counts.total() >= 5
    if name.startswith("hpclm"):
        assert counts["old"] + counts["new"] == counts.total()

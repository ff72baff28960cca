"""A process is killed at every system call with which it saves, prunes, sweeps or sets aside: what stands must be whole."""

import shutil

import pytest

from hpclm.checkpoint import directory
from hpclm.checkpoint import manifest as manifests
from tests import traced
from tests.checkpoint.state import State, progress, store
from tests.checkpoint.victims import resume, save, save_as_rank, save_beside, train, write_beside

pytestmark = pytest.mark.skipif(not traced.usable(), reason="strace is not installed, or may not trace here")


def leave_half_done(folder):
    for name in (".tmp-step-00000003-g0", ".trash-step-00000000"):
        shutil.copytree(folder / "step-00000001", folder / name)


def spoil(folder):
    path = folder / "step-00000002/rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


#                 work, step it saves, what is done to the folder, steps that may be found after a kill
CASES = {
    "save, prune": (save, 3, None, {2, 3}),
    "save beside, as training sees it": (save_beside, 3, None, {2, 3}),
    "save beside, as it is written": (write_beside, 3, None, {2, 3}),
    "save a step again": (save, 2, None, {1, 2}),
    "sweep at start": (resume, None, leave_half_done, {2}),
    "set a bad one aside": (resume, None, spoil, {1}),
}


def reset(folder, good, damage=None):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    if damage:
        damage(folder)


def check(folder, allowed, at):
    """The state after a kill ``at`` a system call: whole, of a step that is allowed; the next save works and tidies up."""
    found, state = store(folder, keep=2), State()
    step = found.resume(state, "auto").step
    assert step in allowed and state.is_of(step), at
    good = sum(is_good(path) for path in directory.steps(folder))
    found.save(State(9.0), progress(9))
    assert found.resume(state, "require").step == 9 and state.is_of(9), at
    left = {p.name for p in folder.iterdir()} - {p.name for p in directory.steps(folder)} - {"latest"}
    assert left <= {".bad-step-00000002"}, (at, left)
    return good


@pytest.mark.parametrize("work, step, damage, allowed", CASES.values(), ids=CASES.keys())
def test_a_kill_at_any_system_call_leaves_the_old_or_the_new(work, step, damage, allowed, good, folder):
    reset(folder, good, damage)
    points = traced.points(work, folder, step)
    assert len(points) > 5
    for call, number, line in points:
        reset(folder, good, damage)
        outcome = traced.run(work, folder, step, inject=f"{call}:signal=KILL:when={number}")
        assert outcome.code == -9 and outcome.answer is None, (line, outcome)
        assert check(folder, allowed, line) >= (1 if damage is spoil else 2), line


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_of_either_of_two_ranks_leaves_the_old_or_the_new(victim, good, folder, tmp_path):
    def both(number, fault):
        reset(folder, good)
        meeting = tmp_path / f"meeting-{number}"
        ranks = [
            traced.Traced(save_as_rank, folder, 3, rank, meeting, **(fault if rank == victim else {"calls": None}))
            for rank in range(2)
        ]
        with ranks[0], ranks[1]:
            gone = [rank.go() for rank in ranks]
            return [rank.end(survives=False) for rank in gone]

    calls = {"calls": traced.WRITING}
    points = traced.named(both("all", calls)[victim].calls)
    assert len(points) > (40 if victim == 0 else 5)
    for call, number, line in points:
        outcome = both(f"{call}-{number}", {"inject": f"{call}:signal=KILL:when={number}"})
        assert outcome[victim].code == -9, (line, outcome)
        assert outcome[1 - victim].code != -9, (line, outcome)
        assert check(folder, {2, 3}, line) >= 2, line


def test_what_gets_its_name_is_on_the_disk_and_so_is_the_name(good, folder):
    """In the order of system calls: each file, the staging_dir's folder, the new name, the folder that has it; and the
    new name of a checkpoint that is pruned, before the first of its files is deleted."""
    reset(folder, good)
    lines = [line for *_, line in traced.points(save, folder, 3)]

    def where(*words):
        return [n for n, line in enumerate(lines) if all(word in line for word in words)]

    staging_dir = f"{folder}/.tmp-step-00000003-g0"
    (published,) = where("rename(", f'"{staging_dir}", "{folder}/step-00000003"')
    for name in ("rank-00000.safetensors", "MANIFEST.json"):
        assert (
            max(where("write(", f"<{staging_dir}/{name}>"))
            < max(where("fsync(", f"<{staging_dir}/{name}>"))
            < published
        )
    assert max(where("fsync(", f"<{staging_dir}/")) < max(where("fsync(", f"<{staging_dir}>")) < published
    pruned = where("step-00000001", "rename(", ".trash")[0]
    assert published < where("fsync(", f"<{folder}>")[0] < pruned
    deleted = next(n for n in where("unlink") if n > pruned)
    assert any(pruned < n < deleted for n in where("fsync(", f"<{folder}>")), lines[pruned:]


def test_what_an_earlier_attempt_renamed_is_deleted_once_that_is_on_the_disk(good, folder):
    reset(folder, good, leave_half_done)
    lines = [line for *_, line in traced.points(resume, folder, None)]
    synced = [n for n, line in enumerate(lines) if "fsync(" in line and f"<{folder}>" in line]
    renamed = [n for n, line in enumerate(lines) if "rename(" in line and ".tmp-step" in line]
    unlinked = [n for n, line in enumerate(lines) if "unlink" in line or "rmdir" in line]
    assert renamed[0] < synced[0] < unlinked[0] and len(synced) == 2, lines


@pytest.mark.parametrize("more", [[], ["checkpoint.background=false"], ["exit_interval=6"]], ids=str)
def test_what_a_run_has_told_is_on_the_disk_before_a_checkpoint_has_its_name(more, tiny, tmp_path):
    """Metrics, attempts and log, and their names: beside the training, at once, and when the run must leave."""
    words = tiny("deep/run", "cluster.preflight=false", *more)
    lines = [line for *_, line in traced.points(train, words, threads=True)]
    out = tmp_path / "deep/run"

    def where(*words):
        return [n for n, line in enumerate(lines) if all(word in line for word in words)]

    published = where("rename(", f'"{out}/checkpoints/.tmp-step-')
    assert len(published) == (2 if more == ["exit_interval=6"] else 3)
    for at in published:
        for name in ("metrics.jsonl", "events.jsonl", "log.txt"):
            written = max(n for n in where("write(", f"<{out}/{name}>") if n < at)
            assert any(written < n < at for n in where("fsync(", f"<{out}/{name}>")), (name, lines[written:at])
    for folder, name in ((out.parent.parent, "deep"), (out.parent, "run"), (out, "checkpoints")):
        made = where("mkdir(", f'"{folder}/{name}"')[0]
        assert any(made < n < published[0] for n in where("fsync(", f"<{folder}>")), name
    created = max(where("openat(", f'"{out}/{name}"', "O_CREAT")[0] for name in ("metrics.jsonl", "events.jsonl"))
    assert any(created < n < published[0] for n in where("fsync(", f"<{out}>"))


def test_records_that_cannot_be_synced_cost_no_checkpoint(folder, caplog):
    def fail():
        raise OSError(5, "Input/output error", "metrics.jsonl")

    saving = store(folder)
    saving.begin(State(1.0), progress(1), None, background=False)
    saving.commit(fail)
    assert "metrics.jsonl cannot be synced: Input/output error" in caplog.text
    assert is_good(folder / "step-00000001")


def is_good(path):
    try:
        directory.verified(path)
    except manifests.BadCheckpoint:
        return False
    return True

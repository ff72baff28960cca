"""Going back to an older checkpoint: what is newer is set aside, whatever is killed in between."""

import json
import shutil

import pytest

from hpclm.base.errors import ConfigError
from hpclm.checkpoint import directory, resumable
from hpclm.rundir import events
from hpclm.rundir.metrics_file import forget_after
from tests import traced
from tests.checkpoint.state import State, saved, store
from tests.checkpoint.victims import roll_back
from tests.events import note

ROWS = "".join(json.dumps({"step": step, "loss": 1.0 / step}) + "\n" for step in range(1, 8))


@pytest.fixture
def out(folder):
    made = folder / "run"
    saved(made / "checkpoints", (1, 2, 4, 6), keep=4)
    (made / "metrics.jsonl").write_text(ROWS)
    return made


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def check(out, before):
    """All that was newer than step 2 is set aside, with every byte, and nothing is left to do."""
    checkpoints = out / "checkpoints"
    assert [path.name for path in directory.steps(checkpoints)] == ["step-00000001", "step-00000002"]
    for number in (4, 6):
        found = {p.name: p.read_bytes() for p in (checkpoints / f".rolled-back-step-0000000{number}").iterdir()}
        assert found.pop("REASON.txt", b"") in (
            b"",
            b"a later start went back to step 2\n",
        )  # a kill may come before it
        assert found == before[number]
    assert steps(out / "metrics.jsonl") == [1, 2] and steps(out / "metrics.rolled-back-1.jsonl") == [3, 4, 5, 6, 7]
    assert not (out / "metrics.rolled-back-2.jsonl").exists() and events.rollback(out) is None
    assert (checkpoints / "latest").read_text() == "step-00000002\n"
    state = State()
    assert store(checkpoints).resume(state, "require").step == 2 and state.is_of(2)


def newer(out):
    return {n: {p.name: p.read_bytes() for p in (out / f"checkpoints/step-0000000{n}").iterdir()} for n in (4, 6)}


def test_what_is_newer_is_set_aside_once(out):
    before = newer(out)
    assert resumable.roll_back(out) is None and resumable.candidate(out)[0].name == "step-00000006"
    events.append(out, "roll back", step=2)
    assert events.rollback(out) == 2 and resumable.candidate(out)[0].name == "step-00000002"
    assert resumable.roll_back(out) == 2
    check(out, before)
    assert resumable.roll_back(out) is None
    assert list(forget_after(out, 2))[-1]["step"] == 2


def test_it_can_be_done_again_and_again(out):
    for _ in range(2):
        events.append(out, "roll back", step=2)
        resumable.roll_back(out)
        saved(out / "checkpoints", (4,), keep=9)
        with (out / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "loss": 2.0}\n{"step": 4, "loss": 2.0}\n')
    events.append(out, "roll back", step=2)
    resumable.roll_back(out)
    away = sorted(path.name for path in (out / "checkpoints").glob(".rolled-back-*"))
    assert away == [f".rolled-back-step-0000000{end}" for end in ("4", "4-1", "4-2", "6")]
    assert [steps(out / f"metrics.rolled-back-{n}.jsonl") for n in (1, 2)] == [[3, 4, 5, 6, 7], [3, 4]]
    shutil.move(out / "checkpoints/.rolled-back-step-00000006", out / "checkpoints/step-00000006")
    assert store(out / "checkpoints").resume(State(), "auto").step == 6  # as the documentation says


@pytest.mark.parametrize(
    "spoil, told",
    [
        (
            lambda out: events.append(out, "roll back", step=3),
            "has no complete checkpoint of step 3, to which the run was asked to go back .* steps 1, 2, 4, 6",
        ),
        (lambda out: note(out, "roll back", step="2"), r"events\.jsonl, line 1, is damaged"),
    ],
)
def test_a_request_that_cannot_be_followed_changes_nothing(out, spoil, told):
    spoil(out)
    with pytest.raises(ConfigError, match=told):
        resumable.candidate(out)
    with pytest.raises(ConfigError):
        resumable.roll_back(out)
    assert len(directory.steps(out / "checkpoints")) == 4 and (out / "metrics.jsonl").read_text() == ROWS


def test_a_step_that_is_not_there_or_not_complete_is_refused_with_those_that_are(out):
    with pytest.raises(
        ConfigError, match="no complete checkpoint of step 5; it has steps 1, 2, 4, 6: hpclm checkpoints"
    ):
        resumable.candidate(out, 5)
    with pytest.raises(
        ConfigError,
        match="none is not a run yet, so it has no checkpoint of step 5; omit the step to start",
    ):
        resumable.candidate(out.with_name("none"), 5)
    assert [resumable.listed(found) for found in ([], directory.steps(out / "checkpoints")[2:3])] == ["none", "step 4"]
    (out / "checkpoints/step-00000002/rank-00000.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"step-00000002 is bad: rank-00000\.safetensors has 0 bytes"):
        resumable.candidate(out, 2)


@pytest.mark.skipif(not traced.usable(), reason="strace is not installed, or may not trace here")
def test_a_kill_at_any_system_call_is_made_good_by_the_next_start(out, folder):
    events.append(out, "roll back", step=2)
    before, good = newer(out), folder / "good"
    shutil.copytree(out, good)

    def reset():
        shutil.rmtree(out)
        shutil.copytree(good, out)

    points = traced.points(roll_back, out)
    assert len(points) > 20
    for call, number, line in points:
        reset()
        outcome = traced.run(roll_back, out, inject=f"{call}:signal=KILL:when={number}")
        assert outcome.code == -9, (line, outcome)
        resumable.roll_back(out)
        check(out, before)


@pytest.mark.skipif(not traced.usable(), reason="strace is not installed, or may not trace here")
def test_the_request_goes_once_all_that_it_asked_for_is_on_the_disk(out):
    events.append(out, "roll back", step=2)
    lines = [line for *_, line in traced.points(roll_back, out)]

    def where(*words):
        return [n for n, line in enumerate(lines) if all(word in line for word in words)]

    _, gone = where("write(", "events.jsonl>")  # reached, rolled back
    renamed = max(where("rename(", ".rolled-back-step-"))
    assert any(renamed < n < gone for n in where("fsync(", f"<{out}/checkpoints>"))
    archived, cut = (
        where("rename(", '"' + str(out / "metrics.rolled-back-1.jsonl") + '"')[0],
        where("rename(", '/metrics.jsonl"')[0],
    )
    assert archived < cut < gone and any(archived < n < cut for n in where("fsync(", f"<{out}>"))

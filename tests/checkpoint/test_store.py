import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hpclm.base.errors import ConfigError, HpclmError, NoCheckpointError
from hpclm.checkpoint import CheckpointStore, Progress, Retention, tensors
from hpclm.checkpoint import format as formats
from hpclm.checkpoint.directory import newest, steps
from hpclm.checkpoint.fingerprint import check_fingerprint
from tests.checkpoint.state import FINGERPRINT, State, progress, saved, store
from tests.checkpoint.test_manifest import rewrite, save_as_ranks
from tests.runs import PATIENCE


def test_what_is_saved_comes_back(tmp_path):
    store, state = saved(tmp_path / "c"), State()
    assert store.resume(state, "auto") == Progress(3, 30, 0.5, 0)
    assert torch.equal(state.held["model.a"], torch.full((40, 8), 3.0))
    assert state.loaded == {"optimizer_steps": 3, "loss_scale": None}


def test_the_newest_are_kept_and_nothing_half_done_stays(tmp_path):
    store = saved(tmp_path / "c", range(1, 7), keep=2)
    (tmp_path / "c/.tmp-step-00000009").mkdir()
    (tmp_path / "c/.trash-step-00000001").mkdir()
    assert store.resume(State(), "auto").step == 6
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["latest", "step-00000005", "step-00000006"]
    assert (tmp_path / "c/latest").read_text() == "step-00000006\n"


def flips(path, count, draw):
    """The file with one bit turned over, ``count`` times at bits spread over all of it."""
    content = path.read_bytes()
    for part in range(count):
        bit = draw.randrange(len(content) * 8 * part // count, len(content) * 8 * (part + 1) // count)
        spoiled = bytearray(content)
        spoiled[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit}", bytes(spoiled)


def cuts(path, count, draw):
    """The file without its end, ``count`` times; at its first byte and its last one too."""
    content = path.read_bytes()
    for size in [0, len(content) - 1, *(draw.randrange(len(content)) for _ in range(count - 2))]:
        yield f"cut to {size}", content[:size]


def others(path, other):
    """All zero, its second half zero, gone, a byte longer, and another step's file of this name."""
    content = path.read_bytes()
    half = len(content) // 2
    yield "zeroed", bytes(len(content))
    yield "half zeroed", content[:half] + bytes(len(content) - half)
    yield "gone", None
    yield "a byte longer", content + b"\0"
    yield "another step's", other.read_bytes()


def says_the_same(spoiled, manifest):
    """Whether a damaged manifest has the same values: the e of a number as E, or a digit that no float is as fine as."""
    try:
        return json.loads(spoiled) == json.loads(manifest)
    except ValueError:
        return False


def test_every_damage_is_found_and_the_one_before_is_used(tmp_path, caplog):
    """512 single bits, 208 ends, and 20 more: of rank 0's file, of another rank's, and of the manifest."""
    folder, draw = tmp_path / "c", random.Random(0)
    saved(folder, (1, 2))
    newest, bad, found = folder / "step-00000002", folder / ".bad-step-00000002", Counter()
    names = {"rank-00000.safetensors": (256, 104), "MANIFEST.json": (256, 104)}
    for name, (turned, ended) in names.items():
        path, good = newest / name, (newest / name).read_bytes()
        damages = [*flips(path, turned, draw), *cuts(path, ended, draw), *others(path, folder / "step-00000001" / name)]
        for what, spoiled in damages:
            path.unlink() if spoiled is None else path.write_bytes(spoiled)
            state = State()
            step = store(folder).resume(state, "auto").step
            assert state.is_of(step), (name, what)
            if step == 2:
                assert name == "MANIFEST.json" and says_the_same(spoiled, good), what
                found["harmless"] += 1
            else:
                reason = (bad / "REASON.txt").read_text()
                named = name in reason or what == "another step's"  # manifest, which the files then differ from
                assert step == 1 and named and reason.strip() in caplog.text, (name, what, reason)
                (bad / "REASON.txt").unlink()
                bad.rename(newest)
                found["detected"] += 1
            caplog.clear()
            path.write_bytes(good)
    assert found["detected"] > 720 and found["harmless"] < 5, found


def test_files_of_two_ranks_that_changed_places_are_found(tmp_path):
    folder = tmp_path / "c"
    saved(folder, (1,))
    first, second = sorted(save_as_ranks(folder, 2, 2).glob("rank-*"))
    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    state = State()
    assert store(folder).resume(state, "auto").step == 1 and state.is_of(1)


def test_a_checkpoint_may_have_more_files_than_a_process_may_have_open(tmp_path, monkeypatch):
    save_as_ranks(tmp_path / "c", 2, 40)
    monkeypatch.setattr(tensors, "AT_ONCE", 3)
    most, read = [], tensors.File.values

    def counted(*args):
        values = read(*args)
        held = (os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir())
        most.append(sum("rank-" in path for path in held))
        return values

    monkeypatch.setattr(tensors.File, "values", counted)
    state = State()
    assert store(tmp_path / "c").resume(state, "auto").step == 2 and state.is_of(2)
    assert max(most) <= 4


def test_a_run_with_only_bad_checkpoints_never_starts_over(tmp_path):
    store = saved(tmp_path / "c", (1, 2))
    for path in (tmp_path / "c").glob("step-*/rank-*"):
        path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):  # and not on the second try either
        with pytest.raises(NoCheckpointError, match="no good checkpoint"):
            store.resume(State(), "auto")


def test_resume_policies(tmp_path):
    empty = CheckpointStore(tmp_path / "empty", Retention(2), FINGERPRINT)
    assert empty.resume(State(), "auto") == Progress() == empty.resume(State(), "never")
    with pytest.raises(NoCheckpointError):
        empty.resume(State(), "require")
    with pytest.raises(ConfigError, match=r"already holds step-00000003, but checkpoint.resume=never"):
        saved(tmp_path / "c").resume(State(), "never")


def test_another_runs_checkpoints_are_refused_and_every_difference_named(tmp_path):
    saved(tmp_path / "c")
    other = CheckpointStore(tmp_path / "c", Retention(), {"model": {"layers": 4}, "seed": 1, "data": {"split": "1"}})
    with pytest.raises(ConfigError) as caught:
        other.resume(State(), "auto")
    assert caught.value.problems[1:] == ["data.split was null and is now 1", "model.layers was 2 and is now 4"]
    check_fingerprint(tmp_path, FINGERPRINT, json.loads(json.dumps(FINGERPRINT)))


def test_a_full_disk_leaves_the_older_ones_alone(tmp_path, monkeypatch):
    store = saved(tmp_path / "c")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1727))  # of 1.2 x 1440 bytes
    with pytest.raises(HpclmError, match="free, but a checkpoint needs"):
        store.save(State(), Progress(4))
    assert [p.name for p in steps(store.folder)] == ["step-00000001", "step-00000002", "step-00000003"]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1728))
    assert store.save(State(), Progress(4)).name == "step-00000004"


def test_a_folder_with_the_name_of_another_step_is_bad_and_pushes_nothing_out(tmp_path):
    saved(tmp_path / "c", (1, 2))
    for number in (100, 101, 102):
        shutil.copytree(tmp_path / "c/step-00000001", tmp_path / f"c/step-00000{number}")
    state = State()
    assert saved(tmp_path / "c", ()).resume(state, "auto").step == 2
    reason = (tmp_path / "c/.bad-step-00000102/REASON.txt").read_text()
    assert reason == "MANIFEST.json is of step 1, but the folder is named after step 102\n"
    assert torch.equal(state.held["model.a"], torch.full((40, 8), 2.0))
    shutil.copytree(tmp_path / "c/step-00000001", tmp_path / "c/step-00000100")
    saved(tmp_path / "c", (3,), keep=2)
    assert [path.name for path in steps(tmp_path / "c")][:2] == ["step-00000002", "step-00000003"]


def leave_only(name):
    def act(folder):
        for path in folder.iterdir():
            path.unlink() if path.is_file() else shutil.rmtree(path)
        if name:
            (folder / name).mkdir()

    return act


def unmount(folder):
    shutil.rmtree(folder)
    folder.symlink_to(folder.with_name("nowhere"))


LOST = {
    "all but latest": leave_only("latest"),
    "all but a bad one": leave_only(".bad-step-00000002"),
    "all in the folder": leave_only(None),
    "the folder": shutil.rmtree,
    "the disk": unmount,
}


@pytest.mark.parametrize("lose", LOST.values(), ids=LOST)
def test_a_run_that_has_saved_does_not_start_over_whatever_is_lost(tmp_path, lose):
    run = saved(tmp_path / "c", (1, 2))
    lose(tmp_path / "c")
    reason = "is a link to a missing target" if lose is unmount else "no good checkpoint"
    with pytest.raises(HpclmError, match=reason):
        run.resume(State(), "auto")


def test_what_cannot_be_told_to_be_bad_is_never_pruned_and_what_is_bad_is_set_aside(tmp_path):
    folder = tmp_path / "c"
    saved(folder, (1, 2, 3))
    rewrite(folder / "step-00000001", lambda content: content.update(schema=99))
    (folder / "step-00000002/rank-00000.safetensors").write_bytes(b"short")
    run = store(folder, keep=2)
    for number in (4, 5, 6):
        run.save(State(float(number)), progress(number))
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == [
        ".bad-step-00000002",
        "step-00000001",
        "step-00000005",
        "step-00000006",
    ]


def test_of_a_link_under_a_wrong_name_only_the_link_is_set_aside(tmp_path):
    folder = tmp_path / "c"
    saved(folder, (1, 2))
    (folder / "step-00000003").symlink_to("step-00000002")
    state, before = State(), sorted((folder / "step-00000002").iterdir())
    assert store(folder).resume(state, "auto").step == 2 and state.is_of(2)
    assert (folder / ".bad-step-00000003").is_symlink()
    assert sorted((folder / "step-00000002").iterdir()) == before


def test_a_checkpoint_that_its_run_removes_while_it_is_read_is_neither_bad_nor_a_broken_disk(
    tmp_path, caplog, monkeypatch
):
    running, real = saved(tmp_path, (1, 2)), formats.verify

    def slow(folder, *args):
        if folder.name == "step-00000002":
            for step in (3, 4):
                running.save(State(float(step)), progress(step))
            shutil.rmtree(folder)
        return real(folder, *args)

    monkeypatch.setattr(formats, "verify", slow)
    folder, manifest = newest(tmp_path)
    assert folder.name == "step-00000004" and "bad" not in caplog.text
    shutil.rmtree(folder)
    with (
        tensors.CheckpointTensors(folder, manifest) as found,
        pytest.raises(HpclmError, match="was removed while it was read"),
    ):
        found.whole("model.a")


def test_the_first_errors_of_the_ranks_are_told_and_nothing_of_the_checkpoint_stays(tmp_path):
    made = store(tmp_path)
    made.begin(State(), progress(1), background=False)
    written = [{"error": "full"}, {"files": {}, "parts": []}, {"error": "broken"}, {"error": "slow"}, {"error": "old"}]
    with pytest.raises(
        HpclmError, match=r"step-00000001 could not be saved: rank 0: full; rank 2: broken; rank 3: slow$"
    ):
        made._publish(made.pending, written)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_knows_its_attempt_and_how_long_it_took(tmp_path):
    made = store(tmp_path, lease=SimpleNamespace(generation=7, check=lambda: None), attempt={"engine": "native"})
    made.begin(State(), progress(1), 2.5, False, "stop")
    made.commit()
    _, manifest = newest(tmp_path)
    assert (manifest.made["engine"], manifest.made["generation"], manifest.why) == ("native", 7, "stop")
    assert 0 <= manifest.made["seconds"] < PATIENCE and manifest.validation == 2.5


def test_values_that_no_file_has_are_refused_by_name(tmp_path):
    saved(tmp_path, (1,))
    with tensors.CheckpointTensors(*newest(tmp_path)) as found:
        with pytest.raises(HpclmError, match=r"has no tensor model\.b; it was saved by a different kind of run"):
            found.block("model.b", [0], [1])
        with pytest.raises(HpclmError, match=r"its files contain 160 of the 320 requested values of model\.a"):
            found.block("model.a", [20, 0], [40, 8])

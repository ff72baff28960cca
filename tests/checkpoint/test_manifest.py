"""Manifests: of earlier versions, which are read; and such as hpclm does not write, of which none is used."""

import gc
import json
import os

import pytest

from hpclm.base.errors import ConfigError
from hpclm.checkpoint import directory
from hpclm.checkpoint import manifest as manifests
from hpclm.checkpoint.manifest import digest_of
from hpclm.checkpoint.staging import write_shards
from tests.checkpoint.state import State, progress, saved, store

NAME = "rank-00000.safetensors"


def rewrite(checkpoint, change):
    """Change what the manifest of a checkpoint says, and let its hash fit."""
    path = checkpoint / "MANIFEST.json"
    content = json.loads(path.read_text())
    del content["blake2b"]
    change(content)
    path.write_text(json.dumps({**content, "blake2b": digest_of(content)}))


def save_as_ranks(folder, step, size):
    """Save a step as ``size`` ranks; the folder of the checkpoint."""
    made = store(folder)
    made.begin(State(), progress(step), background=False)
    staging_dir = made.pending.staging_dir
    (staging_dir / NAME).unlink()
    written = [write_shards(staging_dir, n, list(State(float(step), n, size).tensors())) for n in range(size)]
    made._publish(made.pending, written)
    return folder / f"step-{step:08d}"


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_checkpoint_of_several_ranks_is_read(tmp_path, size):
    checkpoint = save_as_ranks(tmp_path / "c", 2, size)
    state = State()
    assert store(tmp_path / "c").resume(state, "require").step == 2 and state.is_of(2)
    assert directory.verified(checkpoint).progress["step"] == 2


class Blocks(State):
    """One process that holds four blocks of each tensor."""

    def tensors(self):
        for rank in range(4):
            yield from State(2.0, rank, 4).tensors()


def test_a_file_may_hold_several_blocks_of_a_tensor(tmp_path):
    made, state = store(tmp_path / "c"), State()
    made.save(Blocks(), progress(2))
    assert [path.name for path in (tmp_path / "c/step-00000002").glob("rank-*")] == [NAME]
    assert made.resume(state, "require").step == 2 and state.is_of(2)


def parts(*found):
    return lambda content: content["tensors"]["model.a"].update(parts=list(found))


HALF = {"file": NAME, "start": [0, 0], "size": [20, 8]}
ELSEWHERE = "../step-00000001/rank-00000.safetensors"
CHANGES = {
    "half a tensor": (parts(HALF), "lists 160 of the 320 values of model.a"),
    "no parts": (parts(), "lists 0 of the 320 values of model.a"),
    "too many parts": (parts(*[HALF] * 3), "lists 480 of the 320 values of model.a"),
    "half a tensor twice": (parts(HALF, HALF), "lists values of model.a more than once"),
    "a part without size": (parts({key: HALF[key] for key in ("file", "start")}), "cannot be read"),
    "a file that is not listed": (parts({**HALF, "file": "x"}), "refers to files that it does not list"),
    "a file elsewhere": (lambda content: content.update(files={ELSEWHERE: content["files"][NAME]}), "files elsewhere"),
    "the folder": (lambda content: content.update(files={"..": content["files"][NAME]}), "files elsewhere"),
    "no files": (lambda content: content.update(files={}), "lists no files"),
    "no size": (lambda content: content["files"][NAME].pop("size"), "cannot be read"),
    "another field": (lambda content: content.update(x=1), "cannot be read"),
    "a field less": (lambda content: content.pop("scalars"), "cannot be read"),
    "a list of scalars": (lambda content: content.update(scalars=[]), "has no scalars object"),
    "an unknown progress": (lambda content: content["progress"].update(x=1), "cannot be read"),
    "no samples": (lambda content: content["progress"].pop("samples"), "has progress.samples=None"),
    "samples of no number": (lambda content: content["progress"].update(samples=float("nan")), "has progress.samples=nan"),
    "planned text": (lambda content: content["progress"].update(planned="9"), "has progress.planned='9'"),
    "another step": (lambda content: content["progress"].update(step=3), "is of step 3, but the folder is named after step 2"),
}  # fmt: skip


@pytest.mark.parametrize("change, reason", CHANGES.values(), ids=CHANGES)
def test_a_manifest_that_does_not_describe_a_checkpoint_is_not_used_even_if_its_hash_fits(tmp_path, change, reason):
    saved(tmp_path / "c", (1, 2))
    rewrite(tmp_path / "c/step-00000002", change)
    state = State()
    assert store(tmp_path / "c").resume(state, "require").step == 1 and state.is_of(1)
    assert reason in (tmp_path / "c/.bad-step-00000002/REASON.txt").read_text()


ODD = {
    "null": lambda path: path.write_text("null"),
    "nested": lambda path: path.write_text("[" * 200_000),
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
    "gone": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path),
    "a pipe": os.mkfifo,
    "a huge file": lambda path: (path.touch(), os.truncate(path, 1 << 41)),
}


@pytest.mark.parametrize("put", ODD.values(), ids=ODD)
def test_what_is_not_a_manifest_is_bad_and_the_checkpoint_before_is_used(tmp_path, put):
    run = saved(tmp_path / "c", (1, 2))
    path = tmp_path / "c/step-00000002/MANIFEST.json"
    path.unlink()
    put(path)
    assert run.resume(State(), "auto").step == 1
    assert (tmp_path / "c/.bad-step-00000002/REASON.txt").read_text().startswith("MANIFEST.json")


def test_a_checkpoint_of_a_later_hpclm_is_refused_and_left_where_it_is(tmp_path):
    run = saved(tmp_path / "c", (1,))
    rewrite(tmp_path / "c/step-00000001", lambda content: content.update(schema=99))
    with pytest.raises(ConfigError, match="schema 99, but this version of hpclm reads 4;"):
        run.resume(State(), "auto")
    assert (tmp_path / "c/step-00000001/MANIFEST.json").exists()


def test_a_manifest_says_where_every_value_is_and_is_equal_after_reading(tmp_path):
    checkpoint = save_as_ranks(tmp_path / "c", 2, 4)
    manifest = manifests.read_manifest(checkpoint)
    assert manifest.tensors["model.a"] == {
        "shape": [40, 8],
        "parts": [
            {"file": f"rank-0000{rank}.safetensors", "start": [10 * rank, 0], "size": [10, 8]} for rank in range(4)
        ],
    }
    assert manifests.Manifest(**json.loads(json.dumps(manifest.fields))) == manifest
    assert manifest.size == sum(path.stat().st_size for path in checkpoint.glob("rank*"))


@pytest.mark.parametrize(
    "old, new, reason",
    [
        (b"a", b"a", None),
        (b'"model.a"', b'"model.\0"', "it has bytes that are not text"),
        (b"}\n", b"]\n", "its end is not that"),
    ],
    ids=["whole", "zeroed", "cut"],
)
def test_a_large_file_is_looked_at_before_it_is_read(old, new, reason, tmp_path, monkeypatch):
    saved(tmp_path, (1,))
    monkeypatch.setattr(manifests, "USUAL", 64)
    monkeypatch.setattr(manifests, "TAIL", 256)
    path = tmp_path / "step-00000001/MANIFEST.json"
    path.write_bytes(path.read_bytes().replace(old, new))
    if reason is None:
        assert manifests.read_manifest(path.parent).progress["step"] == 1
        return
    with pytest.raises(manifests.BadCheckpoint, match=reason):
        manifests.read_manifest(path.parent)


def test_garbage_is_collected_again_after_a_manifest_only_if_it_was_before():
    for enabled in (False, True):
        gc.enable() if enabled else gc.disable()
        try:
            with manifests.many_objects():
                assert not gc.isenabled()
            assert gc.isenabled() == enabled
        finally:
            gc.enable()

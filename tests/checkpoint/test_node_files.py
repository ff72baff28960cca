"""Checkpoints of which the ranks of a node write one file together (checkpoint.files=node)."""

import copy
import json
import random

import pytest

from hpclm.checkpoint import directory, schema, staging
from hpclm.checkpoint import manifest as manifests
from hpclm.rundir import saved as survey
from tests import ranks
from tests.checkpoint.state import State, progress, saved, store
from tests.engine import sharded

WORDS = ["batch.micro_size=1", "model.dropout=0.1", "engine.precision=fp32", "checkpoint.file_mb=0"]
NODE = "checkpoint.files=node"
LAYOUTS = {
    "native": [],
    "fsdp2": ["engine.name=fsdp2"],
    "deepspeed-pp2": ["engine.name=deepspeed", "parallel.pipeline=2"],
    "native1-tp2": ["engine.zero_stage=1", "parallel.tensor=2"],
    "deepspeed3": ["engine.name=deepspeed", "engine.zero_stage=3"],
}
ALWAYS = ["native", "fsdp2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.whole) for name in LAYOUTS]
)
def test_a_node_s_file_has_those_of_its_ranks_and_a_run_goes_on_to_the_last_bit(tmp_path, name):
    words = [*LAYOUTS[name], *WORDS]
    ((_, whole), *_) = ranks.run(4, sharded.goes_on, tmp_path / "ranks", 4, words)
    ((_, first), *_) = ranks.run(4, sharded.goes_on, tmp_path / "nodes", 2, [*words, NODE])
    ((_, second), *_) = ranks.run(4, sharded.goes_on, tmp_path / "nodes", 4, [*words, NODE])
    assert [loss.hex() for loss in first[1:] + second[1:]] == [loss.hex() for loss in whole[1:]]
    own, joint = tmp_path / "ranks/step-00000004", tmp_path / "nodes/step-00000004"
    assert sorted(path.name for path in joint.iterdir()) == ["MANIFEST.json", "node-00000.bin", "node-00001.bin"]
    for node in range(2):
        parts = [(own / f"rank-{rank:05d}.safetensors").read_bytes() for rank in (2 * node, 2 * node + 1)]
        assert (joint / f"node-{node:05d}.bin").read_bytes() == b"".join(parts)


def test_it_is_read_by_any_number_of_ranks_and_so_are_files_of_ranks(tmp_path):
    wanted = ranks.run(1, sharded.goes_on, tmp_path / "alone", 6, WORDS[:1] + WORDS[2:])[0][1]
    found = []
    for size, steps, more in [(4, 2, ["engine.name=fsdp2", NODE]), (2, 4, []), (1, 6, [NODE])]:
        ((_, losses), *_) = ranks.run(size, sharded.goes_on, tmp_path / "run", steps, [*WORDS[:1], *WORDS[2:], *more])
        found += losses[1:]
    assert found == pytest.approx(wanted[1:], abs=1e-5)


def joint(folder, step=2, size=2):
    """A store with step 1 as a rank's file, and ``step`` as one file of ``size`` ranks."""
    saved(folder, (1,))
    made = store(folder, per_node=True)
    made.begin(State(), progress(step), background=False)
    path, found = made.pending.staging_dir, []
    made.hosts = ("one",) * size
    (path / "node-00000.bin").unlink()
    shards = [list(State(float(step), rank, size).tensors()) for rank in range(size)]
    sizes = [staging.size_on_disk(rank, held) for rank, held in enumerate(shards)]
    for rank in reversed(range(size)):  # in any order
        place = staging.Place.of(rank, made.hosts, sizes)
        found.insert(0, staging.write_shards(path, rank, shards[rank], place))
    made._publish(made.pending, found)
    return made


def test_every_damage_to_it_is_found_with_the_name_of_the_rank_s_part(tmp_path):
    joint(tmp_path)
    newest, bad, draw = tmp_path / "step-00000002", tmp_path / ".bad-step-00000002", random.Random(0)
    state = State()
    assert store(tmp_path).resume(state, "auto").step == 2 and state.is_of(2)
    path = newest / "node-00000.bin"
    content = path.read_bytes()
    facts = json.loads((newest / "MANIFEST.json").read_text())["files"]["node-00000.bin"]
    second = facts["contains"]["rank-00001.safetensors"]["offset"]
    spoiled = [content[:-1], content + b"\0", b"", content[second:] + content[:second]]
    for part in range(128):
        bit = draw.randrange(len(content) * 8 * part // 128, len(content) * 8 * (part + 1) // 128)
        turned = bytearray(content)
        turned[bit // 8] ^= 1 << bit % 8
        spoiled.append(bytes(turned))
    reasons = set()
    for each in spoiled:
        path.write_bytes(each)
        state = State()
        assert store(tmp_path).resume(state, "auto").step == 1 and state.is_of(1)
        reasons.add((bad / "REASON.txt").read_text().strip())
        (bad / "REASON.txt").unlink()
        bad.rename(newest)
    for rank in range(2):
        name = f"rank-0000{rank}.safetensors in node-00000.bin"
        assert f"{name} differs from what was saved (its hash is wrong)" in reasons
    assert all("node-00000.bin" in reason for reason in reasons)


def test_sizes_and_hashes_are_those_of_the_file_and_old_versions_refuse_the_manifest(tmp_path):
    joint(tmp_path)
    newest = tmp_path / "step-00000002"
    assert survey.complete(newest) and directory.verified(newest).files.keys() == {"node-00000.bin"}
    assert manifests.verify(newest, manifests.read(newest), ["node-00000.bin"]) == []
    schemas = [json.loads((tmp_path / f"step-0000000{n}/MANIFEST.json").read_text())["schema"] for n in (1, 2)]
    assert schemas == [4, 5]
    (newest / "node-00000.bin").write_bytes(b"")
    assert not survey.complete(newest)


def test_files_in_it_that_overlap_or_leave_gaps_are_invalid(tmp_path):
    joint(tmp_path)
    good = json.loads((tmp_path / "step-00000002/MANIFEST.json").read_text())["files"]
    assert not [*schema.invalid({"files": good})]

    def changed(change):
        files = copy.deepcopy(good)
        change(files["node-00000.bin"], files["node-00000.bin"]["contains"])
        return [*schema.invalid({"files": files})]

    second = "rank-00001.safetensors"
    for change in [
        lambda node, inner: node.update(size=node["size"] + 1),
        lambda node, inner: node.update(xxh3=""),
        lambda node, inner: node.update(contains=[]),
        lambda node, inner: inner[second].update(offset=0),
        lambda node, inner: inner[second].update(offset=-1),
        lambda node, inner: inner[second].update(size="1"),
        lambda node, inner: inner[second].update(within="/etc/passwd"),
        lambda node, inner: inner[second].pop("offset"),
        lambda node, inner: inner.update({"\n": inner.pop(second)}),
    ]:
        assert changed(change) == ["files"]

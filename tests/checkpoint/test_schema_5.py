"""Checkpoints of schema 5, which earlier versions wrote with one file for the ranks of a node: still read."""

import copy
import json
import random

from hpclm.checkpoint import directory, schema
from hpclm.checkpoint import manifest as manifests
from hpclm.checkpoint.staging import write_shards
from hpclm.rundir import saved as survey
from tests.checkpoint.state import State, progress, saved, store


def joint(folder, step=2, size=2):
    """A store with step 1 as a rank's file, and ``step`` as one file of ``size`` ranks."""
    saved(folder, (1,))
    made = store(folder)
    made.begin(State(), progress(step), background=False)
    path, found = made.pending.staging_dir, []
    (path / "rank-00000.safetensors").unlink()
    for rank in range(size):
        found.append(write_shards(path, rank, list(State(float(step), rank, size).tensors())))
    made._publish(made.pending, found)
    path = folder / f"step-{step:08d}"
    node, whole = {"size": 0, "contains": {}}, b""
    for name, facts in ((name, facts) for one in found for name, facts in one["files"].items()):
        node["contains"][name] = {**facts, "offset": len(whole)}
        whole += (path / name).read_bytes()
        (path / name).unlink()
    (path / "node-00000.bin").write_bytes(whole)
    manifest = json.loads((path / "MANIFEST.json").read_text())
    manifest |= {"schema": 5, "files": {"node-00000.bin": {**node, "size": len(whole)}}}
    del manifest["blake2b"]
    (path / "MANIFEST.json").write_text(json.dumps({**manifest, "blake2b": manifests.digest_of(manifest)}))
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


def test_sizes_and_hashes_are_those_of_the_file(tmp_path):
    joint(tmp_path)
    newest = tmp_path / "step-00000002"
    assert survey.complete(newest) and directory.verified(newest).files.keys() == {"node-00000.bin"}
    assert manifests.verify(newest, manifests.read(newest), ["node-00000.bin"]) == []
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

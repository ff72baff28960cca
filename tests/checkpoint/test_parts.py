"""Parts of tensors that follow each other in even steps are one entry of a manifest, and mean the same."""

import json

import pytest

from hpclm.checkpoint.manifest import digest_of
from hpclm.checkpoint.parts import Plans, files_of, joined, overlap, overlapping
from tests.checkpoint.state import State, saved, store


def part(rank, start, size, more="", **key):
    return {"file": f"rank-{rank:05d}{more}.safetensors", "start": list(start), "size": list(size), **key}


CASES = {
    "rows": [part(rank, (5 * rank, 0), (5, 8)) for rank in range(7)],
    "the last is shorter": [*(part(rank, (5 * rank, 0), (5, 8)) for rank in range(6)), part(6, (30, 0), (2, 8))],
    "two slices": [part(2 * rank + slot, (5 * rank, 4 * slot), (5, 4)) for rank in range(5) for slot in range(2)],
    "replicas share": [part(rank, (9 * rank, 0), (9, 8)) for rank in (0, 1, 2, 5, 6, 9)],
    "second files": [part(rank, (5 * rank,), (5,), "-1", key=f"w#{rank % 2}") for rank in range(9)],
    "runs of values": [part(rank, start, size) for rank, start, size in [(0, (0, 0), (1, 8)), (0, (1, 0), (1, 2)), (1, (1, 2), (1, 6))]],
    "two": [part(rank, (rank,), (1,)) for rank in range(2)],
    "one value": [part(3, (), ())],
    "others": [{**part(rank, (rank, 0), (1, 8)), "file": f"{rank}.safetensors"} for rank in range(5)],
}  # fmt: skip


@pytest.mark.parametrize("parts", CASES.values(), ids=CASES)
def test_joined_parts_stand_for_the_same_ones(parts):
    found = joined(parts)
    everywhere = [each for one in found for each in overlapping(one, 0, 1000)]
    plain = [{name: value for name, value in each.items() if name != "repeat"} for each in everywhere]
    assert sorted(map(str, plain)) == sorted(map(str, parts))
    assert files_of(found, 100) == {each["file"] for each in parts}
    rows = max(each["start"][0] + each["size"][0] for each in parts) if parts[0]["start"] else 0
    for low in range(rows):
        for high in range(low + 1, rows + 1):
            named = [each["file"] for one in found if "repeat" in one for each in overlapping(one, low, high)]
            wanted = [each for each in parts if each["start"][0] < high and each["start"][0] + each["size"][0] > low]
            assert {each["file"] for each in wanted} >= set(named)
            assert len(named) == len(set(named))


def test_a_thousand_ranks_that_share_out_rows_are_one_entry():
    assert joined([part(rank, (4 * rank, 0), (4, 64)) for rank in range(1024)]) == [
        {**part(0, (0, 0), (4, 64)), "repeat": [1024, 1, 4]}
    ]


def test_ranks_say_what_they_wrote_once():
    main, other = Plans(), Plans()
    parts = [["w", [2], part(1, (0,), (2,))]]
    for number in range(3):
        sent = other.message({"files": {"a": number}, "parts": list(parts)})
        assert (sent["parts"] is None) == (number > 0)
        [found] = main.complete([json.loads(json.dumps(sent))])
        assert found == {"files": {"a": number}, "parts": parts}
        assert main.tensors([found]) == {"w": {"shape": [2], "parts": [parts[0][2]]}}
    failed = {"error": "disk full", "parts": []}
    assert main.complete([other.message(failed)]) == [failed]
    assert other.message({"files": {}, "parts": list(parts)})["parts"] is None


@pytest.mark.parametrize("repeat", [[10**15, 1, 1], [2, 1, 0], [3, 1, 20], [2, 1], "x", [True, 1, 1]], ids=str)
def test_parts_that_no_file_has_are_found(tmp_path, repeat):
    saved(tmp_path / "c", (1, 2))
    path = tmp_path / "c/step-00000002/MANIFEST.json"
    content = json.loads(path.read_text())
    content["tensors"]["model.a"]["parts"][0]["repeat"] = repeat
    del content["blake2b"]
    path.write_text(json.dumps({**content, "blake2b": digest_of(content)}, indent=1))
    state = State()
    assert store(tmp_path / "c").resume(state, "require").step == 1 and state.is_of(1)


def rewrite(path, change):
    """Change what a manifest says, with a hash that fits."""
    content = json.loads(path.read_text())
    change(content)
    del content["blake2b"]
    path.write_text(json.dumps({**content, "blake2b": digest_of(content)}, indent=1))


SPLIT = [part(0, (0, 0), (10, 8), key="model.a"), part(0, (10, 0), (30, 8), key="model.a#1")]


@pytest.mark.parametrize(
    "parts, reason",
    [
        (SPLIT[:1], "lists 80 of the 320 values of model.a"),
        (SPLIT[:1] * 4, "contain values of model.a more than once"),
        ([SPLIT[1], part(0, (9, 0), (10, 8))], "contain values of model.a more than once"),
        ([], "lists 0 of the 320 values of model.a"),
    ],
    ids=["missing", "four times", "overlapping", "none"],
)
def test_parts_that_do_not_make_up_their_tensor_are_found(tmp_path, parts, reason):
    saved(tmp_path / "c", (1, 2))

    def change(content):
        content["tensors"]["model.a"]["parts"] = parts

    rewrite(tmp_path / "c/step-00000002/MANIFEST.json", change)
    state = State()
    assert store(tmp_path / "c").resume(state, "require").step == 1 and state.is_of(1)
    assert reason in (tmp_path / "c/.bad-step-00000002/REASON.txt").read_text()


@pytest.mark.parametrize("content", ["null", "[1]", '"x"', "3"])
def test_a_manifest_that_is_no_object_says_so(tmp_path, content):
    saved(tmp_path / "c", (1, 2))
    (tmp_path / "c/step-00000002/MANIFEST.json").write_text(content)
    state = State()
    assert store(tmp_path / "c").resume(state, "require").step == 1
    assert "MANIFEST.json is not a JSON object" in (tmp_path / "c/.bad-step-00000002/REASON.txt").read_text()


BOXES = {
    "rows": ([[(0, 2), (0, 4)], [(2, 5), (0, 4)]], False),
    "columns": ([[(0, 5), (0, 2)], [(0, 5), (2, 4)]], False),
    "a corner": ([[(0, 3), (0, 3)], [(2, 5), (2, 5)]], True),
    "far apart in order": ([[(0, 9), (0, 1)], [(1, 2), (1, 2)], [(8, 9), (0, 4)]], True),
    "one value": ([[], []], True),
    "one": ([[(0, 1)]], False),
}


@pytest.mark.parametrize("boxes, found", BOXES.values(), ids=BOXES)
def test_boxes_that_share_a_value_overlap(boxes, found):
    assert overlap(boxes) == overlap(boxes[::-1]) == found


def test_a_checkpoint_of_an_earlier_version_is_read(tmp_path):
    saved(tmp_path / "c", (1,))
    path = tmp_path / "c/step-00000001/MANIFEST.json"
    content = json.loads(path.read_text())
    for tensor in content["tensors"].values():
        for each in tensor["parts"]:
            del each["size"]
    del content["blake2b"]
    content["schema"] = 3
    path.write_text(json.dumps({**content, "blake2b": digest_of(content)}, indent=1))
    state = State()
    assert store(tmp_path / "c").resume(state, "require").step == 1 and state.is_of(1)

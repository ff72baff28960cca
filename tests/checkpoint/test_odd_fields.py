"""Manifests and headers whose hashes fit, and that hpclm has not written: the checkpoint before is used, or a message says why not."""

import copy
import json
import shutil
import struct
from contextlib import suppress

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpclm.checkpoint import directory
from hpclm.checkpoint.init_from import locate
from hpclm.checkpoint.manifest import digest_of
from hpclm.checkpoint.tensors import Tensors
from hpclm.commands import checkpoints
from hpclm.errors import HpclmError, NoCheckpointError
from hpclm.rundir import runs
from tests.checkpoint.state import State, saved, store

NAME = "rank-00000.safetensors"
ODD = [
    None,
    True,
    0,
    -1,
    3,
    1.5,
    2**63,
    10**5000,
    "x",
    "",
    "\ud800",
    "a\x1b[2J",
    "../x",
    "a\0b",
    [],
    [1],
    [[]],
    {},
    {"a": 1},
]
ODD += [
    float("inf"),
    float("nan"),
    [10**18],
    [-1, 2],
    [0.5],
    ["x"],
    {"size": 1},
    {"data": []},
    {"data": {"tokenizer": [1]}},
]
DEEP: dict = {}
for _ in range(300):
    DEEP = {"a": DEEP}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    saved(folder, (1, 2))
    return folder


@pytest.fixture
def copied(good, tmp_path):
    shutil.copytree(good, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def places(tree, above=()):
    """Every place in a tree of JSON."""
    yield above
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from places(value, (*above, key))


def changed(tree, place, value, how):
    """The tree with another value at a place, without it, or with more in it."""
    tree = copy.deepcopy(tree)
    if not place:
        return value if how == "put" else tree
    *above, last = place
    inner = tree
    for key in above:
        inner = inner[key]
    if how == "put":
        inner[last] = value
    elif how == "drop":
        del inner[last]
    elif isinstance(inner, dict):
        inner["another"] = value
    else:
        inner.append(value)
    return tree


def put_manifest(folder, content):
    if isinstance(content, dict):
        content = {name: value for name, value in content.items() if name != "blake2b"}
        content = {**content, "blake2b": digest_of(content)}
    (folder / "MANIFEST.json").write_text(json.dumps(content, indent=1))


def put_header(folder, header):
    """Put another header into a checkpoint's file, and all hashes right."""
    file = folder / NAME
    raw = file.read_bytes()
    begin = 8 + struct.unpack("<Q", raw[:8])[0]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    head = struct.pack("<Q", len(text)) + text
    file.write_bytes(head + raw[begin:])
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    facts = manifest["files"][NAME]
    facts["size"] = len(head) + len(raw) - begin
    facts["xxh3"] = xxhash.xxh3_64_hexdigest(head) + facts["xxh3"][16:]
    put_manifest(folder, manifest)


def header_of(folder):
    raw = (folder / NAME).read_bytes()
    return json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])


def look_at_it(folder):
    """Everything that reads a checkpoint without changing it; what is wrong is a message."""
    for row in checkpoints.rows(folder, verify=True):
        assert "\x1b" not in checkpoints.line(row)
        json.dumps(row)
    runs.read(folder.parent)
    with suppress(HpclmError):
        locate(folder / "step-00000002")
    with suppress(HpclmError):
        found, manifest = directory.newest(folder)
        with Tensors(found, manifest) as tensors:
            for name in tensors.shapes():
                tensors.whole(name)


def goes_on(folder):
    """Which step a run resumes from, or the message that it cannot."""
    state = State()
    try:
        step = store(folder).resume(state, "auto").step
    except HpclmError as error:
        assert not isinstance(error, NoCheckpointError), error  # a good one is there
        return str(error)
    if step == 1:
        assert state.is_of(1)
    return step


def test_a_good_one_is_used(copied):
    look_at_it(copied)
    assert goes_on(copied) == 2


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data(), st.sampled_from([*ODD, DEEP]), st.sampled_from(["put", "drop", "add"]), st.booleans())
def test_whatever_fields_hold_the_checkpoint_before_is_used_or_a_message_says_why_not(
    good, tmp_path_factory, data, odd, how, head
):
    folder = tmp_path_factory.mktemp("copy") / "checkpoints"
    shutil.copytree(good, folder)
    spoilt = folder / "step-00000002"
    tree = header_of(spoilt) if head else json.loads((spoilt / "MANIFEST.json").read_text())
    place = data.draw(st.sampled_from(list(places(tree))))
    with suppress(ValueError):  # 10**5000 is no JSON
        (put_header if head else put_manifest)(spoilt, changed(tree, place, odd, how))
        look_at_it(folder)
        assert goes_on(folder) in (1, 2) or place[0] in ("schema", "identity", "tensors")
    shutil.rmtree(folder.parent)

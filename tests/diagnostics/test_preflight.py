import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from hpclm.diagnostics import preflight, verdict
from hpclm.diagnostics.preflight import refusal
from hpclm.distributed.context import single
from tests.diagnostics import peers
from tests.events import of_kind
from tests.forks import hpclm
from tests.runs import ROOT


def report(out):
    return of_kind(out, "preflight")[-1]


def test_healthy_ranks_log_one_line_and_leave_only_a_report(tmp_path):
    results = peers.hold(tmp_path, ["a", "a", "b", "b"])
    assert [code for _, code in results] == [0, 0, 0, 0]
    assert results[0][0].startswith("preflight: 4 ranks on 2 nodes agree; slowest link ")
    assert results[0][0].count("\n") == 1 and {text for text, _ in results[1:]} == {""}
    found = report(tmp_path)
    assert found["ok"] and found["bad"] == [] and [each["rank"] for each in found["ranks"]] == [0, 1, 2, 3]
    assert [link["nodes"] for link in found["links"]] == [["b", "a"], ["a", "b"]] and found["links"][0]["speed"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) in (["events.jsonl"], ["events.jsonl", "logs"])


@pytest.mark.parametrize("setting, checked", [("on", True), ("off", False)])
def test_the_check_can_be_disabled(setting, checked, tiny, tmp_path):
    hpclm("train", *tiny("run", f"cluster.preflight={setting}", "budget.steps=1"), check=0)
    assert bool(of_kind(tmp_path / "run", "preflight")) == checked


def test_nodes_with_different_code_are_refused_with_both_digests_and_the_file(tmp_path):
    copies = {}
    for node in "ab":
        copies[node] = tmp_path / node
        for package in ("hpclm", "tests"):
            shutil.copytree(ROOT / package, copies[node] / package, ignore=shutil.ignore_patterns("__pycache__"))
    (copies["a"] / "hpclm" / ".loop.py.swp").write_text("an editor's")
    before = {node: ["env", "-C", copy, f"PYTHONPATH={copy}"] for node, copy in copies.items()}
    out = tmp_path / "out"
    out.mkdir()
    assert [end for _, end in peers.hold(out, ["a", "b"], before=before)] == [0, 0]
    shutil.rmtree(out)
    out.mkdir()
    with (copies["b"] / "hpclm/training/loop.py").open("a") as file:
        file.write("# on this node only\n")
    (text, end), (other, end_of_other) = peers.hold(out, ["a", "a", "b"], before=before)[::2]
    assert (end, end_of_other, other) == (64, 64, "")
    assert re.match(
        r"the nodes run different code: [0-9a-f]{12} on a; [0-9a-f]{12} on b; different: hpclm/training/loop.py\. Install",
        text,
    ), text
    assert list(out.iterdir()) == []


def mounts():
    """Whether this process may make mounts."""
    return shutil.which("unshare") and not subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode


@pytest.mark.skipif(not mounts(), reason="needs the right to unshare mounts")
@pytest.mark.parametrize(
    "nodes, bad", [(["a", "b"], []), (["a", "b", "c"], ["c"])], ids=["each node its own", "one node lost the mount"]
)
def test_a_run_directory_that_is_not_shared_is_refused(nodes, bad, tmp_path):
    alone = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none "{tmp_path}" && exec "$@"', "sh"]
    results = peers.hold(tmp_path, nodes, before={nodes[-1]: alone})
    assert [code for _, code in results] == [1] * len(nodes)
    last = nodes[-1]
    assert f"{tmp_path} on {last} is not the folder that a has" in results[0][0]
    found = report(tmp_path)
    assert found["bad"] == bad and not found["ok"]
    assert (
        f"bad node: {last}; start again without it: hpclm resume {tmp_path} --exclude-bad {tmp_path}" in results[0][0]
    ) == bool(bad)
    assert f"library versions of each process, and the measurements, are in {tmp_path}/events.jsonl" in results[0][0]
    assert all({"host", "device", "torch", "python"} <= row.keys() for row in found["ranks"])


def test_a_refusal_names_its_report_only_if_there_is_one():
    lines = refusal(["a and b disagree"], [], Path("/out"), False).splitlines()
    assert lines == ["preflight: a and b disagree", "set cluster.preflight=false to skip these checks"]
    assert (
        refusal(["x"], [], Path("/out"), True)
        .splitlines()[1]
        .startswith(
            "the host, device and library versions of each process, and the measurements, are in /out/events.jsonl"
        )
    )


@pytest.mark.skipif(not mounts(), reason="needs the right to unshare mounts")
def test_a_node_that_cannot_write_is_named(tmp_path):
    frozen = [
        "unshare",
        "-m",
        "sh",
        "-c",
        f'mount --bind "{tmp_path}" "{tmp_path}" && mount -o remount,ro,bind "{tmp_path}"',
    ]
    frozen[-1] += ' && exec "$@"'
    results = peers.hold(tmp_path, ["a", "b", "c"], before={"b": [*frozen, "sh"]})
    assert f"{tmp_path} cannot be written on b: Read-only file system" in results[0][0]
    assert report(tmp_path)["bad"] == ["b"]


def test_a_folder_without_room_is_refused(tmp_path, monkeypatch):
    import torch

    from hpclm import config
    from hpclm.base.errors import HpclmError
    from hpclm.diagnostics import preflight
    from hpclm.distributed import bootstrap, context

    settings = config.from_cli(["data.source=synthetic", f"out={tmp_path}"])
    with context.join(bootstrap.World("single", 0, 1), settings.cluster) as alone:
        cpu = torch.device("cpu")
        preflight.check_nodes(alone, cpu, (), tmp_path, env={})
        assert report(tmp_path)["ok"] and report(tmp_path)["links"] == []
        with pytest.raises(HpclmError, match=r"MiB free on .*a checkpoint may take 1,125,899,906,842,624"):
            preflight.check_nodes(alone, cpu, (), tmp_path, env={}, room=1 << 70)


def test_what_does_not_stop_a_run_is_logged_and_kept_as_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(verdict, "SHM", 1 << 60)  # more than any machine has
    preflight.check_nodes(single(), torch.device("cpu"), [], tmp_path, room=1)
    found = report(tmp_path)
    assert found["ok"] and not found["problems"] and not found["bad"]
    assert [f"preflight: {text}" for text in found["warnings"]] == caplog.messages
    assert caplog.messages[0].startswith("preflight: /dev/shm of ")


@pytest.mark.parametrize("bad, kept, lines", [
    ([], False, ["set cluster.preflight=false to skip these checks"]),
    (["a"], False, ["bad node: a; start again without it: hpclm resume /r --exclude-bad /r", "set cluster.preflight=false"]),
    (["a", "b"], True, ["bad nodes: a, b; start again without them: hpclm resume /r", "the host, device and library"]),
])  # fmt: skip
def test_a_refusal_says_which_nodes_to_leave_out(bad, kept, lines):
    first, *rest = refusal(["x is wrong"], bad, Path("/r"), kept).splitlines()
    assert first == "preflight: x is wrong"
    assert all(line.startswith(begin) for line, begin in zip(rest, lines, strict=True))

import pytest

from hpclm.diagnostics import verdict
from hpclm.diagnostics.verdict import Link

GIB = 1 << 30


def rank(node, **more):
    same = {"hpclm": "1", "python": "3.11", "torch": "2.6", "cuda": None, "driver": None, "device_name": "CPU"}
    rest = {"device": "cpu", "gpus": 0, "shm": {"total": GIB, "free": GIB}, "visible": None}
    return {"node": node, **same, **rest, **more}


def said(findings):
    return [(finding.text, finding.bad) for finding in findings]


def test_equal_ranks_give_no_finding():
    ranks = [rank("a"), rank("a"), rank("b")]
    assert [
        *verdict.agreement(ranks),
        *verdict.devices(ranks),
        *verdict.memory(ranks),
    ] == []


@pytest.mark.parametrize("key", verdict.AGREE)
def test_the_node_that_differs_from_the_majority_is_bad(key):
    ranks = [rank("a"), rank("b", **{key: "other"}), rank("b", **{key: "other"}), rank("c")]
    (finding,) = verdict.agreement(ranks)
    assert finding.bad == ("b",) and finding.serious
    assert finding.text.startswith(key.replace("_", " ")) and finding.text.endswith("other on b")


def test_if_two_nodes_differ_neither_is_bad():
    (finding,) = verdict.agreement([rank("a"), rank("a"), rank("b", torch="2.5")])
    assert finding == verdict.NodeFinding("torch differs: 2.6 on a; 2.5 on b", (), True)


def test_a_node_whose_ranks_differ_is_bad():
    ranks = [rank("a"), rank("b"), rank("c"), rank("c", device_name="H200")]
    assert said(verdict.agreement(ranks)) == [("device name differs: CPU on a and b; CPU and H200 on c", ("c",))]


def test_ranks_that_share_a_gpu_are_refused_with_CUDA_VISIBLE_DEVICES():
    gpu = {"device": "cuda:0", "uuid": "GPU-1", "visible": "0", "device_used": 0, "device_total": 80 * GIB}
    (finding,) = verdict.devices([rank("a", **gpu), rank("a", **gpu), rank("b", **gpu | {"uuid": "GPU-2"})])
    assert finding.serious and "ranks 0 and 1 on a all use cuda:0 (GPU-1)" in finding.text
    assert "CUDA_VISIBLE_DEVICES=0" in finding.text


def test_a_gpu_that_other_processes_use_is_reported():
    gpu = {"device": "cuda:0", "uuid": "GPU-1", "device_used": 40 * GIB, "device_total": 80 * GIB}
    (finding,) = verdict.devices([rank("a", **gpu)])
    assert (
        "40.0 of 80.0 GiB of cuda:0 on a (rank 0) are in use by other processes" in finding.text and not finding.serious
    )


def test_little_shared_memory_is_reported_and_not_refused():
    low = {"shm": {"total": 64 << 20, "free": 60 << 20}}
    (finding,) = verdict.memory([rank("a"), rank("b", **low), rank("b", **low)])
    assert finding.text.startswith("/dev/shm of b has 60 of 64 MiB free, and 2 processes")
    assert not finding.serious and not finding.bad


FINE = {"free": GIB, "same": True}


@pytest.mark.parametrize(
    "looks, text, bad",
    [
        (
            {"a": FINE, "b": FINE, "c": {"error": "Read-only file system"}},
            "out cannot be written on c: Read-only",
            ("c",),
        ),
        ({"a": FINE, "b": FINE | {"same": False}, "c": FINE}, "out on b is not the folder that a has", ("b",)),
        ({"a": FINE, "b": FINE | {"same": False}}, "out on b is not the folder", ()),  # a folder of each node's own
        ({"a": FINE | {"free": 5}, "b": FINE | {"free": 5}}, "out has 0.0 MiB free on a and b", ()),
    ],
)
def test_a_run_directory_must_be_shared_writable_and_have_room(looks, text, bad):
    (finding,) = verdict.disks("out", looks, room=1 << 20)
    assert finding.text.startswith(text) and finding.bad == bad and finding.serious


def ring(nodes, slow=(), error=""):
    """Links from each of ``nodes`` to the next; those of ``slow`` nodes are slow, or fail with ``error``."""
    pairs = [(nodes[i - 1], node) for i, node in enumerate(nodes)]
    return [Link(pair, 0.0 if error else 0.01, error) if set(pair) & set(slow) else Link(pair, 1.0) for pair in pairs]


@pytest.mark.parametrize("error", ["", "no answer within 15 s"])
@pytest.mark.parametrize("nodes, slow", [("abc", "c"), ("abcd", "d"), ("abcdefgh", "be"), ("abcdefgh", "")])
def test_a_node_without_a_fast_link_is_bad(nodes, slow, error):
    findings = verdict.links(ring(nodes, slow, error))
    assert sorted({node for finding in findings for node in finding.bad}) == list(slow)
    assert all(finding.serious and error in finding.text for finding in findings)


def test_a_slow_link_between_good_nodes_makes_neither_bad():
    measured = [*ring("abcd")[:-1], Link(("c", "d"), 0.01)]
    (finding,) = verdict.links(measured)
    assert finding.bad == () and not finding.serious and finding.text.startswith("messages from c to d: 0.01 GB/s")


def test_of_two_nodes_neither_is_bad():
    assert verdict.links(ring("ab", "b")) == []


BROKEN = "GPU 0 (H100) does not compute: CUDA error: no kernel image is available for execution on the device"


@pytest.mark.parametrize(
    "facts, text",
    [
        ({"torch": None, "error": "ended by signal 6"}, "PyTorch cannot be loaded (ended by signal 6)"),
        ({"gpus": 1, "broken": [BROKEN]}, BROKEN),
        ({"gpus": 2, "local_size": 4}, "4 processes see 2 GPUs"),
        ({"launcher": "Open MPI"}, "Open MPI started this process, but mpi4py is not installed"),
    ],
)
def test_what_would_stop_one_process_is_a_problem(facts, text):
    own = {"launcher": "local", "local_size": 1, "mpi4py": None, **rank("a", **facts)}
    (problem,) = verdict.problems(own)
    assert problem.startswith(text) and not list(verdict.hints(own))


def test_gpus_that_pytorch_does_not_see_are_a_hint():
    own = {"launcher": "local", "local_size": 1, **rank("a", driver="550", visible="")}
    (hint,) = verdict.hints(own)
    assert hint.startswith("this machine has GPUs (driver 550), but PyTorch, built for CUDA None") and not list(
        verdict.problems(own)
    )


BOUND = {
    "all may run anywhere": (["0-1"] * 4, 2, []),
    "one each": (["0", "1"], 2, []),
    "more ranks than cores, evenly": (["0", "1", "0", "1"], 2, []),
    "both on the first of two": (["0", "0"], 2, [("0-1", "core 0")]),
    "more on one than there must be": (["0", "0", "0", "1"], 2, [("0-2", "core 0")]),
    "one core for all": (["0", "0", "0"], 1, []),
    "two pairs": (["0-3", "0-3", "4-7", "4-7"], 8, []),
    "all in a corner": (["0-1", "0-1", "0-1"], 8, [("0-2", "cores 0-1")]),
    "one is free": (["0", "0-7"], 8, []),
    "two bound, one free": (["3", "3", "0-3"], 4, [("0-1", "core 3")]),
}


@pytest.mark.parametrize("bound, available, shared", BOUND.values(), ids=BOUND)
def test_ranks_that_share_a_core_without_need_are_named(bound, available, shared):
    ranks = [rank("a", allowed_cores=cores, cores_of_job=available) for cores in bound]
    texts = [finding.text for finding in verdict.cores(ranks)]
    assert [text.split(", of ")[0] for text in texts] == [
        f"ranks {who} on a are all bound to {cores}" for who, cores in shared
    ]


def test_other_code_is_told_by_digests_nodes_and_files():
    digests = [("a", "1"), ("a", "1"), ("b", "2"), ("c", "1")]
    contents = [{"x.py": "1", "y.py": "1"}] * 2 + [{"x.py": "2", "y.py": "1", "z.py": "1"}, {"x.py": "1", "y.py": "1"}]
    assert verdict.other_code(digests, contents) == (
        "the nodes run different code: 1 on a and c; 2 on b; different: x.py and z.py"
    )


@pytest.mark.parametrize(
    "count, text",
    [(1, "0"), (2, "0 and 1"), (8, "0, 1, 2, 3, 4, 5, 6 and 7"), (9, "0, 1, 2, 3, 4, 5, 6, 7 and 1 more")],
)
def test_a_long_list_says_how_many_more_there_are(count, text):
    assert verdict.listing(range(count)) == text


def test_a_gpu_of_which_others_use_a_tenth_or_less_is_no_finding():
    gpu = {"device": "cuda:0", "uuid": "GPU-1", "device_used": 8 * GIB, "device_total": 80 * GIB}
    assert verdict.devices([rank("a", **gpu)]) == []

"""Ranks of a real Slurm meet, whatever the names of nodes lead to, and whatever order ranks are dealt out in."""

from contextlib import contextmanager

import pytest

from tests.launch.test_send import SMALL, job_id, log_of, submit  # noqa: F401 - a fixture

MEET = [*SMALL, "cluster.start_seconds=30", "--time", 60, "job.requeue=false"]


def trained(submit, *words):  # noqa: F811
    done = submit(*MEET, *words)
    submit.cluster.wait(job_id(done))
    log = log_of(done).read_text()
    assert "done at step 5" in log, log
    return log


@contextmanager
def names(cluster, folder, address):
    """In the block the names of nodes lead to ``address``, or to nothing."""
    lines = [f"{address}.{number} {node}\n" * bool(address) for number, node in enumerate(cluster.nodes, 1)]
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
    for node in cluster.nodes:
        cluster.inside(node, "mount", "--bind", folder / "hosts", "/etc/hosts")
    try:
        yield
    finally:
        for node in cluster.nodes:
            cluster.inside(node, "umount", "/etc/hosts")


@contextmanager
def second_network(cluster):
    """In the block all nodes have an interface ib0 beside that to which their names lead."""
    cluster.run(["ip", "link", "add", "hpclm-ib", "type", "bridge"])
    try:
        cluster.run(["ip", "link", "set", "hpclm-ib", "up"])
        for number, node in enumerate(cluster.nodes, 1):
            ends = [
                "link",
                "add",
                f"hpclm-ib{number}",
                "type",
                "veth",
                "peer",
                "name",
                "ib0",
                "netns",
                cluster.first(node),
            ]
            cluster.run(["ip", *ends])
            cluster.run(["ip", "link", "set", f"hpclm-ib{number}", "master", "hpclm-ib", "up"])
            cluster.inside(node, "ip", "addr", "add", f"10.77.0.{number}/24", "dev", "ib0")
            cluster.inside(node, "ip", "link", "set", "ib0", "up")
        yield
    finally:
        for number in range(1, 1 + len(cluster.nodes)):
            cluster.run(["ip", "link", "del", f"hpclm-ib{number}"], check=False)
        cluster.run(["ip", "link", "del", "hpclm-ib"])


@pytest.fixture
def isolated(cluster):
    if not cluster.isolated:
        pytest.skip("needs nodes with networks of their own")
    return cluster


@pytest.mark.parametrize("template", ["srun", "torchrun"])
@pytest.mark.parametrize("address", ["", pytest.param("198.51.100", marks=pytest.mark.whole)], ids=["none", "dead"])
def test_ranks_meet_where_the_names_of_nodes_lead_nowhere(template, address, isolated, submit, tmp_path):  # noqa: F811
    with names(isolated, tmp_path, address):
        trained(submit, "--nodes", 2, "--template", template)


@pytest.mark.parametrize("address", ["", "198.51.100"], ids=["named otherwise", "and names lead nowhere"])
def test_ranks_meet_where_cluster_interface_names_another_network_than_nodes(address, isolated, submit, tmp_path):  # noqa: F811
    with second_network(isolated):
        if not address:
            trained(submit, "--nodes", 2, "cluster.interface=ib0")
            return
        with names(isolated, tmp_path, address):
            trained(submit, "--nodes", 2, "cluster.interface=ib0")


def test_rank_0_is_where_a_host_file_puts_it_and_ranks_dealt_out_in_turn_are_warned_of(cluster, submit, tmp_path):  # noqa: F811
    first, second, *_ = cluster.nodes
    (tmp_path / "hosts").write_text(f"{second}\n{second}\n{first}\n{first}\n")
    words = ["--nodes", 2, "--gpus", 2, "job.options.distribution=arbitrary", f"job.nodelist={first},{second}"]
    log = trained(submit, *words, f"job.setup=['export SLURM_HOSTFILE={tmp_path}/hosts']", "out=arbitrary")
    assert f"launched by Slurm, on {second}, {first};" in log and "neighbouring" not in log
    log = trained(submit, "--nodes", 2, "--gpus", 2, "job.options.distribution=cyclic", "out=cyclic")
    assert "neighbouring ranks are on different nodes" in log

"""tools/slurm-cluster does what it says."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import runs
from tests.runs import PATIENCE
from tests.slurm import TOOL, slurm_cluster, tool, until

pytestmark = pytest.mark.slurm
GPUS = "0,1,2,3,4,5,6,7"
SLEEP = "sleep 987"
ASLEEP = r"^(/\S+/)?sleep 987"  # the tasks, without the srun that started them
HERE = "echo $SLURMD_NODENAME $(hostname) $CUDA_VISIBLE_DEVICES"


@pytest.fixture(scope="module")
def plain():
    """A cluster whose nodes share this machine's host name, address and process table."""
    with slurm_cluster("--isolate", "none", "--prefix", "plain", "--nodes", 2) as cluster:
        yield cluster


def everywhere(cluster, script, nodes=None):
    """What a shell script prints on each node."""
    size = ["-N", nodes or len(cluster.nodes), "--ntasks-per-node=1", "--gpus-per-node=8", "-t", "2"]
    return sorted(cluster.run(["srun", *size, "bash", "-c", script]).stdout.splitlines())


def namespaces(cluster):
    if not cluster.isolated:
        pytest.skip("this machine does not allow namespaces")


def sleepers(cluster):
    return sorted(process.node for process in cluster.processes(ASLEEP))


def traces(folder):
    """What may be left of a cluster on this machine: the names of everything of it that is found."""
    folder = str(folder)
    slots = [link.name for link in Path("/run").glob("hpclm-slurm-*") if str(link.readlink()) == folder]
    found = [folder] if Path(folder).exists() else []
    for file in ("/proc/mounts", "/etc/hosts"):
        found += [line for line in Path(file).read_text().splitlines() if folder in line]
    if Path("/etc/slurm/slurm.conf").is_symlink() and folder in str(Path("/etc/slurm/slurm.conf").readlink()):
        found.append("/etc/slurm/slurm.conf")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
            held = [str(file.readlink()) for file in (process / "fd").iterdir() if file.is_symlink()]
            environ = (process / "environ").read_bytes()
        except OSError:
            continue
        job = b"SLURM_TASK_PID=" in environ and folder.encode() in environ
        if words and (folder.encode() in words or job or any(name.startswith(folder) for name in held)):
            found.append(words.replace(b"\0", b" ").decode())
    return slots + found


def devices(slot):
    """The network devices of the cluster with this number."""
    lines = subprocess.check_output(["ip", "-o", "link"], text=True)
    return set(re.findall(rf"\bhps(?:{slot}n\d+|lurm{slot})\b", lines))


def test_every_node_is_a_machine_with_a_name_an_address_and_eight_gpus(cluster):
    namespaces(cluster)
    assert everywhere(cluster, HERE) == [f"{node} {node} {GPUS}" for node in cluster.nodes]
    addresses = everywhere(cluster, "hostname -I")
    assert len(set(addresses)) == len(cluster.nodes)
    found = everywhere(cluster, f"echo $(getent hosts {' '.join(cluster.nodes)} | cut -d' ' -f1 | sort)")
    assert {tuple(line.split()) for line in found} == {tuple(sorted(address.strip() for address in addresses))}


@pytest.mark.whole
def test_nodes_share_neither_processes_nor_shared_memory_nor_network_devices(cluster):
    namespaces(cluster)
    seen = everywhere(
        cluster,
        "touch /dev/shm/$SLURMD_NODENAME; sleep 2; echo $(ls /dev/shm) $(pgrep -x slurmd | wc -l) $(ls /sys/class/net)",
    )
    assert seen == [f"{node} 1 eth0 lo" for node in cluster.nodes]


@pytest.mark.whole
def test_up_again_changes_nothing_and_other_settings_are_refused(cluster):
    before = tool("status", "--folder", cluster.folder).stdout
    assert (done := tool("up", "--folder", cluster.folder)).returncode == 0, done.stdout
    pids = r"up, process \d+"
    assert re.findall(pids, tool("status", "--folder", cluster.folder).stdout) == re.findall(pids, before)
    done = tool("up", "--folder", cluster.folder, "--nodes", 2)
    assert done.returncode == 1 and "take it down first" in done.stdout and "nodes=4" in done.stdout


@pytest.mark.whole
def test_without_namespaces_jobs_run_and_a_node_can_be_cut(plain):
    assert not plain.isolated
    host = os.uname().nodename
    assert everywhere(plain, HERE) == [f"plain1 {host} {GPUS}", f"plain2 {host} {GPUS}"]
    job = plain.batch(f"srun {SLEEP}", "-N2", "--no-requeue", "-o", "/dev/null")
    plain.wait(job, "RUNNING")
    until(lambda: {"plain1", "plain2"} == set(sleepers(plain)), "tasks", plain)
    plain.power_off("plain2")
    assert set(sleepers(plain)) == {"plain1"}
    plain.restore()
    assert len(everywhere(plain, HERE)) == 2


@pytest.mark.whole
@pytest.mark.parametrize("options", [(), ("--isolate", "none", "--prefix", "gone")], ids=["namespaces", "plain"])
def test_down_leaves_nothing_even_of_jobs_that_do_not_want_to_end(options, cluster):
    with slurm_cluster("--nodes", 2, "--kill-wait", 2, *options) as other:
        folder = other.folder
        slot = re.search(r"slot=(\d+)", (folder / "etc" / "settings").read_text())[1]
        assert len(devices(slot)) == (3 if other.isolated else 0)
        other.batch("trap '' TERM; sleep 987 & wait; sleep 987", "-o", "/dev/null")
        client = subprocess.Popen(["srun", "-N2", "sleep", "987"], env=other.env, stderr=subprocess.DEVNULL)
        until(lambda: len(sleepers(other)) >= 3, "tasks", other)
        assert traces(folder)
        assert (done := tool("down", "--folder", folder)).returncode == 0, done.stdout
        client.wait(PATIENCE)
        assert traces(folder) == []
        assert devices(slot) == set()
        assert (done := tool("down", "--folder", folder)).returncode == 0 and "nothing" in done.stdout
    assert tool("status", "--folder", cluster.folder).returncode == 0, "the other cluster was not touched"


@pytest.mark.whole
@pytest.mark.slow
def test_with_accounting_sacct_knows_jobs_and_a_half_dead_cluster_is_repaired():
    with slurm_cluster("--accounting", "--nodes", 1) as cluster:
        job = cluster.batch("exit 3", "-o", "/dev/null")
        assert cluster.wait(job) == "FAILED"

        def row():
            return cluster.run(["sacct", "-n", "-X", "-P", "-j", job, "-o", "State,ExitCode"]).stdout.strip()

        until(lambda: row() == "FAILED|3:0", "accounting", cluster)
        for name in ("slurmdbd", "munged", "mariadbd"):
            os.kill(int((cluster.folder / "run" / f"{name}.pid").read_text()), signal.SIGKILL)
        assert (done := tool("up", "--accounting", "--nodes", 1, "--folder", cluster.folder)).returncode == 0, (
            done.stdout
        )
        assert row() == "FAILED|3:0"


@pytest.mark.whole
def test_a_cluster_goes_down_with_the_process_that_wanted_it():
    code = "import sys, time; from tests.slurm import slurm_cluster\nwith slurm_cluster('--nodes', 1) as c: print(c.folder, flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=TOOL.parents[1])
    folder = child.stdout.readline().strip()
    assert traces(folder)
    child.kill()
    child.communicate()
    runs.until(lambda: not traces(folder), "the end of the cluster")


@pytest.mark.whole
def test_a_fault_is_told_with_the_end_of_the_log(tmp_path):
    folder = tmp_path / "cluster"
    done = tool("up", "--folder", folder, "--nodes", 1, "--conf", "SelectType=select/nonsense")
    assert done.returncode == 1 and "slurmctld does not answer" in done.stdout and "nonsense" in done.stdout
    assert tool("down", "--folder", folder).returncode == 0
    assert traces(folder) == []


@pytest.mark.parametrize(
    "words, told",
    [
        (["fly"], "unknown command 'fly'"),
        (["up", "--nodes", "many"], "--nodes must be a whole number above 0, not 'many'"),
        (["up", "--folder", "/tmp/with space"], "--folder must be without spaces"),
        (["up", "--isolate", "walls"], "--isolate must be auto, namespaces or none"),
        (["up", "now"], "up takes options only, not 'now'"),
        (["up", "--folder", "/usr"], "holds something else"),
        (["run"], "run wants a command"),
        (["env", "--folder", "/tmp/no-such-cluster"], "there is no cluster in /tmp/no-such-cluster"),
    ],
)
def test_mistakes_are_told(words, told):
    done = tool(*words)
    assert done.returncode in (1, 2) and told in done.stdout

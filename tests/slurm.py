"""A real Slurm for tests: `tools/slurm-cluster`, brought up once a session and worker, taken down whatever happens.

A test that takes the fixture `cluster` is marked `slurm` by it; all such tests run in one xdist worker, one after another."""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from tests.runs import PATIENCE

TOOL = Path(__file__).parents[1] / "tools" / "slurm-cluster"
ENDED = ("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
OWN = re.compile(r"unshare |bash \S+/node\.sh |slurmd |slurmstepd")  # what every node runs
T = TypeVar("T")


@dataclass(frozen=True)
class Process:
    """A process on a node; `pid` is this machine's number for it."""

    pid: int
    node: str
    words: str


@dataclass(frozen=True)
class Cluster:
    """A Slurm that is up. Every wait ends in an error after `PATIENCE` seconds."""

    folder: Path
    nodes: tuple[str, ...]
    isolated: bool
    env: Mapping[str, str]

    def run(self, words: Sequence[object], check: bool = True, **more):
        """Run a command as a user of the cluster; its output is in `stdout` and `stderr`."""
        options = {"env": self.env, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True, **more}
        done = subprocess.run([str(word) for word in words], timeout=PATIENCE, **options)
        if check and done.returncode:
            raise AssertionError(f"{words} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def batch(self, script: str, *options: object) -> str:
        """Submit a shell script, with sbatch's options; its job id."""
        text = script if script.startswith("#!") else f"#!/bin/bash\n{script}\n"
        return self.run(["sbatch", "--parsable", "--time=60", *options], stdin=None, input=text).stdout.strip()

    def show(self, job_id: str | int) -> dict[str, str]:
        """What `scontrol show job` knows; it forgets a job an hour after its end."""
        text = self.run(["scontrol", "--oneliner", "show", "job", job_id]).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def state(self, job_id: str | int) -> str:
        """PENDING, RUNNING, COMPLETED, ..."""
        return self.show(job_id)["JobState"]

    def wait(self, job_id: str | int, states: str | Sequence[str] = ENDED) -> str:
        """Wait until the job is in one of `states`; which it is."""
        states = (states,) if isinstance(states, str) else states
        return until(lambda: state if (state := self.state(job_id)) in states else "", f"{states}", self)

    def cancel_all(self) -> None:
        """Cancel every job, and wait until the nodes are free of them."""
        jobs = self.run(["squeue", "-h", "-o", "%A"]).stdout.split()
        if jobs:
            self.run(["scancel", *jobs], check=False)
            until(lambda: not self.run(["squeue", "-h"]).stdout.strip(), "an empty queue", self)

    def inside(self, node: str, *words: object):
        """Run a command as root in a node's namespaces."""
        return self.run(["nsenter", "-t", self.first(node), "-m", "-n", "-p", *words])

    def first(self, node: str) -> str:
        """The process with number 1 on a node, by this machine's number for it."""
        pid = (self.folder / "run" / f"slurmd-{node}.pid").read_text().strip()
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]

    def power_off(self, node: str) -> None:
        """Cut a node's power; Slurm finds out by itself, half a minute later, or is told by `down`."""
        self.run([TOOL, "--folder", self.folder, "power-off", node])

    def power_on(self, node: str) -> None:
        self.run([TOOL, "--folder", self.folder, "power-on", node])

    def down(self, node: str) -> None:
        """Tell Slurm that a node is dead."""
        self.run(["scontrol", "update", f"nodename={node}", "state=down", "reason=test"])

    def repair(self) -> None:
        """Start again what was killed of Slurm itself."""
        done = tool("up", "--folder", self.folder)
        assert done.returncode == 0, done.stdout

    def restore(self) -> None:
        """As it was when it came up: no jobs, all nodes idle."""
        for node in self.nodes:
            if self._network(node) is None:
                self.down(node)
                self.power_on(node)
        self.cancel_all()
        if self._states() != {"idle"}:
            self.run(["scontrol", "update", f"nodename={','.join(self.nodes)}", "state=resume"], check=False)
            until(lambda: self._states() == {"idle"}, "idle nodes", self)

    def processes(self, pattern: str) -> list[Process]:
        """What jobs run on the nodes and whose command line matches; nothing that runs beside the nodes."""
        return [each for each in self._on_nodes(pattern) if not OWN.match(each.words)]

    def everything(self, pattern: str) -> list[Process]:
        """What runs on the nodes and whose command line begins so, Slurm's own daemons too."""
        return sorted(self._on_nodes(f"^(?:{pattern})"), key=lambda each: each.node)

    def _on_nodes(self, pattern: str) -> list[Process]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if words and re.search(pattern, words) and (node := self._node(folder)):
                    found.append(Process(int(folder.name), node, words))
            except OSError:  # it has just ended
                continue
        return found

    def slurmd(self, node: str) -> int:
        """Number of the process that manages a node."""
        for name in Path("/proc").glob("[0-9]*/comm"):
            try:
                if name.read_text() == "slurmd\n" and self._node(name.parent) == node:
                    return int(name.parent.name)
            except OSError:  # it has just ended
                continue
        raise AssertionError(f"{node} has no slurmd")

    def _node(self, folder: Path) -> str | None:
        """Which node the process of this folder of /proc runs on."""
        if self.isolated:
            network = (folder / "ns" / "net").readlink()
            return next((node for node in self.nodes if self._network(node) == network), None)
        words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        variables = dict(word.split("=", 1) for word in words if "=" in word)
        ours = variables.get("SLURM_CONF") == self.env["SLURM_CONF"] and "SLURM_TASK_PID" in variables
        return variables.get("SLURMD_NODENAME") if ours else None

    def _network(self, node: str) -> Path | None:
        """The network that a node's first process is in; None when the node is off."""
        try:
            pid = (self.folder / "run" / f"slurmd-{node}.pid").read_text().strip()
            return Path(f"/proc/{pid}/ns/net").readlink()
        except OSError:
            return None

    def _states(self) -> set[str]:
        return set(self.run(["sinfo", "-h", "-N", "-o", "%t"]).stdout.split())


def until(act: Callable[[], T], what: str, cluster: Cluster) -> T:
    """Call `act` until it gives something true; what it gave."""
    deadline = time.monotonic() + PATIENCE
    while not (result := act()):
        if time.monotonic() > deadline:
            queue = cluster.run(["squeue", "--states=all"], check=False).stdout
            log = (cluster.folder / "log" / "slurmctld.log").read_text()[-2000:]
            raise AssertionError(f"no {what} within {PATIENCE:.0f} s\n{queue}\n{log}")
        time.sleep(0.1)
    return result


def tool(*words: object, **more) -> subprocess.CompletedProcess:
    """Run tools/slurm-cluster; its messages are in `stdout`."""
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run([str(word) for word in (TOOL, *words)], timeout=2 * PATIENCE, **{**options, **more})


def environment(folder: Path) -> dict[str, str]:
    """The variables of a process that talks to the cluster: this one's, without those of a job it may be in."""
    told = shlex.split(tool("env", "--folder", folder, check=True).stdout)
    mine = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "OMPI_", "PMI"))}
    return mine | dict(word.split("=", 1) for word in told if "=" in word)


@contextmanager
def slurm_cluster(*options: object) -> Iterator[Cluster]:
    """A separate cluster, with these options of `tools/slurm-cluster up`."""
    if os.geteuid():
        pytest.skip("a Slurm of several nodes needs root")
    if not shutil.which("dpkg-query"):
        pytest.skip("a Slurm of several nodes needs Debian's packages")
    folder = Path(tempfile.mkdtemp(prefix="hpclm-slurm-", dir="/tmp"))  # sockets in it want a short name
    # Takes the cluster down when its input ends: when it is closed here, and when this process is killed.
    janitor = subprocess.Popen(
        ["sh", "-c", f'cat >/dev/null; exec {TOOL} down --folder "$FOLDER"'],
        env={**os.environ, "FOLDER": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # it outlives Ctrl-C
    )
    try:
        done = tool("up", "--folder", folder, *options)
        assert done.returncode == 0, done.stdout
        env = environment(folder)
        settings = (folder / "etc" / "settings").read_text()
        nodes = subprocess.check_output(
            ["sinfo", "-h", "-N", "-p", "main", "-o", "%N"], env=env, text=True, timeout=PATIENCE
        )
        yield Cluster(folder, tuple(nodes.split()), "isolate=namespaces" in settings, env)
    finally:
        janitor.stdin.close()
        janitor.wait(PATIENCE)


@pytest.fixture(scope="session")
def session_cluster() -> Iterator[Cluster]:
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(request: pytest.FixtureRequest, session_cluster: Cluster) -> Iterator[Cluster]:
    """A Slurm of four nodes with 8 pretended GPUs each; idle at first, and whatever a test left is cleared away."""
    grouped = getattr(request.config.option, "loadgroup", False)  # only in a worker
    assert not grouped or request.node.nodeid.endswith("@slurm"), "pytest-xdist no longer keeps groups on one worker"
    yield session_cluster
    session_cluster.restore()


TOGETHER = (
    "test_early_errors",
    "test_house",
    "test_harness",
    "test_finetune",
    "test_chat_template",
    "test_examples",
    "test_import_errors",
    "test_self_check",
    "test_python_arguments",
)
"""Files of which one worker runs all tests: what these share takes long to make or to import."""


def group(items: Sequence[pytest.Item]) -> None:
    """Mark the tests that use a cluster, and let one xdist worker run them all; likewise those of each file of TOGETHER."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("slurm")
        if item.get_closest_marker("slurm"):
            item.add_marker(pytest.mark.xdist_group("slurm"))
        elif item.path.stem in TOGETHER:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))

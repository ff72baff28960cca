"""Runs that hang end, and say why; slow ranks are named; what only takes long is left alone."""

import json
import os
import re
import signal
import socket
import time
from types import SimpleNamespace

import psutil
import pytest

from hpclm.config import ClusterConfig
from hpclm.distributed.ranks import RankInfo
from hpclm.distributed.watchdog import Watchdog
from hpclm.rundir import events, summary
from tests.events import began
from tests.forks import Hpclm, Ranks, hpclm
from tests.runs import has_step, lines, losses, until

HANG = 10.0  # seconds that count as a hang here: more than a busy machine keeps a rank waiting
WATCHED = [f"cluster.hang_minutes={HANG / 60}", "cluster.preflight=false"]


def stacks(out):
    """Files with the stacks of ranks."""
    return {path.name: path.read_text() for path in (out / "logs/errors").glob("*/rank-*.txt")}


LONG = ["budget.steps=120", "checkpoint.every=20", "batch.micro_size=1"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_and_the_run_goes_on_as_if_nothing_had_been(rank, tiny, tmp_path):
    words, out = tiny("run", *LONG, *WATCHED), tmp_path / "run"
    with Ranks(2, words) as ranks:
        ranks.wait_for(out, 7)
        stopped, other = ranks.processes[rank], ranks.processes[1 - rank]
        stopped.send_signal(signal.SIGSTOP)
        assert other.wait() == 85, other.communicate()
        stopped.kill()  # as the launcher does
        stopped.wait()
    text = (out / "log.txt").read_text()
    said = f"rank {rank} on {socket.gethostname()} (pid {stopped.pid}) is blocking the others, it does not answer"
    assert text.count(" E ") == text.count(" E no progress for ") == 1 and said in text, text
    ending = summary.read_summary(out)["ending"]
    assert ending.startswith("no progress for ") and said in ending
    [(name, stack)] = ((name, stack) for name, stack in stacks(out).items() if "blocked" not in name)
    assert name == f"rank-{1 - rank}.txt" and "loop.py" in stack and "in run" in stack
    [report] = events.of_kind(events.read_events(out), "hang")
    assert report["culprits"] == [rank] and [row["rank"] for row in report["ranks"]] == [1 - rank]
    if rank:
        return
    for name in ("run", "whole"):
        with Ranks(2, tiny(name, *LONG, "cluster.preflight=false")) as ranks:
            assert {code for code, _ in ranks.wait().values()} == {0}
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_rank_that_never_returns_from_its_own_code_is_named_with_the_line(tiny, tmp_path):
    more = ["budget.steps=1000", "data.source=tests.faults:stuck", "data.workers=0", "batch.micro_size=1"]
    words = tiny("run", *more, *WATCHED)
    with Ranks(2, words) as ranks:
        assert {code for code, _ in ranks.wait().values()} == {85}
    told = [line for line in lines(tmp_path / "run/log.txt") if " E " in line or line.startswith("  rank")]
    assert re.search(r"rank 1 on .* is blocking the others, in step \d+, at tests.faults:\d+ in wait", told[0])
    assert re.fullmatch(r"  rank 0: step \d+, (waiting in \w+|in the backward pass) \(hpclm[.]\S+ in \w+\)", told[1])
    assert "in wait" in stacks(tmp_path / "run")["rank-1.txt"]


@pytest.mark.slow
def test_a_rank_in_which_python_itself_is_blocked_leaves_its_stacks(tiny, tmp_path):
    words = tiny("run", "budget.steps=1000", "data.source=tests.faults:holding", "batch.micro_size=1", *WATCHED)
    with Ranks(2, words) as ranks:
        assert ranks.processes[0].wait() == 85
        until(lambda: "faults.py" in stacks(tmp_path / "run").get("rank-1-blocked.txt", ""), "the stacks")
    assert "rank 1 on" in (tmp_path / "run/log.txt").read_text()


@pytest.mark.whole  # torchrun waits for 30 s before it kills a rank
@pytest.mark.parametrize("launcher", ["local", pytest.param("mpirun", marks=pytest.mark.mpi)])
def test_a_launcher_ends_with_its_stopped_rank_and_asks_to_be_started_again(launcher, tiny, tmp_path):
    words = tiny("run", "budget.steps=100000", "batch.micro_size=1", *WATCHED, f"job.cluster={launcher}", "job.gpus=2")
    env = os.environ | {"OMP_NUM_THREADS": "1", "HPCLM_SITE": ""}
    with Hpclm("submit", *words, env=env, merged=True) as process:
        until(lambda: has_step(tmp_path / "run", 3), "step 3", process)
        ranks = [attempt["pid"] for attempt in began(tmp_path / "run")]
        others = [pid for pid in descendants(process.pid) if training(pid) and pid not in ranks]
        os.kill(others[0], signal.SIGSTOP)
        said, _ = process.communicate()
    assert process.returncode == 85, said
    assert "rank 1 on" in said and "is blocking the others, it does not answer" in said and "was killed" not in said
    assert "is blocking the others" in summary.read_summary(tmp_path / "run")["ending"]


def descendants(pid):
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def training(pid):
    """Whether a process is a rank, and not a launcher, a guard or a guardian."""
    with open(f"/proc/{pid}/cmdline") as file:
        words = file.read().split("\0")
    return words[1:5] == ["-P", "-u", "-m", "hpclm.train"]


def test_what_takes_long_and_a_pause_of_all_ranks_are_no_hang(tiny, tmp_path):
    words = tiny("run", "budget.steps=60", "data.source=tests.faults:late", "batch.micro_size=1", *WATCHED)
    with Ranks(2, words, TEST_PAUSE=HANG + 2) as ranks:  # rank 0 builds the data while the other waits, then that one
        ranks.wait_for(tmp_path / "run", 5)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in ranks.processes.values():
                process.send_signal(number)
            time.sleep(HANG + 2 if number == signal.SIGSTOP else 0)
        ended = ranks.wait()
    assert {code for code, _ in ended.values()} == {0}, ended
    assert not events.of_kind(events.read_events(tmp_path / "run"), "hang")


def test_a_slow_rank_is_named_in_the_log_and_the_status_within_twenty_steps(tiny, tmp_path):
    more = ["budget.steps=100000", "batch.micro_size=1", "data.workers=0", "cluster.preflight=false"]
    with Ranks(2, tiny("run", *more, "data.source=tests.faults:slow"), TEST_PAUSE=0.1) as ranks:
        until(lambda: events.of_kind(events.read_events(tmp_path / "run"), "slow"), "a slow rank")
        told = [line for line in lines(tmp_path / "run/log.txt") if "is slow: " in line]
        [found] = json.loads(hpclm("status", tmp_path / "run", "--json", check=0).stdout)
        words = hpclm("status", tmp_path / "run", check=0).stdout
        for process in ranks.processes.values():
            process.terminate()
        ranks.wait()
    assert len(told) == 1 and f"rank 1 on {socket.gethostname()}" in told[0]
    assert int(re.search(r"\(step (\d+)\)", told[0])[1]) <= 20
    assert found["slow"][0]["rank"] == 1 and "slower than the others: rank 1 on" in words


@pytest.mark.parametrize("phase, hangs", [("data", False), ("step", True), ("start-up", True), ("", False)])
def test_what_may_take_any_time_is_no_hang(phase, hangs):
    """Such as the preparation of the data."""
    found = []
    [me] = ranks = [RankInfo(0, 1)]
    watchdog = Watchdog(
        ClusterConfig(hang_minutes=0.1), SimpleNamespace(me=me, ranks=ranks, hang=found.append, answer=lambda: None)
    )
    watchdog.enter("step")
    watchdog.enter(phase)
    for seconds, late in ((5, False), (121, hangs)):
        watchdog.now += seconds
        watchdog._check()
        assert bool(found) == late

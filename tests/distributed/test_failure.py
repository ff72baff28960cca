"""The cause of a run's end, from the files that its ranks have left."""

import pytest

from hpclm.base.errors import ConfigError
from hpclm.distributed import failure
from hpclm.distributed.ending import RankEnding
from hpclm.distributed.hang import RankState
from hpclm.distributed.ranks import RankInfo
from hpclm.node import ends
from hpclm.node.ends import End

RANKS = [RankInfo(rank, 4, host=f"node{1 + rank // 2}", pid=100 + rank) for rank in range(4)]
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer [10.0.0.2]:1234"


def lost(rank, time):
    """A rank that has lost a connection."""
    return End(rank, 85, CLOSED, time, symptom=True)


def stuck(rank, time, **doing):
    """A rank that makes no progress."""
    return End(rank, 85, "no progress", time, hang={"phase": "step", "step": 12, "idle": 60.0, **doing})


@pytest.fixture
def verdict(tmp_path, monkeypatch):
    """The verdict on a start of four ranks that have left these ends."""
    monkeypatch.setenv(ends.FOLDER, str(tmp_path))
    RankEnding(RANKS[0], RANKS)

    def of(*left):
        for end in left:
            ends.leave(tmp_path, end)
        return failure.verdict(tmp_path)

    return of


def test_the_earliest_cause_counts_and_no_symptom(verdict):
    found = verdict(lost(0, 1.0), End(2, 64, "no data", 2.0), End(1, 1, "boom", 3.0), lost(3, 1.5))
    assert (found.exit_code, found.text, found.gone) == (64, "no data", ())


@pytest.mark.parametrize(
    "left, names",
    [
        ([0, 1], "ranks 2-3 on node2 left no message: killed"),
        ([0, 1, 2], "rank 3 on node2 (pid 103) left no message: killed"),
        ([3], "ranks 0-2 on node1, node2 left no message: killed"),
        ([0, 1, 2, 3], "none was killed, so the network may be at fault: RuntimeError: [gloo"),
    ],
)
def test_ranks_that_left_no_file_are_the_cause_where_the_others_only_lost_a_connection(left, names, verdict):
    found = verdict(*(lost(rank, float(rank)) for rank in left))
    assert found.exit_code == 85 and names in found.text and not found.hang
    assert [info.rank for info in found.gone] == sorted({0, 1, 2, 3} - {*left})


def test_of_ranks_that_hang_the_one_that_could_not_say_so_blocks_the_others(verdict):
    waits = dict(location="hpclm.engine.step:88 in gradient_norm", waits_in="all_reduce")
    found = verdict(*(stuck(rank, float(rank), **waits) for rank in (0, 1, 3)), End(2, 137, "killed", 9.0))
    assert found.hang and found.exit_code == 85
    assert "no progress for 60 s: rank 2 on node2 (pid 102) is blocking the others, it does not answer" in found.text
    assert "ranks 0-1, 3: step 12, waiting in all_reduce" in found.text


def test_a_rank_that_waits_says_that_it_is_alive_once_another_has_failed(verdict, tmp_path):
    waits = RankEnding(RANKS[2], RANKS)
    waits.answer()
    assert not ends.traces(tmp_path)
    assert [info.rank for info in verdict(lost(0, 1.0), lost(1, 1.0)).gone] == [2, 3]
    waits.answer()
    assert [info.rank for info in verdict().gone] == [3]


def test_all_ranks_are_named_where_none_has_left_anything_and_nothing_is_known_of_those_that_have_not_met(
    verdict, tmp_path
):
    found = verdict()
    assert found.exit_code is None and "ranks 0-3 on node1, node2 left no message: killed" in found.text
    (tmp_path / ends.ANNOUNCED).unlink()
    assert verdict() is None


def test_one_process_reports(tmp_path):
    assert ends.claim_report(tmp_path) and not ends.claim_report(tmp_path)
    ends.announce(tmp_path, [])  # another start
    assert ends.claim_report(tmp_path)


def test_only_a_lost_peer_counts_as_lost():
    assert failure.lost_a_peer(RuntimeError(CLOSED))
    assert not failure.lost_a_peer(RuntimeError("boom")) and not failure.lost_a_peer(ConfigError("the socket is blue"))


@pytest.mark.parametrize(
    "error, code",
    [
        (ConfigError("x"), 64),
        (KeyboardInterrupt(), 130),
        (SystemExit(75), 75),
        (SystemExit(0), 1),
        (ValueError("x"), 1),
    ],
    ids=repr,
)
def test_an_error_has_the_exit_code_of_its_kind(error, code):
    assert failure.described_error(error)[0] == code


def test_a_failure_s_text_is_short_and_none_of_its_lines_looks_like_another_entry():
    text = failure.shortened("a\n2026-03-01 10:15:00 I done" * 10**5)
    assert len(text) < 2 * failure.MAX_TEXT_CHARACTERS
    assert all(line.startswith("  ") for line in text.splitlines()[1:])


def test_a_hang_state_survives_its_file(tmp_path):
    state = RankState("step", 3, 1.5, "here:1 in f", "barrier")
    ends.leave(tmp_path, End(0, 85, "", 1.0, hang=vars(state)))
    assert RankState(**ends.read_ends(tmp_path)[0].hang) == state

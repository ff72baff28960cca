"""The cause that ranks leave in their store."""

from datetime import timedelta

from torch.distributed import HashStore

from hpclm.distributed import failure
from hpclm.distributed.failure import Failure
from hpclm.distributed.rendezvous import RankInfo
from hpclm.distributed.store import JsonStore


def test_the_first_cause_counts_and_replaces_a_symptom():
    raw = HashStore()
    raw.set_timeout(timedelta(seconds=5))
    store = JsonStore(raw)
    assert failure.read(store) is None
    symptom, cause = Failure(2, "disconnected", 85, "closed"), Failure(3, "raised", 64, "no data")
    assert failure.publish(store, symptom) == symptom
    assert failure.publish(store, cause) == cause == failure.read(store)
    for later in (Failure(1, "killed", 1), symptom):
        assert failure.publish(store, later) == cause


def test_a_failure_s_text_is_short_and_none_of_its_lines_looks_like_another_entry():
    text = failure.shortened("a\n2026-03-01 10:15:00 I done" * 10**5)
    assert len(text) < 2 * failure.MAX_TEXT_CHARACTERS
    told = Failure(0, "raised", 1, text).describe([RankInfo(0, 1, 0, 1, host="node1")]).splitlines()
    assert told[0].startswith("rank 0 on node1") and all(line.startswith("  ") for line in told[1:])

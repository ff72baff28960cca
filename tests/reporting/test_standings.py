"""Which runs diverged, and which is the best."""

import json

from hpclm.reporting import history, standings
from tests.reporting import made
from tests.reporting.test_charts import falling


def test_a_spike_that_the_run_recovers_from_is_no_divergence(tmp_path):
    losses = falling(100)
    losses[50:60] = [50.0] * 10
    losses[98:] = [None] * 2  # two steps are too few to tell
    found = history.read_history(made.trained(tmp_path / "one", losses))
    assert standings.diverged(found, standings.healthy_limit({"one": found})) is None
    losses[90:] = [None] * 10
    (tmp_path / "b").mkdir()
    found = history.read_history(made.trained(tmp_path / "b" / "one", losses))
    assert standings.diverged(found, standings.healthy_limit({"one": found})) == 91


def test_runs_that_diverged_come_last_and_those_without_a_validation_loss_after_those_with_one():
    measured, other = standings.Standing("a", 2.5, 7, 2.0, 50, None), standings.Standing("b", 2.25, 7, 3.0, 50, None)
    trained, lost = standings.Standing("c", None, None, 1.0, 50, None), standings.Standing("d", 1.0, 7, None, 50, 30)
    ranked = sorted([lost, trained, measured, other], key=lambda standing: standing.key(False))
    assert [standing.name for standing in ranked] == ["b", "a", "c", "d"]


def test_runs_are_ranked_by_bits_per_byte_if_all_that_were_evaluated_have_them(tmp_path):
    runs = {}
    for name, losses, bits in (("few tokens", [4.0, 3.5], 1.0), ("many tokens", [3.0, 2.5], 1.2)):
        out = made.trained(tmp_path / name, losses)
        with (out / "metrics.jsonl").open("a") as file:
            row = {"step": 2, "part": "valid", "validation_loss": losses[1], "validation_bits_per_byte": bits}
            file.write(json.dumps(row) + "\n")
        runs[name] = history.read_history(out)
    assert [entry.name for entry in standings.ranked(runs)] == ["few tokens", "many tokens"]
    runs["unknown"] = history.read_history(made.trained(tmp_path / "unknown", [3.0, 2.0], {2: 3.0}))
    assert standings.ranked(runs)[0].name == "many tokens"

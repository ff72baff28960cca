"""The steps of a run by its events alone, and the samples of steps."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpclm.base.errors import ConfigError
from hpclm.config.plan import Plan, Rampup
from hpclm.ledger.history import Span, StepCounter, spans
from hpclm.rundir import events


def run(out, happened, rows=()):
    """A run's events, from (kind, step); and rows of (step, time)."""
    out.mkdir()
    for number, (kind, step, *more) in enumerate(happened):
        if kind == "began":
            facts = dict(from_step=step, samples=8 * step, planned=96, config="config.yaml", began=100.0 * number)
            events.append(out, "began", **facts)
        else:
            events.append(out, kind, step=step, **dict(*more))
    with (out / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps({"step": step, "time": time}) + "\n" for step, time in rows)
    return out


def seen(out):
    """Run, attempt, first and last step, last step that was kept."""
    return [(span.out.name, span.attempt, span.first, span.last, min(span.kept, span.last)) for span in spans(out)]


def test_steps_that_later_attempts_repeat_are_undone(tmp_path):
    happened = [
        ("began", 0),
        ("reached", 7),
        ("began", 4),
        ("began", 4),  # killed before its first step
        ("began", 12),
        ("reached", 20),
        ("roll back", 2),
        ("rolled back", 2),
        ("began", 2),
    ]
    out = run(tmp_path / "run", happened, [(1, 50.0), (2, 50.0), (3, 850.0), (4, 860.0)])
    assert seen(out) == [("run", 1, 1, 7, 2), ("run", 3, 5, 12, 2), ("run", 4, 13, 20, 2), ("run", 5, 3, 4, 4)]


def test_rows_that_an_attempt_found_are_not_its_steps(tmp_path):
    out = run(tmp_path / "run", [("began", 0), ("reached", 9), ("began", 4)], [(8, 50.0), (9, 60.0)])
    assert seen(out) == [("run", 1, 1, 9, 4)]


def test_a_branch_begins_with_the_steps_of_its_trunk_as_they_were_then(tmp_path):
    trunk = run(tmp_path / "trunk", [("began", 0), ("reached", 9), ("began", 4), ("reached", 12), ("began", 2)])
    begun = [("branched", 8, dict(trunk=str(trunk), attempts=2)), ("began", 8)]
    branch = run(tmp_path / "branch", begun, [(10, 500.0)])
    last = run(tmp_path / "last", [("branched", 9, dict(trunk=str(branch), attempts=1)), ("began", 9)], [(11, 500.0)])
    expected = [("trunk", 1, 1, 4, 4), ("trunk", 2, 5, 8, 8)]
    assert seen(branch) == [*expected, ("branch", 1, 9, 10, 10)]
    assert seen(last) == [*expected, ("branch", 1, 9, 9, 9), ("last", 1, 10, 11, 11)]
    trunk.rename(tmp_path / "away")
    with pytest.raises(ConfigError, match=r"goes on from step 8 of .*/trunk, which does not exist"):
        spans(branch)


def test_an_attempt_without_its_samples_is_refused(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    events.append(out, "began", from_step=0, config="config.yaml")
    (out / "metrics.jsonl").write_text('{"step": 3}\n')
    with pytest.raises(ConfigError, match=r"attempt 1 .* did not record how many samples"):
        spans(out)


@given(
    begin=st.integers(0, 300),
    steps=st.integers(1, 60),
    rampup=st.one_of(st.none(), st.tuples(st.sampled_from([4, 8, 16]), st.sampled_from([4, 8]), st.integers(1, 400))),
)
def test_steps_and_samples_are_those_of_the_plan(begin, steps, rampup, tmp_path_factory):
    ramp = Rampup(*rampup) if rampup else None
    plan = Plan(1, 16, 1, ramp)
    counter = StepCounter(Span(None, 1, 5, 4 + steps, 99, begin, None, ""), 16, ramp)
    consumed = begin
    for step in range(5, 5 + steps):
        size = plan.batch_size(consumed)
        assert counter.samples(step) == range(consumed, consumed + size)
        numbers = np.arange(consumed, consumed + size)
        assert counter.steps(numbers).tolist() == [step] * size
        consumed += size
    assert counter.all_samples() == range(begin, consumed)

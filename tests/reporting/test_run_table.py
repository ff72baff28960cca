"""One run in detail, and several as a table."""

import pytest

from hpclm.reporting import run_table
from hpclm.rundir import events, runs
from hpclm.rundir.state import state_of
from tests.checkpoint import state
from tests.events import note
from tests.rundir.test_runs import make
from tests.test_status import attempt, rows


def detail(out):
    """What is told of a run, by title."""
    lines = [*run_table.detail(state_of(runs.read_run(out), {}))]
    return {line[:12].strip(): line[12:] for line in lines}


@pytest.mark.parametrize(
    "ended, then",
    [
        (("done", "done at step 5", 0), "hpclm report {0}"),
        (("stopped", "stopped at step 5 (stop_at)", 0, True), "hpclm logs {0} · hpclm resume {0} stop_at=null"),
        (("exited", "SIGTERM: saved at step 5", 85), "hpclm logs {0} · hpclm resume {0}"),
        (("phase", "ended at phase 2", 85), "hpclm logs {0} · hpclm resume {0}"),
        (("failed", "x is wrong", 1), "hpclm logs {0} · hpclm resume {0}"),
        (("failed", "the loss is not finite", 93), "hpclm logs {0} · the log ends with what to change"),
    ],
)
def test_what_to_do_next_depends_on_how_a_run_ended(ended, then, tmp_path):
    out = make(tmp_path / "a", [attempt()], rows(5), ended)
    assert detail(out)["next"] == then.format(out)


def test_everything_about_a_run_is_told_a_line_each(tmp_path):
    last = attempt(from_step=2, host="n1", size=8, launcher="Slurm", config="config-history/0002.yaml")
    figures = [*rows(5), {"step": 4, "validation_loss": 2.25}]
    out = make(tmp_path / "a", [attempt(), last], figures, ("exited", "SIGTERM: saved at step 5", 85), log_txt="x")
    state.saved(out / "checkpoints", [4])
    events.append(out, "roll back", step=3)
    told = detail(out)
    assert (told["step"], told["loss"], told["checkpoint"], told["tokens/s"]) == ("5/20", "2.5000", "4", "100")
    assert told["validation"] == "2.2500 at step 4" and told["ended"] == "SIGTERM: saved at step 5"
    begun = f"2 (1 ended by a signal), the last from step 2 on n1, 8 ranks by Slurm, {last['time']}, settings in config-history/0002.yaml"
    assert told["attempts"] == begun and told["logs"] == f"{out}/log.txt"
    note(out, "began", **last)
    note(out, "ended", state="phase", ending="ended at phase 2", code=85)
    assert detail(out)["attempts"].startswith("3 (1 ended at a phase, 1 ended by a signal), the last from step 2")
    assert detail(out)["state"] == "exited"
    assert told["rollback"] == "the next attempt resumes from step 3"


@pytest.mark.parametrize(
    "launcher, size, text", [("local", 1, ", 1 rank, launched locally"), ("torchrun", 2, ", 2 ranks by torchrun")]
)
def test_who_launched_how_many_ranks_is_told(launcher, size, text, tmp_path):
    out = make(tmp_path / "a", [attempt(size=size, launcher=launcher)], rows(5))
    assert f" on elsewhere{text}, " in detail(out)["attempts"]


def test_a_queue_that_does_not_answer_is_told_once_below_the_table(tmp_path):
    read = [runs.read_run(make(tmp_path / name, [attempt(job_id="7")], rows(5))) for name in "ab"]
    lines = [*run_table.table([state_of(run, None, "squeue did not answer") for run in read])]
    assert len(lines) == 4 and lines[0].split()[:3] == ["RUN", "STATE", "STEP"]
    assert lines[-1] == "queue: unknown (squeue did not answer)"
    assert run_table.values(state_of(read[0], None, "why"))["queue"] == "unknown: why"

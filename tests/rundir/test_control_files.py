"""Requests by files in a run directory."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpclm import cli
from hpclm.base.errors import HpclmError
from hpclm.launch import jobs
from hpclm.rundir.control_files import KILL_SWITCH, ControlFiles, create, followed
from hpclm.rundir.lease import Lease
from tests.checkpoint import state
from tests.rundir.test_runs import make
from tests.runs import until
from tests.test_status import attempt, rows


def test_a_request_is_a_file_of_the_owners_and_no_link_until_it_is_carried_out(tmp_path):
    requests = ControlFiles(tmp_path, str(tmp_path / "everywhere"))
    (tmp_path / "stop").symlink_to(tmp_path / "other")
    (tmp_path / "other").touch()
    create(tmp_path, "save-now")
    found = [requests.requested(name, now=True) for name in ("save-now", "stop", KILL_SWITCH)]
    assert found == [True, False, False]
    requests.remove("save-now")
    assert not requests.requested("save-now") and not (tmp_path / "save-now").exists()
    (tmp_path / "everywhere").touch()
    assert requests.requested(KILL_SWITCH, now=True)


@pytest.mark.parametrize(
    "steps, said",
    [
        ([], "it was at step 5, and nothing is saved. The request was withdrawn"),
        ([3, 4], "it was at step 5, and step 4 is saved. The request was withdrawn"),
    ],
)
def test_a_request_to_a_run_that_ends_without_saving_is_withdrawn_and_says_what_is_lost(steps, said, tmp_path):
    out = make(tmp_path / "a", [attempt()], rows(5), ("failed", "x is wrong", 1))
    state.saved(out / "checkpoints", steps)
    path = create(out, "save-now")
    with pytest.raises(HpclmError) as caught:
        followed(path, time.monotonic() + 600, jobs.States(1))
    assert str(caught.value) == f"{out} has ended meanwhile: failed, x is wrong; {said}" and not path.exists()


def test_a_request_to_a_run_that_ends_with_everything_saved_is_withdrawn_and_said_to_be_needless(tmp_path, capsys):
    out = make(tmp_path / "a", [attempt()], rows(5), ("done", "done at step 5", 0))
    state.saved(out / "checkpoints", [5])
    assert not followed(create(out, "stop"), time.monotonic() + 600, jobs.States(1))
    assert capsys.readouterr().out == f"{out} has ended meanwhile: done at step 5; saved at step 5\n"
    assert not (out / "stop").exists()


def test_a_request_that_is_not_followed_in_time_stays(tmp_path):
    out = make(tmp_path / "a", [attempt()], rows(5))
    with Lease(out), pytest.raises(HpclmError, match="a has not responded in time; the request stays pending"):
        followed(create(out, "stop"), time.monotonic() - 1, jobs.States(1))
    assert (out / "stop").exists() and followed(out / "gone", 0.0, jobs.States(1))


@pytest.mark.parametrize(
    "verb, file, done",
    [
        ("save", "save-now", "saving; see: hpclm checkpoints"),
        ("stop", "stop", "saved and ended; continue with: hpclm resume"),
    ],
)
def test_the_verb_waits_until_a_run_has_complied_and_says_what_comes_next(verb, file, done, tmp_path, capsys):
    out = make(tmp_path / "a", [attempt()], rows(5))

    def comply():
        until((out / file).exists)
        (out / file).unlink()

    with Lease(out), ThreadPoolExecutor() as pool:
        complied = pool.submit(comply)
        assert cli.main(["request", str(out), verb]) == 0
        complied.result()
    assert capsys.readouterr().out == f"{done} {out}\n"

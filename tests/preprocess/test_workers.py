"""Workers encode what takes long; little text has none to wait for."""

import os

import pytest

from hpclm.preprocess import workers


def double_here(number):
    return 2 * number, os.getpid()


def test_work_that_is_soon_done_starts_no_process(monkeypatch):
    monkeypatch.undo()  # what other tests of datasets need
    results = list(workers.ordered(double_here, range(50), 2))
    assert results == [(2 * number, os.getpid()) for number in range(50)]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has one process")
def test_work_that_takes_longer_is_finished_by_others_in_its_order():
    results = list(workers.ordered(double_here, range(50), 2))
    assert [value for value, _ in results] == [2 * number for number in range(50)]
    assert os.getpid() not in {process for _, process in results}


def test_there_are_no_more_workers_than_cores(monkeypatch):
    monkeypatch.setattr(workers.threads, "usable", lambda: 1)
    results = list(workers.ordered(double_here, range(50), 64))
    assert {process for _, process in results} == {os.getpid()}

"""Tests of datasets have little text: where they ask for workers, these start at once."""

import pytest

from hpclm.preprocess import workers


@pytest.fixture(autouse=True)
def workers_at_once(monkeypatch):
    monkeypatch.setattr(workers, "ALONE", 0)

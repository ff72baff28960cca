"""A lock on a folder, and the words for who has it."""

import fcntl
import os
import socket

import pytest

from hpclm.errors import LockedError
from hpclm.node.job import Job, JobIdentity
from hpclm.rundir import lock


def test_a_folder_that_is_held_is_refused_with_the_holder_and_free_again_afterwards(tmp_path):
    holder = f"process {os.getpid()} on {socket.gethostname()}, job 7"
    lock.refuse_if_held(tmp_path, "x.lock")
    with lock.held(tmp_path, "x.lock", Job(JobIdentity("Slurm", "7"))):
        for refused in (
            lambda: lock.refuse_if_held(tmp_path, "x.lock"),
            lock.held(tmp_path, "x.lock", Job()).__enter__,
        ):
            with pytest.raises(LockedError) as caught:
                refused()
            way_out = f"wait for it, end it (hpclm cancel {tmp_path}), or choose another out="
            assert str(caught.value) == f"{tmp_path} is in use by another run ({holder}); {way_out}"
    with (tmp_path / "x.lock").open() as file:  # somebody else looks, too
        assert lock.try_lock(file, tmp_path / "x.lock", fcntl.LOCK_SH)
        lock.refuse_if_held(tmp_path, "x.lock")
    assert (tmp_path / "x.lock").read_text() == ""
    assert lock.described({}) == "process unknown on unknown"

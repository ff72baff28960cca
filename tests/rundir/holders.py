"""Processes that hold a run directory: works for tests.traced."""

import os

from hpclm.base.errors import HpclmError, LockedError
from hpclm.node.job import OwnJob
from hpclm.rundir.lease import Lease
from tests.checkpoint.state import State, progress, store
from tests.runs import until


def job(start, number="7"):
    """A job in its ``start``-th restart."""
    return OwnJob("Slurm", number, start)


def hold(gate, folder, held_by):
    """Hold it until, after the second gate, a heartbeat finds it lost; whether it was, and what a check then says."""
    with Lease(folder, seconds=0.6, job=held_by) as lease:
        gate()
        gate()
        until(lambda: lease.lost, "the loss of the lease")
        try:
            lease.check()
        except LockedError as error:
            return lease.lost, str(error)
        return lease.lost, None


def save_late(gate, folder, value):
    """An attempt that does not know that it was given up saves step 3."""
    with Lease(folder, job=job(0)) as lease:
        made = store(folder / "c", keep=3, lease=lease)
        gate()
        try:
            made.save(State(value), progress(3))
        except HpclmError as error:
            return type(error).__name__
        return "saved"


def sign_off(gate, folder):
    """Hold it, and leave it at the gate."""
    with Lease(folder, job=job(0)):
        gate()


def contend(gate, folder, held_by, count):
    """Take it, if it can be had, and look whether it is still held when all ``count`` attempts have tried."""
    gate()
    tried = folder / f"tried-{os.getpid()}"
    try:
        with Lease(folder, job=held_by) as lease:
            tried.touch()
            until(lambda: len(list(folder.glob("tried-*"))) == count, "the other attempts")
            lease.check()
            return lease.generation
    except LockedError as error:
        tried.touch()
        return str(error)

"""A rank ends with its launcher; that it does is tried in tests/launch/test_killed_launcher.py."""

import ctypes
import signal

import pytest

from hpclm.node import parent
from tests import forks

PR_GET_PDEATHSIG = 2


def death_signal(verb, variable):
    """The signal that this process gets when its parent ends, once it has begun as a rank."""
    parent.end_with_launcher(verb, {variable: "0"})
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value


@pytest.mark.parametrize(
    "verb, variable, number",
    [
        *(("train", name, signal.SIGKILL) for name in parent.LAUNCHED),
        ("train", "SLURM_STEP_ID", 0),  # which Slurm ends
        ("train", "HOME", 0),  # without a launcher
        ("status", "OMPI_COMM_WORLD_RANK", 0),
    ],
)
def test_a_rank_of_mpirun_or_torchrun_ends_with_what_started_it(verb, variable, number):
    assert forks.call(death_signal, verb, variable) == number

import json
import os

import pytest

from hpclm.cluster import hardware
from hpclm.cluster.bootstrap import World, detect
from hpclm.cluster.lease import Lease
from hpclm.errors import ConfigError, LockedError

SLURM = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
OMPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    "env, world",
    [
        ({}, World("single", 0, 1, 0)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, World("single", 0, 1, 0)),  # a batch script, not a step
        (SLURM, World("Slurm", 3, 4, 1)),
        (OMPI, World("Open MPI", 2, 4, 0)),
        ({"MPI_LOCALRANKID": "1", "PMI_RANK": "1", "PMI_SIZE": "2"}, World("MPI", 1, 2, 1)),
        (SLURM | OMPI, World("Open MPI", 2, 4, 0)),
        (SLURM | OMPI | TORCHRUN, World("torchrun", 1, 2, 1)),
    ],
)
def test_the_innermost_launcher_says_who_this_process_is(env, world):
    assert detect(env) == world


def test_a_missing_variable_is_named():
    with pytest.raises(ConfigError, match="Slurm started this process, but 'SLURM_LOCALID' is missing"):
        detect({k: v for k, v in SLURM.items() if k != "SLURM_LOCALID"})


@pytest.mark.parametrize(
    "name, peak",
    {
        "NVIDIA H200": 989e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA L40": 181e12,
        "NVIDIA L4": 121e12,
        "NVIDIA RTX A1000": None,
        "NVIDIA GeForce RTX 4090": None,
    }.items(),
)
def test_a_peak_belongs_to_the_gpu_of_that_very_name(name, peak):
    assert hardware.peak_of(name) == peak


def test_a_folder_has_one_holder_and_a_leaver_leaves_no_name(tmp_path):
    with Lease(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
        with pytest.raises(LockedError, match=f'"pid": {os.getpid()}'), Lease(tmp_path):
            pass
    assert (tmp_path / "lock").read_text() == ""
    with Lease(tmp_path):
        pass

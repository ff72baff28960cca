import os

import pytest

from hpclm.node import environment

SLURM = {"SLURM_JOB_ID": "12", "TMPDIR": "/scratch"}
OWN = {"TORCH_EXTENSIONS_DIR": f"/scratch/hpclm-extensions-{os.getuid()}-12-0"}


@pytest.mark.parametrize(
    "before, builds, after",
    [
        ({}, False, {}),
        ({"LOCAL_RANK": "3"}, False, {}),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3"}, False, {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}),
        (SLURM, False, SLURM),
        (SLURM, True, {**SLURM, **OWN}),
        ({"TORCH_EXTENSIONS_DIR": "/mine", **SLURM}, True, {"TORCH_EXTENSIONS_DIR": "/mine", **SLURM}),
        ({}, True, {}),
    ],
)
def test_deepspeed_gets_the_device_and_a_build_folder(before, builds, after):
    env = dict(before)
    environment.for_deepspeed("cuda", 1, builds, env)
    assert env == {**after, "DS_ACCELERATOR": "cuda", "LOCAL_RANK": "1"}

import os

import pytest

from hpclm.cluster import environment

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
def test_deepspeed_is_told_the_device_and_where_to_build(before, builds, after):
    env = dict(before)
    environment.for_deepspeed("cuda", 1, builds, env)
    assert env == {**after, "DS_ACCELERATOR": "cuda", "LOCAL_RANK": "1"}

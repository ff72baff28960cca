import json
import os

import pytest

from hpclm.errors import LockedError
from hpclm.node import gpus
from hpclm.rundir.lease import Lease


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
def test_the_peak_is_that_of_the_exact_model(name, peak):
    assert gpus.peak_of(name) == peak


def test_a_folder_has_one_holder_and_a_released_lock_names_none(tmp_path):
    with Lease(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
        with pytest.raises(LockedError, match=f"process {os.getpid()} on "), Lease(tmp_path):
            pass
    assert json.loads((tmp_path / "lock").read_text()) == {"generation": 1, "job": None, "start": 0}
    with Lease(tmp_path):
        pass

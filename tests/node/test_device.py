import pytest
import torch

from hpclm.config.engine import EngineConfig
from hpclm.errors import HpclmError
from hpclm.node import hardware


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_job_that_requested_gpus_and_sees_none_does_not_train_on_the_cpu():
    job = {"SLURM_JOB_ID": "7", "SLURM_GPUS_PER_NODE": "8"}
    with pytest.raises(HpclmError, match=r"asked Slurm for GPUs \(SLURM_GPUS_PER_NODE=8\), but PyTorch finds none"):
        hardware.device(EngineConfig(), 0, 1, job)
    assert hardware.device(EngineConfig(device="cpu"), 0, 1, job).type == "cpu"
    assert hardware.device(EngineConfig(), 0, 1, {"SLURM_JOB_ID": "7"}).type == "cpu"


def test_gpus_that_are_named_but_not_found_are_no_reason_to_train_on_the_cpu():
    with pytest.raises(HpclmError, match=r"CUDA_VISIBLE_DEVICES=0,1 names GPUs, but PyTorch finds none"):
        hardware.device(EngineConfig(), 0, 1, {"CUDA_VISIBLE_DEVICES": "0,1"})
    for none in ("", "-1", "NoDevFiles"):
        assert hardware.device(EngineConfig(), 0, 1, {"CUDA_VISIBLE_DEVICES": none}).type == "cpu"
    assert hardware.device(EngineConfig(device="cpu"), 0, 1, {"CUDA_VISIBLE_DEVICES": "0"}).type == "cpu"


@pytest.fixture
def precision():
    """Puts back how fp32 products run."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("precision")
def test_only_precision_decides_how_products_run_and_no_speed_is_claimed(monkeypatch):
    monkeypatch.setattr(hardware, "_product_error", lambda: 1e-7)
    said = hardware.set_matmul(torch.device("cpu"))
    assert said == "fast: oneDNN, with fp32's precision here (relative error 1e-07)"
    assert torch.get_float32_matmul_precision() == "medium"

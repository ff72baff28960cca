import pytest
import torch

from hpclm.base.errors import ConfigError, HpclmError
from hpclm.config.engine import EngineConfig
from hpclm.node import gpus, hardware


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


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_device_without_a_number_is_the_one_in_use(name):
    hardware.use(torch.device(name))


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
    assert said == "oneDNN, full precision (relative error 1e-07)"
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize(
    "local_rank, local_size, gpus, visible, device",
    [(3, 4, 4, "0,1,2,3", 3), (3, 4, 8, None, 3), (3, 4, 1, "3", 0), (0, 1, 1, None, 0), (0, 1, 8, None, 0)],
)
def test_each_process_has_its_own_gpu(local_rank, local_size, gpus, visible, device):
    assert hardware.gpu_of(local_rank, local_size, gpus, visible) == device


@pytest.mark.parametrize(
    "gpus, visible, said",
    [
        (2, "4,5", "they see 2 GPUs (CUDA_VISIBLE_DEVICES=4,5); start 2 on each node, ask for 4 GPUs"),
        (1, None, "1 GPU"),
    ],
)
def test_fewer_gpus_than_processes_are_refused(gpus, visible, said):
    with pytest.raises(ConfigError, match="4 processes run on ") as refused:
        hardware.gpu_of(0, 4, gpus, visible)
    assert said in str(refused.value)


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
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb": None,
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb": None,
        "GRID A100-10C": None,
        "NVIDIA L40S-48Q": None,
        "NVIDIA GeForce RTX 4090": None,
    }.items(),
)
def test_the_peak_is_that_of_the_exact_model(name, peak):
    assert getattr(gpus.kind_of_device(name), "peak", None) == peak


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_a_16_bit_type_on_a_cpu_is_named_with_what_to_set(kind):
    hint = hardware.slow_type(torch.device("cpu"), hardware.TYPES[kind])
    assert f"products in {kind} as in fp32" in hint and "engine.precision=fp32" in hint
    assert hardware.slow_type(torch.device("cpu"), torch.float32) is None
    assert hardware.slow_type(torch.device("cuda"), hardware.TYPES[kind]) is None

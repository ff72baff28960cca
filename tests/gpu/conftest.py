"""Tests of what only a GPU can show. With HPCLM_TEST_DEVICE=cpu they are rehearsed where there is none."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device():
    """Where these tests compute."""
    name = os.environ.get("HPCLM_TEST_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU here")
    return torch.device(name)


@pytest.fixture
def gpu(device):
    """The same for what a CPU has nothing of: streams, separate memory, kernels to choose from."""
    if device.type != "cuda":
        pytest.skip("only a GPU has this")
    return device


@pytest.fixture
def words(tiny, device):
    """Words of a short run on the device: ``hpclm("train", *words("out", ...))``."""
    return lambda out, *more: tiny(out, f"engine.device={device.type}", "checkpoint.every=0", *more)

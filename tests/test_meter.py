import pytest
import torch

from hpclm import config, loop
from hpclm.cluster import hardware
from hpclm.model import count


def test_mfu_is_of_the_peak_of_all_processes_and_tokens_are_of_all(monkeypatch):
    monkeypatch.setattr(hardware, "peak_flops", lambda device, dtype: 1e12)
    run = config.load(None, ["model.context=128"])
    found = loop.speed(run, 4, torch.device("cpu"), torch.bfloat16)(samples=8, seconds=2.0)
    assert found["tokens_per_second"] == 8 * 128 / 2.0
    assert found["mfu"] == pytest.approx(512 * count.flops_per_token(run.model) / 4e12)

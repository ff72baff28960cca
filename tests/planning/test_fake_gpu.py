"""The memory of a step on a fake GPU."""

import torch
from torch import nn

from hpclm.planning.fake_gpu import fake_gpu, peak_memory


def test_what_is_free_before_the_end_of_a_step_counts():
    with fake_gpu(0, 1):
        model = nn.Linear(64, 32, bias=False)
        optimizer = torch.optim.SGD(model.parameters())

        found = peak_memory(model, optimizer, (), lambda: torch.ones(1024, 64))
    assert (found["Parameter"], found["Activation"]) == (4 * 64 * 32, 4 * 1024 * 64)

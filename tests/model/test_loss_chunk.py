"""How many tokens' logits a GPU computes at a time."""

import json
from types import SimpleNamespace

import pytest
import torch

from hpclm import cli
from hpclm.model.count import PER_LOGIT, ROOM, loss_chunk
from hpclm.model.loss import TokenLoss

GIB = 2**30


@pytest.mark.parametrize(
    "tokens, vocab, gib, expected",
    [
        (8192, 50304, 141, 8192),  # all of a micro-batch
        (16384, 50304, 141, 8192),  # two equal chunks, of at most 10,672
        (16384, 50304, 79, 8192),
        (16384, 50304, 40, 4096),  # a smaller GPU
        (16384, 25152, 79, 16384),  # with tensor parallelism
        (16384, 256_000, 79, 4096),
        (3 * 10_000, 50304, 79, 10_000),
        (10_679, 50304, 79, 5340),  # a prime number
        (1000, 50304, 24, 1000),
    ],
)
def test_the_logits_of_a_chunk_fit_4_gib_on_a_large_gpu(tokens, vocab, gib, expected):
    found = loss_chunk(tokens, vocab, gib * GIB)
    assert found == expected
    assert found <= 4096 or found * vocab * PER_LOGIT <= ROOM


def test_the_loss_goes_by_the_gpus_memory_and_by_its_part_of_the_vocabulary(monkeypatch):
    asked = []
    answer = SimpleNamespace(total_memory=79 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: asked.append(device) or answer)
    labels = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1), numel=lambda: 16384)
    head = SimpleNamespace(weight=torch.empty(50304, 0))
    assert TokenLoss._chosen(head, labels) == 8192 and asked == [torch.device("cuda", 1)]
    assert TokenLoss._chosen(head, torch.zeros(16384)) == 512


@pytest.mark.parametrize("kind, tokens", [("H100", 8192), ("A100-40GB", 4096)])
def test_the_planner_counts_the_chunk_that_the_gpu_will_choose(kind, tokens, capsys):
    settings = ["configs/gpt2-124m.yaml", "batch.micro_size=16", "--gpus-kind", kind, "--json"]
    assert cli.function("planner")(settings) == 0
    [stage] = json.loads(capsys.readouterr().out)["memory"]
    compiled = 6  # bytes: a logit, its gradient, and that of the chunk before, in bf16
    assert stage["logits"] == pytest.approx(tokens * 50304 * compiled)

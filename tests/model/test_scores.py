"""Windows, documents, caps, sinks and biases, against attention written down in full."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from hpclm.model import position
from hpclm.model.attention.layout import block_mask, block_starts
from hpclm.model.attention.scores import MAX_SAVED_CONTEXT, ROWS_PER_BLOCK, Scores, attend, flex_attention
from hpclm.model.context import Flex, LayerContext

HEADS, GROUPS, WIDTH = 4, 2, 16
CPU = torch.device("cpu")


def in_full(q, k, v, documents, window, slopes, how):
    """[B, H, T, D] from whole [T, T] scores."""
    k, v = (z.repeat_interleave(HEADS // k.shape[1], 1) for z in (k, v))
    scores = q @ k.transpose(-1, -2) * (how.scale or WIDTH**-0.5)
    if how.cap:
        scores = how.cap * torch.tanh(scores / how.cap)
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])
    if slopes is not None:
        scores = scores + slopes[:, None, None] * (columns - rows)
    allowed = (columns <= rows)[None, None]
    if window:
        allowed = allowed & (columns > rows - window)
    if documents is not None:
        allowed = allowed & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = scores.masked_fill(~allowed, -torch.inf)
    if how.sinks is None:
        return scores.softmax(-1) @ v
    sinks = how.sinks[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v


CASES = list(itertools.product([None, 50, 200], [False, True], [None, 2.0], [False, True], ["none", "alibi"]))


@pytest.mark.parametrize("length", [300, MAX_SAVED_CONTEXT + 90])
def test_every_combination_is_what_whole_scores_give_with_its_gradients(length):
    draw = torch.Generator().manual_seed(length)
    shapes = [(2, heads, length, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    qkv = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
    sinks, outer = torch.randn(HEADS, generator=draw).requires_grad_(), torch.randn(shapes[0], generator=draw)
    texts = torch.stack([torch.arange(length) // 37, torch.arange(length) // 290])
    for window, several, cap, sink, positions in CASES if length < MAX_SAVED_CONTEXT else CASES[::5]:
        documents = texts if several else None
        how = Scores(0.3 if cap else None, cap, sinks=sinks if sink else None)
        starts = block_starts(texts, range(0, length, ROWS_PER_BLOCK)) if several else None
        slopes = position.alibi_slopes(HEADS, CPU) if positions == "alibi" else None
        context = LayerContext(window=window, documents=documents, starts=starts, slopes=slopes)
        inputs = [*qkv, sinks] if sink else qkv
        results = []
        for y in (attend(*qkv, context, how), in_full(*qkv, documents, window, slopes, how)):
            results.append([y.detach(), *torch.autograd.grad(y, inputs, outer)])
        for ours, whole in zip(*results, strict=True):
            assert (ours - whole).abs().max() < 2e-5, (window, several, cap, sink, positions)


def test_dropout_of_capped_scores_in_a_window_is_that_of_their_softmax():
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, HEADS, 90, WIDTH, generator=draw) for _ in range(3))
    how = Scores(0.3, 2.0, dropout=0.5)
    torch.manual_seed(7)
    found = attend(q, k, v, LayerContext(window=50), how)
    torch.manual_seed(7)
    dropped = F.dropout(in_full(q, k, torch.eye(90).expand(2, HEADS, 90, 90), None, 50, None, how), 0.5)
    assert (found - dropped @ v).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_takes_windows_caps_and_sinks():
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 200, WIDTH, generator=draw) for heads in (HEADS, GROUPS, GROUPS))
    documents = torch.stack([torch.arange(200) // 37, torch.arange(200) // 150])
    sinks = torch.randn(HEADS, generator=draw)
    for window, cap, sink in ((None, None, sinks), (None, 2.0, None), (50, None, None), (50, 2.0, sinks)):  # all pairs
        how = Scores(0.3, cap, sinks=sink)
        flex = Flex(block_mask(200, CPU, documents, window), None)
        whole = in_full(q, k, v, documents, window, None, how)
        assert (flex_attention(q, k, v, flex, how) - whole).abs().max() < 1e-5, (window, cap, sink is None)


def test_columns_that_no_row_of_a_block_attends_to_are_not_computed():
    texts = torch.tensor([[0] * 130 + [1] * 270, [0] * 100 + [1] * 200 + [2] * 100])
    assert block_starts(texts, range(0, 400, ROWS_PER_BLOCK)) == (0, 0, 100, 130)

import pytest
import torch
import torch.nn.functional as F

from hpclm.config import ModelConfig
from hpclm.model import position
from hpclm.model.attention import layout
from hpclm.model.attention.backend import KernelChoice, choose, flexible, installed_flash, prefer
from hpclm.model.attention.layout import ROWS_PER_BLOCK
from hpclm.model.attention.scores import blocked, flex_attention
from hpclm.model.context import Flex, LayerContext
from hpclm.model.stack import Stack
from tests.engine.test_native import GPT2, batches_of, engine_of, settings

CPU = torch.device("cpu")


@pytest.mark.parametrize("length", [1, 7, ROWS_PER_BLOCK, ROWS_PER_BLOCK + 1, 300])
def test_attention_in_blocks_is_causal_attention(length):
    draw = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(2, 3, length, 8, generator=draw).requires_grad_() for _ in range(3))
    outer = torch.randn(2, 3, length, 8, generator=draw)
    found = {}
    for name, attend in {
        "ours": blocked,
        "torch": lambda *x: F.scaled_dot_product_attention(*x, is_causal=True),
    }.items():
        y = attend(q, k, v)
        found[name] = [y.detach(), *torch.autograd.grad(y, (q, k, v), outer)]
    for a, b in zip(found["ours"], found["torch"], strict=True):
        assert (a - b).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("documents", [True, False], ids=["documents", "whole"])
@pytest.mark.parametrize("positions", ["alibi", "none"])
@pytest.mark.parametrize("groups", [2, 4])
def test_flex_attention_is_attention_in_blocks(documents, positions, groups):
    """The forward pass; FlexAttention has no backward pass on CPUs."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 200, 16, generator=draw) for heads in (4, groups, groups))
    numbers = torch.stack([torch.arange(200) // 37, torch.arange(200) // 90]) if documents else None
    slopes = position.alibi_slopes(4, CPU) if positions == "alibi" else None
    flex = Flex(layout.block_mask(200, CPU, numbers), slopes)
    wanted = blocked(q, k, v, context=LayerContext(documents=numbers, slopes=slopes))
    assert torch.allclose(flex_attention(q, k, v, flex), wanted, atol=1e-5)


def test_a_gpu_makes_no_mask_of_length_by_length():
    def model(**more):
        return ModelConfig.of({"hidden": 64, "attention.heads": 4, **more})

    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert flexible(model(positions="alibi"), True, gpu, True) and flexible(model(), True, gpu, True)
    assert flexible(model(**{"attention.kernel": "flex"}), True, gpu, False)
    for other in (
        (model(), True, gpu, False),  # causal: cuDNN is faster
        (model(), True, cpu, True),
        (model(), False, gpu, True),  # only compiled is it fast
        (model(**{"attention.dropout": 0.1}), True, gpu, True),  # which it does not have
        (model(**{"attention.kernel": "flash"}), True, gpu, True),
        (
            ModelConfig.of({"hidden": 32, "attention.heads": 4}),
            True,
            gpu,
            True,
        ),  # heads of 8, for which it has no kernel
    ):
        assert not flexible(*other)


BLACKWELL, HOPPER, AMPERE, VOLTA = (10, 0), (9, 0), (8, 0), (7, 0)
BOTH = ("FA3", "FA4")


@pytest.mark.parametrize(
    "more, capability, cudnn, installed, words, warning",
    [
        ({}, HOPPER, 91600, (), "cuDNN, else FlashAttention, memory-efficient, math", None),
        ({}, HOPPER, 91600, BOTH, "cuDNN, else FlashAttention 3, memory-efficient, math", None),
        ({}, HOPPER, 91002, (), "FlashAttention, else cuDNN", "cuDNN 9.10 is older than 9.15"),
        ({}, HOPPER, None, BOTH, "FlashAttention 3, else cuDNN", "no cuDNN"),
        (dict(hidden=1024), HOPPER, 91600, (), "FlashAttention, else cuDNN", "older than 9.22, which attention with heads of 256"),
        ({"attention.dropout": 0.1}, HOPPER, 91600, BOTH, "FlashAttention, else cuDNN", "multiples of 1/16 as model.attention.dropout, not 0.1"),
        ({"attention.dropout": 0.125}, HOPPER, 91600, (), "cuDNN, else", None),
        ({"attention.kernel": "flash"}, HOPPER, 91600, BOTH, "FlashAttention 3, else cuDNN", None),
        ({"attention.kernel": "cudnn"}, AMPERE, 91600, (), "cuDNN, else", None),
        ({"attention.kernel": "cudnn"}, HOPPER, 90100, (), "cuDNN, else", "model.attention.kernel=cudnn: cuDNN 9.1 is older"),
        ({"attention.kernel": "math"}, HOPPER, 91600, (), "math", None),
        ({}, AMPERE, 91600, BOTH, "FlashAttention, else cuDNN", None),
        ({}, HOPPER, None, ("FA4",), "FlashAttention 4, else cuDNN", "no cuDNN"),
        ({}, BLACKWELL, 91600, BOTH, "cuDNN, else FlashAttention 4, memory-efficient, math", None),
        ({"attention.kernel": "flash", "hidden": 1024}, BLACKWELL, 91600, BOTH, "FlashAttention, else cuDNN", None),
        ({}, VOLTA, 91600, (), "memory-efficient, else math", None),
        ({"attention.kernel": "flash"}, VOLTA, 91600, (), "memory-efficient, else math", "this GPU is too old"),
    ],
)  # fmt: skip
def test_the_kernel_suits_the_gpu_and_the_log_says_why_a_faster_one_does_not(
    more, capability, cudnn, installed, words, warning
):
    choice = choose(ModelConfig.of({"hidden": 256, "attention.heads": 4, **more}), capability, cudnn, installed)
    assert str(choice).startswith(words)
    assert warning in choice.warning if warning else choice.warning is None


def test_installed_flash_attentions_are_found_without_importing_them(tmp_path, monkeypatch):
    assert installed_flash() == set()
    for name in ("flash_attn_interface.py", "flash_attn/__init__.py", "flash_attn/cute/interface.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("raise RuntimeError('built for another PyTorch')")
        monkeypatch.syspath_prepend(tmp_path)
    assert installed_flash() == {"FA3", "FA4"}


def test_a_flash_attention_that_cannot_be_loaded_is_left_out(tmp_path, monkeypatch, caplog):
    tmp_path.joinpath("flash_attn_interface.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    before = torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)
    try:
        found = prefer(KernelChoice(before, flash="FA3"))
    finally:
        torch.nn.attention._sdpa_kernel(before, set_priority=True)
    assert (
        found == KernelChoice(before)
        and "FlashAttention 3 is installed but cannot be used: undefined symbol" in caplog.text
    )


def test_the_order_of_kernels_is_pytorchs_from_then_on():
    before = torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)
    try:
        choice = choose(
            ModelConfig.of({"hidden": 256, "attention.heads": 4, "attention.kernel": "flash"}), HOPPER, 91600
        )
        assert prefer(choice) == choice
        assert tuple(torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)) == choice.order
    finally:
        torch.nn.attention._sdpa_kernel(before, set_priority=True)


def test_alibis_slopes_are_made_once(monkeypatch):
    made, slopes = [], position.alibi_slopes
    counted = position.PositionKind(slopes=lambda *given: made.append(given) or slopes(*given))
    monkeypatch.setitem(position.POSITIONS, "alibi", counted)
    config = settings(dict(GPT2, positions="alibi"), dict(recompute="full"))
    engine, batches = engine_of(config), batches_of(config)
    assert isinstance(engine.model, Stack)
    for step in range(2):
        engine.train_step(batches.step(8 * step), 3e-3, step)
    assert len(made) == 1


def test_flex_attention_of_other_documents_is_the_same_graph():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flex_attention, backend=counter, fullgraph=True, dynamic=False)
    q, k, v = (torch.randn(2, 4, 128, 16) for _ in range(3))
    slopes = position.alibi_slopes(4, CPU)
    for width in (37, 11, 90):
        numbers = (torch.arange(128) // width).expand(2, -1)
        found = compiled(q, k, v, Flex(layout.block_mask(128, CPU, numbers), slopes))
        assert torch.allclose(
            found, blocked(q, k, v, context=LayerContext(documents=numbers, slopes=slopes)), atol=1e-5
        )
    assert counter.frame_count == 1

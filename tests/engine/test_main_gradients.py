"""Gradients that the backward pass adds to the fp32 ones in place, as on GPUs; here the products themselves are those of a CPU."""

from functools import partial

import pytest
import torch

from hpclm import config
from hpclm.engine import compute_copies, native, sharded_optimizer
from hpclm.model import compiled, stack
from hpclm.parallel import main_gradients
from tests import ranks
from tests.engine import sharded
from tests.parity import STYLES

WORDS = ["engine.precision=bf16", "batch.micro_size=2", "model.layers=2"]
MODEL = native.native_model
FROZEN = "model.freeze=[tokens.*, block0.*, norm.*]"


def model(traced, config, compute):
    """The model of an engine, compiled if ``traced``."""
    made = MODEL(config, compute)
    if traced:
        made.compile_blocks()
    return made


def gradients(words, in_place, traced=False):
    """Losses and gradient norms, the fp32 gradients just before the last update, by name, and the number of graphs."""
    counter = None
    if traced:
        from torch._dynamo.testing import CompileCounterWithBackend

        counter = CompileCounterWithBackend("aot_eager")
        stack.compiled = lambda function, whole: compiled.compiled(function, whole, counter)
    for module in (native, sharded_optimizer):
        module.adds_in_place = lambda *_: in_place
        module.native_model = partial(model, traced)
    run, engine, batches, _ = sharded.made(words)
    norm, found, completed = engine.gradient_norm, {}, []
    copies = [copy for copy in engine.copies.masters if copy.requires_grad]
    for copy in copies:
        copy.register_post_accumulate_grad_hook(completed.append)

    def looked_at():
        for weight in engine.shards.whole if hasattr(engine, "shards") else engine.weights:
            if weight.trained:
                found[weight.name] = weight.parameter.grad.clone().numpy()
        return norm()

    engine.gradient_norm = looked_at
    results = sharded.steps(run, engine, batches, 0, 3)
    added = [name for module in engine.model.modules() for name in getattr(module, "main_grads", ())]
    assert bool(added) == in_place
    if in_place:  # autograd makes no gradient, but says that it is complete
        assert len(completed) == 3 * len(batches.step(0)) * len(copies)
        # biases and norms: where they are compiled, no kernel of their own
        assert not traced or len(added) == len(copies)
    losses, norms = [[getattr(result, what) for result in results] for what in ("loss", "grad_norm")]
    return losses, norms, found, counter and counter.frame_count


@pytest.mark.parametrize(
    "size, words, traced",
    [
        (1, [], True),
        (1, [*STYLES["llama"], "engine.recompute=full", "engine.loss_chunk=8"], False),
        (2, ["parallel.tensor=2", *STYLES["bloom"]], False),
        (2, ["engine.zero_stage=1", "engine.bucket_mb=0.02"], False),
        (1, [FROZEN], True),
        (2, [FROZEN, "engine.zero_stage=1", *STYLES["llama"]], False),
        pytest.param(2, [FROZEN, "parallel.tensor=2", *STYLES["bloom"]], True, marks=pytest.mark.whole),
        pytest.param(2, ["parallel.tensor=2", *STYLES["bloom"]], True, marks=pytest.mark.whole),
        pytest.param(1, [*STYLES["llama"], "engine.recompute=selective"], True, marks=pytest.mark.whole),
        pytest.param(2, ["engine.zero_stage=1", *STYLES["llamadocs"]], True, marks=pytest.mark.whole),
        pytest.param(4, ["engine.zero_stage=1", "parallel.tensor=2"], False, marks=pytest.mark.whole),
        pytest.param(1, ["model.dropout=0.1", "engine.recompute=full", "engine.precision=fp16"], True, marks=pytest.mark.whole),
    ],
    ids=["gpt2", "llama-full", "tensor-bloom", "sharded", "frozen", "frozen-sharded", "frozen-tensor", "tensor-traced", "llama-selective", "sharded-docs", "sharded-tensor", "fp16"],
)  # fmt: skip
def test_gradients_that_are_added_in_place_are_the_same(size, words, traced):
    wanted = ranks.run(size, gradients, [*WORDS, *words], False)
    found = ranks.run(size, gradients, [*WORDS, *words], True, traced)
    for (losses, norms, grads, _), (near, lengths, mine, count) in zip(wanted, found, strict=True):
        assert near == pytest.approx(losses, abs=0.02) and lengths == pytest.approx(norms, rel=0.05)
        assert mine.keys() == grads.keys() and any(grad.any() for grad in grads.values())
        for name, grad in grads.items():
            apart = abs(mine[name] - grad).max()
            assert apart <= 0.05 * abs(grad).max() + 1e-4, name
        assert count in (None, 3 + (FROZEN in words))  # input, block, final norm; and a frozen block


@pytest.mark.parametrize(
    "words, device, wanted",
    [
        ([], "cuda", True),
        ([], "cpu", False),
        (["engine.offload_activations=true"], "cuda", False),
        (["model.block=tests.blocks:Mine"], "cuda", False),
    ],
)
def test_only_blocks_of_our_own_on_gpus_add_gradients_in_place(words, device, wanted):
    run = config.load(None, ["data.source=synthetic", *words])
    assert compute_copies.adds_in_place(run.engine, run.model, torch.device(device)) is wanted


def test_no_gradient_of_a_matrix_or_table_is_written_beside_the_fp32_one():
    draw = torch.Generator().manual_seed(1)
    x, d_y = (torch.randn(6, 4, generator=draw).bfloat16() for _ in range(2))
    weight = torch.nn.Parameter(torch.randn(4, 4, generator=draw).bfloat16())
    total, ids = torch.ones(4, 4), torch.tensor([0, 3, 3, 1, 0, 3])
    main_gradients.linear(x, weight, None, total).backward(d_y)
    assert torch.equal(total, 1 + (d_y.t() @ x).float())
    for vocabulary in (4, 9):  # fewer rows than tokens, and more
        total = torch.zeros(vocabulary, 4)
        table = torch.nn.Parameter(torch.zeros(vocabulary, 4).bfloat16())
        main_gradients.embedding(ids, table, total).backward(d_y)
        wanted = torch.zeros(vocabulary, 4).index_put_((ids,), d_y.float(), accumulate=True)
        assert torch.equal(total, wanted) and table.grad is None

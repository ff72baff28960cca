"""In bf16 and fp16 weights are cast once a step, and gradients are added to the fp32 ones where these lie."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpclm.engine import native
from tests.engine.test_native import GPT2, LLAMA, batches_of, engine_of, settings

BATCH = dict(global_size=12, micro_size=4)  # three micro-batches
WET = {"dropout": 0.1, "attention.dropout": 0.1}


class Recorded(TorchDispatchMode):
    """The operations that run, as (name, type and shape of the first tensor)."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        self.calls.append((function.overloadpacket.__name__, first is not None and (first.dtype, tuple(first.shape))))
        return function(*args, **(kwargs or {}))


def trained(config, dtype, steps=3):
    engine, batches = engine_of(config, dtype), batches_of(config)
    return engine, [engine.train_step(batches.step(12 * step), 3e-3, step) for step in range(steps)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape, engine",
    [(dict(GPT2, **WET), {}), (LLAMA, dict(recompute="full")), (dict(GPT2, tied=False), dict(recompute="selective"))],
    ids=["gpt2", "llama-full", "untied-selective"],
)
def test_a_step_with_weights_cast_once_is_one_that_casts_them_in_every_forward_pass(shape, engine, dtype, monkeypatch):
    config = settings(shape, engine, batch=BATCH)
    once, found = trained(config, dtype)
    assert once.copies.masters

    def none(self, model, in_place=False):
        self.masters, self.tables, self._added = {}, [], {}

    monkeypatch.setattr(native.ComputeCopies, "__init__", none)
    always, wanted = trained(config, dtype)
    assert not always.copies.masters and found == wanted
    for a, b in zip(once.weights, always.weights, strict=True):
        assert a.name == b.name and torch.equal(a.parameter, b.parameter), a.name


def test_no_weight_is_cast_in_a_micro_batch_and_no_gradient_moves():
    config = settings(dict(GPT2, hidden=48, context=16), batch=BATCH)  # no activation has the shape of a weight
    engine, batches = engine_of(config, torch.bfloat16), batches_of(config)
    engine.train_step(batches.step(0), 3e-3, 0)
    before = {w.name: w.parameter.grad.data_ptr() for w in engine.weights if w.parameter in engine.kept_gradients}
    assert len(before) == len(engine.weights) - 2  # the embeddings of tokens and positions
    with Recorded() as recorded:
        engine.train_step(batches.step(12), 3e-3, 1)
    matrices = {
        tuple(w.parameter.shape) for w in engine.weights if w.parameter.ndim == 2 and w.name.startswith("block")
    }
    matrices |= {shape[::-1] for shape in matrices}
    casts = [call for call in recorded.calls if call[0] == "_to_copy" and call[1][1] in matrices]
    assert matrices and not casts
    after = {w.name: w.parameter.grad.data_ptr() for w in engine.weights if w.parameter in engine.kept_gradients}
    assert after == before and not any(w.grad.any() for w in engine.kept_gradients)


def test_nothing_is_multiplied_by_a_factor_of_1():
    config = settings(dict(GPT2, hidden=48), batch=BATCH)
    engine, batches = engine_of(config), batches_of(config)
    table = tuple(engine.model.layers["tokens"].weight.shape)
    with Recorded() as recorded:
        engine.train_step(batches.step(0), 3e-3, 0)
    assert not [call for call in recorded.calls if call[0] in ("mul", "mul_") and call[1][1:] == (table,)]
    labels = (4, config.model.context)
    weights = [call for call in recorded.calls if call[0] == "mul" and call[1] == (torch.float32, labels)]
    assert not weights

"""QK-clip is the formula of its paper, and the same in every layout."""

import pytest
import torch

from hpclm.base.errors import ConfigError
from tests.engine.test_native import GPT2, LLAMA, batches_of, engine_of, settings
from tests.parity import STYLES, alone, trained

LIMIT = 0.3
OPTIM = dict(name="muon", newton_schulz_type="fp32", lr=1e-2, min_lr=1e-4, eps=1e-5)  # as tests.parity
BIASED = {**LLAMA, "attention.qkv_bias": True, "attention.pattern": ["window", "full"], "attention.window": 5}
DOCUMENTS = dict(reset_attention_mask=True, reset_position_ids=True)


def scores(attention, x, metadata):
    """[H] the largest scores of each head, from whole [T, T] ones."""
    heads = attention.qkv(x).unflatten(-1, (-1, attention.per_group + 2, attention.width))
    q, k = heads[..., :-2, :], heads[..., -2:-1, :]  # [T, B, G, heads, D]
    if metadata.cos is not None:
        cos, sin, half = metadata.cos[..., None, :], metadata.sin[..., None, :], attention.width // 2
        q, k = (z * cos + torch.cat([-z[..., half:], z[..., :half]], -1) * sin for z in (q, k))
    products = torch.einsum("tbghd,sbgxd->bghts", q, k) / attention.width**0.5
    at = torch.arange(len(x))
    seen = (at[:, None] >= at)[None].repeat(x.shape[1], 1, 1)
    if metadata.window is not None:
        seen &= at[:, None] - at < metadata.window
    if metadata.documents is not None:
        seen &= metadata.documents[:, :, None] == metadata.documents[:, None]
    return products.masked_fill(~seen[:, None, None], -torch.inf).amax((0, 3, 4)).flatten()


@pytest.mark.parametrize("shape, data", [(GPT2, {}), (LLAMA, {}), (BIASED, DOCUMENTS)], ids=["gpt2", "gqa", "biased"])
def test_an_update_is_that_of_a_plain_loop_over_heads(shape, data):
    clipping, plain = (
        settings(shape, dict(recompute="full"), dict(OPTIM, **more), data=data) for more in (dict(qk_clip=LIMIT), {})
    )
    engine, other, batches = engine_of(clipping), engine_of(plain), batches_of(plain)
    largest, scaled = {}, 0
    for name, module in other.model.named_modules():
        if name.endswith(".attention"):

            def note(module, given, _, name=name):
                with torch.no_grad():
                    now = scores(module, *given)
                largest[name] = torch.maximum(largest.get(name, now), now)

            module.register_forward_hook(note)
    for step in range(4):
        result = engine.train_step(batches.step(8 * step), 1e-2, step)
        largest.clear()
        other.train_step(batches.step(8 * step), 1e-2, step)
        assert result.numbers["max_attention_score"] == pytest.approx(max(s.max().item() for s in largest.values()))
        with torch.no_grad():
            for name, found in largest.items():
                attention = other.model.get_submodule(name)
                for weight in (w for w in (attention.qkv.weight, attention.qkv.bias) if w is not None):
                    by_key = weight.view(-1, attention.per_group + 2, attention.width, *weight.shape[1:])
                    for group, s in zip(by_key, found.view(len(by_key), -1).amax(1), strict=True):
                        group[:-1] *= min(1.0, (LIMIT / s.item()) ** 0.5)
                        scaled += s.item() > LIMIT
        for (name, a), (_, b) in zip(engine.model.weights(), other.model.weights(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)
    assert scaled


CLIPPED = ["engine.precision=fp32", "optim.name=muon", "optim.newton_schulz_type=fp32", "optim.qk_clip=0.5"]
CLIPPED += ["batch.micro_size=2", "model.layers=2", *STYLES["llama"], "model.attention.qkv_bias=true"]
LAYOUTS = {
    "tp2": (2, ["parallel.tensor=2"]),
    "pp2": (2, ["engine.name=pipelining", "parallel.pipeline=2"]),
    "fsdp2": (2, ["engine.name=fsdp2"]),
    "zero1": (2, ["engine.zero_stage=1"]),
    "hybrid": (4, ["engine.name=fsdp2", "parallel.shard=2"]),
    "zero1-tp2": (4, ["engine.zero_stage=1", "parallel.tensor=2"]),
    "dp2pp2": (4, ["engine.name=pipelining", "parallel.pipeline=2"]),
    "dp2cp2": (4, ["parallel.context=2"]),
}
WHOLE = ("zero1", "hybrid", "zero1-tp2", "dp2pp2")


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.whole if name in WHOLE else []) for name in LAYOUTS]
)
def test_every_layout_clips_alike(layout):
    size, words = LAYOUTS[layout]
    found, wanted = trained(size, *CLIPPED, *words), alone(*CLIPPED)
    assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-5)
    for name, tensor in wanted["tensors"].items():
        if name.startswith("model."):
            torch.testing.assert_close(found["tensors"][name], tensor, rtol=0, atol=1e-5, msg=name)
    without = alone(*(word for word in CLIPPED if "qk_clip" not in word))
    assert max(abs(a - b) for a, b in zip(without["losses"], wanted["losses"], strict=True)) > 1e-3


def test_a_run_resumes_to_the_last_bit_and_a_skipped_step_clips_nothing():
    words = [*CLIPPED, "engine.zero_stage=1"]
    straight, half = trained(2, *words, steps=4), trained(2, *words, steps=2)
    rest = trained(2, *words, steps=4, first=2, saved=half)
    assert all(torch.equal(rest["tensors"][name], tensor) for name, tensor in straight["tensors"].items())
    engine = engine_of(settings(GPT2, optim=dict(OPTIM, qk_clip=LIMIT)))
    before = [weight.parameter.detach().clone() for weight in engine.weights]
    engine.qk_clip.largest.fill_(torch.inf)
    engine.qk_clip.clip(torch.tensor(1.0))
    assert all(torch.equal(weight.parameter, was) for weight, was in zip(engine.weights, before, strict=True))


@pytest.mark.parametrize(
    "own, error",
    [
        (
            dict(model={**GPT2, "attention.qk_norm": True}),
            r"optim\.qk_clip=100\.0 has no effect with model\.attention\.qk_norm=true",
        ),
        (
            dict(engine=dict(name="deepspeed")),
            r"engine 'deepspeed' does not support optim\.qk_clip=100\.0; engines that do: native",
        ),
        (dict(engine=dict(name="fairscale")), r"engine 'fairscale' does not support optim\.qk_clip=100"),
        (dict(model=dict(GPT2, block="my.mod:Block")), r"optim\.qk_clip cannot measure .* model\.block=my\.mod:Block"),
        (dict(optim=dict(qk_clip=0.0)), r"optim\.qk_clip=0\.0 must be more than 0"),
    ],
    ids=["qk_norm", "deepspeed", "fairscale", "block", "zero"],
)
def test_what_cannot_clip_says_so(own, error):
    with pytest.raises(ConfigError, match=error):
        settings(**{**dict(model=GPT2, optim=dict(qk_clip=100.0)), **own})

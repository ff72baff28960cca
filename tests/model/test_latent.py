"""Latent attention: the scores that QK-clip lowers, what the cache keeps, and what is refused."""

import pytest
import torch

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.config import EngineConfig, ModelConfig
from hpclm.model import gpt
from hpclm.model.cache import KeyValueCache
from hpclm.model.stack import Stack
from hpclm.parallel.micro_batch import MicroBatch
from tests.networks import LATENT


def model(**more):
    shape = ModelConfig.of({**LATENT, **more})
    return Stack(shape, gpt.layers(shape, EngineConfig(), torch.float32, 1), torch.float32)


@pytest.mark.parametrize("more", [{}, {"attention.latent.q_rank": 20, "attention.latent.value_dim": 6}], ids=len)
def test_the_factors_of_qk_clip_lower_the_largest_score_of_each_head_to_the_limit(more):
    stack = model(init_std=0.5, layers=1, **more)
    attention = stack.layers["block0"].attention
    ids = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(3))

    def largest():
        attention.largest = torch.full((4,), -torch.inf)
        stack.train()(MicroBatch(ids))
        return attention.largest

    before = largest()
    limit = before.median().item()
    factors = attention.clip_factors(before[None], limit)
    with torch.no_grad():
        for name, rows in factors.items():
            attention.get_submodule(name).weight.mul_(rows[0, :, None])
    assert before.max() > 1.2 * limit and (before < limit).any()
    assert torch.allclose(largest(), before.clamp(max=limit), rtol=1e-5)


def test_the_cache_keeps_the_narrow_vector_and_the_shared_key_of_each_token():
    stack = model().eval()
    cache = KeyValueCache(stack.config, [4, 4], 10, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        stack.head(torch.ones(2, 4, dtype=torch.int64), cache)
    assert {tuple(kept.shape) for kept in (x for each in cache._kept.values() for x in each)} == {(2, 10, 12 + 8)}


REFUSED = {
    "model.attention.kv_heads=2": "model.attention.latent.kv_rank=12 does not support model.attention.kv_heads",
    "model.attention.qk_norm=true": "model.attention.latent.kv_rank=12 does not support model.attention.qk_norm",
    "model.attention.kernel=flash": "model.attention.kernel=flash does not support model.attention.latent.kv_rank",
    "model.attention.latent.rope_dim=5": "model.attention.latent.rope_dim=5 must be even",
    "model.rope.fraction=0.5": "model.rope.fraction=0.5 has no effect with model.attention.latent.kv_rank=12",
    "engine.fp8=rowwise": "engine.fp8=rowwise does not support model.attention.latent.kv_rank=12",
    "parallel.tensor=3": "model.attention.heads=4 must be a multiple of parallel.tensor=3",
}


@pytest.mark.parametrize("word, message", REFUSED.items(), ids=REFUSED)
def test_what_latent_attention_does_not_have_is_refused_by_name(word, message):
    shape = [f"model.{key}={str(value).lower()}" for key, value in LATENT.items()]
    with pytest.raises(ConfigError) as error:
        config.load(None, [*shape, word])
    assert message in str(error.value)


def test_a_rank_is_needed_for_the_other_settings():
    with pytest.raises(ConfigError, match=r"latent.q_rank=8 has no effect with .*kv_rank=0"):
        config.load(None, ["model.attention.latent.q_rank=8"])

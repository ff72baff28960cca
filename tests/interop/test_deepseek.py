"""Networks with latent attention, drawn at random: transformers' random weights compute the same logits and text here, and go back."""

import random

import pytest
import torch

from hpclm import cli
from tests.interop import made
from tests.interop.test_experts import continued
from tests.interop.test_huggingface import louder, peer, peer_logits, weights

main = cli.function("convert")

OFTEN, ALL = 2, 60
TIE = 1e-4
"""Scores of experts that are nearer than this may be chosen otherwise here."""


def drawn(seed):
    """Name of a class, and its settings."""
    draw = random.Random(seed)
    name = draw.choice(["DeepseekV2", "DeepseekV3", "DeepseekV3", "Glm4MoeLite"])
    heads = draw.choice([2, 3, 6])
    groups, experts = draw.choice([(1, 5), (2, 8), (4, 12)])
    top = draw.randint(1, groups)
    layers = draw.randint(2, 4)
    config = dict(hidden_size=48, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads)
    config |= dict(
        vocab_size=93, intermediate_size=80, max_position_embeddings=64, rms_norm_eps=draw.choice([1e-6, 1e-3])
    )
    config |= dict(
        kv_lora_rank=draw.choice([4, 24, 64]), q_lora_rank=draw.choice([None, 20]), v_head_dim=draw.randint(1, 30)
    )
    config |= dict(qk_nope_head_dim=2 * draw.randint(1, 10), qk_rope_head_dim=2 * draw.randint(1, 8))
    config |= dict(
        n_routed_experts=experts, n_shared_experts=draw.randint(1, 3), moe_intermediate_size=4 * draw.randint(2, 10)
    )
    config |= dict(
        num_experts_per_tok=draw.randint(2, top * (experts // groups)), routed_scaling_factor=draw.choice([1.0, 2.5])
    )
    config |= dict(attention_bias=draw.random() < 0.5, tie_word_embeddings=draw.random() < 0.3)
    scaling = dict(rope_type="yarn", factor=draw.choice([1.0, 4.0, 40.0]), original_max_position_embeddings=16)
    scaling |= draw.choice([{}, {"mscale": 0.7}, {"mscale_all_dim": 0.7}, {"mscale": 1.0, "mscale_all_dim": 0.7}])
    linear = dict(rope_type="linear", factor=3.0)
    config["rope_parameters"] = {
        "rope_theta": 500.0,
        **draw.choice([dict(rope_type="default"), linear, scaling, scaling]),
    }
    if name == "DeepseekV2":
        method = draw.choice(["greedy", "group_limited_greedy"])
        return name, config | dict(
            topk_method=method, n_group=groups, topk_group=groups, first_k_dense_replace=draw.randint(0, layers - 1)
        )
    config |= dict(
        n_group=groups, topk_group=top, norm_topk_prob=draw.random() < 0.5, rope_interleave=draw.random() < 0.7
    )
    if name == "DeepseekV3":
        return name, config | dict(first_k_dense_replace=draw.randint(0, layers))
    return name, config | dict(mlp_layer_types=["sparse", *draw.choices(["dense", "sparse"], k=layers - 1)])


def of_seed(transformers, seed, folder):
    """Save transformers' network of a seed, or of the next one whose choices of experts are not tied; it and its logits."""
    while True:
        name, settings = drawn(seed)
        config = getattr(transformers, f"{name}Config")(**settings)
        there = louder(
            transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        ).eval()
        for key, bias in there.state_dict().items():
            if key.endswith("e_score_correction_bias"):
                bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(seed)) * 0.1)
        logits, gap = with_gap(there)
        if gap > TIE:
            there.save_pretrained(folder)
            return there, logits
        seed += ALL


def with_gap(there):
    """A model's logits, and the smallest distance between a score that any topk() chooses and the best one that it does not."""
    gaps = []
    topk = torch.Tensor.topk

    def watched(scores, k, dim=-1, **more):
        best = topk(scores, min(k + 1, scores.shape[-1])).values
        gaps.append((best[..., k - 1] - best[..., k]).min().item() if k < scores.shape[-1] else torch.inf)
        return topk(scores, k, dim, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", watched)
        patch.setattr(torch, "topk", watched)
        logits = peer_logits(there)
    assert gaps or not any(".mlp.gate." in key for key in there.state_dict())
    return logits, min(gaps, default=torch.inf)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.whole] * (n >= OFTEN)) for n in range(ALL)])
def test_a_drawn_network_has_the_same_logits_and_text_here_and_goes_back_bit_for_bit(seed, tmp_path):
    transformers = pytest.importorskip("transformers")
    there, theirs = of_seed(transformers, seed, tmp_path / "hf")
    main([str(tmp_path / "hf"), str(tmp_path / "run")])
    ours = made.logits(tmp_path / "run")
    assert theirs.std() > 0.05 and (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    prompt = [7, 7, 2, 90, 11]
    text = there.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert text[0, len(prompt) :].tolist() == continued(tmp_path / "run", prompt, 9)
    main([str(tmp_path / "run"), str(tmp_path / "back")])
    back = peer(tmp_path / "back")
    assert (peer_logits(back) - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    main([str(tmp_path / "back"), str(tmp_path / "again")])
    first, second = weights(tmp_path / "run"), weights(tmp_path / "again")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)

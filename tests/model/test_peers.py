"""The same weights give the same numbers in Megatron-core and in transformers."""

import numpy as np
import pytest
import torch

from hpclm.config import ModelConfig
from hpclm.model.loss import TokenLoss
from hpclm.parallel.micro_batch import MicroBatch
from tests import weights
from tests.shared import shared

TOKENS = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(3))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture
def golden():
    arrays = np.load(shared("reference/model/gpt2_style.npz"))
    return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


GOLDEN = ModelConfig.of(
    {"vocab_size": 128, "layers": 2, "hidden": 32, "attention.heads": 4, "context": 16, "activation": "gelu"}
)


def named(golden, kind):
    return weights.from_mcore({k.removeprefix(kind): v for k, v in golden.items() if k.startswith(kind)})


@pytest.mark.parametrize("chunk", [7, 4096])
def test_logits_loss_and_gradients_are_those_of_megatron_core(golden, chunk):
    model = weights.build(GOLDEN, named(golden, "param/"))
    inputs, labels = golden["tokens"][:, :-1], golden["tokens"][:, 1:]
    head = model.head(inputs)
    assert (head.logits() - golden["logits"]).abs().max() < 1e-5
    mask = golden["loss_mask"] / golden["loss_mask"].sum()
    loss, _ = TokenLoss(chunk)(head, labels, mask)
    assert loss.item() == pytest.approx(golden["loss"].item(), abs=1e-6)
    loss.backward()
    theirs = named(golden, "grad/")
    ours = {name.removeprefix("layers."): p.grad for name, p in model.named_parameters()}
    assert max(relative(ours[name], theirs[name]) for name in theirs) < 1e-4


def same_logits(model, peer, tokens=TOKENS):
    with torch.no_grad():
        ours, theirs = model.eval().head(tokens).logits(), peer.eval()(tokens).logits
    assert theirs.std() > 0.05  # the comparison says something
    assert (ours - theirs).abs().max() < 1e-5


def test_golden_weights_give_the_same_logits_in_transformers(golden):
    transformers = pytest.importorskip("transformers")
    peer = transformers.GPT2LMHeadModel.from_pretrained(shared("reference/model/hf_from_mcore/gpt2"))
    model = weights.build(GOLDEN, weights.from_peer(GOLDEN, peer.state_dict()))
    same_logits(model, peer)
    assert (model.head(golden["tokens"][:, :-1]).logits() - golden["logits"]).abs().max() < 1e-5


def louder(peer):
    """InitSpec weights large enough that every part of the model matters to the logits."""
    with torch.no_grad():
        draw = torch.Generator().manual_seed(5)
        for name, p in peer.named_parameters():
            norm = "norm" in name or "ln_" in name
            p.copy_(torch.randn(p.shape, generator=draw) * 0.2 + norm * name.endswith("weight"))
    return peer


def test_gpt2_is_transformers_gpt2():
    transformers = pytest.importorskip("transformers")
    shape = dict(n_layer=3, n_embd=48, n_head=4, n_positions=16, vocab_size=96)
    peer = louder(transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)))
    config = ModelConfig.of(
        {"vocab_size": 96, "vocab_multiple": 1, "layers": 3, "hidden": 48, "attention.heads": 4, "context": 16}
    )
    same_logits(weights.build(config, weights.from_peer(config, peer.state_dict())), peer)


LLAMA = {
    "vocab_size": 96, "vocab_multiple": 1, "layers": 2, "hidden": 48, "attention.heads": 6, "ffn": 80, "context": 16, "positions": "rope", "norm": "rmsnorm",
    "activation": "swiglu", "bias": False, "tied": False, "rope.base": 5000.0, "norm_eps": 1e-6,
}  # fmt: skip
THEIRS = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 16, "tie_word_embeddings": False, "rope_theta": 5000.0, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize("groups", [6, 3, 1])
def test_llama_is_transformers_llama(groups):
    transformers = pytest.importorskip("transformers")
    peer = louder(transformers.LlamaForCausalLM(transformers.LlamaConfig(**THEIRS, num_key_value_heads=groups)))
    config = ModelConfig.of({**LLAMA, "attention.kv_heads": groups})
    same_logits(weights.build(config, weights.from_peer(config, peer.state_dict())), peer)


def test_qk_norm_is_qwen3s():
    transformers = pytest.importorskip("transformers")
    peer = louder(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**THEIRS, num_key_value_heads=2)))
    config = ModelConfig.of({**LLAMA, "attention.kv_heads": 2, "attention.qk_norm": True})
    same_logits(weights.build(config, weights.from_peer(config, peer.state_dict())), peer)


@pytest.mark.parametrize("heads", [4, 6])
def test_alibi_and_embedding_norm_are_blooms(heads):
    transformers = pytest.importorskip("transformers")
    shape = dict(vocab_size=96, hidden_size=48, n_layer=2, n_head=heads)
    peer = louder(transformers.BloomForCausalLM(transformers.BloomConfig(**shape)))
    config = ModelConfig.of(
        {
            "vocab_size": 96,
            "vocab_multiple": 1,
            "layers": 2,
            "hidden": 48,
            "attention.heads": heads,
            "context": 16,
            "positions": "alibi",
            "embed_norm": True,
        }
    )
    same_logits(weights.build(config, weights.from_peer(config, peer.state_dict())), peer)


def test_a_document_mask_gives_each_document_the_logits_it_has_alone():
    for positions in ("learned", "sinusoidal", "rope", "alibi"):
        config = ModelConfig.of(
            {
                "vocab_size": 96,
                "layers": 2,
                "hidden": 48,
                "attention.heads": 4,
                "context": 16,
                "positions": positions,
                "init_std": 0.2,
            }
        )
        model = weights.build(config).eval()
        where = torch.tensor([[*range(6), *range(10)]])
        documents = torch.tensor([[0] * 6 + [1] * 10])
        with torch.no_grad():
            together = model(MicroBatch(TOKENS[:1], positions=where, documents=documents)).value.logits()
            first, second = model.head(TOKENS[:1, :6]).logits(), model.head(TOKENS[:1, 6:]).logits()
            plain = model.head(TOKENS[:1]).logits()
        assert (together - torch.cat([first, second], 1)).abs().max() < 1e-5, positions
        assert (together - plain)[:, 6:].abs().max() > 1e-2, positions  # without the mask it is another answer

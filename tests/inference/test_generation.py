"""Cached generation writes what transformers writes, and what the model without a cache would."""

import pytest
import torch

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig, load
from hpclm.inference import run_model
from hpclm.inference.generation import Batch, choose, continue_all, window_start
from hpclm.inference.generation_settings import Sampling
from hpclm.model.expert_mlp import routers
from hpclm.parallel.mesh import Compute
from tests.interop import made
from tests.weights import build

convert = cli.function("convert")

GREEDY = Sampling(temperature=0)
PROMPTS = [[5, 17, 40], [9], [88, 3, 3, 61, 20, 7], [1, 2]]


def model_of(folder):
    config = load(folder / "config.yaml")
    return run_model.load_model(folder, config, None, Compute(torch.device("cpu"), torch.float32))[0]


def continued(model, prompts, most=9, sampling=GREEDY, ended=lambda number, new: False):
    return continue_all(model, prompts, most, model.config.vocab_size, sampling, ended)


def uncached(model, prompts, most=9):
    """Greedy continuations, each computed from the whole window again."""
    found = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(most):
            window = ids[window_start(len(ids), model.config.context) :]
            with torch.no_grad():
                ids.append(int(model.head(torch.tensor([window])).logits()[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


@pytest.mark.parametrize("kind", ["gpt2", "gpt2 untied", "llama", "llama grouped", "qwen3", "bloom", "neox"])
def test_greedy_text_is_that_of_transformers_token_by_token(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    made.run(tmp_path / "run", made.NETWORKS[kind][1])
    convert([str(tmp_path / "run"), str(tmp_path / "hf")])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    model = model_of(tmp_path / "run")
    alone = [
        theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=9,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    assert [continued(model, [prompt])[0] for prompt in PROMPTS] == alone
    assert continued(model, PROMPTS) == alone
    assert len({tuple(each) for each in alone}) > 1


NETWORKS = {**{kind: network for kind, (_, network) in made.NETWORKS.items()}, **made.OWN}


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_batch_with_a_cache_computes_what_each_prompt_gets_alone_without_one(kind, tmp_path):
    made.run(tmp_path / "run", NETWORKS[kind])
    model = model_of(tmp_path / "run")
    draw = torch.Generator().manual_seed(7)
    with torch.inference_mode():
        batch = Batch(model, PROMPTS, 9, 93)
        for _ in range(9):
            for row, ids in zip(batch.logits(), batch.ids):
                assert (row - model.head(torch.tensor([ids])).logits()[0, -1]).abs().max() < 1e-5
            batch.advance(torch.randint(93, (4,), generator=draw).tolist(), range(4))


@pytest.mark.parametrize("positions", ["learned", "rope", "alibi"])
def test_text_longer_than_the_context_goes_on(positions, tmp_path):
    made.run(tmp_path / "run", dict(made.SHAPE, positions=positions))
    model = model_of(tmp_path / "run")
    long = [list(range(30)), *PROMPTS]
    assert continued(model, long, 40) == uncached(model, long, 40)


def test_the_window_is_at_least_three_quarters_of_the_context():
    starts = [window_start(length, 16) for length in range(1, 100)]
    assert starts[:16] == [0] * 16 and starts[16] == 4 and sorted(starts) == starts
    assert all(12 < length - start <= 16 for length, start in zip(range(17, 100), starts[16:]))


def test_a_sequence_that_ends_leaves_the_others_as_they_are(tmp_path):
    made.run(tmp_path / "run", dict(made.SHAPE))
    model = model_of(tmp_path / "run")
    long = [list(range(14)), *PROMPTS]  # the longest ends first, so the others need more slots than the context has
    whole = continued(model, long, 20)
    cut = continued(model, long, 20, ended=lambda number, new: len(new) == (2, 20, 5, 20, 1)[number])
    assert cut == [new[:count] for new, count in zip(whole, (2, 20, 5, 20, 1))]


def test_sampling_of_a_prompt_does_not_depend_on_the_batch_and_follows_the_seed(tmp_path):
    made.run(tmp_path / "run", dict(made.SHAPE))
    model = model_of(tmp_path / "run")
    drawn = Sampling(temperature=1.0, top_k=None, seed=3)
    assert continued(model, PROMPTS[:1], sampling=drawn)[0] == continued(model, PROMPTS, sampling=drawn)[0]
    same = continued(model, [PROMPTS[0]] * 2, 20, drawn)
    assert same[0] != same[1] and same == continued(model, [PROMPTS[0]] * 2, 20, drawn)
    assert same != continued(model, [PROMPTS[0]] * 2, 20, Sampling(temperature=1.0, top_k=None, seed=4))


def test_top_k_and_top_p_leave_the_most_likely_tokens():
    from hpclm.inference.generation import Sampler

    logits = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()[torch.tensor([3, 0, 4, 1, 2])]  # tokens 1, 3, 4, 0, 2

    def drawn(**options):
        sampler = Sampler(Sampling(temperature=1.0, **options), 0)
        return {sampler(logits) for _ in range(300)}

    assert drawn(top_k=None) == {0, 1, 2, 3, 4}
    assert drawn(top_k=2) == {1, 3}
    assert drawn(top_k=None, top_p=0.6) == {1, 3}  # the fewest that sum to at least 0.6
    assert drawn(top_k=None, top_p=0.5) == {1} == drawn(top_k=None, top_p=1e-9)
    assert drawn(top_k=4, top_p=0.88) == {1, 3, 4}


def test_wrong_options_and_values_that_are_not_finite_are_refused():
    for options in ({"top_p": 0.0}, {"top_p": 1.5}, {"top_k": 0}, {"temperature": -1.0}, {"temperature": float("nan")}):
        with pytest.raises(ConfigError, match=r"^[a-z_]+=.* must be"):
            Sampling(**options)
    with pytest.raises(ConfigError, match="not finite"):
        choose(torch.tensor([[0.0, float("nan")]]), [])


def test_a_block_of_ones_own_is_used_without_a_cache(tmp_path):
    made.run(tmp_path / "run", dict(made.SHAPE))
    model = model_of(tmp_path / "run")
    batch = Batch(model, PROMPTS, 5, 93)
    assert batch.cached
    with_cache, batch.cached = batch.logits(), False
    assert (batch.logits() - with_cache).abs().max() < 1e-5


EXPERTS = {
    "softmax": {"experts.ffn": 24},
    "sigmoid in groups": {
        "experts.router_score": "sigmoid",
        "experts.router_choice_bias": True,
        "experts.router_groups": 4,
        "experts.router_top_groups": 2,
    },
    "shared, in a loop": {
        "experts.ffn": 22,
        "experts.shared_ffn": 8,
        "experts.pattern": ["dense", "experts"],
        "activation": "gelu",
    },
}


@pytest.mark.parametrize("kind", EXPERTS)
def test_tokens_take_the_experts_that_they_take_without_a_cache(kind):
    shape = {
        "vocab_size": 90,
        "layers": 3,
        "hidden": 32,
        "attention.heads": 4,
        "context": 32,
        "init_std": 0.3,
        "experts.count": 8,
    }
    model = build(ModelConfig.of({"activation": "swiglu", **shape, **EXPERTS[kind]})).eval()
    for router in routers(model):
        if router.choice_bias is not None:
            router.choice_bias.copy_(torch.linspace(-0.3, 0.3, 8))
    assert continued(model, PROMPTS) == uncached(model, PROMPTS)
    assert [continued(model, [prompt])[0] for prompt in PROMPTS] == uncached(model, PROMPTS)


def test_the_fewest_tokens_whose_probabilities_reach_top_p_are_drawn_from():
    from hpclm.inference.generation import Sampler

    for top_p, drawn in ((0.25, 1), (0.26, 2), (0.5, 2), (0.51, 3), (1.0, 4)):
        sampler = Sampler(Sampling(1.0, None, top_p), 0)
        assert len({sampler(torch.zeros(4)) for _ in range(80)}) == drawn, top_p
    sampler = Sampler(Sampling(1.0, 1), 0)
    assert {sampler(torch.tensor([0.0, 1.0, 0.0])) for _ in range(20)} == {1}

"""Presets: those of published models have the network of transformers' class, and a small twin of each trains."""

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from hpclm import config
from hpclm.base import shipped
from hpclm.base.extras import EXTRAS
from hpclm.config import ModelConfig, compose
from hpclm.config.phases import in_phase
from hpclm.data.corpus import mixtures_of_phases
from hpclm.interop.huggingface import families
from hpclm.interop.huggingface.family import effective
from hpclm.interop.rules import placements
from hpclm.launch import debug
from hpclm.preprocess import command_line
from hpclm.rundir import config_history
from tests import twins
from tests.forks import Ranks, hpclm
from tests.runs import ROOT, lines

LLAMA3 = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)
LLAMA3 |= dict(num_key_value_heads=8, vocab_size=128256, rope_theta=500000.0, rms_norm_eps=1e-5)
SCALED = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=8192, beta_fast=32, beta_slow=1)
OLMO3 = dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32)
OLMO3 |= dict(num_key_value_heads=32, vocab_size=100278, rope_theta=500000, rms_norm_eps=1e-6, sliding_window=4096)
SMOLLM3 = dict(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16)
SMOLLM3 |= dict(num_key_value_heads=4, vocab_size=128256, rope_theta=5000000.0, rms_norm_eps=1e-6)
QWEN3 = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "head_dim": 128,
}
QWEN3 |= dict(num_key_value_heads=8, vocab_size=151936, rope_theta=1000000, rms_norm_eps=1e-6)
OLMOE = dict(hidden_size=2048, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=16)
OLMOE |= dict(num_key_value_heads=16, vocab_size=50304, num_experts=64, num_experts_per_tok=8, norm_topk_prob=False)
QWEN3_MOE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "head_dim": 128,
}
QWEN3_MOE |= dict(num_key_value_heads=4, vocab_size=151936, rope_theta=1000000, rms_norm_eps=1e-6, num_experts=128)
QWEN3_MOE |= dict(num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, mlp_only_layers=[])
PUBLISHED = {
    "olmo3-7b": {
        **OLMO3,
        "model_type": "olmo3",
        "max_position_embeddings": 65536,
        "rope_scaling": dict(YARN, attention_factor=1.2079441541679836),
    },
    "smollm3-3b": dict(
        SMOLLM3,
        model_type="smollm3",
        max_position_embeddings=65536,
        no_rope_layer_interval=4,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": dict(QWEN3, model_type="qwen3", max_position_embeddings=32768),
    "olmoe-7b": dict(OLMOE, model_type="olmoe", max_position_embeddings=4096, rms_norm_eps=1e-5, clip_qkv=None),
    "qwen3-30b-a3b": dict(QWEN3_MOE, model_type="qwen3_moe", max_position_embeddings=32768),
    "llama3-8b": dict(LLAMA3, model_type="llama", max_position_embeddings=8192),
    "marin-8b": {
        **LLAMA3,
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "rope_scaling": dict(SCALED, rope_type="llama3"),
    },
}
"""What decides about the network in the config.json of each."""
BEFORE = {  # kv_heads: null is as many as heads
    "olmo3-7b": {"attention.kv_heads": None},
    "qwen3-8b": {"context": 4096, "rope.base": 10000.0},
    "olmoe-7b": {
        "attention.kv_heads": None,
        "experts.balance_micro_batch": 0.01 / 16,
        "experts.router_z_loss": 0.001 / 16 / 8,
    },
    "qwen3-30b-a3b": {"context": 4096, "rope.base": 10000.0, "experts.balance_step": 0.001},
}
"""What later stages than the preset's, for long contexts, changed, and what config.json does not say."""
PARAMETERS = {
    "olmo3-7b": 7_298_011_136,
    "smollm3-3b": 3_075_098_624,
    "qwen3-8b": 8_190_735_360,
    "olmoe-7b": 6_919_161_856,
    "qwen3-30b-a3b": 30_532_122_624,
    "llama3-8b": 8_030_261_248,
    "marin-8b": 8_030_261_248,
}


def preset(name, *words):
    return config.load(ROOT / f"configs/{name}.yaml", list(words))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_network_is_that_of_the_published_model(name):
    transformers = pytest.importorskip("transformers")
    run = preset(name)
    published, model = PUBLISHED[name], in_phase(run, len(run.data.phases)).model
    imported = ModelConfig.of(families.model_settings(published) | BEFORE.get(name, {}))
    assert effective(imported) == effective(model)
    with torch.device("meta"):
        there = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**published))
        ours = {name: torch.empty(placement.shape) for name, placement in placements(model).items()}
    theirs = {name: weight.shape for name, weight in there.named_parameters()}
    found = {}
    for rule in families.of_network(model).rules(model):
        found |= {name: part.shape for name, part in zip(rule.theirs, rule.split(ours[rule.ours]), strict=True)}
    assert of_layers(found) == of_layers(theirs)
    assert sum(shape.numel() for shape in theirs.values()) == PARAMETERS[name]


def of_layers(shapes):
    """Shapes by name; of experts, which transformers keeps in one tensor, the number of values in a layer."""
    experts = Counter()
    for name, shape in shapes.items():
        if ".experts." in name:
            experts[name.partition(".experts.")[0]] += shape.numel()
    return {name: shape for name, shape in shapes.items() if ".experts." not in name} | experts


DATASETS = ("data/text_document", "demo/data_text_document", "data/meg-gpt2-oscar-en-10k_text_document")
DATASETS += ("nist02-32k_text_document", "bin/train", "bin/valid", "test-data-bin/train", "test-data-bin/valid")
"""What presets read, and under data/ what those read that leave it to their user; whole recipes name theirs."""
RECIPES = ("marin-8b", "olmo3-7b", "smollm3-3b")
"""The presets with all phases of a published run."""
COMPILED = ("gpt2-124m", "olmo3-7b", "gpt-13b-3d")
"""One of each engine that is compiled, as it is shipped, on four processes; the kernels of one twin take a CPU more than a minute."""
SUBMITTED = ("debug", "recipes/megatron-deepspeed")
"""Those whose two processes `hpclm submit` starts; to start them for every preset would show the same again, and take seconds each."""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the data of all presets, to start them in."""
    folder = tmp_path_factory.mktemp("presets")
    of_recipes = {
        prefix for name in RECIPES for entry in mixtures_of_phases(preset(name).data) for prefix in entry.prefixes
    }
    for name in {*DATASETS, *of_recipes}:
        twins.dataset(folder / name)
    return folder


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.whole)])
@pytest.mark.parametrize("name", shipped.presets())
def test_a_twin_trains_on_several_processes(name, processes, home):
    given = preset(name)
    for extra in EXTRAS.keys() & {given.engine.name}:
        pytest.importorskip(extra)
    words = twins.twin(given, processes)
    if given.missing():
        words.append("data.prefix=data/text_document")
    if given.engine.compile and not (name in COMPILED and processes == 4):
        words.append("engine.compile=false")
    out = home / f"{processes}/{name.replace('/', '-')}"
    words = [name, *words, f"out={out}"]
    if name in SUBMITTED or processes > 2:
        said = hpclm("submit", "--cluster", "local", "--gpus", processes, *words, cwd=home, check=0).stderr
        assert f"{processes} processes, launched locally" in said
    else:
        with Ranks(processes, words, cwd=home) as ranks:
            ended = ranks.wait()
        said = "".join(output for _, output in ended.values())
        assert [code for code, _ in ended.values()] == [0] * processes, said
        assert f"{processes} processes" in said
    used, rows = config.load(out / "config.yaml"), [json.loads(line) for line in lines(out / "metrics.jsonl")]
    changed = {word.partition("=")[0] for word in words} | {"job.gpus", "job.cluster"}
    assert used.diff(given).keys() <= changed | {
        "data.prefix",
        "data.train",
        "data.phases",
        "data.valid",
        "data.split_by",
        *compose.LENGTHS,
    }  # absolute, decided now, and replaced by the length that is typed
    micro_size = config_history.micro_size(out)  # auto, which is 0, stays in config.yaml
    assert used.batch.micro_size in (0, micro_size)
    assert replace(used, batch=replace(used.batch, micro_size=micro_size)).plan(processes)
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3] and all(math.isfinite(row["loss"]) for row in steps)
    assert steps[0]["batch_size"] == (used.batch.rampup or [used.batch.global_size])[0]
    held_out = used.data.valid or not used.data.train
    assert any("validation_loss" in row for row in rows) == bool(used.evaluate.every and held_out)
    assert (out / "checkpoints/step-00000003").is_dir() == used.checkpoint.enabled
    assert any(out.glob("tensorboard/events*")) == used.log.tensorboard
    assert "Traceback" not in said


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_on_data_of_ones_own(name, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Some text. " * 10_000)
    run, dataset = command_line.planned([name, f"data={text}", f"out={tmp_path / 'run'}"])
    assert run.data.prefix == str(dataset.prefix)
    assert (run.data.train, run.data.phases, run.data.order) == ([], [], "mcore")
    debugged = preset(name, *debug.overrides(preset(name)))
    assert debugged.data.source == "synthetic" and not debugged.data.phases
    own = preset(name, "data.train=[mine]", "data.phases=[]")
    assert own.diff(preset(name)).keys() == {"data.train", "data.phases"}

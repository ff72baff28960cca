"""The planner's arithmetic against a step that is traced: memory and communication of every engine and preset within 3%."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hpclm import config
from hpclm.errors import ConfigError
from hpclm.node.gpus import KINDS
from hpclm.planning import forecast, ranks, suggest, trace
from tests import runs
from tests.forks import hpclm

# what a traced GPU claims to have, so that the loss chooses the same number of tokens
KIND = replace(KINDS["H200"], memory=128)
ALLOWED = 0.03
SHORT = ["model.layers=6"]
SMALL = [*SHORT, "batch.micro_size=8"]
DP, TP, PP = "job.gpus=8", "parallel.tensor=2", "parallel.pipeline=4"
NODES = [DP, "job.nodes=2", "parallel.shard=8"]
STAGES = ["model.layers=8", "batch.micro_size=4", DP, PP, "batch.global_size=64", "engine.compile=false"]
FAIRSCALE, DEEPSPEED = "engine.name=fairscale", "engine.name=deepspeed"
# preset, settings, rank
LAYOUTS = {
    "native": ("gpt2-124m", SHORT, 0),
    "native, eager": ("gpt2-124m", [*SHORT, "engine.compile=false"], 0),
    "native, replicas": ("gpt-1b3", [*SMALL, DP], 7),
    "native, optimizer sharded": ("gpt2-124m", [*SHORT, DP, "engine.zero_stage=1"], 3),
    "native, compute gradients": ("gpt2-124m", [*SHORT, DP, "engine.gradients=compute"], 3),
    "native, tensor": ("gpt-1b3", [*SMALL, DP, TP], 5),
    "native, selective": ("gpt-1b3", [*SMALL, "engine.recompute=selective"], 0),
    "native, recomputed": ("gpt-1b3", [*SMALL, "engine.recompute=full"], 0),
    "native, dropout": ("gpt2-345m", SHORT, 0),
    "native, one micro-batch": ("small", ["engine.precision=bf16"], 0),
    "fsdp2": ("llama-7b", [*SHORT, DP, "batch.micro_size=2", "batch.global_size=64"], 7),
    "fsdp2, 512 ranks": ("llama-7b", [*SHORT, "job.nodes=64", DP, "parallel.shard=null", "batch.micro_size=2"], 511),
    "fsdp2, stage 2": ("llama-7b", [*SHORT, DP, "batch.micro_size=2", "engine.zero_stage=2"], 0),
    "fsdp2, tensor": ("llama-7b", [*SHORT, DP, TP, "batch.micro_size=2"], 0),
    "fsdp2, recomputed": ("llama-7b", [*SHORT, DP, "batch.micro_size=2", "engine.recompute=full"], 0),
    "fsdp2, hybrid": ("llama-7b", [*SHORT, *NODES, "batch.micro_size=2", "batch.global_size=128"], 9),
    "fsdp2, hybrid, stage 2": ("llama-7b", [*SHORT, *NODES, "batch.micro_size=2", "engine.zero_stage=2"], 15),
    "fsdp2, hybrid, tensor": ("llama-7b", [*SHORT, *NODES, TP, "batch.micro_size=2", "parallel.shard=4"], 3),
    "fsdp2, hybrid, deferred": ("llama-7b", [*SHORT, *NODES, "batch.micro_size=2", "engine.defer_reduction=true"], 0),
    "fsdp2, hybrid, compute gradients": (
        "llama-7b",
        [*SHORT, *NODES, "batch.micro_size=2", "engine.gradients=compute"],
        0,
    ),
    "native, optimizer sharded in groups": ("gpt2-124m", [*SHORT, *NODES, "engine.zero_stage=1"], 12),
    "fairscale": ("gpt-1b3", [*SMALL, DP, FAIRSCALE, "engine.compile=false"], 0),
    "pipelining, first stage": ("gpt-1b3", [*STAGES, "engine.name=pipelining"], 0),
    "pipelining, second stage": ("gpt-1b3", [*STAGES, "engine.name=pipelining"], 2),
    "pipelining, last stage": ("gpt-1b3", [*STAGES, "engine.name=pipelining"], 7),
    "deepspeed, stage 0": ("gpt-1b3", [*SMALL, DP, DEEPSPEED, "engine.zero_stage=0"], 0),
    "deepspeed, stage 1": ("gpt-1b3", [*SMALL, DP, DEEPSPEED, "engine.zero_stage=1"], 0),
    "deepspeed, stage 2": ("gpt-1b3", [*SMALL, DP, DEEPSPEED, "engine.zero_stage=2"], 0),
    "deepspeed, pipeline": ("gpt-13b-3d", ["model.layers=8", "job.nodes=2", DP, "batch.global_size=32"], 0),
}
USUAL = ("native, eager", "native, tensor", "fsdp2, 512 ranks", "fsdp2, hybrid", "pipelining, second stage")
# GPUs that the presets are meant for
PRESETS = {path.stem: [] for path in sorted(Path("configs").glob("*.yaml"))}
PRESETS |= {"llama-7b": [DP], "gpt-13b-3d": ["job.nodes=4", DP, "batch.global_size=64"]}


def needs(words):
    for name in ("deepspeed", "fairscale"):
        if f"engine.name={name}" in words:
            pytest.importorskip(name)


def planned(run, rank):
    """The forecast of a rank's stage: bytes of tensors, bytes sent."""
    found = forecast.of(run, KIND)
    stage = rank * run.parallel.pipeline // found.layout.gpus
    return found, found.tensors(stage), asdict(found.volumes[stage])


def traced(run, preset, words, rank):
    seen = trace.of(run, rank)
    return seen.memory, seen.sent


def traced_by_a_process(run, preset, words, rank):
    """The same, in a new process: DeepSpeed keeps the kind of device as long as its process lives."""
    given = [f"configs/{preset}.yaml", "engine.precision=bf16", *words, f"--rank={rank}"]
    found = json.loads(runs.hpclm("planner", "--trace", "--json", *given, check=0).stdout)
    return found["memory"], found["sent"]


def compare(preset, words, rank):
    run = config.load(f"configs/{preset}.yaml", ["engine.precision=bf16", *words])
    run = suggest.with_micro_size(run, KIND)
    found, held, sent = planned(run, rank)
    memory, collectives = (traced_by_a_process if run.engine.name == "deepspeed" else traced)(run, preset, words, rank)
    assert held == pytest.approx(sum(memory.values()), rel=ALLOWED)
    if found.layout.gpus > 1:
        everything = sum(collectives.values())
        for axis, seen in collectives.items():
            assert sent[axis] == pytest.approx(seen, rel=ALLOWED, abs=ALLOWED / 10 * everything), axis


def rows(table, usual):
    return [
        pytest.param(*row, id=name, marks=[] if name in usual else [pytest.mark.whole]) for name, row in table.items()
    ]


@pytest.mark.parametrize("preset, words, rank", rows(LAYOUTS, USUAL))
def test_memory_and_communication_of_every_engine_are_those_of_a_traced_step(preset, words, rank):
    needs(words)
    compare(preset, words, rank)


@pytest.mark.whole
@pytest.mark.parametrize("preset", PRESETS)
def test_memory_and_communication_of_every_preset_are_those_of_a_traced_step(preset):
    compare(preset, PRESETS[preset], 0)


def test_weights_gradients_and_moments_of_a_rank_are_what_zero_says():
    run = config.load("configs/llama-7b.yaml", [*SHORT, DP, "batch.micro_size=1", "batch.global_size=16"])
    seen = trace.of(run, 3)
    assert seen.parameters == 8 * seen.updated
    assert seen.memory["weights"] == seen.memory["gradients"] == 4 * seen.updated
    assert seen.memory["optimizer"] == pytest.approx(8 * seen.updated, rel=1e-3)


def test_what_a_step_keeps_by_mistake_is_seen(monkeypatch):
    """As if an activation were kept for no reason."""
    from hpclm.model.layers import RowLinear

    run = config.load("configs/gpt2-124m.yaml", ["model.layers=2"])
    forward, before, kept = RowLinear.forward, sum(trace.of(run).memory.values()), []

    def keeping(self, x):
        kept.append(x.float())
        return forward(self, x)

    monkeypatch.setattr(RowLinear, "forward", keeping)
    assert sum(trace.of(run).memory.values()) > 1.1 * before


def test_submit_shows_any_rank_of_a_large_run_without_a_gpu(tmp_path):
    words = [
        "--nodes",
        "64",
        "--gpus",
        "8",
        "llama-7b",
        "data.source=synthetic",
        "model.layers=2",
        f"out={tmp_path}/run",
    ]
    ended = hpclm("submit", "--dry-run", "--ranks", "0,511", *words)
    assert "rank 0 of 512: engine fsdp2" in ended.stdout and "rank 511 of 512" in ended.stdout
    assert "over shard      (   8 ranks)" in ended.stdout and "over replicate  (  64 ranks)" in ended.stdout
    assert not (tmp_path / "run").exists()


def test_ranks_are_checked_and_need_a_dry_run():
    assert ranks.chosen("0,8-10,511", 512) == [0, 8, 9, 10, 511]
    for text, told in (("512", "ranks 0 to 511"), ("one", "such as 0,511"), ("5-3", "ranks 0 to")):
        with pytest.raises(ConfigError, match=told):
            ranks.chosen(text, 512)
    assert "--ranks is for --dry-run" in hpclm("submit", "--ranks", "0", "debug", check=2).stderr


def test_the_traced_memory_is_told_to_programs():
    found = json.loads(hpclm("planner", "--trace", "--json", "configs/debug.yaml", "engine.compile=false").stdout)
    assert set(found["memory"]) == {"weights", "gradients", "optimizer", "gathered", "logits", "activations"}

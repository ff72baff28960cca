"""Every setting has an effect that can be seen, or a message says by its name why it has none: no setting is silent.

A row sets one setting, on top of what it needs, and what is looked at must change: a model that trains two steps, the samples that are
read, the script of a job. What needs several processes, GPUs or a whole run is shown by the test that the row names.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from hpclm import config
from hpclm.base import shipped
from hpclm.base.errors import ConfigError
from hpclm.checkpoint import Retention
from hpclm.config import compose, no_effect, section
from hpclm.config.deepspeed import json_settings as deepspeed
from hpclm.config.fields import keys, split_key
from hpclm.config.length import run_length
from hpclm.data import sources
from hpclm.diagnostics.corruption import verifier
from hpclm.distributed.context import single
from hpclm.launch import container, job, setup
from hpclm.launch.local import unused
from hpclm.launch.schedulers.slurm_script import render
from hpclm.optim.schedules import learning_rate
from hpclm.optim.stability import LossScale, NonfiniteGuard
from hpclm.parallel.mesh import Mesh
from hpclm.preprocess.writer import Writer
from hpclm.training.opening import open_devices
from hpclm.training.start import RunStart
from tests.engine.test_native import batches_of, engine_of
from tests.forks import hpclm
from tests.runs import ROOT

TINY = [
    "model={vocab_size: 64, vocab_multiple: 1, layers: 2, hidden: 32, context: 16, attention: {heads: 4}}",
    "batch={global_size: 8, micro_size: 4}",
    "data.source=synthetic",
    "budget.steps=100",
    "optim={lr: 1e-2, min_lr: 1e-3}",
    "engine={device: cpu, precision: fp32}",
]
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def made(*words):
    return compose.from_cli([*TINY, *words])


def trains(run, folder):
    """Losses, norms, loss scales and saved scalars of two steps, shapes of weights, and learning rates."""
    engine, batches = engine_of(run, TYPES[run.engine.precision]), batches_of(run)
    shapes, seen = {name: placement.shape for name, placement in engine.model.placements.items()}, []
    for step in range(2):
        done = run.batch.global_size * step
        rate = learning_rate(done if run.optim.unit == "samples" else step, 1, 100, run.optim)
        result = engine.train_step(batches.step(done), rate, step)
        seen += [result.numbers, result.loss_scale, sorted(result.seconds)]
    return shapes, repr(seen), engine.scalars(), sums(engine)


def sums(engine):
    """A number for all weights and moments."""
    return [float(shard.tensor.double().square().sum()) for shard in engine.tensors()]


def rates(run, folder):
    """Learning rates of the whole run."""
    size = run.batch.global_size if run.optim.unit == "samples" else 1
    return [learning_rate(step * size, size, 100 * size, run.optim) for step in range(100)]


def scales(run, folder):
    """Loss scales in a run with overflows in a row, and with quiet steps in between."""
    scale, seen = LossScale.first(run.scaler), []
    for overflow in [True, False, True, True, *[False] * 5, *[True] * 40]:
        scale = scale.after(overflow, run.scaler)
        seen.append(scale.value)
    return seen


def plans(run, folder):
    """How batches are divided over 8 processes, and where the run ends."""
    plan = run.plan(8)
    sizes = [plan.batch_size(samples) for samples in range(0, 100, 8)]
    shards = run.parallel.shard_size(8 // run.parallel.model)
    return plan.data, plan.micro_size, sizes, run_length(run, 1000), shards


def spikes(run, folder):
    """Whether a loss that rises is a spike."""
    guard = NonfiniteGuard(run.optim)
    for step in range(1, 30):
        guard.observe(step, 1.0 + 0.001 * (step % 3) + (step == 29), False, False)
    return guard.health.spiking_since


def extends(run, folder):
    """DeepSpeed's JSON."""
    return json.dumps(deepspeed(run.for_engine(), "fp32"), sort_keys=True)


def scripts(run, folder):
    """The script of the run's job, and how its supervisor starts the ranks."""
    path = Path("/runs/one/config.yaml")
    script = render(run, path, list(setup.lines(run, path)), setup.supervisor(run.job, path))
    return script.text, container.words(run), job.torchrun_agent(run)


def keeps(run, folder):
    """What of a run's checkpoints is kept."""
    saving = run.checkpoint
    return Retention(saving.keep_last, saving.keep_every, saving.keep_best, saving.keep_epochs, 10.0)


def opens(run, folder):
    """The limit of collectives over data-parallel ranks."""
    return open_devices(run, single()).mesh.dp.options.limit


def verifies(run, folder):
    """Whether the state is checked for corruption."""
    return verifier(engine_of(run), Mesh(), single(), run.cluster.verify_every) is None


def says_itself(run, folder):
    """The settings, where they are what others read."""
    return run.name, run.out


def reads(run, folder):
    """All samples of every split, with what counts in the loss, and whether an index is kept."""
    source = sources.build_source(run.data, run.model, run.seed)
    splits = {}
    for split in ("train", *source.held_out, "test"):
        if source.per_epoch(split):
            samples = source.samples(split, None)
            rows = np.zeros((len(samples), run.model.context + 1), np.int64)
            left_out = sources.excluded(source, run.data) if split == "train" else None
            for index, row in enumerate(rows):
                samples.read(index, row)
                if left_out:
                    left_out.replace(samples, index, row)
            splits[split] = rows.tolist()
            if run.data.order == "packed":
                marks = np.zeros(rows.shape, np.int64), np.zeros(rows.shape, bool)
                for index, pair in enumerate(zip(*marks, strict=True)):
                    samples.read_documents(index, *pair)
                splits[split] += [mark.tolist() for mark in marks]
    return splits, source.eod, run.data.index_cache and sorted(Path(run.data.index_cache).iterdir())


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Datasets a and b of 60 documents that end with 256, c with a loss mask, and d with fairseq's lines."""
    folder, draw = tmp_path_factory.mktemp("datasets"), np.random.default_rng(0)
    note = {"tokenizer": {"kind": "bytes", "files": {}, "size": 257, "eod": 256}}
    for name in ("a", "b", "c", "c_loss"):
        with Writer(folder / name, np.uint8 if name.endswith("loss") else "u2") as writer:
            writer.note = None if name.endswith("loss") else note
            for size in np.random.default_rng(1).integers(5, 30, 60):
                ids = draw.integers(0, 2 if name.endswith("loss") else 250, size)
                writer.add_document(ids if name.endswith("loss") else np.append(ids[1:], 256))
    (folder / "list").write_text("3\n5\n")
    for kind in ("bin", "idx"):
        (folder / f"bare.{kind}").write_bytes((folder / f"a.{kind}").read_bytes())
    for number, name in enumerate(("vocab", "other")):
        words = {"<unk>": 0, "<|endoftext|>": 1 + number, "<eod>": 2 - number}
        (folder / f"{name}.json").write_text(json.dumps(words))
    return folder


ROPE = ["model.positions=rope"]
LATENT = [*ROPE, "model.attention.latent.kv_rank=8"]
EXPERTS = ["model.experts.count=4"]
WINDOW = [*ROPE, "model.attention.pattern=[window]", "model.attention.window=8"]
MUON = ["optim.name=muon"]
FP16 = ["engine.precision=fp16"]
A = ["data.source=indexed", "data.prefix=DATA/a", "model.vocab_size=300", "model.context=32"]
BARE = [*A, "data.prefix=DATA/bare"]
WORDS = [*BARE, "data.tokenizer=whitespace", "data.tokenizer_files=[DATA/vocab.json]"]
PACKED = [*A, "data.order=packed"]
LISTED = ["data.source=indexed", "model.vocab_size=300", "data.train=[DATA/a]", "data.split=969,30,1"]
EVEN = [*A, "data.split=1,1,1"]
STAGES = ["parallel.pipeline=2", "engine.name=pipelining"]
SCALED = "model.rope.scaling={rope_type: linear, factor: '2'}"

ACTS = {
    "name=other": (says_itself, []),
    "out=/elsewhere/run": (says_itself, []),
    "seed=2": (trains, []),
    "model.vocab_size=70": (trains, []),
    "model.vocab_multiple=128": (trains, []),
    "model.layers=3": (trains, []),
    "model.hidden=48": (trains, []),
    "model.attention.heads=2": (trains, []),
    "model.attention.head_dim=16": (trains, []),
    "model.attention.kv_heads=2": (trains, []),
    "model.ffn=48": (trains, []),
    "model.context=32": (trains, []),
    "model.positions=rope": (trains, []),
    "model.rope.base=50.0": (trains, ROPE),
    "model.rope.fraction=0.5": (trains, ROPE),
    SCALED: (trains, ROPE),
    "model.attention.pattern=[window]": (trains, ["model.attention.window=8", "model.attention.pattern=[full, window]"]),
    "model.attention.window=4": (trains, WINDOW),
    "model.rope.window_base=50.0": (trains, WINDOW),
    "model.rope.window_scaled=false": (trains, [*WINDOW, SCALED]),
    "model.norm=rmsnorm": (trains, []),
    "model.norm_order=post": (trains, []),
    "model.norm_eps=0.1": (trains, []),
    "model.activation=relu": (trains, []),
    "model.bias=false": (trains, []),
    "model.attention.qkv_bias=false": (trains, []),
    "model.attention.out_bias=false": (trains, []),
    "model.mlp_bias=false": (trains, []),
    "model.tied=false": (trains, []),
    "model.embed_norm=true": (trains, []),
    "model.embed_scale=true": (trains, []),
    "model.attention.qk_norm=true": (trains, []),
    "model.attention.qk_norm_span=projection": (trains, ["model.attention.qk_norm=true", "model.norm=rmsnorm"]),
    "model.attention.score_scale=0.9": (trains, []),
    "model.attention.score_cap=0.01": (trains, []),
    "model.attention.sinks=true": (trains, []),
    "model.attention.latent.kv_rank=8": (trains, ROPE),
    "model.attention.latent.q_rank=8": (trains, LATENT),
    "model.attention.latent.rope_dim=4": (trains, LATENT),
    "model.attention.latent.value_dim=4": (trains, LATENT),
    "model.attention.latent.norm_eps=0.1": (trains, LATENT),
    "model.embed_multiplier=2.0": (trains, []),
    "model.freeze=[norm.*]": (trains, []),
    "model.residual_multiplier=0.5": (trains, []),
    "model.experts.count=4": (trains, []),
    "model.experts.per_token=3": (trains, EXPERTS),
    "model.experts.ffn=48": (trains, EXPERTS),
    "model.experts.shared_ffn=16": (trains, EXPERTS),
    "model.experts.pattern=[dense,experts]": (trains, EXPERTS),
    "model.experts.router_score=sigmoid": (trains, EXPERTS),
    "model.experts.router_normalize=false": (trains, EXPERTS),
    "model.experts.router_scale=2.0": (trains, EXPERTS),
    "model.experts.router_groups=2": (trains, EXPERTS),
    "model.experts.router_top_groups=2": (trains, ["model.experts.count=8", "model.experts.router_groups=4"]),
    "model.experts.router_bias=true": (trains, EXPERTS),
    "model.experts.router_choice_bias=true": (trains, EXPERTS),
    "model.experts.balance_bias=0.1": (trains, [*EXPERTS, "model.experts.router_choice_bias=true"]),
    "model.experts.balance_sequence=0.1": (trains, EXPERTS),
    "model.experts.balance_step=0.1": (trains, EXPERTS),
    "model.experts.balance_micro_batch=0.1": (trains, EXPERTS),
    "model.experts.router_z_loss=0.1": (trains, EXPERTS),
    "model.logit_multiplier=0.5": (trains, []),
    "model.logit_cap=0.1": (trains, []),
    "model.logits_fp32=true": (trains, ["engine.precision=bf16"]),
    "model.dropout=0.3": (trains, []),
    "model.attention.dropout=0.3": (trains, []),
    "model.init_std=0.1": (trains, []),
    "data.prefix=DATA/b": (reads, A),
    "data.blend=[1, DATA/a, 3, DATA/b]": (reads, ["data.source=indexed", "data.blend=[DATA/a, DATA/b]", "model.vocab_size=300"]),
    "data.split=1,1,1": (reads, A),
    "data.split_by=tokens": (reads, A),
    "data.train=[DATA/b]": (reads, LISTED),
    "data.valid=[DATA/b]": (reads, LISTED),
    "data.test=[DATA/b]": (reads, LISTED),
    "data.validation=[more=DATA/b]": (reads, A),
    "data.order=packed": (reads, A),
    "data.break_mode=eos": (reads, A),
    "data.keep_partial=true": (reads, EVEN),
    "data.short_part=repeat": (reads, [*A, "data.split=59,1,0"]),
    "data.loss_mask=require": (reads, [*PACKED, "data.prefix=DATA/c", "data.loss_mask=ignore"]),
    "data.without=DATA/list": (reads, A),
    "data.index_cache=DATA/cache": (reads, A),
    "data.tokenizer=bytes": (reads, BARE),
    "data.tokenizer_files=[DATA/other.json]": (reads, WORDS),
    "data.eod=<eod>": (reads, WORDS),
    "data.eod_mask_loss=true": (trains, []),
    "data.reset_position_ids=true": (trains, []),
    "data.reset_attention_mask=true": (trains, []),
    "batch.global_size=16": (plans, ["batch.micro_size=1"]),
    "batch.micro_size=1": (plans, ["batch={global_size: 16, micro_size: 2}"]),
    "batch.rampup=[8,8,64]": (plans, ["batch={global_size: 16, micro_size: 1}"]),
    "batch.loss_norm=microbatch": (trains, ["data.eod_mask_loss=true"]),
    "budget.steps=50": (plans, ["batch.micro_size=1"]),
    "budget.samples=80": (plans, ["batch.micro_size=1"]),
    "budget.tokens=1280": (plans, ["batch.micro_size=1"]),
    "budget.epochs=0.5": (plans, ["batch.micro_size=1"]),
    "optim.name=muon": (trains, []),
    "optim.lr=0.02": (trains, []),
    "optim.min_lr=0.005": (trains, []),
    "optim.betas=[0.5,0.9]": (trains, []),
    "optim.eps=0.1": (trains, []),
    "optim.weight_decay=0.5": (trains, []),
    "optim.decayed=all": (trains, []),
    "optim.groups=[{match: norm, lr: 0.1}]": (trains, []),
    "optim.z_loss=0.01": (trains, []),
    "optim.momentum=0.5": (trains, MUON),
    "optim.nesterov=false": (trains, MUON),
    "optim.newton_schulz_steps=3": (trains, MUON),
    "optim.newton_schulz_type=fp32": (trains, MUON),
    "optim.adjust=original": (trains, MUON),
    "optim.split=false": (trains, MUON),
    "optim.qk_clip=0.001": (trains, []),
    "optim.clip=0.01": (trains, []),
    "optim.schedule=linear": (rates, []),
    "optim.unit=samples": (rates, ["optim.warmup=40"]),
    "optim.warmup=10": (rates, []),
    "optim.warmup_fraction=0.2": (rates, []),
    "optim.warmup_start=0.0": (rates, ["optim.warmup=10"]),
    "optim.schedule_length=50": (rates, []),
    "optim.power=2.0": (rates, ["optim.schedule=fairseq_polynomial"]),
    "optim.period=30": (rates, ["optim.schedule=fairseq_cosine"]),
    "optim.restarts=true": (rates, ["optim.schedule=fairseq_cosine", "optim.period=30"]),
    "optim.wsd_decay=30": (rates, ["optim.schedule=wsd"]),
    "optim.wsd_style=cosine": (rates, ["optim.schedule=wsd"]),
    "optim.guard=skip_step": (trains, []),
    "optim.spike=5.0": (spikes, []),
    "scaler.initial=1024.0": (scales, FP16),
    "scaler.window=3": (scales, FP16),
    "scaler.hysteresis=1": (scales, FP16),
    "scaler.consecutive=true": (scales, FP16),
    "scaler.minimum=64.0": (scales, FP16),
    "parallel.tensor=2": (plans, ["batch={global_size: 16, micro_size: 1}"]),
    "parallel.context=2": (plans, ["batch={global_size: 16, micro_size: 1}"]),
    "parallel.pipeline=2": (plans, ["batch={global_size: 16, micro_size: 1}", "engine.name=deepspeed"]),
    "parallel.shard=2": (plans, ["batch={global_size: 16, micro_size: 1}", "engine.zero_stage=1"]),
    "engine.precision=bf16": (trains, []),
    "engine.zero_stage=2": (extends, ["engine.name=deepspeed"]),
    "engine.offload=optimizer": (extends, ["engine.name=deepspeed"]),
    "engine.offload_folder=/nvme": (extends, ["engine={name: deepspeed, zero_stage: 3, offload: optimizer}"]),
    "engine.bucket_mb=5.0": (extends, ["engine.name=deepspeed"]),
    "engine.extra.zero_optimization.sub_group_size=1e8": (extends, ["engine.name=deepspeed"]),
    "cluster.timeout_minutes=3": (opens, []),
    "cluster.verify_every=0": (verifies, []),
    "checkpoint.keep_last=5": (keeps, []),
    "checkpoint.keep_every=2000": (keeps, []),
    "checkpoint.keep_best=2": (keeps, []),
    "checkpoint.keep_epochs=2": (keeps, ["checkpoint.epochs=1"]),
    "log.timers=true": (trains, []),
    "job.nodes=2": (scripts, []),
    "job.gpus=2": (scripts, []),
    "job.time=60": (scripts, []),
    "job.partition=big": (scripts, []),
    "job.exclude=node1": (scripts, []),
    "job.nodelist=node1": (scripts, []),
    "job.mem=8G": (scripts, []),
    "job.cpus_per_task=4": (scripts, []),
    "job.options.account=me": (scripts, []),
    "job.warn_seconds=60": (scripts, []),
    "job.requeue=false": (scripts, []),
    "job.restarts=2": (scripts, ["job.template=torchrun"]),
    "job.template=mpirun": (scripts, []),
    "job.modules=[gcc]": (scripts, []),
    "job.venv=/venv": (scripts, []),
    "job.conda=/conda": (scripts, []),
    "job.setup=[ulimit -l unlimited]": (scripts, []),
    "job.snapshot=true": (scripts, []),
    "job.env.A=1": (scripts, []),
    "job.container=/image.sif": (scripts, []),
    "job.runtime=docker": (scripts, ["job.container=/image.sif"]),
    "job.mounts=[/data]": (scripts, ["job.container=/image.sif"]),
}  # fmt: skip
"""Setting: what changes with it, on top of these settings."""

ELSEWHERE = {
    "stop_at": "tests/reporting/test_history.py",
    "exit_interval": "tests/checkpoint/test_saver.py",
    "exit_minutes": "tests/checkpoint/test_saver.py",
    "kill_switch": "tests/test_recipes.py",
    "model.block": "tests/test_layouts.py",
    "model.kernels": "tests/model/test_compiled.py",
    "model.attention.kernel": "tests/model/test_attention.py",
    "data.source": "tests/test_layouts.py",
    "data.workers": "tests/data/test_corpus.py",
    "data.phases": "tests/training/test_phases.py",
    "data.max_epochs": "tests/data/test_streams.py",
    "budget.hours": "tests/test_train.py",
    "optim.ema": "tests/test_weight_average.py",
    "optim.nonfinite_limit": "tests/test_spikes.py",
    "parallel.expert": "tests/engine/test_experts.py",
    "parallel.split_experts": "tests/engine/test_experts.py",
    "parallel.partition": "tests/engine/test_stages.py",
    "parallel.schedule": "tests/test_layouts.py",
    "parallel.chunks": "tests/test_layouts.py",
    "engine.name": "tests/test_layouts.py",
    "engine.gradients": "tests/engine/test_sharded_optimizer.py",
    "engine.defer_reduction": "tests/engine/test_reductions.py",
    "engine.fp8": "tests/engine/test_fp8.py",
    "engine.device": "tests/test_prechecks.py",
    "engine.deterministic": "tests/gpu/test_checkpoints.py",
    "engine.compile": "tests/model/test_compiled.py",
    "engine.recompute": "tests/model/test_dropout.py",
    "engine.recompute_every": "tests/model/test_dropout.py",
    "engine.offload_activations": "tests/test_prechecks.py",
    "engine.loss_chunk": "tests/engine/test_main_gradients.py",
    "evaluate.every": "tests/training/test_metrics.py",
    "evaluate.batches": "tests/training/test_metrics.py",
    "checkpoint.enabled": "tests/engine/test_unsaved_state.py",
    "checkpoint.every": "tests/checkpoint/test_saver.py",
    "checkpoint.minutes": "tests/checkpoint/test_saver.py",
    "checkpoint.epochs": "tests/test_recipes.py",
    "checkpoint.background": "tests/checkpoint/test_saver.py",
    "checkpoint.file_mb": "tests/test_preemption.py",
    "checkpoint.resume": "tests/test_resume.py",
    "checkpoint.init_from": "tests/test_finetune.py",
    "checkpoint.grace_seconds": "tests/test_run_directory.py",
    "log.every": "tests/training/test_metrics.py",
    "log.tensorboard": "tests/test_several_runs.py",
    "log.sinks": "tests/sinks/test_sinks.py",
    "train.callbacks": "tests/training/test_callbacks.py",
    "optim.arguments": "tests/optim/test_user_optimizer.py",
    "log.project": "tests/sinks/test_sinks.py",
    "profile.steps": "tests/training/test_profile.py",
    "job.cluster": "tests/test_submit.py",
    "job.notify": "tests/node/test_notify.py",
    "job.hostfile": "tests/launch/test_mpi.py",
    "cluster.start_seconds": "tests/distributed/test_ranks.py",
    "cluster.hang_minutes": "tests/distributed/test_watchdog.py",
    "cluster.interface": "tests/distributed/test_ranks.py",
    "cluster.preflight": "tests/test_layouts.py",
    "cluster.self_check": "tests/diagnostics/test_self_check.py",
}
"""Setting: the test of what it does, which sets it."""


def key_of(word):
    """The setting that a word of a command line sets."""
    return split_key(word.partition("=")[0])[0]


def with_data(words, datasets):
    """``words``, with the folder of the datasets."""
    return [word.replace("DATA", str(datasets)) for word in words]


def test_every_setting_is_in_the_table():
    shown = [*map(key_of, ACTS), *ELSEWHERE]
    assert sorted(shown) == sorted(keys())


@pytest.mark.parametrize("setting", ELSEWHERE)
def test_what_needs_a_whole_run_or_several_processes_is_set_by_the_test_that_the_table_names(setting):
    assert f"{setting}=" in (ROOT / ELSEWHERE[setting]).read_text()


@pytest.mark.parametrize("word", ACTS)
def test_a_setting_changes_what_the_table_says(word, datasets, monkeypatch):
    look, needs = ACTS[word]
    if look is scripts:
        monkeypatch.setattr("hpclm.launch.schedulers.slurm_script.node_kinds", lambda job: [])
    before = look(made(*with_data(needs, datasets)), datasets)
    after = look(made(*with_data([*needs, word], datasets)), datasets)
    assert after != before


IDLE = {
    "a window as long as the samples": ([*ROPE, "model.attention.pattern=[window]", "model.attention.window=16"], "model.attention.window=16 has no effect with model.context=16"),
    "a pattern longer than the model": (["model.attention.pattern=[full, full, window]", "model.attention.window=4"], "with model.layers=2 no layer is of kind window"),
    "unscaled windows without scaling": ([*WINDOW, "model.rope.window_scaled=false"], "model.rope.window_scaled=false has no effect"),
    "a base of windows without positions": (
        [*ROPE, "model.attention.pattern=[full, window_nope]", "model.attention.window=4", "model.rope.window_base=50"],
        "model.rope.window_base and model.rope.window_scaled have no effect: no layer with a window has positions",
    ),
    "a base where all positions are in windows": (
        [*ROPE, "model.attention.pattern=[window]", "model.attention.window=4", "model.rope.base=500", "model.rope.window_base=50"],
        "model.rope.base=500.0 has no effect: all layers with positions have windows",
    ),
    "a scaling of which windows are free": (
        [*ROPE, "model.attention.pattern=[window]", "model.attention.window=4", SCALED, "model.rope.window_scaled=false"],
        "model.rope.scaling has no effect with model.rope.window_scaled=false",
    ),
    "positions that no layer has": ([*ROPE, "model.attention.pattern=[nope]"], "model.rope.base and the other settings of rotary positions have no effect"),
    "biases that are all set": (
        ["model={norm: rmsnorm, bias: false, mlp_bias: true, attention: {qkv_bias: true, out_bias: true}}"], "model.bias=false has no effect",
    ),
    "fp32 logits in fp32": (["model.logits_fp32=true"], "model.logits_fp32=true has no effect with engine.precision=fp32"),
    "a rate at an end that does not come": (["optim.schedule=constant"], "optim.min_lr=0.001 has no effect with optim.schedule=constant"),
    "the length of a schedule without end": (
        ["optim={schedule: fairseq_inverse_sqrt, warmup: 4, schedule_length: 9}"],
        "optim.min_lr=0.001, optim.schedule_length=9 have no effect with optim.schedule=fairseq_inverse_sqrt",
    ),
    "restarts without periods": (["optim={schedule: fairseq_cosine, restarts: true}"], "optim.restarts=true has no effect without optim.period"),
    "a unit of nothing": (["optim.unit=samples"], "optim.unit=samples has no effect without optim.warmup"),
    "what decays by nothing": (["optim={weight_decay: 0.0, decayed: all}"], "optim.decayed=all has no effect with optim.weight_decay=0"),
    "a split of a block of one's own": (
        [*MUON, "optim.split=false", "model.block=mine:Block"], "optim.split=false has no effect with model.block=mine:Block",
    ),
    "a ramp without a slope": (["batch.rampup=[8,8,100]"], "batch.rampup=[8, 8, 100] has no effect"),
    "overflows in a row of one": ([*FP16, "scaler={consecutive: true, hysteresis: 1}"], "scaler.consecutive=true has no effect"),
    "fp32 gradients in fp32": (["engine.gradients=compute"], "engine.gradients=compute has no effect with engine.precision=fp32"),
    "deterministic kernels of GPUs": (["engine.deterministic=true"], "engine.deterministic=true has no effect with engine.device=cpu"),
    "a project of no sink": (["log.project=mine"], "log.project=mine has no effect without log.sinks"),
    "validation on the training data": (
        ["data={source: indexed, train: [a, b], valid: [./c/../b]}"], "data.valid has no effect as held-out data: data.train contains ./c/../b too",
    ),
    "a validation set of the training data": (
        ["data={source: indexed, train: [a], validation: [x=a]}"], "data.validation has no effect as held-out data: data.train contains a too",
    ),
    "a runtime of no container": (["job.runtime=docker"], "job.runtime=docker has no effect without job.container"),
    "hosts of another launcher": (["job={hostfile: /hosts, cluster: slurm}"], "job.hostfile=/hosts has no effect with job.cluster=slurm"),
    "what to keep of nothing": (
        ["checkpoint={enabled: false, every: 5, keep_best: 2}"], "checkpoint.keep_best=2 has no effect with checkpoint.enabled=false",
    ),
    "kept steps between saves": (
        ["checkpoint={every: 300, keep_every: 1000}"], "checkpoint.keep_every=1000 keeps multiples of 3000 only: checkpoint.every=300",
    ),
    "the best of a few": (
        ["checkpoint={every: 300, keep_best: 2}", "evaluate.every=200"],
        "checkpoint.keep_best=2 needs evaluations of the steps that are saved; with checkpoint.every=300 and evaluate.every=200 only "
        "the last step and multiples of 600 have one",
    ),
    "the best of chance": (["checkpoint={every: 0, minutes: 5, keep_best: 2}"], "with checkpoint.every=0 and evaluate.every=1000 they coincide"),
}  # fmt: skip
"""Settings, and what is said of the one that has no effect."""


@pytest.mark.parametrize("words, says", IDLE.values(), ids=IDLE)
def test_a_setting_that_another_one_switches_off_is_named(words, says):
    assert [reason for reason in section.warnings(made(*words)) if says in reason]
    assert len(list(section.warnings(made(*words)))) == 1


@pytest.mark.parametrize("name", ["debug", "small", "gpt2-124m", "llama-7b"])
def test_who_switches_evaluations_and_saves_of_a_preset_off_is_not_told_what_the_preset_says_of_them(name):
    run = config.load(shipped.presets()[name], ["evaluate.every=0", "checkpoint.enabled=false"])
    assert [reason for reason in section.warnings(run) if "evaluate" in reason or "checkpoint" in reason] == []


ALONE = {
    ("engine.zero_stage=1", "engine.bucket_mb=5"): "engine.zero_stage=1, engine.bucket_mb=5.0 have no effect with one data-parallel replica",
    ("engine.zero_stage=1", "parallel.shard=4"): "engine.zero_stage=1, parallel.shard=4 have no effect with one",
    ("engine.name=fsdp2", "engine.defer_reduction=true"): "engine.defer_reduction=true has no effect with one",
    ("batch.micro_size=8", "batch.loss_norm=microbatch", "data.eod_mask_loss=true"): "loss_norm=microbatch has no effect: a step has one micro-batch",
}  # fmt: skip
TOGETHER = {
    ("engine.zero_stage=1", "parallel.shard=2"): "parallel.shard=2 has no effect with 2 data-parallel ranks",
    ("engine.zero_stage=1", "parallel.shard=8"): "parallel.shard=8 has no effect with 2 data-parallel ranks",
    (
        "engine.name=fsdp2",
        "engine.defer_reduction=true",
    ): "defer_reduction=true has no effect: a step has one micro-batch per replica",
}


@pytest.mark.parametrize("processes, rows", {1: ALONE, 2: TOGETHER}.items())
def test_a_setting_that_the_number_of_processes_switches_off_is_named(processes, rows):
    for words, says in rows.items():
        run = made(*words)
        assert [reason for reason in no_effect.by_facts(run, plan=run.plan(processes)) if says in reason], words
    for words in (["engine.zero_stage=0"], [], ["engine.name=deepspeed", "engine.zero_stage=2"]):
        assert not list(no_effect.by_facts(made(*words), plan=made(*words).plan(processes)))


@pytest.mark.parametrize("word, says", {
    "stop_at=101": "stop_at=101 has no effect: the run ends after 100 steps",
    "exit_interval=200": "exit_interval=200 has no effect",
    "checkpoint.keep_every=1000": "checkpoint.keep_every=1000 has no effect",
    "profile.steps=[200,210]": "profile.steps: step=200 has no effect",
}.items())  # fmt: skip
def test_a_setting_of_steps_after_the_end_is_named(word, says):
    run = made(word)
    [reason] = no_effect.by_facts(run, length=run_length(run, 1000))
    assert says in reason


@pytest.mark.parametrize("words, gpu, fp32, says", [
    (["engine.deterministic=true"], False, False, "engine.deterministic=true has no effect on a CPU"),
    (["engine.deterministic=true"], True, False, None),
    (["engine.gradients=compute", "model.logits_fp32=true"], False, True, "engine.gradients=compute, model.logits_fp32=true have no effect"),
    (["engine.gradients=compute", "model.logits_fp32=true"], True, False, None),
])  # fmt: skip
def test_a_setting_that_the_chosen_device_switches_off_is_named(words, gpu, fp32, says):
    said = list(no_effect.by_facts(made("engine={device: auto, precision: auto}", *words), gpu=gpu, fp32=fp32))
    assert len(said) == (says is not None) and all(says in reason for reason in said)


def test_saves_at_the_ends_of_epochs_that_do_not_come_are_named():
    run = made("checkpoint.epochs=2", "checkpoint.keep_epochs=1")
    length = run_length(run, None)
    [reason] = no_effect.by_facts(run, length=length, per_epoch=600)
    assert "checkpoint.epochs=2.0, checkpoint.keep_epochs=1 have no effect: the run ends after 1.33 epochs" in reason
    assert not list(no_effect.by_facts(run, length=length, per_epoch=400))


def test_an_update_guard_that_never_judges_is_named():
    run = made("optim.guard=skip_step", "budget.steps=20")
    [reason] = no_effect.by_facts(run, length=run_length(run, 1000))
    assert "optim.guard=skip_step has no effect: it judges from about 64 steps on" in reason


def test_best_checkpoints_without_evaluations_are_refused():
    [problem] = made("checkpoint.keep_best=2", "evaluate.every=0").missing()
    assert "checkpoint.keep_best=2 keeps the lowest validation losses, but evaluate.every=0 measures none" in problem
    for words in (["evaluate.every=500"], ["evaluate.every=1"], ["evaluate.every=0", "checkpoint.enabled=false"]):
        assert not made("checkpoint.keep_best=2", *words).missing()


@pytest.mark.parametrize("cluster, words", {
    "local": ["job={venv: /v, partition: p, time: '60', mem: 8G, cpus_per_task: 4, exclude: n1, requeue: false}"],
    "mpirun": ["job={options: {account: me}, nodelist: n1, template: torchrun, runtime: docker, cpus_per_task: 4}"],
    "interactive": ["job={modules: [gcc], setup: [ls], restarts: 2, nodelist: n1, snapshot: true}"],
}.items())  # fmt: skip
def test_settings_of_a_job_that_its_launcher_does_not_follow_are_named(cluster, words):
    job = made(*words).job
    [note] = unused(job, cluster)
    set_here = words[0].removeprefix("job={").rstrip("}")
    assert note.count("job.") == len([part for part in set_here.split(", ") if ": " in part]) + 1  # and job.cluster
    assert f"have no effect with job.cluster={cluster}" in note
    assert not list(unused(made().job, cluster))


def plans_on(run, processes):
    """Whether a run's batches can be divided over so many processes."""
    try:
        return run.plan(processes)
    except ConfigError:
        return None


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_settings_file_has_no_setting_without_effect(path):
    run = compose.load(path)
    smallest = run.parallel.smallest
    fits = [smallest * replicas for replicas in (16, 2, 1) if plans_on(run, smallest * replicas)]
    plan = run.plan(fits[0])
    length = run_length(run, 100_000)
    said = [*section.warnings(run), *no_effect.by_facts(run, plan=plan, length=length)]
    assert not said


def without_effect(run):
    """The settings that change nothing with the run's data."""
    start = RunStart(run)
    start.source = sources.build_source(run.data, run.model, run.seed)
    return start.without_effect()


RESETS = ["data.reset_attention_mask=true", "data.reset_position_ids=true", "data.eod_mask_loss=true"]


@pytest.fixture(scope="module")
def without_ends(datasets):
    """Datasets like a whose documents do not end with 256: bare has none, inside has some, rare one in the last document."""
    note = {"tokenizer": {"kind": "bytes", "files": {}, "size": 257, "eod": 256}}
    draw = np.random.default_rng(2)
    for name in ("never", "inside", "rare"):
        with Writer(datasets / name, "u2") as writer:
            writer.note = note
            for number in range(60):
                ids = draw.integers(0, 250, 20)
                ids[3] = 256 if name == "inside" else ids[3]
                ids[-1] = 256 if name == "rare" and number == 59 else ids[-1]
                writer.add_document(ids)
    return datasets


@pytest.mark.parametrize("settings", [RESETS, *[[word] for word in RESETS]], ids=len)
@pytest.mark.parametrize("prefix, named", {"a": None, "inside": None, "rare": None, "never": "/never"}.items())
def test_settings_of_documents_are_named_where_no_document_ends(settings, prefix, named, without_ends):
    run = made(*with_data([*A, f"data.prefix=DATA/{prefix}", *settings], without_ends))
    said = without_effect(run)
    if named is None:
        assert not said
        return
    [reason] = said
    assert all(word in reason for word in settings)
    assert f"{named}: no end-of-document token (256) was found there" in reason and "--append-eod" in reason


def test_only_the_datasets_of_a_blend_that_lack_ends_are_named(without_ends):
    words = ["data.source=indexed", "model.vocab_size=300", "data.blend=[DATA/a, DATA/never, DATA/inside]", RESETS[0]]
    run = made(*with_data(words, without_ends))
    [reason] = sources.without_effect(sources.build_source(run.data, run.model, run.seed))
    assert f"has no effect on {without_ends}/never: no end" in reason
    packed = made(*with_data([*words, "data.order=packed"], without_ends))
    assert not sources.without_effect(sources.build_source(packed.data, packed.model, packed.seed))


@pytest.mark.parametrize("words, says", {
    ("data.loss_mask=ignore",): "data.loss_mask=ignore has no effect: no dataset has a loss mask",
    ("data.split=1", "evaluate.every=5"): "evaluate.every=5 has no effect: the data settings keep nothing for evaluations",
    ("data.split=1", "checkpoint.keep_best=2"): "checkpoint.keep_best=2 has no effect: the data settings keep nothing",
}.items())  # fmt: skip
def test_settings_that_these_data_switch_off_are_named(words, says, datasets):
    run = made(*with_data([*A, *words], datasets))
    assert [reason for reason in without_effect(run) if says in reason]


def test_a_run_says_once_what_has_no_effect_and_trains(tiny, tmp_path, without_ends, caplog):
    words = with_data([*A, *RESETS], without_ends) + [f"data.prefix={without_ends}/never", "data.split=1", "stop_at=1"]
    done = hpclm("train", *tiny("run", *words, "log.project=mine", "exit_interval=99"), check=0)
    text = done.stdout + done.stderr
    for says in ("data.eod_mask_loss=true", "log.project=mine has no effect", "exit_interval=99 has no effect"):
        assert text.count(says) == 1
    assert "warning" not in hpclm("train", *tiny("quiet", "budget.steps=2"), check=0).stderr.lower()

from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from hpclm import cli, config
from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig, RunConfig, compose
from hpclm.config.fields import docs, keys
from hpclm.config.length import run_length
from hpclm.config.plan import Length
from hpclm.documentation import topics
from tests.forks import hpclm
from tests.runs import ROOT

DEBUG = ROOT / "configs/debug.yaml"


def problems(*words):
    with pytest.raises(ConfigError) as caught:
        config.load(DEBUG, list(words))
    return caught.value.problems


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_settings_file_loads_and_plans(path):
    run = config.load(path)
    needs_data = not any(word in path.read_text() for word in ("prefix:", "train:", "synthetic"))
    assert [m.split()[0] for m in run.missing()] == ["data.prefix"] * needs_data
    assert run.plan(run.parallel.smallest).global_size == run.batch.global_size
    found = run_length(run, 100_000)
    assert found.steps > 0
    assert run.name == path.stem
    assert run.optim.warmup < found.in_unit(run.optim.unit)


def test_settings_files_hold_only_what_differs_from_the_defaults():
    import yaml

    for path in (ROOT / "configs").glob("*.yaml"):
        tree = yaml.safe_load(path.read_text())
        for field in fields(RunConfig):
            if is_dataclass(field.type) and field.name in tree:
                for name, value in tree[field.name].items():
                    default = {f.name: f.default for f in fields(field.type)}[name]
                    plain = tuple(value) if isinstance(value, list) else value
                    assert plain != default, f"{path.name}: {field.name}.{name}={value} is the default"


@pytest.mark.parametrize(
    "word, answer",
    {
        "modle.layers=3": "unknown setting modle.layers. Did you mean 'model.layers'?",
        "model.layer=3": "Did you mean 'model.layers'?",
        "layers=3": "Did you mean 'model.layers'?",
        "optim.lr=abc": "optim.lr='abc' must be a number",
        "budget.steps=1.5": "must be a whole number",
        "budget.steps=true": "must be a whole number",
        "model.positions=ropee": "must be one of learned, sinusoidal, rope, alibi, none. Did you mean 'rope'?",
        "model={positions: rope, rope: {scaling: {rope_type: yarm}}}": "longrope. Did you mean 'yarn'?",
        "model={positions: rope, rope: {scaling: {rope_type: linear, facter: '2'}}}": "rope_type=linear. Did you mean 'factor'?",
        "model.norm=null": "model.norm must be one of layernorm, rmsnorm, not empty",
        "log.tensorboard=maybe": "must be true or false",
        "batch.rampup=[1,2]": "must be a list of 3 numbers",
        "engine=native": "engine is a section; set its fields, such as engine.name=",
        "model.attention.heads=7": "model.hidden=64 must be a multiple of model.attention.heads=7",
        "model.attention.kv_heads=3": "model.attention.heads=4 must be a multiple of model.attention.kv_heads=3",
        "model.dropout=1": "must be at least 0 and less than 1",
        "model.dropout=nan": "must be at least 0 and less than 1",
        "batch.micro_size=3": "batch.global_size=16 must be a multiple of batch.micro_size=3 x 1 data-parallel replica = 3; "
        "batch.micro_size=1 fits",
        "batch.rampup=[8,3,100]": "does not reach batch.global_size",
        "batch={micro_size: 8, rampup: [4,4,100]}": "batch.rampup's start=4 must be a multiple of batch.micro_size=8",
        "budget.hours=.inf": "must be more than 0 and at most 1,000,000,000",
        "budget.steps=0": "must be at least 1",
        "optim={lr: 0, min_lr: 0}": "optim.lr=0 changes no weight",
        "optim.min_lr=1": "must not be more than optim.lr",
        "optim.period=2": "has no effect with optim.schedule=cosine; it applies to fairseq_cosine",
        "optim.schedule=cosin": "Did you mean 'cosine'?",
        "optim.warmup_fraction=0.1": "cannot be combined",
        "optim.betas=[0.9,1.0]": "less than 1",
        "engine.name=deepspeeed": "choose one of ['deepspeed', 'fairscale', 'fsdp2', 'native', 'pipelining'] or 'package.module:Name'",
        "engine.recompute_every=2": "has no effect with engine.recompute=none",
        "checkpoint.keep_last=1": "must be at least 2",
        "data.split=a,b": "data.split=a,b must be up to three non-negative numbers",
        "data.split=0,0,0": "must be up to three non-negative numbers",
        "data.tokenizer_files=[a]": "data.tokenizer_files=[a] has no effect without data.tokenizer: set the kind",
        "data.eod=x": "has no effect with data.source=synthetic",
        "scaler.window=5": "it applies to fp16. Leave it out, or set scaler.window=1000",
        "batch.loss_norm=microbatch": "has no effect without data.eod_mask_loss=true",
        "data.order=dse": "has no effect with data.source=synthetic",
        "data.tokenizer=bytes": "has no effect with data.source=synthetic",
        "optim.schedule_length=5": "optim.warmup=10 must be less than optim.schedule_length=5",
        "optim.warmup_start=1": "optim.warmup_start=1.0 must not be more than optim.lr=0.003",
        "seed=-1": "seed=-1 must be from 0 to 4,294,967,295",
        "out=${nope}": "there is neither a setting nor an environment variable nope",
        "out=": "out is empty",
        "optim={schedule: fairseq_polynomial, power: .inf}": "optim.power=inf must be more than 0 and finite",
        "engine.bucket_mb=.inf": "engine.bucket_mb=inf must be more than 0 and finite",
        "scaler.initial=.inf": "scaler.initial=inf must be more than 0 and finite",
        "cluster.timeout_minutes=.inf": "cluster.timeout_minutes=inf must be more than 0 and at most 1,000,000",
        "x=[": "not a YAML value",
        "model={positions: sinusoidal, hidden: 65, attention: {heads: 5}}": "needs an even model.hidden, not 65",
        "model.rope.base=5": "model.rope.base=5.0 has no effect with model.positions=learned",
        "model={positions: rope, rope: {base: 1}}": "model.rope.base=1.0 must be more than 1",
        "model={positions: rope, rope: {fraction: 0.2}}": "model.rope.fraction=0.2 of a head of 16 is 3",
        "model.logit_cap=0": "model.logit_cap=0.0 must be more than 0",
        "model.attention.qk_norm_span=projection": "needs model.attention.qk_norm=true and model.norm=rmsnorm",
        "model={attention: {kernel: flash, score_cap: 5}}": "model.attention.kernel=flash does not support model.attention.score_cap",
        "model={attention: {kernel: cudnn, pattern: [window], window: 8}}": "model.attention.kernel=cudnn does not support model.attention.window",
        "model.block=gtp": "choose one of ['gpt'] or 'package.module:Name'",
        "model.attention.pattern=[fall]": "model.attention.pattern=[fall] must be a list of full, window, nope, window_nope",
        "model.attention.pattern=[]": "model.attention.pattern=[] must be a list of full, window, nope, window_nope",
        "model.attention.pattern=[window]": "model.attention.pattern=[window] needs model.attention.window",
        "model.attention.window=8": "model.attention.window=8 has no effect: no layer of model.attention.pattern=[full] is of kind window",
        "model.rope.window_scaled=false": "model.rope.window_scaled=false has no effect without model.attention.window",
        "model.attention.pattern=[nope,full]": "layers without positions need model.positions=rope in the others",
        "model.rope.fraction=0.5": "model.rope.fraction=0.5 has no effect with model.positions=learned; it applies to rope",
        "model={positions: rope, attention: {pattern: [window], window: 8}, rope: {window_base: 1}}": "model.rope.window_base=1.0 must be more than 1",
        "model.layers=10001": "model.layers=10001 must be from 1 to 10000",
        "model={positions: rope, rope: {scaling: {rope_type: linear, factor: '0'}}}": "factor=0 must be a number of more than 0",
        "model={positions: rope, rope: {scaling: {rope_type: yarn, factor: '2'}}}": "yarn needs original_max_position_embeddings",
        "model={positions: rope, rope: {scaling: {rope_type: yarn, truncate: '1'}}}": "truncate=1 must be true or false",
        "model={positions: rope, rope: {scaling: {rope_type: longrope, short_factor: '1'}}}": "short_factor=1 must be a list of numbers",
        "model={positions: rope, rope: {scaling: {rope_type: longrope, short_factor: '[1, 2]'}}}": "has 2 numbers, but 8 frequencies",
        "model={positions: rope, rope: {scaling: {rope_type: llama3, factor: '8', original_max_position_embeddings: '16', "
        "low_freq_factor: '4', high_freq_factor: '4'}}}": "low_freq_factor must be less than high_freq_factor",
        "engine.fp8=delayed": "must be one of tensorwise, rowwise",
        "engine={fp8: rowwise, precision: fp16}": "engine.fp8=rowwise needs engine.precision=bf16, not fp16",
        "engine.fp8=rowwise": "engine.fp8=rowwise has no effect with model.layers=2: the first and the last block stay in bf16",
        "model.experts.count=32769": "model.experts.count=32769 must be from 0 to 32768",
        "model={activation: xielu, experts: {count: 4}}": "model.activation=xielu is not supported with model.experts.count",
        "model={experts: {count: 4, ffn: 0}}": "model.experts.ffn=0 must be at least 1",
        "model={experts: {count: 4, shared_ffn: -1}}": "model.experts.shared_ffn=-1 must be at least 0",
        "model={experts: {count: 4, pattern: []}}": "model.experts.pattern=[] must be a list of experts and dense",
        "model={experts: {count: 4, pattern: [expert]}}": "model.experts.pattern=[expert] must be a list of experts and dense",
        "model={experts: {count: 4, pattern: [dense]}}": "no layer of model.experts.pattern=[dense] is of kind experts",
        "model={experts: {count: 4, per_token: 5}}": "model.experts.per_token=5 must be from 1 to model.experts.count=4",
        "model={experts: {count: 4, per_token: 1}}": "model.experts.per_token=1 needs model.experts.router_normalize=false",
        "model={experts: {count: 6, router_groups: 4}}": "model.experts.router_groups=4 must be a divisor of model.experts.count=6",
        "model={experts: {count: 8, router_groups: 4, router_top_groups: 5}}": "model.experts.router_top_groups=5 must be from 1 to model.experts.router_groups=4",
        "model={experts: {count: 4, router_groups: 4, router_top_groups: 4}}": "model.experts.router_groups=4 leaves one expert in a group",
        "model={experts: {count: 8, router_groups: 4, per_token: 3}}": "more than the 2 experts of model.experts.router_top_groups=1 groups",
        "model={experts: {count: 4, router_scale: 0}}": "model.experts.router_scale=0.0 must be more than 0",
        "model={experts: {count: 4, balance_bias: 0.1}}": "model.experts.balance_bias=0.1 has no effect with model.experts.router_choice_bias=false: it moves that bias",
        "model={experts: {ffn: 8, router_scale: 2}}": "model.experts.ffn=8, model.experts.router_scale=2.0 have no effect with model.experts.count=0",
        "parallel.split_experts=false": "parallel.split_experts=false has no effect with parallel.tensor=1",
        "parallel.expert=2": "parallel.expert=2 has no effect with model.experts.count=0",
        "parallel.chunks=2": "parallel.chunks=2 has no effect with parallel.pipeline=1",
        "parallel={pipeline: 2, chunks: 2}": "parallel.chunks=2 has no effect with parallel.schedule=1f1b",
        "parallel={pipeline: 2, schedule: interleaved}": "parallel.schedule=interleaved needs parallel.chunks of 2 or more",
        "parallel.shard=1": "parallel.shard=1 must be at least 2",
        "parallel.context=64": "must be a multiple of 2 x parallel.context=64 x parallel.tensor=1 = 128",
        "engine.zero_stage=4": "engine.zero_stage=4 must be from 0 to 3",
        "engine.offload_folder=/x": "engine.offload_folder=/x has no effect with engine.offload=none",
        "engine.offload=optimizer": "engine.offload=optimizer at engine.zero_stage=0; engines that do: deepspeed",
        "engine={name: deepspeed, offload: parameters}": "it supports optimizer at zero_stage=1, optimizer at zero_stage=2, "
        "optimizer at zero_stage=3, parameters at zero_stage=3",
        "engine={name: deepspeed, zero_stage: 2, offload: optimizer, offload_activations: true}": "engine 'deepspeed' does not support engine.offload_activations=true",
        "engine={compile: true, offload_activations: true}": "engine.compile=true does not support engine.offload_activations=true",
        "engine={name: fsdp2, zero_stage: 1}": "engine 'fsdp2' does not support engine.zero_stage=1; it supports stages 2, 3",
        "engine.device=gpu": "one of auto, cpu, cuda. Did you mean 'cuda'?",
        "job={venv: /v, conda: c}": "job.venv=/v and job.conda=c cannot be combined",
        "job={container: a.sif, venv: /v}": "job.venv=/v has no effect with job.container",
        "job={container: a.sif, snapshot: true}": "job.snapshot=true has no effect with job.container",
        "job={container: a.sif, template: mpirun}": "job.container needs job.template=srun, not mpirun",
        "job.template=srn": "Did you mean 'srun'?",
        "job.mounts=[/a]": "job.mounts=[/a] has no effect without job.container",
        "job={time: '2', warn_seconds: 120}": "job.time=2 must be longer than job.warn_seconds=120",
        "job={restarts: 2, cluster: mpirun}": "job.restarts=2: mpirun cannot restart ranks",
        "job.env={HPCLM_X: a}": "job.env.HPCLM_X is set by the shell or the launcher",
        "job.env={A: [b]}": "job.env.A must be text (command line)",
        "job.env={A:1}": "job.env has no space after the ':' of A, which YAML needs",
        "job.options={qos: ''}": "job.options.qos is empty; give its value",
        "job.options={ntasks: '4'}": "job.options.ntasks: processes are job.nodes x job.gpus",
        "log.project= ": "log.project=' ' must be one line of text that is not empty",
        "log.sinks=[wandb,wandb]": "log.sinks has 'wandb' twice",
        "log.tensorboard=2": "log.tensorboard=2 must be true or false",
        "profile.steps=[1,101]": "at most 100 steps",
        "profile.steps=[0,5]": "profile.steps=[0, 5] must each be at least 1",
        "optim={schedule: fairseq_inverse_sqrt, warmup: 0}": "optim.schedule=fairseq_inverse_sqrt needs a warm-up",
        "optim={warmup: 0, warmup_start: 0}": "optim.warmup_start=0.0 has no effect without optim.warmup",
        "optim={warmup: 100, schedule_length: 100}": "optim.warmup=100 must be less than optim.schedule_length=100",
        "optim.groups=[{match: a, lr: -1}]": "lr and weight_decay must be numbers of at least 0",
        "optim.groups=[{match: a, lr: true}]": "lr and weight_decay must be numbers of at least 0",
        "optim.z_loss=-1": "optim.z_loss=-1.0 must be at least 0",
        "optim.name=cpu_adam": "optim.name=cpu_adam needs engine.offload=optimizer or parameters",
        "scaler={initial: 1, minimum: 2}": "scaler.initial=1.0 must be at least scaler.minimum=2.0",
        "scaler.minimum=0": "scaler.minimum=0.0 must be more than 0",
        "batch.micro_size=0": "batch.micro_size=0 must be at least 1, or auto",
        "batch.rampup=[20,4,100]": "with start at most batch.global_size=16",
        "budget.steps=10B": "budget.steps='10B' must be a whole number or null: 10000000000, or 10e9",
        "budget.steps=1.1k": "budget.steps='1.1k' must be a whole number or null: 1100, or 1.1e3",
        "budget.epochs=0": "budget.epochs=0.0 must be more than 0 and at most 1,000,000,000",
        "checkpoint.keep_epochs=1": "checkpoint.keep_epochs=1 has no effect without checkpoint.epochs",
        "checkpoint={enabled: false, resume: require}": "nothing for checkpoint.resume=require to resume from",
        "checkpoint.minutes=0": "checkpoint.minutes=0.0 must be more than 0",
        "checkpoint={init_from: x, resume: require}": "checkpoint.init_from starts a new run, which checkpoint.resume=require forbids",
        "kill_switch= ": "kill_switch is empty; give a path, or null",
        "exit_minutes=0": "exit_minutes=0.0 must be more than 0",
        "seed=4294967296": "from 0 to 4,294,967,295",
        "seed=9223372036854775808": "a whole number of at most 9,223,372,036,854,775,807",
        "data={source: my.mod:src, order: packed}": "data.source=my.mod:src orders its own samples",
        "data={source: indexed, loss_mask: require}": "data.loss_mask=require needs data.order=packed",
        "data={source: indexed, blend: [0, a, 1, b]}": "weights must be more than 0",
        "data={source: indexed, blend: [1, a, 1, a]}": "contains a dataset twice",
        "data={source: indexed, validation: [a/b=c]}": "'a/b=c' must be name=path",
        "data={source: indexed, prefix: a, tokenizer: gpt3}": "Did you mean 'gpt2'?",
        "data.source=indxed": "choose one of ['indexed', 'synthetic']",
        "data.split=1,1,1,1": "must be up to three non-negative numbers",
        "data=a text": "data='a text' must be a section, such as {prefix: DATASET}",
        "WANDB_PROJECT=x": "WANDB_PROJECT is an environment variable, not a setting",
        "steps": "'steps' is not key=value",
    }.items(),
)
def test_a_wrong_setting_is_answered_with_the_way_out(word, answer):
    assert any(answer in problem for problem in problems(word)), problems(word)


@pytest.mark.parametrize(
    "words",
    [
        ["seed=4294967295"],
        ["batch.rampup=[16,4,100]"],
        ["checkpoint.keep_last=2"],
        ["cluster.timeout_minutes=1000000"],
        ["engine.precision=fp16", "scaler={initial: 1, minimum: 1}"],
        ["engine.name=pipelining", "parallel.pipeline=2"],
        ["job={options: {nice: ''}, env: {RANKS: a}, restarts: 2, cluster: local, template: torchrun}"],
        ["job={time: '2', warn_seconds: 119}"],
        ["job={container: a.sif, mounts: [/my data]}"],
        ["model={experts: {count: 1, per_token: 1}}"],
        ["model={experts: {count: 4, per_token: 4, pattern: [experts, dense]}}"],
        ["model={experts: {count: 8, router_groups: 4, per_token: 2}}"],
        ["model.layers=10000"],
        ["optim={min_lr: 3e-3, warmup_start: 3e-3}"],
        ["optim={warmup: 99, schedule_length: 100}"],
        ["profile.steps=[5,5]"],
        ["profile.steps=[5,104]"],
        ["parallel.context=32"],
    ],
    ids=" ".join,
)
def test_a_setting_at_its_bound_is_accepted(words):
    config.load(DEBUG, words)


@pytest.mark.parametrize("word", ["stop_at=0", "exit_interval=-1"])
def test_a_setting_of_the_top_level_is_named_as_it_is_typed(word):
    assert problems(word) == [f"{word} must be at least 1"]


@pytest.mark.parametrize(
    "words, answer",
    {
        (
            "data.source=indexed",
            "data.eod=x",
        ): "data.eod=x has no effect without data.tokenizer: a dataset's own tokenizer is used",
        (
            "optim.schedule=fairseq_cosine",
            "optim.schedule_length=50",
            "optim.period=9",
        ): "has no effect with optim.period=9",
        (
            "optim.schedule=wsd",
            "optim.schedule_length=50",
            "optim.wsd_decay=45",
        ): "must be at most optim.schedule_length=50",
        (
            "engine.name=deepspeed",
            "parallel={pipeline: 2, schedule: gpipe}",
        ): "parallel.schedule=gpipe; it supports 1f1b",
        (
            "engine.name=deepspeed",
            "optim.guard=clip_update",
        ): "engine 'deepspeed' does not support optim.guard=clip_update",
        ("engine.name=pipelining", "parallel.pipeline=3"): "= 3 stages, but model.layers=2; each stage needs a block",
        (
            "model.attention.kv_heads=2",
            "parallel.tensor=4",
        ): "model.attention.kv_heads=2 must be a multiple of parallel.tensor=4",
        (
            "model.attention.dropout=0.1",
            "parallel.context=2",
        ): "model.attention.dropout=0.1 is not supported with parallel.context=2",
        (
            "model.block=my.mod:Block",
            "parallel.context=2",
        ): "model.block=my.mod:Block is not supported with parallel.context=2",
        ("model.experts.count=3", "parallel.expert=2"): "model.experts.count=3 must be a multiple of parallel.expert=2",
        (
            "model={experts: {count: 2, shared_ffn: 6}}",
            "parallel.tensor=4",
        ): "(model.experts.shared_ffn)=6 must be a multiple of parallel.tensor=4",
        ("model={experts: {count: 2, ffn: 6}}", "parallel.tensor=4"): "or set parallel.split_experts=false",
        (
            "budget={steps: null, hours: 1}",
            "optim={schedule: constant, warmup: 0, warmup_fraction: 0.1}",
        ): "optim.warmup_fraction needs a length",
    }.items(),
)
def test_settings_that_cancel_each_other_are_refused(words, answer):
    assert any(answer in problem for problem in problems(*words)), problems(*words)


def test_a_warm_up_given_as_a_fraction_counts_against_the_tail_of_wsd():
    words = ["optim.schedule=wsd", "optim.schedule_length=50", "optim.warmup=0", "optim.warmup_fraction=0.2"]
    assert "the warm-up of 10 + optim.wsd_decay=45" in problems(*words, "optim.wsd_decay=45")[0]
    assert config.load(DEBUG, [*words, "optim.wsd_decay=40"]).optim.wsd_decay == 40


def test_all_problems_are_reported_together():
    found = problems("modle.layers=3", "optim.lr=abc", "model.attention.heads=7", "optim.clip=-1", "batch.micro_size=3")
    assert len(found) == 5


def test_a_number_may_be_written_as_people_write_it():
    words = ["budget.tokens=1e9", "optim.lr=1e-2", "name=007", "budget.steps=1_000"]
    run = config.load(DEBUG, [*words, "data.source=indexed", "data.split=900,50,50"])
    assert run.budget.tokens == 1_000_000_000
    assert run.budget.steps == 1000
    assert (run.optim.lr, run.name, run.out, run.data.split) == (0.01, "007", "runs/007", "900,50,50")


def test_what_is_written_reads_back_as_the_same_settings(tmp_path):
    words = [
        "batch.rampup=[8,8,100]",
        "name=a b: c",
        "model.rope.base=5e5",
        "model.positions=rope",
        "data.tokenizer_files=[]",
    ]
    run = config.load(DEBUG, words)
    config.dump(run, tmp_path / "config.yaml")
    assert config.load(tmp_path / "config.yaml") == run


def test_an_invalid_settings_file_is_refused_with_the_reason(tmp_path, monkeypatch):
    for content, answer in {
        "a: [": "is not YAML",
        "- a\n": "must be a mapping",
        "a: {b: 1}\n": "unknown setting a.b",
        "seed: 1\nseed: 2\n": "key .seed. appears twice",
    }.items():
        path = tmp_path / "wrong.yaml"
        path.write_text(content)
        with pytest.raises(ConfigError, match=answer):
            config.load(path)
    with pytest.raises(
        ConfigError,
        match=r"no settings file, run directory or preset has this name\. Did you mean 'debug'\? Presets are ",
    ):
        config.load("configs/debgu.yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/debgu").mkdir(parents=True)
    (tmp_path / "runs/debgu/config.yaml").touch()
    with pytest.raises(ConfigError, match=r"Did you mean 'runs/debgu'"):
        config.load("debgu")
    (tmp_path / "mine.yaml").touch()
    with pytest.raises(ConfigError, match=f"Did you mean '{tmp_path}/mine.yaml'"):
        config.load(tmp_path / "myne.yaml")
    with pytest.raises(ConfigError, match=r"Did you mean 'recipes/bigscience'"):
        config.load("bigscence")
    with pytest.raises(ConfigError, match=r"recipes/megatron-deepspeed$"):  # sharing .yaml does not make names similar
        config.load("nosuch.yaml")


def test_a_preset_is_found_from_any_folder_and_a_file_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "debug").mkdir()  # a folder is not a settings file
    for name in ("debug", "debug.yaml", "configs/debug.yaml", "configs/debug"):
        assert config.load(name) == config.load(DEBUG)
    for name in ("recipes/fairseq", "recipes/fairseq.yaml", "configs/recipes/fairseq", "configs/recipes/fairseq.yaml"):
        assert config.load(name).name == "fairseq"
    (tmp_path / "configs").mkdir()
    for name in ("debug.yaml", "configs/debug.yaml"):
        (tmp_path / name).write_text("seed: 77\n")
        assert config.load(name).seed == 77
    with pytest.raises(ConfigError, match=r"elsewhere/debug\.yaml does not exist"):
        config.load("elsewhere/debug.yaml")


def test_a_later_override_wins():
    assert config.load(DEBUG, ["seed=1", "seed=2"]).seed == 2


def test_every_setting_is_explained_and_the_reference_page_is_current():
    assert docs(RunConfig).keys() == set(keys())
    page = (ROOT / "docs/settings.md").read_text()
    assert page == topics.reference(), "run: hpclm config --reference > docs/settings.md"


def test_config_prints_settings_that_load_as_the_same_run(tmp_path):
    printed = hpclm("config", DEBUG, "seed=5", check=0).stdout
    assert "# Transformer blocks. From 1 to 10000.\n  layers: 2" in printed
    (tmp_path / "again.yaml").write_text(printed)
    assert config.load(tmp_path / "again.yaml") == config.load(DEBUG, ["seed=5"])


@pytest.mark.parametrize(
    "words, steps",
    {
        ("budget.steps=7",): 7,
        ("budget.steps=null", "budget.samples=100"): 6,  # 16 a step, the last 4 are left out
        ("budget.steps=null", "budget.tokens=6400"): 6,
        ("budget.steps=null", "budget.epochs=2"): 12,
        ("budget.steps=50", "budget.samples=100"): 6,  # the first that is reached
        ("budget.steps=null", "budget.samples=200", "batch.micro_size=4", "batch.rampup=[4,4,60]"): 18,
        ("budget.steps=null", "budget.hours=1", "optim.schedule_length=20"): None,
    }.items(),
)
def test_a_budget_ends_where_it_says(words, steps):
    run = config.load(DEBUG, list(words))
    assert run_length(run, samples_per_epoch=100).steps == steps


@pytest.mark.parametrize(
    "words",
    [
        ("budget.steps=9223372036854775807",),
        ("budget.steps=562949953421312",),
        ("budget.steps=null", "budget.tokens=9223372036854775807", "model.context=16"),
        ("batch.global_size=4611686018427387904",),
    ],
)
def test_a_budget_that_cannot_be_counted_is_refused(words):
    with pytest.raises(ConfigError, match="at most 9007199254740991 samples can be counted"):
        run = config.load(DEBUG, list(words))
        run_length(run, None)


def test_the_longest_budget_that_can_be_counted_is_accepted():
    run = config.load(DEBUG, ["budget.steps=562949953421311"])
    assert run_length(run, None).samples == 2**53 - 16


def test_a_budget_of_less_than_a_step_is_refused():
    run = config.load(DEBUG, ["budget.steps=null", "budget.samples=15"])
    with pytest.raises(ConfigError, match="less than the first step's 16"):
        run_length(run, 100)


def test_a_run_by_the_clock_needs_a_length_for_its_schedule():
    assert "set optim.schedule_length" in problems("budget.steps=null", "budget.hours=1")[0]
    run = config.load(DEBUG, ["budget.steps=null", "budget.hours=1", "optim.schedule=constant"])
    assert run_length(run, 1) == Length(None, None)


@pytest.mark.parametrize("bad", [{"hidden": 10, "attention.heads": 3}, dict(layers=0), dict(vocab_size=-1)])
def test_a_section_refuses_to_exist_with_values_that_cannot_work(bad):
    with pytest.raises(ConfigError):
        ModelConfig.of(bad)


def test_settings_can_be_inspected_without_data():
    assert "prefix: null" in hpclm("config", "gpt2-124m", check=0).stdout
    assert "steps: null" in hpclm("config", check=0).stdout
    assert "lr: 0.004" in hpclm("config", "debug", "--changed", "optim.lr=0.004", check=0).stdout
    done = hpclm("train", "gpt2-124m", "budget.steps=null", check=64)
    assert "data.prefix is not set" in done.stderr and "no budget" in done.stderr


def test_config_prints_all_settings_or_those_that_differ_or_the_page_of_all(capsys):
    assert cli.main(["config", "debug", "optim.lr=0.004"]) == 0
    whole = capsys.readouterr().out
    assert cli.main(["config", "debug", "--changed", "optim.lr=0.004"]) == 0
    less = capsys.readouterr().out
    assert "lr: 0.004" in whole and "weight_decay:" in whole and "lr: 0.004" in less and "weight_decay:" not in less
    assert cli.main(["config", "--reference"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs/settings.md").read_text()


def test_a_shipped_settings_file_is_found_by_its_name_from_anywhere(tmp_path):
    assert "name: debug" in hpclm("config", "debug", check=0, cwd=tmp_path).stdout
    assert Path(tmp_path).exists()


TOO_LONG = {
    "steps": ["budget.steps=1000", "optim.warmup=2000"],
    "exactly": ["budget.steps=2000", "optim.warmup=2000"],
    "samples": ["budget.samples=32000", "optim.warmup=2000"],
    "tokens": ["budget.tokens=32000000", "optim.warmup=2000"],
    "the shorter of two, with hours": ["budget.steps=1000", "budget.hours=5", "optim.warmup=2000"],
    "warm-up in samples": ["budget.steps=1000", "optim.unit=samples", "optim.warmup=64000"],
    "wsd's decay": ["budget.steps=1000", "optim.schedule=wsd", "optim.wsd_decay=5000"],
    "wsd's decay after a long warm-up": [
        "budget.steps=1000",
        "optim.schedule=wsd",
        "optim.warmup=1000",
        "optim.wsd_decay=5000",
    ],
}


@pytest.mark.parametrize("words", TOO_LONG.values(), ids=TOO_LONG.keys())
@pytest.mark.parametrize("place", ["words", "file"])
def test_a_warm_up_or_decay_longer_than_the_budget_given_with_it_is_refused(words, place, tmp_path):
    if place == "file":
        (tmp_path / "x.yaml").write_text("".join(word.replace("=", ": ") + "\n" for word in words))
        words = [str(tmp_path / "x.yaml")]
    with pytest.raises(ConfigError) as error:
        compose.from_cli(words)
    said = str(error.value)
    assert any(
        length in said for length in ("warm-up of 2000", "warm-up of 64000", "wsd_decay=5000", "warm-up of 1000")
    )
    assert any(end in said for end in ("after 1000 ", "after 2000 ", "after 976 ", "after 32000 ", "the budget=1000"))


@pytest.mark.parametrize("words", [
    ["gpt2-124m", "budget.steps=20"],
    ["gpt2-124m", "budget={steps: 20}", "optim.schedule=wsd"],
    ["budget.hours=5", "optim.warmup=2000", "optim.schedule=constant"],
    ["budget.steps=1000", "optim.warmup=2000", "optim.schedule_length=100000"],
    ["budget.steps=2001", "optim.warmup=2000"],
    ["budget.steps=1000", "stop_at=20", "optim.warmup=500"],
    ["budget.epochs=1", "optim.warmup=2000"],
    ["optim.warmup=2000"],
], ids=" ".join)  # fmt: skip
def test_a_budget_lowered_to_try_a_preset_and_budgets_of_unknown_length_are_accepted(words, tmp_path):
    settings = compose.from_cli(words)
    compose.dump(settings, tmp_path / "config.yaml")
    assert compose.load(tmp_path / "config.yaml") == settings  # a job reads what was accepted


@pytest.mark.parametrize("typed", ["budget.epochs=150", "budget={epochs: 150, tokens: null}"])
def test_a_length_that_is_typed_replaces_those_of_the_file_and_of_the_run(typed, tmp_path):
    (tmp_path / "a.yaml").write_text("budget: {steps: 20, samples: 100, hours: 3}\ndata: {source: synthetic}\n")
    loaded = config.load(tmp_path / "a.yaml", [typed])
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text(compose.dumped(config.load(tmp_path / "a.yaml")))
    for run in (
        loaded,
        config.load(tmp_path / "run", [typed]),
        compose.changed(config.load(tmp_path / "a.yaml"), [typed]),
    ):
        assert (run.budget.epochs, run.budget.hours, run.budget.steps, run.budget.samples) == (150, 3, None, None)
    two = config.load(tmp_path / "a.yaml", ["budget.steps=5", "budget.samples=90"]).budget
    assert (two.steps, two.samples) == (5, 90)
    kept = config.load(tmp_path / "a.yaml", ["budget.steps=null", "budget.hours=1"]).budget
    assert (kept.steps, kept.samples, kept.hours) == (None, 100, 1)


def test_a_new_run_with_the_settings_of_another_is_told_that_its_weights_are_not_used(tmp_path, caplog):
    folder = tmp_path / "base"
    (folder / "checkpoints").mkdir(parents=True)
    config.dump(config.load(None, ["data.source=synthetic", f"out={folder}"]), folder / "config.yaml")
    said = f"only the settings of {folder} are used; checkpoint.init_from={folder} begins with its weights too"
    for words, warned in (
        ([f"out={tmp_path}/new"], True),
        ([f"out={tmp_path}/new", f"checkpoint.init_from={folder}"], False),
        ([], False),
        ([f"out={folder}"], False),
    ):
        caplog.clear()
        config.from_cli([str(folder), *words])
        assert (said in caplog.text) == warned

"""A setting that does not exist is answered with the one that was meant."""

import pytest

from hpclm import cli, config
from hpclm.base.errors import ConfigError
from hpclm.config import fields
from hpclm.config.elsewhere import SEE
from hpclm.config.hints import hint, mistakes
from hpclm.config.sbatch import advice

KEYS = fields.keys()
MEANT = {
    "optim.learning_rate": "optim.lr",
    "optim.learning_rte": "optim.lr",
    "optimizer.lr": "optim.lr",
    "optimizer.name": "optim.name",
    "eval.every": "evaluate.every",
    "logging.every": "log.every",
    "data.sed": "seed",
    "my.checkpoint_dir": "out",
    "model.num_attention_heads": "model.attention.heads",
    "ds.zero_optimization.stage": "engine.zero_stage",
    "model.num_layer": "model.layers",
    "modle.layers": "model.layers",
    "layers": "model.layers",
    "trainer.max_steps": "budget.steps",
    "optim.grad_clip": "optim.clip",
    "checkpoint.save_interval": "checkpoint.epochs or checkpoint.every",
    "my.bf16": "engine.precision=bf16",
    "dat.eod_mask_loss": "data.eod_mask_loss",
}


EXACT = {
    "fp16.enabled": "engine.precision=fp16",
    "bf16": "engine.precision=bf16",
    "scheduler.type": "optim.schedule",
    "eval.iters": "evaluate.batches",
    "data.path": "data.prefix",
    "--micro-batch-size": "batch.micro_size",
    "max_iters": "budget.steps",
    "n_positions": "model.context",
    "attention.dropout": "model.attention.dropout",
    "lr_warmup_samples": "optim.warmup optim.unit=samples",
}


@pytest.mark.parametrize("key", MEANT)
def test_a_name_that_is_like_a_setting_is_answered_with_a_question(key):
    assert hint(key, KEYS) == f". Did you mean {MEANT[key]!r}?"


@pytest.mark.parametrize("key", EXACT)
def test_exactly_the_name_of_another_project_is_answered_with_the_setting(key):
    assert hint(key, KEYS) == f": it is {EXACT[key]} here"


def test_an_exact_name_may_be_explained_or_mean_different_things_in_different_projects():
    with pytest.raises(ConfigError, match="unknown setting synchronize_each_layer: hpclm submit --debug waits"):
        config.load(None, ["synchronize_each_layer=true"])
    several = "checkpoint.epochs=... (fairseq); checkpoint.every=... (Megatron-LM, Megatron-DeepSpeed)"
    assert hint("save_interval", KEYS) == f": {several}; {SEE}"


def test_nothing_is_suggested_for_a_dissimilar_name():
    assert hint("zzz.qqq", KEYS) == hint("", KEYS) == ". See hpclm config --reference for all settings."


@pytest.mark.parametrize(
    "key, end",
    {
        "job.exclusive": ": set job.options.exclusive='' (sbatch --exclusive)",
        "job.mail_typ": ". Options of sbatch are job.options.NAME. See hpclm config --reference for all settings.",
        "job.chdir": ": set job.options.chdir=... (sbatch --chdir)",
        "job.ntasks": ": processes are job.nodes x job.gpus (--nodes, --gpus)",
        "job.ntasks_per_node": ": processes are job.nodes x job.gpus (--nodes, --gpus)",
        "job.zzz": ". Options of sbatch are job.options.NAME. See hpclm config --reference for all settings.",
        "model.expert": ". Did you mean 'model.experts'?",  # not parallel.expert
        "model.experts.z_loss": ". Did you mean 'model.experts.router_z_loss'?",  # not optim.z_loss
        "model.attn.dropout": ". Did you mean 'model.attention.dropout'?",
        "model.rope.type": ". See hpclm config --reference for all settings.",
    }.items(),
)
def test_an_option_of_sbatch_is_answered_with_where_it_stands(key, end):
    assert hint(key, KEYS) == end


@pytest.mark.parametrize(
    "option, value, says",
    [
        ("--gres", "gpu:4", "use --gpus 4 (GPUs of each node)"),
        ("--gpus-per-node", "8", "use --gpus 8 (GPUs of each node)"),
        ("--gres", "gpu:a100", "it is an option of sbatch: hpclm submit --sbatch gres=gpu:a100"),
        ("--qos", "high", "it is an option of sbatch: hpclm submit --sbatch qos=high"),
        ("--qos", "", "it is an option of sbatch: hpclm submit --sbatch qos=..."),
        ("--exclusive", "", "it is an option of sbatch: hpclm submit --sbatch exclusive"),
        ("-D", "/x", "it is an option of sbatch: hpclm submit --sbatch chdir=/x"),
        ("-n", "4", "processes are job.nodes x job.gpus (--nodes, --gpus)"),
        ("--mem", "8G", "set job.mem"),
        ("--exclusively", "", ""),
        ("-x", "", "set job.exclude"),
    ],
)
def test_an_option_of_sbatch_is_answered_with_what_to_give_in_its_place(option, value, says):
    assert advice(option, value) == says


@pytest.mark.parametrize(
    "words, says",
    {
        "optim.lr = 3": ["write optim.lr=3, without spaces"],
        "optim.lr =3": ["write optim.lr=3, without spaces"],
        "optim.lr= 3": ["write optim.lr=3, without a space"],
        "batch.global_size=8 K": ["write batch.global_size=8K, in one word"],
        "--vocab-size 32 k": ["write --vocab-size 32K, in one word"],
        "optim.lr": ["optim.lr has no value: optim.lr=…"],
        "nothing at all": [],
    }.items(),
)
def test_stray_words_are_answered_with_what_was_meant(words, says):
    words = words.split()
    assert (
        mistakes([word for word in words if "=" not in word or word.startswith("=") or word.endswith("=")], words)
        == says
    )


OPTIONS = {
    "train debug --optim.lr 1e-3": "settings are written without dashes, as key=value: optim.lr=1e-3",
    "train debug --learning-rate=1e-3 --no-such 3": "as key=value: optim.lr=1e-3",
    "train debug --bf16": "as key=value: engine.precision=bf16",
    "train --optim.lr --budget.steps 4 debug": "as key=value: optim.lr=... budget.steps=4",
    "submit debug --micro-batch-size 4": "as key=value: batch.micro_size=4",
    "submit debug --nodess 4": "did you mean --nodes 4?",
    "config debug --partition-activations": "always divided (sequence parallelism)",
    "train debug --kill-switch-path /tmp/x": "as key=value: kill_switch=/tmp/x",
    "train debug --gradient-accumulation-steps 4": "batch.global_size = batch.micro_size x accumulation steps x data-parallel replicas",
    "train debug --nothing-like-it": "unrecognized arguments: --nothing-like-it",
    "train debug --data-path 0.3 a 0.7 b": "as key=value: data.blend='[0.3,a,0.7,b]'",
    "train --data-path my_text_document small": "as key=value: data.prefix=my_text_document",
    "train debug --rampup-batch-size 16 16 5859375": "as key=value: batch.rampup='[16,16,5859375]'",
    "train debug --adam-beta2 0.98 --adam-beta1 0.8": "as key=value: optim.betas='[0.8,0.98]'",
    "train debug --adam-beta2 0.98": "as key=value: optim.betas='[...,0.98]'",
    "train debug --lr-decay-style inverse-square-root": "as key=value: optim.schedule=inverse_sqrt",
    "train debug --lr-decay-style other": "as key=value: optim.schedule=...",
    "train debug --bf16 False": "--bf16: leave it out",
    "train debug --train-tokens 300000000000": "as key=value: budget.tokens=300000000000",
    "train debug --lr-warmup-tokens 9": "optim.unit=samples with optim.warmup and optim.schedule_length",
    "train debug --virtual-pipeline-model-parallel-size 2": "parallel.schedule=interleaved with parallel.chunks",
    "train debug --rope-scaling-factor 8": "--rope-scaling-factor: model.rope.scaling, as rope_parameters in transformers",
    "train debug --learning-rte 1e-3": "--learning-rte: did you mean optim.lr?",
    "train debug --decoder-num-layers 8": "--decoder-num-layers: did you mean model.layers?",
    "train debug --warmup 0.01": "optim.warmup=0.01 (hpclm); optim.warmup_fraction=0.01 (Megatron-LM, Megatron-DeepSpeed)",
    "train debug --nnodes 2": "use hpclm submit --nodes 2",
    "train debug --prompt x": "--prompt: it is an option of hpclm generate",
    "status x --wait 9": "--wait: it is an option of hpclm request and hpclm cancel",
}


@pytest.mark.parametrize("arguments", OPTIONS)
def test_an_option_that_is_a_setting_is_answered_with_the_setting(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments.split())
    *usage, message = capsys.readouterr().err.splitlines()
    assert len(usage) <= 4
    assert ended.value.code == 2 and message.removesuffix(f"; {SEE}").endswith(OPTIONS[arguments])

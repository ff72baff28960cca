"""A setting that does not exist is answered with the one that was meant."""

import re

import pytest

from hpclm import cli, config
from hpclm.config import fields
from hpclm.config.hints import OTHER_NAMES, hint, is_reason, mistakes, sbatch_option
from hpclm.config.migrating import SEE
from hpclm.errors import ConfigError

KEYS = fields.keys()
MEANT = {
    "optim.learning_rate": "optim.lr",
    "optim.learning_rte": "optim.lr",
    "optimizer.lr": "optim.lr",
    "optimizer.name": "optim.name",
    "fp16.enabled": "engine.precision",
    "bf16": "engine.precision=bf16",
    "scheduler.type": "optim.schedule",
    "eval.iters": "evaluate.batches",
    "eval.every": "evaluate.every",
    "logging.every": "log.every",
    "data.path": "data.prefix",
    "data.sed": "seed",
    "checkpoint.dir": "out",
    "model.num_attention_heads": "model.heads",
    "--micro-batch-size": "batch.micro_size",
    "ds.zero_optimization.stage": "engine.zero_stage",
    "model.num_layer": "model.layers",
    "modle.layers": "model.layers",
    "layers": "model.layers",
    "trainer.max_steps": "budget.steps",
    "max_iters": "budget.steps",
    "optim.grad_clip": "optim.clip",
    "n_positions": "model.context",
    "checkpoint.save_interval": "checkpoint.every",
    "attention.dropout": "model.attention_dropout",
}


def suggested(key):
    match = re.fullmatch(r"\. Did you mean '(.*)'\?", hint(key, KEYS))
    return match and match[1]


@pytest.mark.parametrize("key", MEANT)
def test_the_setting_that_was_meant_is_named(key):
    assert suggested(key) == MEANT[key]


def test_every_name_of_the_table_leads_to_a_setting_that_exists_or_says_why_there_is_none():
    for name, meant in OTHER_NAMES.items():
        if is_reason(meant):
            assert hint(f"train.{name}", KEYS) == f": {meant}"
            assert all(key in KEYS for key in re.findall(r"\b(?:batch|log|parallel|engine|job)\.\w+", meant)), name
            continue
        assert meant.partition("=")[0] in KEYS, f"{name}: {meant}"
        if "=" in meant:
            config.load(None, [meant])
        for typed in (name, f"my.{name}", "--" + name.replace("_", "-")):
            assert suggested(typed) == meant, typed
    with pytest.raises(ConfigError, match="unknown setting synchronize_each_layer: hpclm submit --debug waits"):
        config.load(None, ["synchronize_each_layer=true"])


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
        ("--exclusively", "", None),
        ("-x", "", None),
    ],
)
def test_an_option_of_sbatch_is_answered_with_what_to_give_in_its_place(option, value, says):
    assert sbatch_option(option, value) == says


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
}


@pytest.mark.parametrize("arguments", OPTIONS)
def test_an_option_that_is_a_setting_is_answered_with_the_setting(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments.split())
    *usage, message = capsys.readouterr().err.splitlines()
    assert len(usage) <= 4
    assert ended.value.code == 2 and message.removesuffix(f"; {SEE}").endswith(OPTIONS[arguments])

"""A setting that does not exist is answered with the one that was meant."""

import re

import pytest

from hpclm import cli, config
from hpclm.config import fields
from hpclm.config.hints import OTHER_NAMES, hint, is_reason
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

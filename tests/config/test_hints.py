"""A setting that does not exist is answered with the one that was meant."""

import re

import pytest

from hpclm import cli, config
from hpclm.config import fields
from hpclm.config.hints import hint
from hpclm.config.peers import PEERS, WITHOUT
from hpclm.errors import ConfigError

KEYS = fields.keys()


def suggested(key):
    found = re.fullmatch(r"\. Did you mean '(.*)'\?", hint(key, KEYS))
    return found and found[1]


MEANT = {
    "optim.learning_rate": "optim.lr",
    "fp16.enabled": "engine.precision",
    "scheduler.type": "optim.schedule",
    "eval.iters": "evaluate.batches",
    "data.path": "data.prefix",
    "checkpoint.dir": "out",
    "checkpoint.keep": "checkpoint.keep_last",
    "optim.lr_rate": "optim.lr",
    "model.num_attention_heads": "model.heads",
    "engine.dtype": "engine.precision",
    "learning_rate": "optim.lr",
    "optimizer.lr": "optim.lr",
    "--micro-batch-size": "batch.micro_size",
    "train.global_batch_size": "batch.global_size",
    "ds.zero_optimization.stage": "engine.zero_stage",
    "model.n_embd": "model.hidden",
    "model.num_layer": "model.layers",
    "modle.layers": "model.layers",
    "model.layer": "model.layers",
    "layers": "model.layers",
    "optim.learning_rte": "optim.lr",
    "optim.warmup_step": "optim.warmup",
    "trainer.max_steps": "budget.steps",
    "trainer.precision": "engine.precision",
    "parallel.tensor_parallel": "parallel.tensor",
    "checkpoint.save_interval": "checkpoint.every",
    "eval.every": "evaluate.every",
    "profile_step_start": "profile.steps",
    "logging.every": "log.every",
    "optimizer.name": "optim.name",
    "data.sed": "seed",
    "bf16": "engine.precision=bf16",
    "adam_beta2": "optim.betas",
    "tokens_per_sample": "model.context",
    "block_size": "model.context",
    "attention.dropout": "model.dropout",
}


@pytest.mark.parametrize("key", MEANT)
def test_the_setting_that_was_meant_is_named(key):
    assert suggested(key) == MEANT[key]


def test_every_name_of_the_table_leads_to_a_setting_that_exists():
    for name, ours in PEERS.items():
        key, _, value = ours.partition("=")
        assert key in KEYS, f"{name}: {ours}"
        if value:
            config.load(None, [ours])
        if name not in {key.rpartition(".")[2] for key in KEYS}:
            for written in (name, f"train.{name}", "--" + name.replace("_", "-")):
                assert suggested(written) == ours, written


def test_what_has_no_setting_says_why():
    assert not WITHOUT.keys() & (PEERS.keys() | set(KEYS))
    for name, reason in WITHOUT.items():
        assert hint(f"train.{name}", KEYS) == f": {reason}"
        for key in re.findall(r"\b(?:checkpoint|log|parallel|engine|job)\.\w+", reason):
            assert key in KEYS, f"{name}: {key}"
    with pytest.raises(ConfigError, match="unknown setting synchronize_each_layer: hpclm submit --debug waits"):
        config.load(None, ["synchronize_each_layer=true"])


def test_whatever_is_typed_the_suggestion_is_a_setting():
    for key in [
        *KEYS[::5],
        *[*PEERS][::9],
        "zzz",
        "model.zzz",
        "x.y.z",
        "",
        "modle.lyaers",
        "ddata.prefx",
        "optim.lrr",
    ]:
        for typed in (key + "s", key[:-1], key[1:], key.replace(".", "_"), f"model.{key}", key.upper()):
            found = suggested(typed)
            assert found is None or found.partition("=")[0] in KEYS, typed


def test_nothing_is_suggested_for_a_dissimilar_name():
    assert hint("zzz.qqq", KEYS) == ". See hpclm config --reference for all settings."


@pytest.mark.parametrize(
    "words, answer",
    {
        (
            "batch.micro_size=2",
            "job.nodes=2",
            "job.gpus=8",
            "parallel.tensor=2",
        ): "; here 2 x 4 x 8, which is batch.global_size=64",
        ("batch.micro_size=2",): "; here 2 x 4 x replicas: batch.global_size=8 on one GPU",
        ("batch.micro_size=auto",): "data-parallel replicas (command line)",
    }.items(),
)
def test_accumulation_steps_are_answered_with_the_arithmetic(words, answer):
    for name in ("gradient_accumulation_steps", "optim.update_freq"):
        with pytest.raises(ConfigError) as raised:
            config.load(None, [f"{name}=4", *words])
        (said,) = raised.value.problems
        assert (
            f"unknown setting {name}: it follows from batch.global_size = batch.micro_size x" in said and answer in said
        )


OPTIONS = {
    "train debug --optim.lr 1e-3": "settings are written without dashes, as key=value: optim.lr=1e-3",
    "train debug --learning-rate=1e-3 --no-such 3": "as key=value: optim.lr=1e-3",
    "train debug --bf16": "as key=value: engine.precision=bf16",
    "train --optim.lr --budget.steps 4 debug": "as key=value: optim.lr=... budget.steps=4",
    "submit debug --micro-batch-size 4": "as key=value: batch.micro_size=4",
    "submit debug --nodess 4": "did you mean --nodes 4?",
    "config debug --partition-activations": "--partition-activations: ",
    "train debug --kill-switch-path /tmp/x": "as key=value: kill_switch=/tmp/x",
    "planner debug --tensor-model-parallel-size 2": "as key=value: parallel.tensor=2",
    "train debug --gradient-accumulation-steps 4": "batch.global_size = batch.micro_size x accumulation steps x data-parallel replicas",
    "train debug --nothing-like-it": "unrecognized arguments: --nothing-like-it",
}


@pytest.mark.parametrize("words", OPTIONS)
def test_an_option_that_is_a_setting_is_answered_with_the_setting(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    said = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and OPTIONS[words] in said
    assert said.endswith(OPTIONS[words]) or OPTIONS[words].endswith(": ")

"""batch.micro_size=auto."""

from dataclasses import replace

import pytest

from hpclm import config
from hpclm.config import compose
from hpclm.distributed.context import single
from hpclm.errors import ConfigError
from hpclm.node.gpus import KINDS
from hpclm.planning import forecast, suggest
from hpclm.planning import micro_batch as training
from tests.forks import hpclm

H200, H100 = KINDS["H200"], KINDS["H100"]


def preset(name, *words):
    return config.load(f"configs/{name}.yaml", ["data.source=synthetic", *words])


@pytest.mark.parametrize(
    "name, words, kind, size",
    [
        ("gpt-1b3", [], H200, 16),
        ("gpt-1b3", [], H100, 8),
        ("llama-7b", ["job.gpus=8"], H200, 4),
        ("llama-7b", ["job.gpus=8"], H100, 2),
        ("gpt-1b3", ["batch.micro_size=2"], H200, 2),
        ("gpt-1b3", ["batch.global_size=12"], H200, 4),
    ],
    ids=str,
)
def test_auto_is_the_fastest_size_that_fits_and_divides(name, words, kind, size):
    found = suggest.with_micro_size(preset(name, *words), kind)
    assert found.batch.micro_size == size and forecast.of(found, kind).room == "fits"


def test_a_layout_that_cannot_fit_is_refused_with_both_numbers():
    with pytest.raises(
        ConfigError, match=r"micro_size=1 this layout needs \d+ GiB of each of 1 x 1 GPUs, which have 79"
    ):
        suggest.with_micro_size(preset("llama-7b"), H100)


def test_auto_can_be_written_to_a_file_and_read_back(tmp_path):
    run = preset("gpt-1b3")
    compose.dump(run, tmp_path / "config.yaml")
    assert config.load(tmp_path / "config.yaml") == run and run.batch.micro_size == 0


def test_a_run_keeps_the_number_it_started_with(tmp_path):
    run, context = preset("gpt-1b3", f"out={tmp_path}"), single()
    first = training.resolved(run, context, lambda *_: H200)
    assert first.batch.micro_size == 16
    compose.dump(first, tmp_path / "config.yaml")
    assert training.resolved(run, context, lambda *_: H100).batch.micro_size == 16
    other = replace(run, batch=replace(run.batch, global_size=24))  # 16 does not divide it
    assert training.resolved(other, context, lambda *_: H100).batch.micro_size == 8


def test_training_writes_the_number_to_config_yaml(tmp_path):
    words = ["data.source=synthetic", "budget.steps=1", "batch.global_size=6", "model.layers=1", "model.hidden=16"]
    words += ["model.context=16", "model.vocab_size=64", "model.heads=2"]
    ended = hpclm("train", *words, "batch.micro_size=auto", f"out={tmp_path}/run", "engine.device=cpu")
    assert ended.returncode == 0, ended.stderr
    assert config.load(tmp_path / "run/config.yaml").batch.micro_size == 2

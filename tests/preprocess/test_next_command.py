"""The command that preprocessing prints trains on the dataset as it is, whatever its size."""

import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from hpclm import cli
from hpclm.checkpoint import Progress
from hpclm.config import dump, from_cli
from hpclm.data import sources
from hpclm.parallel.mesh import Compute
from hpclm.preprocess.next_command import LARGE_FROM, dataset_settings, next_command, next_tuning_command
from hpclm.preprocess.writer import Writer
from hpclm.training.run_data import build_data
from tests.preprocess.texts import preprocess


def dataset(path, lengths):
    with Writer(path, "u2") as writer:
        for length in lengths:
            writer.add_document(np.zeros(length, np.uint16))
    return Path(path)


CORPORA = {
    "four lines": [33] * 4,
    "a page": [300],
    "a text": [1_000_000],
    "a small corpus in lines": [40] * 200,
    "a small corpus in two documents": [4000, 4054],
    "a few short documents at the end": [9000] * 50 + [1] * 2,
    "a book": [100] * 3000,
    "enough for GPT-2's smallest shape": [LARGE_FROM // 90] * 100,
}


@pytest.mark.parametrize("corpus", CORPORA)
def test_the_next_command_fits_a_corpus_of_any_size(corpus, tmp_path):
    prefix = dataset(tmp_path / "x", CORPORA[corpus])
    config = from_cli(shlex.split(next_command([prefix], 64))[2:], None)
    source = sources.build_source(config.data, config.model, config.seed)
    opened = build_data(config, config.plan(), Compute(torch.device("cpu"), torch.float32), source, Progress())
    train, parts, length = opened.train, opened.held_out, opened.length
    assert length.steps >= 10
    warmup = config.optim.warmup or config.optim.warmup_fraction * length.steps
    assert warmup <= 0.06 * length.steps
    assert length.samples / source.per_epoch("train") <= max(10, 12 * 16 / source.per_epoch("train"))
    assert len(parts) == (corpus != "four lines")
    assert (config.data.split_by == "tokens") == (corpus in ("a page", "a text", "a small corpus in two documents"))
    train.close()


@pytest.mark.parametrize("lengths", [[1], [4], [2, 2], [128]])
def test_a_corpus_that_is_too_small_gets_no_command(lengths, tmp_path):
    prefix = dataset(tmp_path / "x", lengths)
    refused = f"add text; {sum(lengths)} tokens are too few (a first run needs at least 129)"
    assert next_command([prefix], 64) == next_command([prefix, prefix], 64) == refused


def made_run(tmp_path, *words):
    config = from_cli(["small", "model.context=16", *words], None)
    (tmp_path / "run").mkdir(exist_ok=True)
    dump(config, tmp_path / "run/config.yaml")
    return str(tmp_path / "run")


@pytest.mark.parametrize(
    "length, smaller",
    [
        (16, ["batch.global_size=2", "batch.micro_size=2"]),
        (64, ["batch.global_size=8", "batch.micro_size=4"]),
        (256, []),
    ],
)
def test_a_model_is_tuned_with_batches_that_last_for_ten_steps(length, smaller, tmp_path):
    run = made_run(tmp_path, "batch.global_size=16", "batch.micro_size=4")
    words = shlex.split(next_tuning_command(dataset(tmp_path / "x", [length] * 10), run, False))
    assert words[:3] == ["hpclm", "train", f"{run}/config.yaml"] and f"checkpoint.init_from={run}" in words
    assert {"name=tuned", "out=runs/tuned", "optim.lr=1e-5", "optim.min_lr=1e-6", "budget.epochs=3"} <= set(words)
    assert "data.order=packed" not in words
    assert [word for word in words if word.startswith("batch.")] == smaller


def test_conversations_are_kept_whole_and_apart_in_tuning(tmp_path):
    run = made_run(tmp_path)
    words = shlex.split(next_tuning_command(dataset(tmp_path / "x", [20, 20]), run, True))
    assert {"data.order=packed", "data.reset_attention_mask=true", "data.reset_position_ids=true"} <= set(words)
    assert "data.split_by=tokens" not in words and "data.split=1" in words


def test_tuning_data_below_one_sample_get_no_command(tmp_path):
    said = "add text; 16 tokens are too few for a sample of model.context=16; import the model with a shorter context"
    assert next_tuning_command(dataset(tmp_path / "x", [16]), made_run(tmp_path), False) == said


@pytest.mark.parametrize(
    "lengths, words",
    [
        ([90] * 90 + [10] * 20, []),
        ([50] * 10, ["data.split=90,10"]),
        ([1000], ["data.split=90,10", "data.split_by=tokens"]),
        ([20], ["data.split=1"]),
    ],
)
def test_a_dataset_is_divided_so_that_there_is_a_sample_to_validate_on(lengths, words, tmp_path):
    prefix = dataset(tmp_path / "x", lengths)
    assert dataset_settings(prefix, 64, 16) == [f"data.prefix={prefix}", "model.vocab_size=64", *words]


def test_validation_data_that_is_too_short_is_not_evaluated(tmp_path):
    lengths = dict(train=9000, valid=400, valid1=20)
    train, long, short = (dataset(tmp_path / name, [count]) for name, count in lengths.items())
    assert next_command([train, long], 64).endswith(f"data.valid=[{long}]' model.vocab_size=64")
    assert next_command([train, long, short], 64).endswith(" evaluate.every=0")


def test_the_printed_command_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("t.txt").write_text("To be, or not to be, that is the question:\n" * 5)
    assert preprocess("--input", "t.txt", "--output-prefix", "it's", "--tokenizer", "bytes", "--append-eod") == 0
    printed = capsys.readouterr().out.partition("next: ")[2]
    words = shlex.split(printed)[1:]
    assert cli.main([*words, "engine.device=cpu", "stop_at=1", "log.tensorboard=false"]) == 0
    assert Path("runs/small/checkpoints/step-00000001").is_dir()

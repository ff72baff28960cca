"""A run with optim.ema: the average is evaluated, saved and resumed with it, and read by commands with --ema."""

import json

import pytest
import torch

import hpclm
from hpclm import cli
from hpclm.checkpoint import directory
from hpclm.checkpoint.tensors import CheckpointTensors
from tests.runs import figures

WORDS = ["optim.ema=0.8", "evaluate.every=4", "evaluate.batches=2"]


def saved(run, step=None):
    """The tensors of the newest checkpoint of a run, or of that of ``step``."""
    place = directory.newest(run / "checkpoints")
    if step is not None:
        place = directory.locate(run / f"checkpoints/step-{step:08}")
    with CheckpointTensors(*place) as tensors:
        return {name: tensors.whole(name) for name in tensors.shapes()}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Settings that read a dataset of bytes."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("".join(f"a text with the number {number}\n" for number in range(300)))
    words = ["--input", str(folder / "text.txt"), "--output-prefix", str(folder / "text"), "--tokenizer", "bytes"]
    assert cli.main(["preprocess", *words]) == 0
    split = ["data.split=80,20", "data.split_by=tokens"]
    return [f"data.prefix={folder / 'text_text_document'}", "data.source=indexed", *split, "model.vocab_size=257"]


def test_its_average_is_evaluated_in_training_and_read_by_every_command(text, tiny, tmp_path, capsys):
    run = tmp_path / "run"
    assert cli.main(["train", *tiny("run", *WORDS, *text)]) == 0
    tensors = saved(run)
    [*_, (step, loss, of_average)] = figures(run, "step", "validation_loss", "validation_loss_ema")
    assert step == 12 and abs(of_average - loss) > 1e-3
    assert f"with averaged weights {of_average:.4f}" in (run / "log.txt").read_text()
    capsys.readouterr()
    for more, expected in (([], loss), (["--ema"], of_average)):
        assert cli.main(["evaluate", str(run), "--samples", "16", "--json", *more]) == 0
        assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(expected, rel=1e-6)
    model = hpclm.load(run, ema=True)
    for name, weight in model.stack.weights():
        assert torch.equal(weight, tensors[f"ema.{name}"]), name
    copied = hpclm.load(model.save(tmp_path / "copied"))
    assert all(torch.equal(weight, tensors[f"ema.{name}"]) for name, weight in copied.stack.weights())
    for path, more in (("average", ["--ema"]), ("weights", [])):
        assert cli.main(["convert", str(run), str(tmp_path / path), *more]) == 0
    assert "the average of the weights at step 12" in capsys.readouterr().out
    card = (tmp_path / "average/README.md").read_text()
    assert "optim.ema=0.8" in card and f"{of_average:.4f}" in card and f"{loss:.4f}" not in card
    from transformers import AutoModelForCausalLM

    ids = torch.arange(12)[None]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "average")(ids).logits
        torch.testing.assert_close(logits, model(ids), rtol=1e-4, atol=1e-4)
    opened = hpclm.open(run)
    assert "validation, averaged weights" in opened.report().path.read_text()
    assert cli.main(["generate", str(run), "--prompt", "a s", "--temperature", "0", "--ema"]) == 0
    text = opened.generate("a s", temperature=0, ema=True)
    assert capsys.readouterr().out == f"a s{text}\n" and text == model.generate("a s", temperature=0)
    assert opened.evaluate(samples=16, ema=True)["loss"] == pytest.approx(of_average, rel=1e-6)


def test_an_evaluation_changes_nothing_and_a_run_resumes_to_the_last_bit(tiny, tmp_path):
    assert cli.main(["train", *tiny("straight", *WORDS, "checkpoint.every=1", "checkpoint.keep_every=1")]) == 0
    assert cli.main(["train", *tiny("resumed", *WORDS[:1], "stop_at=7")]) == 0
    assert cli.main(["train", *tiny("resumed", *WORDS[:1], "evaluate.every=3")]) == 0
    average = None
    for step in range(2, 13):
        now = saved(tmp_path / "straight", step)
        if average is None:
            average = {name: tensor for name, tensor in now.items() if name.startswith("ema.")}
            continue
        for name, was in average.items():
            average[name] = was * 0.8 + now[name.replace("ema.", "model.", 1)] * (1 - 0.8)
            assert torch.equal(now[name], average[name]), name
    resumed = saved(tmp_path / "resumed")
    assert resumed.keys() == now.keys()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in now.items())


def test_it_may_be_switched_on_and_off_and_a_run_without_one_says_so(text, tiny, tmp_path, capsys):
    assert cli.main(["train", *tiny("run", *text, "stop_at=4")]) == 0
    for command, *more in (["evaluate"], ["convert", str(tmp_path / "x")], ["generate", "--prompt", "a"]):
        capsys.readouterr()
        assert cli.main([command, str(tmp_path / "run"), *more, "--ema"]) == 64
        assert "the checkpoint of step 4 has no average of the weights" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    assert cli.main(["train", *tiny("run", *text, *WORDS, "stop_at=8")]) == 0
    log = (tmp_path / "run/log.txt").read_text()
    assert "optim.ema: the checkpoint has no average of the weights; it begins with the weights of this step" in log
    assert any(name.startswith("ema.") for name in saved(tmp_path / "run"))
    assert cli.main(["train", *tiny("run", *text)]) == 0
    assert "the average of the weights in the checkpoint is dropped" in (tmp_path / "run/log.txt").read_text()
    assert not any(name.startswith("ema.") for name in saved(tmp_path / "run"))

"""The model card of an export: its figures are the run's, and its code loads the model."""

import json
import os
import re

import pytest

from hpclm import __version__, cli
from tests.interop import made

convert = cli.function("convert")


def words(*parts):
    return [str(part) for part in parts]


@pytest.fixture
def run(tiny, tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "Once upon a time there was a number."}\n' * 50)
    tokenizer = words("--tokenizer", "json", "--tokenizer-files", tmp_path / "tok.json", "--append-eod")
    train = words("--input", tmp_path / "t.jsonl", "--output", tmp_path / "tok.json", "--vocab-size", 300)
    assert cli.main(["train-tokenizer", *train]) == 0
    files = words("--input", tmp_path / "t.jsonl", "--output-prefix", tmp_path / "secret/stories")
    assert cli.main(["preprocess", *files, *tokenizer]) == 0
    settings = [word for word in tiny("run", "evaluate.every=6") if word != "data.source=synthetic"]
    more = [
        "model.vocab_size=300",
        "model.context=64",
        "data.split=8,2,0",
        "batch.global_size=4",
        "batch.micro_size=4",
        "optim.warmup_fraction=0.25",
    ]
    assert cli.main(["train", *settings, *more, f"data.prefix={tmp_path}/secret/stories_text_document"]) == 0
    return tmp_path / "run"


def test_a_card_says_what_was_trained_on_what_and_how_and_its_code_runs(run, tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    run = run.rename(tmp_path / "mine|two")
    before = os.umask(0o027)
    try:
        assert convert(words(run, tmp_path / "hf", "--dtype", "bf16")) == 0
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "hf").iterdir()} == {0o640}
    card = (tmp_path / "hf/README.md").read_text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    held_out = [row["validation_loss"] for row in rows if "validation_loss" in row]
    table = dict(re.findall(r"^\| (.+?) \| (.+) \|$", card, re.M))
    assert table["steps"] == "12" and table["tokens seen"] == f"{12 * 4 * 64:,}"
    assert table["training loss, mean of the last 12 steps"] == f"{sum(losses) / 12:.4f}"
    assert table["loss on valid, step 12"] == f"{held_out[-1]:.4f}"
    assert table["dataset"] == "stories_text_document" and "json tokenizer" in table["tokenizer"]
    assert table["optim.name"] == "adamw" and table["batch.global_size"] == "4"
    assert table["optim.warmup_fraction"] == "0.25" and table["optim.clip"] == "1.0"
    assert not {"optim.momentum", "model.rope.base"} & set(table)  # Muon's, and of rotary positions
    assert table["engine.precision, as it ran"] == "fp32" and table["weights in these files"] == "bf16"
    assert f"hpclm {__version__}" in card and "# mine\\|two" in card and str(tmp_path) not in card
    [code] = re.findall(r"```python\n(.*?)```", card, re.S)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    monkeypatch.setattr("builtins.input", lambda _: "Once upon a time")
    exec(code, {})
    assert capsys.readouterr().out.startswith("Once upon a time")


def test_a_card_of_imported_weights_and_of_a_network_with_its_own_class_says_so(tmp_path):
    made.run(tmp_path / "run", made.OWN["bigscience"])
    assert convert(words(tmp_path / "run", tmp_path / "hf")) == 0
    card = (tmp_path / "hf/README.md").read_text()
    assert "from_pretrained('hf', trust_remote_code=True)" in card and "modeling_hpclm.py" in card
    assert "unknown: the weights were imported" in card and "is not included" in card

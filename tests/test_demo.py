"""``hpclm demo``: from nothing to a model that writes."""

import json
from pathlib import Path

from hpclm import cli
from hpclm.commands import demo
from hpclm.reporting import characters
from hpclm.reporting.history import History
from tests.runs import hpclm, losses

SMALL = ["model={layers: 1, hidden: 32, heads: 2, context: 32}", "batch={global_size: 4, micro_size: 4}"]
SMALL += ["budget.steps=4", "evaluate.every=2", "checkpoint.every=2", "optim.warmup=1", "engine.device=cpu"]


def test_the_demo_makes_its_data_trains_and_generates_and_continues_where_it_was(tmp_path):
    (tmp_path / "demo").mkdir()
    documents = [json.dumps({"text": f"def f{n}(x):\n    return x + {n}\n" * 20}) for n in range(100)]
    (tmp_path / "demo/corpus.jsonl").write_text("\n".join(documents) + "\n")  # what is there is not made again
    told = hpclm("demo", *SMALL, cwd=tmp_path, check=0).stdout
    assert "1/6" not in told and "   $ hpclm train-tokenizer --input demo/corpus.jsonl" in told
    assert "loss over 4 steps" in told and "step     4   validation loss" in told
    assert "hpclm generate demo/run --prompt" in told
    assert list(losses(tmp_path / "demo/run")) == [1, 2, 3, 4]


def test_a_mistake_in_the_demos_settings_is_told_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo", "budget.stepps=3"]) == 64
    assert "budget.steps" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_corpus_has_a_document_for_each_source_file(tmp_path):
    told = demo.write_corpus(tmp_path / "corpus.jsonl", Path(json.__file__).parent)
    rows = [json.loads(line) for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    assert f"{len(rows)} documents" in told
    assert {"__init__.py", "decoder.py", "encoder.py"} <= {row["source"] for row in rows}
    assert all(row["text"] for row in rows)


def test_the_curve_has_the_first_loss_at_the_top_and_the_last_at_the_bottom(tmp_path):
    steps = tuple({"step": n, "loss": 5.0 - n} for n in range(1, 5))
    history = History(tmp_path, (), (*steps, {"step": 5, "loss": None}), ({"step": 4, "validation_loss": 1.5},), ())
    lines = characters.curve(history).splitlines()
    assert lines[0].startswith("loss over 4 steps")
    drawn = [line for line in lines if "|" in line]
    assert drawn[0].startswith("  4.00 |·") and drawn[-1].startswith("  1.00 |") and drawn[-1].endswith("·")
    assert lines[-1] == "  step     4   validation loss 1.500"


def test_the_curve_of_a_run_without_steps_is_empty(tmp_path):
    assert characters.curve(History(tmp_path, (), (), (), ())) == ""

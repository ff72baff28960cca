"""``hpclm ledger`` as a person calls it: the same document by number and by text, tampered data, and what does not exist."""

import json
import subprocess
import sys

import numpy as np
import pytest

from hpclm import cli
from hpclm.ledger.reads import FACTS
from tests import forks

TEXTS = [f"{number}: " + "what a model reads " * (number % 7) for number in range(80)]


@pytest.fixture
def run(tiny, tmp_path):
    """A run over a dataset of TEXTS."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "d.jsonl").write_text(lines)
    words = ["--input", f"{tmp_path}/d.jsonl", "--output-prefix", f"{tmp_path}/d", "--tokenizer", "bytes"]
    assert cli.main(["preprocess", *words, "--append-eod"]) == 0
    words = tiny("run", "model.vocab_size=257", "data.source=indexed", f"data.prefix={tmp_path}/d_text_document")
    forks.hpclm("train", *words, check=0)
    return tmp_path / "run"


@pytest.mark.slow
def test_a_document_is_found_by_its_number_and_by_its_text(run, tmp_path, capsys):
    prefix = tmp_path / "d_text_document"
    (tmp_path / "text.txt").write_text(TEXTS[13] + "\n")

    def said(*words, code=0):
        capsys.readouterr()
        assert cli.main(["ledger", str(run), *words]) == code
        output = capsys.readouterr()
        return output.err if code else output.out

    by_number = json.loads(said("--document", "13", "--json"))
    steps = [read["step"] for read in by_number["reads"] if not read["undone"]]
    assert steps and by_number["tokens"] == len(TEXTS[13]) + 1
    assert by_number["checkpoint_before"] == (
        str(run / "checkpoints" / f"step-{(steps[0] - 1) // 4 * 4:08}") if steps[0] > 4 else None
    )
    for step in range(1, 13):
        parts = [json.loads(line) for line in said("--at", str(step), "--json").splitlines()]
        assert sum(part["tokens"] for part in parts) == 8 * 17
        assert (step in steps) == any(part["document"] == 13 for part in parts)
    make = f"hpclm data index {prefix}"
    assert make in said("--text", str(tmp_path / "text.txt"), code=64)
    assert cli.main(make.split()[1:]) == 0
    assert "80 documents indexed in " in capsys.readouterr().out
    assert json.loads(said("--text", str(tmp_path / "text.txt"), "--json")) == by_number
    assert json.loads(said("--document", f"{prefix}:13", "--json")) == by_number
    (run / FACTS).write_text("[")  # it may be lost or damaged
    assert json.loads(said("--document", "d_text_document:13", "--json")) == by_number

    (tmp_path / "text.txt").write_text("no such text")
    assert f"no document of {prefix} has the text of" in said("--text", str(tmp_path / "text.txt"), code=64)
    assert "has documents 0 to 79; it has no document 80" in said("--document", "80", code=64)
    assert f"has read {prefix}: give PREFIX:DOCUMENT, because other is none of them" in said(
        "--document", "other:3", code=64
    )
    assert "has trained steps 1 to 12; it has no step 13" in said("--at", "13", code=64)
    assert json.loads(said("--json"))["steps"] == "1-12"

    assert "12 steps verified" in said("--verify")
    with open(f"{prefix}.bin", "r+b") as file:
        tokens = np.fromfile(file, np.uint16)
        tokens[tokens == ord("w")] = ord("W")
        file.seek(0)
        tokens.tofile(file)
    assert "read other tokens than the datasets have now: 1-12" in said("--verify", code=64)
    assert "1 step read other tokens than the datasets have now: 5" in said("--verify", "--at", "5", code=64)


@pytest.mark.slow
def test_it_needs_no_pytorch(run):
    code = f"import sys; from hpclm import cli; cli.main(['ledger', {str(run)!r}, '--document', '3']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_data_without_documents_are_refused_by_name(tiny, tmp_path, capsys):
    forks.hpclm("train", *tiny("run", "budget.steps=2"), check=0)
    assert cli.main(["ledger", str(tmp_path / "run"), "--document", "3"]) == 64
    assert "data.source=synthetic has no documents on disk" in capsys.readouterr().err
    assert cli.main(["ledger", str(tmp_path / "run"), "--verify"]) == 0

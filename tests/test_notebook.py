"""A notebook: the first example of docs/python.md, and a mistake."""

import re

import nbformat
from nbconvert.preprocessors import ExecutePreprocessor

from tests.runs import ROOT

TINY = '"small", {"model": {"layers": 1, "hidden": 16, "heads": 2, "context": 16}, "engine.device": "cpu"}'


def test_the_first_example_in_a_notebook(tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "Once upon a time there was a number."}\n' * 100)
    example = re.search(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.S)[1]
    assert '"small"' in example and "steps=200" in example
    cells = [example.replace('"small"', TINY).replace("steps=200", "steps=20"), 'hpclm.train("smal")']
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    ExecutePreprocessor(timeout=100, allow_errors=True).preprocess(notebook, {"metadata": {"path": tmp_path}})
    shown, error = (cell.outputs for cell in notebook.cells)
    [plot] = [output.data for output in shown if "image/png" in output.get("data", {})]
    assert plot["text/plain"].startswith("runs/small: step 20/20, loss ")
    printed = "".join(output.text for output in shown if output.output_type == "stream")
    assert "validation_loss" in printed
    assert "iframe" in shown[-1].data["text/html"] and (tmp_path / "runs/small/report.html").is_file()
    [line] = error[0].traceback
    assert line.startswith("ConfigError: settings file smal does not exist") and "\n" not in line

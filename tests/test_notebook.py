"""A notebook: the first example of docs/python.md, and a mistake."""

import re

import nbformat
from nbconvert.preprocessors import ExecutePreprocessor

from tests.events import began
from tests.runs import PATIENCE, ROOT

TINY = (
    '"small", {"model": {"layers": 1, "hidden": 16, "attention": {"heads": 2}, "context": 16}, "engine.device": "cpu"}'
)
COMMAND = "hpclm.train in a notebook"


def test_the_first_example_in_a_notebook(tmp_path):
    (tmp_path / "text.txt").write_text("Once upon a time there was a number.\n" * 100)
    example = re.search(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.S)[1]
    assert '"small"' in example and "steps=500" in example
    without = "import sys; sys.modules.update(matplotlib=None, pandas=None); run.resume(steps=22).metrics"
    cells = [example.replace('"small"', TINY).replace("steps=500", "steps=20"), 'hpclm.train("smal")', without]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    ExecutePreprocessor(timeout=PATIENCE, allow_errors=True).preprocess(notebook, {"metadata": {"path": tmp_path}})
    shown, error, plain = (cell.outputs for cell in notebook.cells)
    [plot] = [output.data for output in shown if "image/png" in output.get("data", {})]
    assert plot["text/plain"].startswith("runs/small: step 20/20, loss ")
    printed = "".join(output.text for output in shown if output.output_type == "stream")
    assert "validation_loss" in printed
    assert "iframe" in shown[-1].data["text/html"] and (tmp_path / "runs/small/report.html").is_file()
    assert began(tmp_path / "runs/small")[0]["command"] == COMMAND
    [line] = error[0].traceback
    assert (
        line.startswith("ConfigError: smal does not exist: no settings file, run directory or preset has this name")
        and "\n" not in line
    )
    [progress] = [output.data for output in plain if output.output_type == "display_data"]
    assert progress.keys() == {"text/plain"} and progress["text/plain"].startswith("runs/small: step 22/22, loss ")
    assert (
        plain[-1].traceback[0].startswith("ConfigError: run.metrics needs pandas, which is not installed: pip install")
    )

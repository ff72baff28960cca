"""What is missing or misspelt is said before PyTorch, which takes seconds, is imported."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from hpclm import config
from tests.events import note
from tests.runs import ROOT

SHAPE = "model={layers: 1, hidden: 16, context: 16, vocab_size: 64, attention: {heads: 2}}"
DATASET = ["data.source=indexed", "data.prefix=missing"]
SMALL = ["data.source=synthetic", "out=runs/none"]
OWN = {
    "nosuch.mod:Foo": "No module named 'nosuch'",
    "tests.nosuch:Foo": "No module named 'tests.nosuch'",
    "tests.runs.nosuch:Foo": "No module named 'tests.runs.nosuch'",
    "tests.runs:hplcm": f"{ROOT}/tests/runs.py has no 'hplcm'. Did you mean 'hpclm'?",
}
# command: exit code, what its message names
CASES = {
    # a run directory
    **{f"{verb} missing": (64, "missing") for verb in ("status", "logs", "report", "cancel", "checkpoints", "resume")},
    **{f"{verb} missing": (64, "missing") for verb in ("sync", "evaluate", "train", "submit")},
    "generate missing --prompt a": (64, "missing"),
    "request missing save": (64, "missing"),
    "evaluate missing --tasks a": (64, "missing"),
    "evaluate missing --tasks a --follow": (64, "missing"),
    "evaluate missing --text text.txt": (64, "missing"),
    "evaluate missing --data data": (64, "missing"),
    "convert missing target": (64, "missing"),
    # a settings file, preset or setting
    **{f"{verb} missing.yaml": (64, "missing.yaml") for verb in ("train", "submit", "planner", "config")},
    **{f"{verb} smal": (64, "Did you mean 'small'?") for verb in ("train", "submit", "planner", "config")},
    **{f"{verb} small optim.lrr=1": (64, "optim.lr'") for verb in ("train", "submit", "planner", "config")},
    "evaluate runs/saved optim.lrr=1": (64, "optim.lr'"),
    "generate runs/saved --prompt a optim.lrr=1": (64, "optim.lr'"),
    "convert runs/saved target optim.lrr=1": (64, "optim.lr'"),
    "resume runs/saved optim.lrr=1": (64, "optim.lr'"),
    # a model for other programs
    **{
        f"{command}": (
            64,
            "exported is not a run directory: it holds a model for transformers; to use it here, make a run of it: hpclm convert",
        )
        for command in (
            "generate exported --prompt a",
            "evaluate exported",
            "status exported",
            "train exported",
            "resume exported x=1",
        )
    },
    "generate model.gguf --prompt a": (64, "it is a model for llama.cpp, which hpclm writes and does not read"),
    "convert model.gguf made": (64, "convert the safetensors model that it was made from"),
    "convert exported/model.safetensors made": (64, "exported TARGET"),
    # a checkpoint
    "train small data.source=synthetic out=runs/none --from 5": (
        64,
        "runs/none is not a run yet, so it has no checkpoint of step 5",
    ),
    "submit small data.source=synthetic out=runs/none --from 5": (
        64,
        "runs/none is not a run yet, so it has no checkpoint of step 5",
    ),
    "resume none --from 5": (64, "none is not a run directory: it does not exist"),
    "checkpoints runs/new": (64, "runs/new/checkpoints"),
    "checkpoints runs/empty": (66, "runs/empty/checkpoints"),
    "evaluate runs/new": (64, "runs/new has no checkpoints"),
    "evaluate runs/empty": (66, "runs/empty/checkpoints"),
    "evaluate runs/empty --tasks a": (66, "runs/empty/checkpoints"),
    f"submit small {SMALL[0]} out=runs/none --cluster local --gpus 2 cluster.interface=eth9": (
        64,
        "cluster.interface=eth9: ",
    ),
    "generate runs/empty-text --prompt a": (66, "runs/empty-text/checkpoints"),
    "report runs/empty --samples a": (66, "runs/empty/checkpoints"),
    "convert runs/new target": (64, "runs/new has no checkpoints"),
    "convert runs/empty target": (66, "runs/empty/checkpoints"),
    "convert runs/empty target.gguf": (66, "runs/empty/checkpoints"),
    "convert other target": (64, "other cannot be converted"),
    "resume runs/saved --from 7": (64, "step 7"),
    f"train small {SMALL[0]} out=runs/saved --from 7": (64, "step 7"),
    f"train small {SMALL[0]} out=runs/empty checkpoint.resume=require": (66, "runs/empty/checkpoints"),
    f"train small {' '.join(SMALL)} checkpoint.init_from=missing": (64, "checkpoint.init_from=missing"),
    f"submit small {' '.join(SMALL)} checkpoint.init_from=missing": (64, "checkpoint.init_from=missing"),
    # a run whose files cannot be its own
    f"train small {SMALL[0]} out=runs/damaged": (
        64,
        "events.jsonl, line 2, is damaged: remove the line, or restore the file from a copy",
    ),
    # code of the user's own
    **{
        f"{verb} small {SMALL[0]} out=runs/none {setting}": (64, f"{key} '{name}' cannot be loaded: {why}")
        for verb in ("train", "submit")
        for key in ("engine.name", "model.block", "optim.schedule", "data.source", "log.sinks", "train.callbacks")
        for name, why in OWN.items()
        for setting in [f"{key}=[{name}]" if key in ("log.sinks", "train.callbacks") else f"{key}={name}"]
    },
    "train small data.prefix=data data.tokenizer=nosuch.mod:Foo": (
        64,
        "data.tokenizer 'nosuch.mod:Foo' cannot be loaded",
    ),
    "submit small job.cluster=nosuch.mod:Foo": (
        64,
        "job.cluster 'nosuch.mod:Foo' cannot be loaded: No module named 'nosuch'",
    ),
    "train small optim.name=nosuch.mod:Foo": (64, "optim.name"),
    "preprocess --input text.txt --output-prefix made --tokenizer nosuch.mod:Foo": (64, "No module named 'nosuch'"),
    # an input file, dataset or tokenizer
    "train small data.prefix=missing out=runs/none": (64, "missing.bin and missing.idx"),
    "train runs/new data.source=indexed data.prefix=missing": (64, "missing.bin and missing.idx"),
    "train small data.source=missing.module:source out=runs/none": (64, "missing.module"),
    "submit small data.prefix=missing out=runs/none": (64, "missing.bin and"),
    f"submit small {' '.join(SMALL)} job.template=missing": (64, "missing"),
    f"submit small {' '.join(SMALL)} --hostfile missing": (64, "missing"),
    "evaluate runs/saved --data missing": (64, "missing.bin and missing.idx"),
    "evaluate runs/saved-text --text missing.txt": (64, "missing.txt"),
    "evaluate runs/saved-data": (64, "missing.bin and"),
    "evaluate runs/lost-tokenizer --text text.txt": (64, "tokenizer.json"),
    "generate runs/lost-tokenizer --prompt a": (64, "tokenizer.json"),
    "generate runs/saved --prompt a": (64, "has no tokenizer, and reads and writes no text"),
    "evaluate runs/saved --text text.txt": (64, "has no tokenizer, and reads and writes no text"),
    "evaluate runs/saved --text missing.txt": (64, "missing.txt cannot be read"),
    "generate runs/saved-text --prompts missing.txt": (64, "missing.txt"),
    "report runs/saved -o missing/report.html": (64, "missing"),
    **{f"data {what} missing": (64, "missing.bin and missing.idx") for what in ("inspect", "verify")},
    "preprocess --input missing.txt --output-prefix made --tokenizer bytes": (64, "missing.txt"),
    "preprocess --input text.txt --output-prefix made --tokenizer json --tokenizer-files missing": (64, "missing"),
    "train-tokenizer --input missing.txt --output made.json --vocab-size 300": (64, "missing.txt"),
    "docs xyzzy": (64, "xyzzy"),
}
if importlib.util.find_spec("lm_eval"):
    CASES |= {
        "evaluate runs/saved-text --tasks nosuch": (64, "has no task 'nosuch'"),
        "evaluate runs/saved-text --tasks arc_easy,helaswag": (
            64,
            "has no task 'helaswag'; your own tasks need --tasks-path. Did you mean 'hellaswag'?",
        ),
        "evaluate runs/saved-text --tasks nosuch --follow": (64, "has no task 'nosuch'"),
        "evaluate runs/saved-text --tasks nosuch --follow --submit": (64, "has no task 'nosuch'"),
        "evaluate runs/saved-text --tasks arc_easy --tasks-path nosuch": (64, "nosuch is not a folder of task files"),
    }


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    """How each of CASES ends."""
    here = tmp_path_factory.mktemp("here")
    (here / "text.txt").write_text("text\n")
    (here / "other").mkdir()
    (here / "exported").mkdir()
    (here / "exported/config.json").write_text("{}")
    (here / "exported/model.safetensors").touch()
    (here / "model.gguf").touch()
    runs = {
        "new": [],
        "empty": [],
        "saved": [],
        "empty-text": [*DATASET, "data.tokenizer=bytes"],
        "saved-text": [*DATASET, "data.tokenizer=bytes"],
        "lost-tokenizer": [*DATASET, "data.tokenizer=json", "data.tokenizer_files=[missing/tokenizer.json]"],
        "saved-data": DATASET,
    }
    for name, settings in runs.items():
        out = here / "runs" / name
        (out if name == "new" else out / "checkpoints").mkdir(parents=True, mode=0o700)
        out.chmod(0o700)
        words = [SHAPE, "data.source=synthetic", "budget.steps=2", f"out={out}", *settings]
        config.dump(config.load(None, words), out / "config.yaml")
        if not name.startswith(("new", "empty")):
            (out / "checkpoints/step-00000001").mkdir()
            (out / "checkpoints/step-00000001/MANIFEST.json").write_text("{}")
    (here / "runs/damaged").mkdir(mode=0o700)
    note(here / "runs/damaged", "roll back", step=None)
    note(here / "runs/damaged", "began", size="2")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    commands = json.dumps([command.split() for command in CASES])
    done = subprocess.run(
        [sys.executable, "-m", "tests.early"], input=commands, cwd=here, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("command", CASES)
def test_an_error_that_names_what_is_missing_comes_before_pytorch_is_imported(command, endings):
    code, said = endings[command]
    assert "PyTorch is imported" not in said, said
    assert (code, CASES[command][1] in said) == (CASES[command][0], True), said

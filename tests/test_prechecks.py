"""Whatever a start refuses without knowing the hardware, the dry run refuses too, with the same words."""

import sys

import numpy as np
import pytest

from hpclm import cli
from hpclm.data.tokenizers import build_tokenizer
from hpclm.inference import run_settings
from hpclm.preprocess.writer import Writer

OWN = """
from hpclm.config.supports import Supports
from hpclm.engine.native import NativeEngine

class Engine(NativeEngine):
    supports = Supports("mine:Engine", options=())

broken = None
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with datasets, and modules of the user's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])  # as PYTHONPATH does
    (tmp_path / "own_engine.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("import not_installed_anywhere\nclass Block: ...\n")
    note = {"tokenizer": build_tokenizer("bytes", []).fingerprint}
    for name, lengths, its in (("plain", [40] * 50, None), ("noted", [40] * 50, note), ("short", [5] * 2, None)):
        with Writer(tmp_path / name, "u2") as writer:
            writer.note = its
            for length in lengths:
                writer.add_document(np.arange(length))
    return tmp_path


DATA = ["data.source=indexed", "model.vocab_size=300"]
REFUSED = {
    "activations offloaded from a CPU": (
        ["engine.offload_activations=true"],
        "moves activations from the GPU to CPU",
    ),
    "a made-up language of few words": (["model.vocab_size=8"], "needs model.vocab_size of at least 16"),
    "a schedule that is nowhere": (["optim.schedule=nowhere:f"], "optim.schedule 'nowhere:f' cannot be loaded"),
    "a block that cannot be imported": (["model.block=own_broken:Block"], "No module named 'not_installed_anywhere'"),
    "an engine that is nowhere": (["engine.name=nowhere:Engine"], "'nowhere:Engine' cannot be loaded"),
    "an engine that cannot do it": (
        ["engine.name=own_engine:Engine", "engine.bucket_mb=4"],
        "does not support engine.bucket_mb=4.0; e",
    ),
    "a source that is nowhere": (["data.source=nowhere:f"], "data.source 'nowhere:f' cannot be loaded"),
    "no step in the budget": (["budget.samples=7"], "less than the first step's 8"),
    "no step in the epochs": ([*DATA, "data.prefix=plain", "budget.epochs=0.01"], "budget.epochs=0.01 is 1 samples"),
    "millions of passes": ([*DATA, "data.prefix=plain", "budget.steps=9_000_000"], "passes over the train split of"),
    "a part shorter than a sample": ([*DATA, "data.prefix=short"], "one sample needs model.context + 1 = 17"),
    "validation data shorter than a sample": (
        [*DATA, "data.train=[plain]", "data.valid=[short]", "evaluate.every=5"],
        "short has 10 tokens (2 of 2 sequences)",
    ),
    "masks without an end of document": (
        [*DATA, "data.prefix=plain", "data.eod_mask_loss=true"],
        "needs the end-of-document",
    ),
    "tokens outside the vocabulary": (
        [*DATA, "data.prefix=plain", "model.vocab_size=30"],
        "plain holds token 39, outside model.vocab_size=30",
    ),
    "a smaller vocabulary": (
        [*DATA, "data.prefix=noted", "model.vocab_size=30"],
        "smaller than the 257 entries of the bytes",
    ),
    "a final decay longer than the run": (
        ["optim.schedule=wsd", "optim.wsd_decay=20", "optim.warmup=0"],
        "optim.wsd_decay=20 = 20 steps must be at most the budget=12",
    ),
    "weights to begin with that are nowhere": (
        ["checkpoint.init_from=nowhere"],
        "is neither a run directory with checkpoints",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_start_refuses_the_dry_run_refuses(case, here, tiny, capsys):
    more, answer = REFUSED[case]
    words = [*tiny("run", *more)]
    for verb in (["submit", "--dry-run"], ["train"]):
        assert cli.main([*verb, *words]) == 64
        assert answer in capsys.readouterr().err, verb
        assert not (here / "run").exists()


def test_checkpoints_that_cannot_be_begun_from_are_told_before_the_queue(here, tiny, capsys):
    assert cli.main(["train", *tiny("old", "stop_at=1")]) == 0
    capsys.readouterr()

    def refused(words, *options):
        code = cli.main(["submit", "--dry-run", *options, *words])
        return code, capsys.readouterr().err

    assert refused(tiny("new", "checkpoint.init_from=old"))[0] == 0
    other = refused(tiny("new", "checkpoint.init_from=old", "model.attention.heads=2"))
    assert other[0] == 64 and "has another one" in other[1] and "model.attention.heads was 4 and is now 2" in other[1]
    assert refused(tiny("new", "checkpoint.init_from=later", "job.dependency=afterok:1"))[0] == 0
    assert "checkpoint.resume=never" in refused(tiny("old", "checkpoint.resume=never"))[1]
    next((here / "old/checkpoints").glob("step-*/rank*")).write_bytes(b"")
    assert refused(tiny("new", "checkpoint.init_from=old"))[0] == 66
    assert refused(tiny("old", "checkpoint.init_from=gone"))[0] == 0  # the run resumes from its own


def test_a_model_that_was_trained_with_offloaded_activations_is_measured_on_a_cpu(here, tiny, capsys):
    assert cli.main(["train", *tiny("run", "stop_at=1")]) == 0
    path = here / "run/config.yaml"
    path.write_text(path.read_text().replace("offload_activations: false", "offload_activations: true"))
    assert run_settings.inference_settings(here / "run", ["engine.device=cpu"]).engine.device == "cpu"

"""What hpclm's functions do with their arguments, and what a run says of itself, without training."""

import errno
import os
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import hpclm
from hpclm.api import several
from hpclm.api.checked import PATH, TEXTS, UnfitError, checked, fitted, plain
from hpclm.api.live import LiveProgress
from hpclm.api.options import RunKeywords
from hpclm.api.run import Report
from hpclm.api.selftest import _folders
from hpclm.base.errors import Interrupted
from hpclm.config.checks import MAX_INTEGER
from hpclm.rundir.lease import Lease
from tests.checkpoint import state
from tests.rundir.test_runs import make
from tests.runs import ROOT
from tests.test_status import attempt, rows


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.jsonl").write_text('{"text": "Once upon a time."}\n' * 20)
    return tmp_path


def test_keywords_are_the_settings_of_their_names():
    made = hpclm.settings("debug", steps=9, lr=0.5, seed=0, out="runs/y", device="cpu")
    assert (made.budget.steps, made.optim.lr, made.seed, made.out, made.engine.device) == (9, 0.5, 0, "runs/y", "cpu")
    job = RunKeywords(nodes=2, gpus=3, time="10:00", partition="p").compose("debug", ()).job
    assert (job.nodes, job.gpus, job.time, job.partition) == (2, 3, "10:00", "p")


@pytest.mark.parametrize("name, wrong", [("nodes", 0), ("gpus", 0), ("time", "soon")])
def test_keywords_of_submit_are_the_job_settings_of_their_names(name, wrong):
    with pytest.raises(hpclm.ConfigError, match=rf"^job\.{name}="):
        hpclm.submit("debug", **{name: wrong})


def test_problems_are_in_the_order_of_the_arguments():
    with pytest.raises(hpclm.ConfigError) as caught:
        hpclm.settings("debug", seed=[], lr="y", steps="x")
    assert [problem.partition("=")[0] for problem in caught.value.problems] == ["steps", "lr", "seed"]
    assert caught.value.problems[0] == "steps='x' must be a whole number or None"


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: hpclm.settings("debug", step=3), "settings has no argument 'step'. Did you mean 'steps'?"),
        (
            lambda: hpclm.settings("debug", layers=3),
            "settings has no argument 'layers'; settings are given as {'model.layers': ...}",
        ),
        (lambda: hpclm.open("x", zzz=1), "open has no argument 'zzz'."),
        (lambda: hpclm.settings(), "settings: missing a required argument: 'base'"),
        (lambda: hpclm.settings("debug", {"a b": 1}), "unknown setting 'a b'"),
        (lambda: RunKeywords(tokenizer="bytes").run("debug", ()), "tokenizer='bytes' has no effect without data="),
        (lambda: hpclm.sweep("debug", {"seed": [1]}, parallel=0), "parallel=0 must be at least 1"),
        (lambda: hpclm.compare([]), "runs is empty; give at least one run"),
    ],
)
def test_a_call_that_means_nothing_says_why(call, said):
    with pytest.raises(hpclm.ConfigError) as caught:
        call()
    assert caught.value.problems == [said]


def test_changes_win_over_what_a_text_needs_and_that_over_keywords(here):
    changes = ({"model.vocab_size": 300, "optim.lr": 0.25},)
    made = RunKeywords(data="text.jsonl", tokenizer="bytes", lr=0.5, seed=4, out="runs/a").run("small", changes)
    assert (made.model.vocab_size, made.optim.lr, made.seed) == (300, 0.25, 4)
    assert made.data.prefix.startswith("runs/datasets/text-")


def test_before_text_becomes_a_dataset_a_run_directory_that_is_a_file_or_other_data_are_refused(here):
    Path("taken").write_text("")
    with pytest.raises(hpclm.ConfigError, match="run directory taken is a file; choose another out"):
        RunKeywords(data="text.jsonl", out="taken").run("small", ())
    with pytest.raises(hpclm.ConfigError, match=r"data\.prefix"):
        RunKeywords(data="text.jsonl", out="new").run("small", [{"data.prefix": "x"}])
    assert sorted(path.name for path in here.iterdir()) == ["taken", "text.jsonl"]


def failing(error):
    def function(dtype: Literal["fp32", "bf16"] = "fp32") -> str:
        if error:
            raise error
        return dtype

    return checked(function)


def test_a_choice_is_one_of_the_words():
    assert failing(None)("bf16") == "bf16"
    with pytest.raises(hpclm.ConfigError, match=r"^dtype='int4' must be one of fp32, bf16$"):
        failing(None)("int4")


@pytest.mark.parametrize(
    "error, kind, said",
    [
        (
            OSError(errno.EROFS, "Read-only", "x"),
            hpclm.HpclmError,
            "'x': Read-only; check its type and permissions",
        ),
        (OSError(errno.EACCES, "No", "x"), hpclm.ConfigError, "'x': No; check its type and permissions"),
        (OSError(errno.EPIPE, "Gone"), OSError, "[Errno 32] Gone"),
        (Interrupted("x: saved"), Interrupted, "x: saved"),
        (KeyboardInterrupt(), Interrupted, "function was interrupted"),
        (hpclm.ConfigError("two\nlines"), hpclm.ConfigError, r"two\nlines"),
        (hpclm.HpclmError("x"), hpclm.HpclmError, "x"),
        (ZeroDivisionError("x"), ZeroDivisionError, "x"),
    ],
    ids=repr,
)
def test_errors_of_a_function_are_those_of_hpclm_in_one_line(error, kind, said):
    with pytest.raises(kind) as caught:
        failing(error)()
    assert type(caught.value) in (kind, BrokenPipeError) and str(caught.value) == said


def test_a_snapshot_says_how_far_a_run_is_and_how_long_it_will_take(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out, done = make(tmp_path / "a", [attempt()], rows(5)), "step 5/{}, loss 2.5000, 100 tokens/s{}"
    assert repr(LiveProgress(out)) == f"{out}: {done.format(20, ', 30 s left')}"
    assert repr(LiveProgress(out, 8)) == f"{out}: {done.format(8, ', 6 s left')}"
    assert repr(LiveProgress(out, 90)) == f"{out}: {done.format(20, ', 30 s left')}"
    assert repr(LiveProgress(out, 5)) == f"{out}: {done.format(5, '')}" and LiveProgress(out)._repr_png_() is None
    for more, loss in (({}, "not finite"), ({"counted_tokens": 0}, "none"), ({"counted_tokens": 3}, "not finite")):
        make(out, [attempt()], [{**rows(5)[-1], "loss": None, **more}])
        assert f"step 5/20, loss {loss}, " in repr(LiveProgress(out))
    assert repr(LiveProgress(tmp_path / "new")) == f"{tmp_path / 'new'}: starting"


def test_a_run_says_how_it_stands_and_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed = hpclm.Run(make(tmp_path / "a", [attempt()], rows(5), ("failed", "x is wrong", 1)))
    assert repr(failed) == "Run('a'): failed, x is wrong, step 5, loss 2.5000" and failed.status == "failed"
    exited = hpclm.Run(make(tmp_path / "b", [attempt()], rows(5), ("exited", "SIGTERM: saved at step 4, exiting", 85)))
    assert repr(exited) == "Run('b'): exited, SIGTERM: saved at step 4, exiting, loss 2.5000"
    assert repr(hpclm.Run(make(tmp_path / "c"))) == "Run('c'): new, step 0"
    monkeypatch.chdir(tmp_path / "a")
    assert os.fspath(failed) == "." and os.fspath(exited) == f"{tmp_path}/b"
    assert [*failed.metrics["loss"]] == [row["loss"] for row in failed.rows] == [row["loss"] for row in rows(5)]


def test_the_checkpoints_of_a_run_are_those_that_are_complete_the_oldest_first(tmp_path):
    out = make(tmp_path / "a")
    assert hpclm.Run(out).checkpoints == []
    made = state.saved(out / "checkpoints", [4, 8, 12])
    next((made.folder / "step-00000012").glob("*.safetensors")).unlink()
    assert [(each.step, each.path.name) for each in hpclm.Run(out).checkpoints] == [
        (4, "step-00000004"),
        (8, "step-00000008"),
    ]


def test_a_run_of_this_process_is_not_cancelled_by_it_and_one_that_is_over_is_told_of(tmp_path, capsys):
    mine = make(tmp_path / "a", [attempt()], rows(5))
    with (
        Lease(mine),
        pytest.raises(
            hpclm.ConfigError, match="is trained by this process; interrupt the cell or the call that trains it"
        ),
    ):
        hpclm.Run(mine).cancel()
    over = hpclm.Run(make(tmp_path / "b", [attempt()], rows(5), ("done", "done at step 5", 0)))
    with pytest.raises(hpclm.ConfigError, match=r"^wait=-1\.0 must be at least 0$"):
        over.cancel(wait=-1)
    assert over.cancel(wait=0) is over and "done at step 5" in "".join(capsys.readouterr())


def test_what_a_run_evaluates_and_generates_is_refused_in_the_words_of_python(tmp_path):
    run = hpclm.Run(make(tmp_path / "a"))
    for more, said in (
        (dict(tokens=3), "tokens= is for text= and data=; use samples="),
        (dict(text="x", data="y"), "give one of text= and data=, with tokens= instead of samples="),
        (dict(text="x", samples=3), "give one of text= and data=, with tokens= instead of samples="),
        (dict(text="x"), "text='x' does not exist; text= takes the path of a text or .jsonl file"),
        (dict(samples=0), "samples=0 must be at least 1"),
    ):
        with pytest.raises(hpclm.ConfigError) as caught:
            run.evaluate(**more)
        assert str(caught.value) == said
    for more, name in ((dict(top_k=-1), "top_k"), (dict(top_p=2.0), "top_p"), (dict(temperature=-1), "temperature")):
        with pytest.raises(hpclm.ConfigError, match=f"^{name}="):
            run.generate("x", **more)


def test_a_report_is_shown_inline_as_it_is(tmp_path):
    (tmp_path / "x.html").write_text('<b title="x">&amp;')
    report = Report(tmp_path / "x.html")
    assert 'srcdoc="&lt;b title=&quot;x&quot;&gt;&amp;amp;"' in report._repr_html_()
    assert os.fspath(report) == f"{tmp_path}/x.html"


def test_the_values_of_a_sweep_are_settings_and_parts_of_names():
    assert several._axes("optim.lr=1e-3,3e-3") == [("optim.lr", [("1e-3", "1e-3"), ("3e-3", "3e-3")])]
    found = several._axes({"optim": {"lr": [1e-3, 0.123456789]}, "seed": range(2), "name": ["x"]})
    assert [(key, [name for _, name in pairs]) for key, pairs in found] == [
        ("optim.lr", ["0.001", "0.123457"]),
        ("seed", ["0", "1"]),
        ("name", ["x"]),
    ]
    assert [float(value) for value, _ in found[0][1]] == [1e-3, 0.123456789]
    [(_, [(value, name)])] = several._axes({"optim": [{"lr": 0.5, "clip": 2}]})
    assert (value, name) == ("{lr: 0.5, clip: 2}", "lr-0.5-clip-2")
    for wrong, said in (({"optim.lr": []}, "optim.lr has no values"), ({"a b": [1]}, "unknown setting 'a b'")):
        with pytest.raises(hpclm.ConfigError, match=said):
            several._axes(wrong)


def test_the_module_of_own_code_is_looked_for_where_it_is_here():
    assert _folders("tests.runs:hpclm") == [ROOT] and _folders("json.decoder:x") == [Path(os.__file__).parent]
    assert _folders("no_such_module:X") == _folders("a-b:x") == _folders("sys:x") == []


def test_numbers_are_whole_up_to_64_bits_and_neither_true_nor_of_two_dimensions():
    assert fitted(MAX_INTEGER, int) == -fitted(-MAX_INTEGER, int) == MAX_INTEGER and fitted(3.0, int) == 3
    assert plain(np.eye(2)) == [[1.0, 0.0], [0.0, 1.0]] and plain(np.arange(2)) == [0, 1]
    for kind, wrong in (
        (int, MAX_INTEGER + 1),
        (int, True),
        (int, 2.5),
        (float, True),
        (str, Path("x")),
        (TEXTS, np.eye(2)),
        (PATH, "a\0b"),
    ):
        with pytest.raises(UnfitError):
            fitted(wrong, kind)

"""Tasks of lm-evaluation-harness: scored as the library scores an export, from a run and while it trains."""

import json
import os
import random
import signal
import sys

import pytest

from hpclm import cli
from hpclm.data import tokenizers
from hpclm.inference import harness
from hpclm.rundir import control_files, runs
from hpclm.rundir.status import status_of
from hpclm.training import tasks
from tests.interop import made
from tests.runs import Ranks

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own
DRAW = random.Random(3)
WORDS = ["so", "it", "goes", "and", "then", "a", "small", "model", "reads", "text,", "12", "345", "éà", "don't"]
TASKS = "own_choice,own_rolling,own_generate"
NETWORKS = {"gpt2": made.SHAPE, "llama": made.LLAMA}
HEAD = "task: {}\noutput_type: {}\ndataset_path: json\ntest_split: test\ndataset_kwargs: {{data_files: {{test: {}}}}}\n"
KINDS = {
    "own_choice": (
        "multiple_choice",
        '{doc_to_text: "{{q}}", doc_to_choice: choices, doc_to_target: answer, metric_list: [{metric: acc}, {metric: acc_norm}]}',
        lambda: {"q": some(0, 20), "choices": [some(1, 4), some(1, 4), "it"], "answer": DRAW.randrange(3)},
    ),
    "own_rolling": (
        "loglikelihood_rolling",
        '{doc_to_text: "", doc_to_target: "{{q}}", metric_list: [{metric: byte_perplexity}, {metric: bits_per_byte}]}',
        lambda: {"q": some(2, 150)},
    ),
    "own_generate": (
        "generate_until",
        '{doc_to_text: "{{q}}", doc_to_target: "{{a}}", generation_kwargs: {until: [goes], max_gen_toks: 24, do_sample: false}, '
        "metric_list: [{metric: chrf}]}",
        lambda: {"q": some(2, 70), "a": some(1, 3)},
    ),
}


def some(least, most):
    return " ".join(DRAW.choices(WORDS, k=DRAW.randrange(least, most)))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tokenizer, a dataset, and a folder with a task of each kind, none of which needs a network."""
    root = tmp_path_factory.mktemp("harness")
    (root / "t.jsonl").write_text("".join(json.dumps({"text": some(3, 30)}) + "\n" for _ in range(300)))
    for words in (
        ["train-tokenizer", "--input", root / "t.jsonl", "--output", root / "tok.json", "--vocab-size", 300],
        ["preprocess", "--input", root / "t.jsonl", "--output-prefix", root / "d", "--append-eod"]
        + ["--tokenizer", "json", "--tokenizer-files", root / "tok.json"],
    ):
        assert cli.main(list(map(str, words))) == 0
    (root / "tasks").mkdir(mode=0o755)
    for name, (kind, rest, row) in KINDS.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row()) + "\n" for _ in range(12)))
        head = HEAD.format(name, kind, root / f"{name}.jsonl")
        (root / "tasks" / f"{name}.yaml").write_text(head + "".join(f"{line}\n" for line in lines(rest)))
    return root


def lines(flow):
    """A YAML mapping's lines, from its flow form."""
    import yaml

    yield from yaml.safe_dump(yaml.safe_load(flow)).splitlines()


@pytest.fixture(autouse=True)
def offline(tmp_path_factory, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def size_of(place):
    return tokenizers.build("json", [str(place / "tok.json")]).size


def evaluate(capsys, run, place, *more, code=0):
    words = ["evaluate", run, "--tasks", TASKS, "--tasks-path", place / "tasks", "--json", "engine.device=cpu", *more]
    capsys.readouterr()
    assert cli.main(list(map(str, words))) == code
    said = capsys.readouterr()
    return said.err if code else json.loads(said.out)


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.whole)])
def test_scores_are_those_of_the_export_in_the_library(kind, place, tmp_path, capsys):
    pytest.importorskip("accelerate")
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    network = dict(NETWORKS[kind], vocab_size=size_of(place), vocab_multiple=8, context=64)
    made.run(tmp_path / "run", network, tokenizer="json", tokenizer_files=[str(place / "tok.json")])
    assert cli.main(["convert", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    theirs = simple_evaluate(
        "hf",
        model_args=dict(pretrained=str(tmp_path / "hf"), dtype="float32"),
        device="cpu",
        batch_size=3,
        tasks=TASKS.split(","),
        task_manager=TaskManager(include_path=str(place / "tasks"), include_defaults=False),
        bootstrap_iters=0,
    )["results"]
    ours = evaluate(capsys, tmp_path / "run", place, "--batch", 5, "engine.precision=fp32")
    assert ours["samples"] == dict.fromkeys(KINDS, 12) and ours["step"] == 7
    for task, row in ours["tasks"].items():
        for metric in [name for name in row if "_stderr" not in name]:
            assert row[metric] == pytest.approx(theirs[task][f"{metric},none"], abs=1e-4), (task, metric)
    assert 0 < ours["tasks"]["own_choice"]["acc"] < 1 and ours["tasks"]["own_generate"]["chrf"] > 0
    some = evaluate(capsys, tmp_path / "run", place, "--samples", 5, "engine.precision=fp32")
    assert some["samples"]["own_rolling"] == 5 and some["tasks"] != ours["tasks"]


def scored(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["tasks"]["own_choice"]) for row in rows if "tasks" in row]


def training(place, tiny, out):
    """Words of a run that scores a task after steps 4 and 8."""
    shape = f"model={{vocab_size: {size_of(place)}, layers: 2, hidden: 32, heads: 4, context: 64}}"
    tasks = ["evaluate.tasks=[own_choice]", f"evaluate.tasks_path={place}/tasks", "evaluate.tasks_every=4"]
    data = [shape, f"data.prefix={place}/d_text_document", "data.source=indexed", "data.split=9,1,0", "budget.steps=8"]
    return tiny(out, *data, *tasks)


def test_scores_that_a_signal_interrupts_are_those_of_the_same_step_after_the_restart(
    place, tiny, tmp_path, capsys, monkeypatch, hear
):
    assert cli.main(["train", *training(place, tiny, "whole")]) == 0
    real, left = harness.Tasks.score, []

    def interrupted(*args, **more):
        if left:
            os.kill(os.getpid(), signal.SIGTERM) if left.pop() == 1 else (tmp_path / "run/stop").touch()
        return real(*args, **more)

    monkeypatch.setattr(harness.Tasks, "score", interrupted)
    monkeypatch.setattr(tasks, "OFTEN", 0.0)
    monkeypatch.setattr(control_files, "INTERVAL", 0.0)
    words, out = training(place, tiny, "run"), tmp_path / "run"
    for order, code, steps in [(2, 0, []), (None, 0, [4, 8]), (1, 85, [4]), (2, 0, [4]), (None, 0, [4, 8])]:
        if code:  # once more, from the last step, which has only its scores left to do
            kept = (out / "metrics.jsonl").read_text().splitlines(keepends=True)[:-1]
            (out / "metrics.jsonl").write_text("".join(kept))
        left[:] = [order] if order else []
        assert cli.main(["train", *words]) == code
        assert [step for step, _ in scored(out)] == steps and not (out / ".tasks").exists()
        owed = order and steps == [4]
        assert ("left no time to measure the model after step 8, the last one" in capsys.readouterr().err) == bool(owed)
        assert (status_of(runs.read(out), None).name == "done") == (steps == [4, 8])
    assert scored(out) == scored(tmp_path / "whole")


def test_processes_of_the_library_end_although_this_one_ignores_sigterm(place, tmp_path, capsys, monkeypatch):
    from lm_eval import evaluator

    network = dict(NETWORKS["gpt2"], vocab_size=size_of(place), vocab_multiple=8, context=64)
    made.run(tmp_path / "run", network, tokenizer="json", tokenizer_files=[str(place / "tok.json")])
    real, seen = evaluator.simple_evaluate, []
    monkeypatch.setattr(
        evaluator, "simple_evaluate", lambda **more: (seen.append(signal.getsignal(signal.SIGTERM)), real(**more))[1]
    )
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert evaluate(capsys, tmp_path / "run", place)["tasks"]["own_generate"]["chrf_stderr"] >= 0
    assert seen == [signal.SIG_DFL] and signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_a_task_that_fails_ends_no_training(place, tiny, tmp_path, capsys):
    rows = (place / "own_choice.jsonl").read_text().splitlines()
    rows[5] = json.dumps(
        {**json.loads(rows[5]), "q": "345"}
    )  # which the library takes for a number, and asserts that it is text
    (tmp_path / "bad.jsonl").write_text("\n".join(rows))
    (tmp_path / "bad").mkdir(mode=0o755)
    text = (place / "tasks/own_choice.yaml").read_text().replace(f"{place}/own_choice", f"{tmp_path}/bad")
    (tmp_path / "bad/own_choice.yaml").write_text(text)
    words = [*training(place, tiny, "run"), f"evaluate.tasks_path={tmp_path}/bad", "budget.steps=5"]
    assert cli.main(["train", *words]) == 0
    assert capsys.readouterr().err.count("the tasks were not measured: AssertionError: Context is not a string") == 2
    assert scored(tmp_path / "run") == []
    (tmp_path / "bad/own_choice.yaml").write_text(text.replace("{{q}}", "{{ 1 // 0 }}"))
    assert cli.main(["train", *words, f"out={tmp_path}/new"]) == 64  # the first document shows it
    assert "cannot be loaded: ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    "size", [1, pytest.param(2, marks=pytest.mark.whole)], ids=["one process", "two, tensor parallel"]
)
def test_a_run_scores_tasks_on_the_same_steps_whatever_stops_it_and_whatever_its_layout(
    size, place, tiny, tmp_path, capsys
):
    words = training(place, tiny, "run")
    assert cli.main(["train", *words, "stop_at=6"]) == 0
    if size == 1:
        assert cli.main(["train", *words]) == 0
    else:
        with Ranks(2, [*words, "parallel.tensor=2"], HF_HUB_OFFLINE=1, HF_HOME=tmp_path) as ranks:
            assert [code for code, _ in ranks.wait().values()] == [0, 0]
    found = dict(scored(tmp_path / "run"))
    assert [*found] == [4, 6, 8]  # where an attempt stops it is measured
    later = evaluate(capsys, tmp_path / "run", place)["tasks"]["own_choice"]
    assert found[8] == {name: later[name] for name in ("acc", "acc_norm")}
    assert not (tmp_path / "run" / ".tasks").exists()


def test_what_cannot_be_measured_is_refused_before_the_start(place, tiny, tmp_path, capsys, monkeypatch):
    tasks = [f"evaluate.tasks_path={place}/tasks", "evaluate.tasks_every=4"]
    assert cli.main(["train", *tiny("run", "evaluate.tasks=[own_choice]", "evaluate.every=0")]) == 64
    assert "evaluate.tasks has no effect with evaluate.every=0" in capsys.readouterr().err
    assert cli.main(["train", *tiny("run", *tasks)]) == 64
    assert "evaluate.tasks_every=4 has no effect without evaluate.tasks" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert cli.main(["train", *tiny("run", *tasks, "evaluate.tasks=[own_choice]")]) == 64
    assert (
        "evaluate.tasks needs lm_eval, which is not installed: pip install 'hpclm[lm-eval]'" in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


def test_task_files_that_others_can_write_are_not_read(place, tmp_path, capsys):
    made.run(tmp_path / "run", dict(made.SHAPE, vocab_size=257, context=16), tokenizer="bytes")
    (place / "tasks").chmod(0o777)
    try:
        said = evaluate(capsys, tmp_path / "run", place, code=64)
    finally:
        (place / "tasks").chmod(0o755)
    assert "task files, which may name code to run in your name" in said and "chmod go-w" in said
    (tmp_path / "x.yaml").write_text("task: x\n")
    words = [
        "evaluate",
        str(tmp_path / "run"),
        "--tasks",
        str(tmp_path / "x.yaml"),
        "--tasks-path",
        str(place / "tasks"),
    ]
    assert cli.main(words) == 64 and "x.yaml is not the name of a task" in capsys.readouterr().err

"""Tasks of lm-evaluation-harness: scored as the library scores an export, from a run and while it trains."""

import functools
import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

import hpclm
from hpclm import cli
from hpclm.checkpoint import directory
from hpclm.data import tokenizers
from hpclm.rundir import metrics_file
from tests import forks
from tests.interop import made
from tests.runs import ROOT, until

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


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    """Nothing is downloaded, and the library asks pip once for what is installed, not at each scoring."""
    import datasets
    from torch.utils import collect_env

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.getbasetemp() / "datasets"))
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(collect_env, "get_pretty_env_info", functools.cache(collect_env.get_pretty_env_info))
        yield


def size_of(place):
    return tokenizers.build_tokenizer("json", [str(place / "tok.json")]).size


def evaluate(capsys, run, place, *more, code=0):
    words = ["evaluate", run, "--tasks", TASKS, "--tasks-path", place / "tasks", "--json", "engine.device=cpu", *more]
    capsys.readouterr()
    assert cli.main(list(map(str, words))) == code
    said = capsys.readouterr()
    return said.err if code else json.loads(said.out)


def imported(folder, run):
    """Import a folder whose tokenizer begins every text with a token, and whose model has many ends."""
    tree = json.loads((folder / "tokenizer.json").read_text())
    [token] = tree["added_tokens"]
    piece = {"id": token["content"], "ids": [token["id"]], "tokens": [token["content"]]}
    single = [{"SpecialToken": {"id": token["content"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    template = dict(type="TemplateProcessing", single=single, pair=[*single, {"Sequence": {"id": "B", "type_id": 1}}])
    tree["post_processor"] = {**template, "special_tokens": {token["content"]: piece}}
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    for name in ("config.json", "generation_config.json"):
        ends = json.loads((folder / name).read_text()) | {"eos_token_id": [0, *range(40, 70)]}
        (folder / name).write_text(json.dumps(ends))
    assert cli.main(["convert", str(folder), str(run)]) == 0


@pytest.mark.parametrize("kind", ["gpt2", "imported", pytest.param("llama", marks=pytest.mark.whole)])
def test_scores_are_those_of_the_export_in_the_library(kind, place, tmp_path, capsys):
    pytest.importorskip("accelerate")
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    network = dict(NETWORKS.get(kind, made.LLAMA), vocab_size=size_of(place), vocab_multiple=8, context=64)
    made.run(tmp_path / "run", network, tokenizer="json", tokenizer_files=[str(place / "tok.json")])
    if kind == "imported":
        assert cli.main(["convert", str(tmp_path / "run"), str(tmp_path / "there")]) == 0
        (tmp_path / "run").rename(tmp_path / "begun")
        imported(tmp_path / "there", tmp_path / "run")
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
    assert ours["samples"] == dict.fromkeys(KINDS, 12) and ours["step"] == (0 if kind == "imported" else 7)
    for task, row in ours["tasks"].items():
        for metric in [name for name in row if "_stderr" not in name]:
            assert row[metric] == pytest.approx(theirs[task][f"{metric},none"], abs=1e-4), (task, metric)
    assert 0 < ours["tasks"]["own_choice"]["acc"] < 1 and ours["tasks"]["own_generate"]["chrf"] > 0
    some = evaluate(capsys, tmp_path / "run", place, "--samples", 5, "engine.precision=fp32")
    assert some["samples"]["own_rolling"] == 5 and some["tasks"] != ours["tasks"]


UNSCORABLE = {
    "joined": ("a smal", "l", "", "merges the continuation into the context"),
    "white space": ("  ", "x", "", "the context has no tokens"),
    "empty": ("", "", "", "the continuation has no tokens"),
    "end alone": ("", "<|endoftext|>", "", "has no separate token"),
    "too long": ("a", "so it goes " * 60, " ", "but model.context=64"),
}


@pytest.fixture(scope="module")
def export(place, tmp_path_factory):
    """A run, and the library's hf model of its export."""
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM

    root = tmp_path_factory.mktemp("export")
    network = dict(made.LLAMA, vocab_size=size_of(place), vocab_multiple=8, context=64)
    made.run(root / "run", network, tokenizer="json", tokenizer_files=[str(place / "tok.json")])
    assert cli.main(["convert", str(root / "run"), str(root / "hf")]) == 0
    return root / "run", HFLM(pretrained=str(root / "hf"), dtype="float32", device="cpu", batch_size=2)


def task_of(folder, name, kind, rest, rows):
    """A folder with one task."""
    folder.mkdir(mode=0o755)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{name}.yaml").write_text(
        HEAD.format(name, kind, folder / "rows.jsonl") + "".join(f"{each}\n" for each in lines(rest))
    )
    return ["--tasks", name, "--tasks-path", folder]


@pytest.mark.parametrize("case", UNSCORABLE)
def test_a_pair_that_the_librarys_model_does_not_score_is_refused(case, export, tmp_path, capsys):
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    context, choice, delimiter, said = UNSCORABLE[case]
    rest = '{doc_to_text: "{{q}}", doc_to_choice: choices, doc_to_target: answer, target_delimiter: "%s", metric_list: [{metric: acc}]}'
    rows = [{"q": "so", "choices": ["it"] * 2, "answer": 0}, {"q": context, "choices": [choice, "so"], "answer": 0}]
    words = task_of(tmp_path / "tasks", "odd", "multiple_choice", rest % delimiter, rows)
    run, model = export
    with pytest.raises((AssertionError, IndexError)):
        manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
        simple_evaluate(model, tasks=["odd"], task_manager=manager, bootstrap_iters=0)
    error = evaluate(capsys, run, tmp_path, *words, code=64)
    assert said in error and "lm-evaluation-harness's own hf model fails here" in error and "Traceback" not in error


def test_a_filter_is_a_part_of_the_name_of_a_metric_unless_it_changes_nothing():
    from hpclm.inference.harness import _figures

    row = {
        "alias": "a",
        "acc,none": 1,
        "acc_stderr,none": "N/A",
        "exact,strict": 0.5,
        "exact_stderr,strict": 0.25,
        "sample_len": 3,
    }
    assert dict(_figures(row)) == {"acc": 1.0, "exact,strict": 0.5, "exact_stderr,strict": 0.25}


def test_a_pair_has_the_log_probability_of_its_last_tokens_after_all_that_fit_before_them(export):
    import torch

    from hpclm.config import load
    from hpclm.inference import run_model
    from hpclm.inference.harness import log_likelihoods
    from hpclm.parallel.mesh import Compute

    config = load(export[0] / "config.yaml")
    model, _ = run_model.load_model(export[0], config, None, Compute(torch.device("cpu"), torch.float32))
    ids = torch.randint(0, 250, (80,), generator=torch.Generator().manual_seed(1)).tolist()

    def by_hand(before, after):
        read = [*before, *after][-65:]
        likely = model.head(torch.tensor([read[:-1]])).logits()[0, -len(after) :].log_softmax(-1)
        return likely[range(len(after)), after].sum().item(), likely.argmax(-1).tolist()

    best = by_hand(ids[:3], ids[3:4])[1]
    pairs = [(ids[:3], ids[3:4]), (ids[:3], best), (ids, ids[:5]), (ids[:1], ids[1:65]), (ids[:2], ids[2:4])]
    calls = []
    found = log_likelihoods(model, pairs, 2, lambda: calls.append(1))
    assert [score for score, _ in found] == pytest.approx([by_hand(*pair)[0] for pair in pairs], rel=1e-4)
    assert [greedy for _, greedy in found] == [False, True, False, False, False]
    assert len(calls) == 2  # four inputs, of which the one that two pairs share is read once


def test_a_task_that_generates_a_whole_context_is_refused(export, tmp_path, capsys):
    rest = KINDS["own_generate"][1].replace("max_gen_toks: 24", "max_gen_toks: 64")
    words = task_of(tmp_path / "tasks", "long", "generate_until", rest, [{"q": "so", "a": "it"}])
    error = evaluate(capsys, export[0], tmp_path, *words, code=64)
    assert "up to 64 tokens" in error and "model.context=64" in error


def test_a_text_has_the_bits_per_byte_of_a_rolling_task(export, place, tmp_path, capsys):
    rows = [json.loads(line) for line in (place / "own_rolling.jsonl").read_text().splitlines()]
    assert any(len(row["q"]) > 400 for row in rows)  # some do not fit in a context
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": row["q"]}) + "\n" for row in rows))
    words = [str(export[0]), "engine.device=cpu", "engine.precision=fp32"]
    ours = evaluate(capsys, export[0], place, "--tasks", "own_rolling", "engine.precision=fp32")["tasks"]["own_rolling"]
    capsys.readouterr()
    assert cli.main(["evaluate", *words, "--text", str(tmp_path / "t.jsonl"), "--json"]) == 0
    text = json.loads(capsys.readouterr().out)
    assert text["bits_per_byte"] == pytest.approx(ours["bits_per_byte"], abs=1e-5)


COLLECT = """import json
def process_results(doc, results):
    with open({path!r}, "a") as file:
        file.write(json.dumps(results[0]) + "\\n")
    return {{"n": len(results[0])}}
"""


def test_each_sample_of_a_question_has_its_own_random_numbers_in_batches_of_any_size(export, tmp_path, capsys):
    rest = (
        '{doc_to_text: "{{q}}", doc_to_target: "{{q}}", generation_kwargs: {until: [], do_sample: true, temperature: 1.0, max_gen_toks: 12}, '
        "repeats: 9, filter_list: [{name: all, filter: [{function: take_first_k, k: 9}]}], metric_list: [{metric: n, aggregation: mean, "
        "higher_is_better: true}]}"
    )
    words = task_of(tmp_path / "tasks", "rep", "generate_until", rest, [{"q": "so"}, {"q": "so"}, {"q": "it goes"}])
    with (tmp_path / "tasks/rep.yaml").open("a") as file:
        file.write("process_results: !function utils.process_results\n")
    samples = []
    for size in (4, 5, 64):
        (tmp_path / "tasks/utils.py").write_text(COLLECT.format(path=str(path := tmp_path / f"{size}.jsonl")))
        evaluate(capsys, export[0], tmp_path, *words, "--batch", size, "engine.precision=fp32")
        samples.append([json.loads(line) for line in path.read_text().splitlines()])
    assert samples[0] == samples[1] == samples[2]
    assert len({text for texts in samples[0] for text in texts}) == 27


def scored(out):
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may still be being written
    return [(row["step"], row["tasks"]["own_choice"]) for row in rows if "tasks" in row]


def training(place, tiny, out, *more):
    """Words of a run that saves after every fourth of 16 steps."""
    shape = f"model={{vocab_size: {size_of(place)}, layers: 2, hidden: 32, context: 64, attention: {{heads: 4}}}}"
    data = [shape, f"data.prefix={place}/d_text_document", "data.source=indexed", "data.split=9,1,0", "budget.steps=16"]
    return tiny(out, *data, "checkpoint.keep_last=9", *more)


def words_of_follower(place, out, *more):
    words = ["--tasks", "own_choice", "--tasks-path", f"{place}/tasks", "--follow", "engine.device=cpu", *more]
    return ["evaluate", str(out), *words]


def followed(capfd, place, out, *more, meanwhile=lambda: None):
    """The exit code of ``hpclm evaluate --follow`` of a run, here and now, and what it says. A process of its own would import
    the library anew, which takes many seconds; ``meanwhile`` is called beside it."""
    capfd.readouterr()
    with ThreadPoolExecutor() as beside:
        called = beside.submit(meanwhile)
        code = cli.main(words_of_follower(place, out, *more))
        called.result()
    return code, "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "layout", [[], pytest.param(["parallel.tensor=2"], marks=pytest.mark.whole)], ids=["one", "tp2"]
)
def test_each_checkpoint_of_a_run_is_scored_once_while_it_trains_and_after_it(layout, place, tiny, tmp_path, capfd):
    out = tmp_path / "run"
    words = training(
        place, tiny, "run", "budget.steps=100000", "checkpoint.every=40", "checkpoint.keep_last=500", *layout
    )
    with forks.Ranks(1 + len(layout), words) as ranks:
        until(lambda: len(directory.steps(out / "checkpoints")) >= 2, alive=ranks.processes[0])

        def stop():
            try:
                until(lambda: len(scored(out)) >= 2)  # the run copies what is scored while it trains
            finally:
                for process in ranks.processes.values():
                    process.terminate()

        code, said = followed(capfd, place, out, meanwhile=stop)
        assert {code for code, _ in ranks.wait().values()} == {85}
    assert code == 0 and "is exited, and its checkpoints are scored" in said, said
    steps = sorted(int(folder.name[5:]) for folder in (out / "checkpoints").glob("step-*"))
    with forks.Ranks(1 + len(layout), [*words, f"stop_at={steps[-1] + 4}"]) as ranks:  # and the rest when it resumes
        assert {code for code, _ in ranks.wait().values()} == {0}
    assert [step for step, _ in scored(out)] == steps
    assert [row["step"] for row in hpclm.open(out).rows if "tasks" in row] == steps


def test_an_interrupted_follower_ends_with_85_and_the_next_one_scores_the_rest(place, tiny, tmp_path, capfd):
    out = tmp_path / "run"
    assert cli.main(["train", *training(place, tiny, "run")]) == 0

    def interrupt():
        until(lambda: (out / "scores.jsonl").exists() and (out / "scores.jsonl").stat().st_size)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, lambda *_: None)  # of this process, where the follower was faster than the signal
    code, said = followed(capfd, place, out, meanwhile=interrupt)
    assert code == 0 or (code == 85 and "the same command scores" in said), said
    with metrics_file.scoring(out):
        code, said = followed(capfd, place, out)
        assert code == 75 and "another hpclm evaluate --follow is scoring" in said
    code, said = followed(capfd, place, out)
    assert code == 0 and "is done, and its checkpoints are scored" in said and "hpclm sync" in said
    assert [step for step, _ in scored(out)] == [4, 8, 12, 16]
    later = evaluate(capfd, out, place)["tasks"]["own_choice"]
    assert scored(out)[-1][1] == {name: later[name] for name in ("acc", "acc_norm")}


@pytest.mark.slurm
def test_a_job_follows_the_run(cluster, place, tiny, tmp_path):
    out = tmp_path / "hpclm.train-2"
    assert cli.main(["train", *training(place, tiny, out.name)]) == 0
    env = {**cluster.env, "HF_HUB_OFFLINE": "1", "HF_HOME": f"{place}/hf", "PYTHONPATH": str(ROOT), "HPCLM_SITE": ""}
    said = forks.hpclm(*words_of_follower(place, out, "--submit", "job.time=60"), env=env, check=0).stdout
    assert said.startswith("submitted job ") and "which scores the run's checkpoints" in said
    until(lambda: [step for step, _ in scored(out)] == [4, 8, 12, 16])


def test_scores_of_a_checkpoint_that_was_set_aside_do_not_come_back(place, tiny, tmp_path, capfd):
    out = tmp_path / "run"
    assert cli.main(["train", *training(place, tiny, "run")]) == 0
    assert followed(capfd, place, out)[0] == 0
    before = dict(scored(out))
    assert cli.main(["train", *training(place, tiny, "run"), "--from", "8", "optim.lr=1e-3"]) == 0
    assert [step for step, _ in scored(out)] == [4, 8]
    assert followed(capfd, place, out)[0] == 0
    after = dict(scored(out))
    assert list(after) == [4, 8, 12, 16] and [after[step] == before[step] for step in (4, 8)] == [True, True]
    assert len((out / "scores.jsonl").read_text().splitlines()) == 4


def test_a_task_that_fails_is_named_and_the_next_checkpoint_is_tried(place, tiny, tmp_path, capfd):
    rows = (place / "own_choice.jsonl").read_text().splitlines()
    rows[5] = json.dumps(
        {**json.loads(rows[5]), "q": "345"}
    )  # which the library takes for a number, and asserts that it is text
    (tmp_path / "bad.jsonl").write_text("\n".join(rows))
    (tmp_path / "bad").mkdir(mode=0o755)
    text = (place / "tasks/own_choice.yaml").read_text().replace(f"{place}/own_choice", f"{tmp_path}/bad")
    (tmp_path / "bad/own_choice.yaml").write_text(text)
    assert cli.main(["train", *training(place, tiny, "run", "budget.steps=8")]) == 0
    code, said = followed(capfd, place, tmp_path / "run", "--tasks-path", f"{tmp_path}/bad")
    assert code == 0 and said.count("is not scored: AssertionError: Context is not a string") == 2
    assert scored(tmp_path / "run") == []
    words = ["evaluate", str(tmp_path / "run"), "--tasks", "own_choice", "--tasks-path", str(tmp_path / "bad")]
    assert cli.main(words) == 64
    assert "error: the task own_choice failed: AssertionError: Context is not a string" in capfd.readouterr().err
    (tmp_path / "bad/own_choice.yaml").write_text(text.replace("{{q}}", "{{ 1 // 0 }}"))
    code, said = followed(capfd, place, tmp_path / "run", "--tasks-path", f"{tmp_path}/bad")
    assert code == 64 and "cannot be loaded: ZeroDivisionError" in said


def test_follow_needs_tasks_and_a_run_of_ones_own(place, tiny, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["evaluate", str(tmp_path), "--follow"])
    assert "--follow is for --tasks" in capsys.readouterr().err
    assert cli.main(["train", *tiny("run", "evaluate.tasks=[own_choice]")]) == 64
    assert "evaluate.tasks" in capsys.readouterr().err


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

"""``hpclm evaluate --text`` and ``--data``: every token scored once, by the model as it is."""

import io
import json
import math

import pytest
import torch

from hpclm import cli
from hpclm import config as configs
from hpclm.commands import evaluate as verb
from hpclm.config import load
from hpclm.inference import run_model, run_settings, scoring
from hpclm.inference.evaluation import TaskRequest
from hpclm.parallel.mesh import Compute
from tests.interop import made
from tests.runs import exit_code

TEXTS = ["so it goes, and then it does not", "ö, a short one", "x" * 70]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "run"
    made.run(folder, dict(made.SHAPE, vocab_size=257, context=16), tokenizer="bytes")
    return folder


def evaluate(capsys, *words, code=0):
    assert cli.main(["evaluate", *map(str, words)]) == code
    said = capsys.readouterr()
    return said.err if code else json.loads(said.out)


def by_hand(run, documents):
    """Nats and tokens of documents, straight from the logits: a window of the context at a time, the last one whole as well."""
    config = load(run / "config.yaml")
    model, _ = run_model.load_model(run, config, None, Compute(torch.device("cpu"), torch.float32))
    nats = count = 0
    for document in documents:
        ids = [256, *document]
        for begin in range(0, len(ids) - 1, 16):
            end = min(begin + 17, len(ids))
            window, new = ids[max(0, end - 17) : end], end - begin - 1
            with torch.no_grad():
                likelihood = model.head(torch.tensor([window[:-1]])).logits()[0].double().log_softmax(-1)
            nats -= likelihood[range(len(window) - 1), window[1:]][-new:].sum().item()
            count += new
    return nats, count


def check(found, nats, tokens, size, documents):
    assert (found["tokens"], found["bytes"], found["documents"]) == (tokens, size, documents)
    assert found["loss"] == pytest.approx(nats / tokens, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)


def test_a_text_is_one_document_and_a_jsonl_file_one_a_line(run, tmp_path, capsys, monkeypatch):
    (tmp_path / "t.txt").write_text("\n".join(TEXTS))
    whole = "\n".join(TEXTS).encode()
    found = evaluate(capsys, run, "--text", tmp_path / "t.txt", "--json")
    check(found, *by_hand(run, [whole]), len(whole), 1)
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in TEXTS))
    each = [text.encode() for text in TEXTS]
    lines = evaluate(capsys, run, "--text", tmp_path / "t.jsonl", "--json")
    check(lines, *by_hand(run, each), sum(map(len, each)), 3)
    assert lines["loss"] != found["loss"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(TEXTS).encode())))
    assert evaluate(capsys, run, "--text", "-", "--json")["loss"] == found["loss"]


def test_a_dataset_gives_what_its_text_gives_but_for_the_ends_of_documents(run, tmp_path, capsys):
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in TEXTS))
    words = ["--input", tmp_path / "t.jsonl", "--output-prefix", tmp_path / "d", "--tokenizer", "bytes", "--append-eod"]
    assert cli.main(["preprocess", *map(str, words)]) == 0
    capsys.readouterr()
    found = evaluate(capsys, run, "--data", tmp_path / "d_text_document", "--json")
    each = [[*text.encode(), 256] for text in TEXTS]
    check(found, *by_hand(run, each), sum(map(len, each)) - 3, 3)
    some = evaluate(capsys, run, "--data", tmp_path / "d_text_document", "--json", "--tokens", 20)
    check(some, *by_hand(run, each[:1]), len(TEXTS[0]), 1)


@pytest.mark.parametrize(
    "words, code, said",
    [
        (["--text", "/nowhere"], 64, "/nowhere cannot be read: No such file"),
        (["--data", "/nowhere"], 64, "/nowhere"),
        (["--text", "x", "--data", "y"], 2, "not allowed with"),
        (["--text", "x", "--samples", "3"], 2, "use --tokens"),
        (["--tokens", "3"], 2, "use --samples"),
    ],
)
def test_wrong_options_are_named(run, words, code, said, capsys):
    assert exit_code(["evaluate", str(run), *words]) == code and said in capsys.readouterr().err


def test_a_text_that_cannot_be_scored_is_refused(run, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    assert "nothing to score" in evaluate(capsys, run, "--text", tmp_path / "empty.txt", code=64)
    (tmp_path / "no.jsonl").write_text('{"text": 1}\n')
    assert "no.jsonl, line 1 must be" in evaluate(capsys, run, "--text", tmp_path / "no.jsonl", code=64)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert "not UTF-8" in evaluate(capsys, run, "--text", tmp_path / "latin.txt", code=64)


def test_perplexity_has_no_cap_and_hides_nothing():
    assert math.isnan(scoring.perplexity(math.nan))
    assert scoring.perplexity(0.0) == 1.0 and scoring.perplexity(25.0) == math.exp(25)
    assert scoring.perplexity(1e9) == scoring.perplexity(math.inf) == math.inf


def test_a_model_whose_loss_is_not_finite_is_an_error(tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as drawn:
        drawn.setattr(made.torch, "randn", lambda shape, **_: torch.full(shape, math.nan))
        made.run(tmp_path / "run", dict(made.SHAPE, vocab_size=257, context=16), tokenizer="bytes")
    (tmp_path / "t.txt").write_text(TEXTS[0])
    said = evaluate(capsys, tmp_path / "run", "--text", tmp_path / "t.txt", "--json", code=64)
    assert "the loss is nan: the model gives values that are not finite" in said and "hpclm checkpoints" in said


def test_the_model_of_a_run_whose_optimizer_works_on_offloaded_state_needs_no_such_optimizer(tiny):
    words = ["engine.name=deepspeed", "engine.zero_stage=1", "engine.offload=optimizer", "optim.name=cpu_adam"]
    config = configs.load(None, tiny("run", *words))
    assert run_settings.for_inference(config).optim.name == "adamw" and config.optim.name == "cpu_adam"


def test_a_format_and_a_number_of_tokens_are_what_is_read_of_a_text(run, tmp_path, capsys):
    (tmp_path / "t.txt").write_text("".join(json.dumps({"text": each}) + "\n" for each in TEXTS))
    each = [text.encode() for text in TEXTS]
    lines = evaluate(capsys, run, "--text", tmp_path / "t.txt", "--format", "jsonl", "--json")
    assert (lines["documents"], lines["bytes"]) == (3, sum(map(len, each)))
    first = evaluate(capsys, run, "--text", tmp_path / "t.txt", "--format", "jsonl", "--json", "--tokens", 20)
    check(first, *by_hand(run, each[:1]), len(each[0]), 1)


def test_the_figures_of_a_part_are_printed_with_four_digits_and_of_as_many_samples_as_are_asked_for(run, capsys):
    words = [run, "--part", "test", "--samples", 3, "data.source=synthetic", "data.tokenizer=null"]
    found = evaluate(capsys, *words, "--json")
    assert (found["part"], found["samples"]) == ("test", 3)
    assert cli.main(["evaluate", *map(str, words)]) == 0
    said = capsys.readouterr().out
    assert f"loss {found['loss']:.4f}  " in said and "  samples 3" in said


def test_the_options_of_tasks_are_what_is_asked_of_them():
    words = ["run", "--tasks", "a,b", "--tasks-path", "p", "--samples", "3", "--shots", "2"]

    def asked(*more):
        given = verb.parser().values([*words, *more])
        return verb._tasks(*(given[name] for name in ("tasks", "tasks_path", "samples", "shots", "batch")))

    assert asked() == TaskRequest(["a", "b"], "p", 3, 2, 16)
    assert asked("--batch", "4").batch == 4

"""The verb ``hpclm generate``, on a run that was trained on bytes."""

import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest

import hpclm
from hpclm import cli
from hpclm.base.terminal import plain
from hpclm.inference.completion import Completer
from hpclm.inference.conversation import converse
from hpclm.inference.generation_settings import Limits, Sampling
from tests.forks import Ranks
from tests.interop import made
from tests.preprocess.texts import documents, preprocess
from tests.runs import exit_code

SHAPE = dict(made.SHAPE, vocab_size=257, context=64)
GREEDY = ["--temperature", "0", "--tokens", "12"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "run"
    made.run(folder, SHAPE, tokenizer="bytes")
    return folder


def generate(capsys, *words, code=0):
    assert cli.main(["generate", *map(str, words)]) == code
    said = capsys.readouterr()
    return said.err if code else said.out


def test_a_file_of_prompts_gives_what_each_prompt_gives_alone(run, tmp_path, capsys):
    prompts = ["so it", "a", "the cat sat\\on", ""]
    alone = [generate(capsys, run, "--prompt", each, *GREEDY)[:-1] for each in prompts]
    (tmp_path / "p.txt").write_text("\n".join(prompts) + "\n")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in prompts))
    for name in ("p.txt", "p.jsonl"):
        rows = map(json.loads, generate(capsys, run, "--prompts", tmp_path / name, "--batch", 3, *GREEDY).splitlines())
        rows = list(rows)
        assert [row["prompt"] for row in rows] == prompts
        assert [row["prompt"] + row["text"] for row in rows] == alone
        assert {row["finish"] for row in rows} <= {"length", "end"} and all(1 <= row["tokens"] <= 12 for row in rows)


def test_a_prompt_of_which_the_model_does_not_see_the_beginning_is_named_once(run, tmp_path, capsys, caplog):
    (tmp_path / "p.txt").write_text("\n".join(["x" * 64, "x" * 65, "x" * 70]) + "\n")
    generate(capsys, run, "--prompts", tmp_path / "p.txt", "--batch", 2, "--tokens", 1)
    said = [record.getMessage() for record in caplog.records if "does not see the beginning" in record.getMessage()]
    assert said == [
        "a prompt has 65 tokens, and model.context=64: the model does not see the beginning of longer prompts"
    ]
    caplog.clear()
    generate(capsys, run, "--prompt", "x" * 64, "--tokens", 1)
    assert "does not see" not in caplog.text


def test_sampled_text_depends_on_the_seed_and_the_place_in_the_file_and_not_on_the_batch(run, tmp_path, capsys):
    (tmp_path / "p.txt").write_text("so\n" * 5)
    options = ["--prompts", tmp_path / "p.txt", "--temperature", "1", "--tokens", "12"]
    one, four = (generate(capsys, run, *options, "--batch", size) for size in (1, 4))
    assert one == four and len(set(one.splitlines())) == 5
    assert generate(capsys, run, *options, "--seed", 1) != one


def test_standard_input_is_a_prompt_or_a_prompt_a_line(run, monkeypatch, capsys):
    def said(option):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"so\nit")))
        return generate(capsys, run, option, "-", "--json", *GREEDY)

    assert json.loads(said("--prompt"))["prompt"] == "so\nit"
    assert [json.loads(line)["prompt"] for line in said("--prompts").splitlines()] == ["so", "it"]


ENDS = {
    "Windows": b"so \r\nit\r\n",
    "a byte order mark": b"\xef\xbb\xbfso\nit\n",
    "no end of the last line": b"so\r\nit",
    "empty lines": b"so\r\n\r\nit\n\n",
    "what ends no line": "so\rit\nso\x85it\nso\u2028it\x0bit\n".encode(),
    "an empty file": b"",
}


@pytest.mark.parametrize("content", ENDS.values(), ids=ENDS)
def test_prompts_are_the_lines_that_preprocess_reads(content, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_bytes(content)
    if content:
        words = ["--format", "lines", "--empty", "keep", "--tokenizer", "bytes", "--append-eod"]
        assert preprocess("--input", "p.txt", "--output-prefix", "x", *words) == 0
    lines = ["".join(parts).removesuffix("|") for parts in documents("x_text_document")] if content else []
    capsys.readouterr()
    of_file = generate(capsys, run, "--prompts", "p.txt", *GREEDY)
    assert [json.loads(row)["prompt"] for row in of_file.splitlines()] == lines
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert generate(capsys, run, "--prompts", "-", *GREEDY) == of_file


def test_a_stop_string_ends_the_text_before_it(run):
    completer, drawn = Completer.of_run(run, []), Sampling(temperature=1.0, seed=7)

    def text(*stop):
        (done,) = completer.complete(["so"], Limits(60, stop), drawn)
        return done.text, done.finish

    whole, finish = text()
    assert finish == "length" and len(whole) > 40
    for stop in ([whole[20:22]], [whole[2:35]], [whole[0]], [whole[30:33], whole[12:14]], ["nowhere", whole[25:28]]):
        end = min(at for each in stop if (at := whole.find(each)) >= 0)
        assert text(*stop) == (whole[:end], "stop"), stop
    assert text("nowhere") == (whole, "length")


def test_interactive_continues_the_text_line_by_line(run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("so\n\n/clear\na\n"))
    first, second, third = generate(capsys, run, "--interactive", *GREEDY).split("\n")[:3]
    assert "so" + first == plain(generate(capsys, run, "--prompt", "so", *GREEDY)[:-1])
    assert "so" + first + second == plain(generate(capsys, run, "--prompt", "so" + first, *GREEDY)[:-1])
    assert "a" + third == plain(generate(capsys, run, "--prompt", "a", *GREEDY)[:-1])


def test_a_line_continues_the_text_so_far_with_numbers_of_its_own_and_a_cleared_text_is_forgotten(
    run, monkeypatch, capsys
):
    completer, drawn = Completer.of_run(run, []), Sampling(temperature=1.0, seed=3)

    def said(text, *typed, stop=()):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in typed)))
        converse(completer, text, Limits(8, stop), drawn)
        return capsys.readouterr().out

    def text(prompt, turn=0):
        return completer.complete([prompt], Limits(8), replace(drawn, first=turn))[0].text

    first = text("so")
    second = text(f"so{first} it ", 1)
    assert said("so", " it ") == plain(f"{first}\n{second}\n")
    assert said("", "so", " it ") == plain(f"{first}\n{second}\n")
    assert said("so", "/clear", "a") == plain(f"{first}\n{text('a', 1)}\n")
    assert said("so", stop=(first[2:5],)) == plain(f"{first[:2]}\n")  # no part of it is shown while it comes


def test_interactive_knows_its_commands(run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("/help\n/claer\n/exit\nso\n"))
    assert cli.main(["generate", str(run), "--interactive"]) == 0
    out, err = capsys.readouterr()
    assert out == "" and "/clear         begin a new text" in err
    assert "unknown command /claer" in err and "Did you mean '/clear'?" in err


def test_a_run_may_be_named_below_runs(run, capsys):
    below = ["--runs", str(run.parent)]
    assert generate(capsys, run.name, *below, "--prompt", "so", *GREEDY) == generate(
        capsys, run, "--prompt", "so", *GREEDY
    )
    assert cli.main(["evaluate", "nowhere", *below]) == 64
    assert "nowhere is not a run directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, code, said",
    [
        ([], 2, "give --prompt TEXT, --prompts FILE, --interactive or --chat"),
        (["--prompts", "p", "--prompt", "x"], 2, "goes with neither"),
        (["--prompt", "x", "--top-p", "0"], 2, "--top-p 0.0 must be more than 0"),
        (["--prompt", "x", "--tokens", "0"], 2, "--tokens 0 must be at least 1"),
        (["--prompt", "x", "--temperature", "nan"], 2, "--temperature nan must be a finite number"),
        (["--prompt", "x", "--stop", ""], 2, "--stop '' is empty"),
        (["--prompt", "x", "--temperature", "-1"], 2, "--temperature -1.0 must be a finite number of at least 0"),
        (["--prompt", "x", "--top-p", "2"], 2, "--top-p 2.0 must be more than 0 and at most 1"),
        (["--prompt", "x", "--stop", "\udcff"], 2, "is not UTF-8 text"),
        (["--prompt", "\udcff"], 64, "the prompt is not UTF-8 text"),
        (["--prompts", "/nowhere"], 64, "--prompts /nowhere cannot be read: No such file"),
    ],
)
def test_wrong_options_are_named(run, words, code, said, capsys):
    assert exit_code(["generate", str(run), *words]) == code and said in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--temperature=-1", "--tokens=0", "--top-p=2", "--stop="])
def test_a_wrong_option_is_refused_without_pytorch(words, tmp_path):
    code = (
        "import sys, atexit, os; from hpclm import cli\n"
        "atexit.register(lambda: 'torch' in sys.modules and os._exit(99)); sys.exit(cli.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "generate", tmp_path, "--prompt", "x", words], capture_output=True
    )
    assert done.returncode == 2, done.stderr


def test_half_a_character_in_a_file_of_prompts_is_named(run, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "\\ud800"}\n')
    assert "p.jsonl, line 1 must be" in generate(capsys, run, "--prompts", tmp_path / "p.jsonl", code=64)


def test_a_line_that_is_no_prompt_is_named(run, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n{"text": "x"}\n')
    assert "p.jsonl, line 2 must be a JSON object" in generate(capsys, run, "--prompts", tmp_path / "p.jsonl", code=64)


LAYOUTS = {
    "tensor": ["parallel.tensor=2"],
    "pipeline": ["engine.name=pipelining", "parallel.pipeline=2", "batch.micro_size=2"],
    "ZeRO 1": ["engine.zero_stage=1"],
    "fsdp2": ["engine.name=fsdp2"],
}


@pytest.mark.whole
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_checkpoint_of_any_layout_continues_text_as_one_process_does(layout, tiny, tmp_path, capsys):
    settings = ["model.vocab_size=257", "budget.steps=4"]
    assert cli.main(["train", *tiny("alone", *settings)]) == 0
    with Ranks(2, tiny("split", *settings, *layout)) as ranks:
        assert [code for code, _ in ranks.wait().values()] == [0, 0]
    (tmp_path / "p.txt").write_text("so it goes\nand then\na cat\n")
    words = [
        "--prompts",
        tmp_path / "p.txt",
        "--temperature",
        1,
        "--tokens",
        12,
        "data.source=indexed",
        "data.tokenizer=bytes",
    ]
    capsys.readouterr()
    alone, split = (generate(capsys, tmp_path / name, *words) for name in ("alone", "split"))
    assert split == alone and sum(json.loads(line)["tokens"] for line in split.splitlines()) > 20


def test_a_text_is_printed_with_its_prompt_and_as_json_apart_from_it(run, capsys):
    words = [run, "--prompt", "so", "--tokens", 3, "--top-k", 0, "--temperature", 3, "--seed", 5]
    row = json.loads(generate(capsys, *words, "--json"))
    assert row.keys() == {"prompt", "text", "tokens", "finish"} and row["prompt"] == "so"
    assert generate(capsys, *words) == f"so{row['text']}\n"
    assert hpclm.open(run).generate("so", tokens=3, top_k=None, temperature=3.0, seed=5) == row["text"]


def test_a_file_of_prompts_is_answered_in_json(run, tmp_path, capsys):
    (tmp_path / "p.txt").write_text("so\nit\n")
    rows = [
        json.loads(line) for line in generate(capsys, run, "--prompts", tmp_path / "p.txt", "--tokens", 1).splitlines()
    ]
    assert [row["prompt"] for row in rows] == ["so", "it"]

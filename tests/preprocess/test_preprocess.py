import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from hpclm.config import DataConfig
from hpclm.data import tokenizer_folder
from hpclm.data.indexed import IndexedDataset, sidecar
from hpclm.preprocess.inputs import CHUNK, chunks, find
from tests.preprocess.texts import content, jsonl, preprocess, write

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT.parent / "shared" / "reference"
INPUTS = REFERENCE / "inputs"
needs_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason="the peers' files are not here")


def documents(prefix):
    dataset = IndexedDataset(prefix)
    return [bytes(dataset.tokens(i).tolist()).decode() for i in range(len(dataset))]


@needs_reference
def test_whitespace_words_are_the_seed_scripts_bytes(tmp_path):
    words = ["--input", INPUTS / "lines.txt", "--format", "lines", "--output-prefix", tmp_path / "lines"]
    assert preprocess(*words, "--tokenizer", "whitespace", "--tokenizer-files", INPUTS / "vocab.json") == 0
    original = REFERENCE / "seed2_lines/lines_text_sentence"
    assert content(tmp_path / "lines_text_document", "bin", "idx") == content(original, "bin", "idx")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Preprocess files {name: content} with the bytes tokenizer to x_text_document, in a new folder."""
    monkeypatch.chdir(tmp_path)

    def run(inputs, *words):
        write(**inputs)
        return preprocess("--input", *inputs, "--output-prefix", "x", "--tokenizer", "bytes", *words)

    return run


FORMATS = {
    "lines": ({"a.txt": "one\n\ntwo \r\nthrée"}, ["--format", "lines"], ["one", "two ", "thrée"], 1),
    "jsonl": ({"a.jsonl": jsonl("one\nmore", "", "天😀") + "\n"}, [], ["one\nmore", "天😀"], 1),
    "json ending": ({"a.json": jsonl("one")}, [], ["one"], 0),
    "files": (
        {"a.txt": "one\ntwo\n", "b.txt": "three", "c.txt": ""},
        [],
        ["one\ntwo\n", "three"],
        1,
    ),
    "a mark at the start": ({"a.txt": b"\xef\xbb\xbfone\ntwo"}, [], ["one\ntwo"], 0),
    "kinds mixed, in order": ({"b.txt": "one", "a.jsonl": jsonl("two")}, [], ["one", "two"], 0),
    "JSONL under another name": ({"a.txt": jsonl("one")}, ["--format", "jsonl"], ["one"], 0),
}


@pytest.mark.parametrize("inputs, words, expected, skipped", FORMATS.values(), ids=FORMATS.keys())
def test_a_document_is_a_line_an_object_or_a_file_and_empty_ones_are_counted(
    inputs, words, expected, skipped, run, capsys
):
    assert run(inputs, *words) == 0
    assert documents("x_text_document") == expected
    note = sidecar("x_text_document")
    assert (note["documents"], note["counts"].get("skipped", 0)) == (len(expected), skipped)
    assert note["tokens"] == sum(len(text.encode()) for text in expected)
    told = capsys.readouterr().out
    assert re.search(rf"{len(expected)} documents?, {note['tokens']} tokens?", told)
    assert re.findall(r"; (\d+) empty documents? skipped", told) == [str(skipped)] * bool(skipped)
    assert "next: add text" in told


def test_another_key_names_the_dataset_too(run):
    assert run({"a.jsonl": jsonl("one", key="body")}, "--json-key", "body") == 0
    assert documents("x_body_document") == ["one"]


def test_a_dataset_carries_its_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("x y")
    Path("v.json").write_text('{"<unk>": 0, "<|endoftext|>": 1, "x": 2}')
    words = ["--input", "a.txt", "--output-prefix", "x", "--tokenizer", "whitespace", "--tokenizer-files", "v.json"]
    assert preprocess(*words) == 0
    note = sidecar("x_text_document")
    assert (note["tokenizer"]["kind"], note["tokenizer"]["size"], note["tokenizer"]["eod"]) == ("whitespace", 3, 1)
    Path("v.json").unlink()
    assert tokenizer_folder.of_data(DataConfig(prefix="x_text_document")).build().encode("x") == [2, 1]
    assert IndexedDataset("x_text_document").flat.tolist() == [2, 0, 1]


def test_text_that_ends_documents_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text(jsonl("x <|endoftext|> x", "x x<|endoftext|>", "x"))
    tokens = {"<|endoftext|>": 0, "x": 1, "[UNK]": 2}
    tokenizer = Tokenizer(WordLevel(tokens, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save("t.json")
    words = ["--input", "a.jsonl", "--tokenizer", "json", "--tokenizer-files", "t.json", "--output-prefix"]
    assert preprocess(*words, "bare") == 0 and "end-of-document" not in capsys.readouterr().err
    assert preprocess(*words, "x", "--append-eod") == 0
    assert (
        "x_text_document: the text has the token <|endoftext|> 2 times (20.0% of the tokens). It ends a document"
        in capsys.readouterr().err
    )
    assert IndexedDataset("x_text_document").flat.tolist() == [1, 0, 1, 0, 1, 1, 0, 0, 1, 0]
    for part in ("0/2", "1/2"):
        assert preprocess(*words, "y", "--append-eod", "--part", part) == 0
    assert sidecar("y_text_document")["counts"]["special"] == {"<|endoftext|>": 2}


def test_the_dataset_does_not_depend_on_the_number_of_workers(run):
    inputs = {"a.txt": "".join(f"line {i} {'x' * (i % 90)}\n" for i in range(40_000)), "b.jsonl": jsonl(*"abc")}
    assert run(inputs) == 0
    assert len(list(chunks(find(["a.txt"], "lines")))) == -(-len(inputs["a.txt"]) // CHUNK) > 3
    alone = content("x_text_document")
    assert run(inputs, "--workers", "3", "--overwrite") == 0
    assert content("x_text_document") == alone


BROKEN = {
    "not JSON": (jsonl("one") + "{oops\n", "a.jsonl:2 is not JSON"),
    "not an object": ("[1]\n", "a.jsonl:1 holds a JSON list"),
    "another key": ('{"body": "x", "id": 1}\n', "a.jsonl:1 has no key 'text'; it has ['body', 'id']"),
    "not text": ('{"text": 5}\n', "a.jsonl:1: 'text' holds a JSON int, not text"),
    "half a character": (
        '{"text": "\\ud83d"}\n',
        "a.jsonl:1: 'text' holds half a character (a lone surrogate); hpclm preprocess --on-error skip",
    ),
    "not UTF-8": (jsonl("one").encode() + b'{"text": "\xe9"}\n', "a.jsonl:2 is not UTF-8: byte 0xe9 at 10"),
}


@pytest.mark.parametrize("text, message", BROKEN.values(), ids=BROKEN.keys())
def test_an_unreadable_line_is_named_and_nothing_is_left(text, message, run, tmp_path, capsys):
    assert run({"a.jsonl": text}) == 64
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_bad_line_that_a_worker_finds_is_named_too(run, tmp_path, capsys):
    text, message = BROKEN["not JSON"]
    assert run({"a.jsonl": text}, "--workers", 2) == 64
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("inputs", [{"a.txt": ""}, {"a.txt": b"\xef\xbb\xbf", "b.txt": ""}, {"a.jsonl": jsonl("", "")}])
def test_an_input_without_documents_is_refused(inputs, run, tmp_path, capsys):
    assert run(inputs) == 64
    assert "no documents in a." in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == set(inputs)


def test_a_dataset_is_replaced_only_with_overwrite(run, capsys):
    assert run({"a.txt": "one"}) == 0
    assert run({"a.txt": "two"}) == 64
    assert "x_text_document.idx exists; give --overwrite" in capsys.readouterr().err
    assert documents("x_text_document") == ["one"]
    assert run({"a.txt": "two"}, "--overwrite") == 0
    assert documents("x_text_document") == ["two"]


def test_a_failed_run_leaves_the_dataset_that_was_there(run):
    assert run({"a.jsonl": jsonl("one")}) == 0
    assert run({"a.jsonl": jsonl("two") + "oops"}, "--overwrite") == 64
    assert documents("x_text_document") == ["one"]


def test_a_missing_input_and_a_tokenizer_that_ends_documents_itself_are_refused(run, tmp_path, capsys):
    assert preprocess("--input", "nowhere.txt", "--output-prefix", "x", "--tokenizer", "bytes") == 64
    assert "nowhere.txt does not exist" in capsys.readouterr().err
    Path("v.json").write_text('{"<unk>": 0, "<|endoftext|>": 1}')
    Path("a.txt").write_text("one")
    words = ["--input", "a.txt", "--output-prefix", "x", "--tokenizer", "whitespace", "--tokenizer-files", "v.json"]
    assert preprocess(*words, "--append-eod") == 64
    assert "leave out --append-eod" in capsys.readouterr().err
    assert run({"a.txt": "one"}, "--json-key", "text") == 64
    assert "--json-keys text has no effect" in capsys.readouterr().err


LINES = "".join(f"a line of {number} words\n" for number in range(50))
CHINESE = "".join(f"天地玄黄宇宙洪荒日月盈昃辰宿列张{number}\n" for number in range(50))
WARNED = {
    "lines": (
        ["a.txt", "--format", "lines"],
        LINES,
        "only \\d+\\.\\d tokens on average.* omit --format lines, so that a .txt is one document",
    ),
    "objects": (
        ["a.jsonl"],
        jsonl(*LINES.splitlines()),
        "only \\d+\\.\\d tokens on average.* join them into one document.*data.reset_attention_mask=true",
    ),
    "a text": (["a.txt"], LINES, None),
    "long lines": (["a.txt", "--format", "lines"], LINES.replace("words", "words " * 5), None),
    "a few": (["a.jsonl"], jsonl("one", "two"), None),
}


@pytest.mark.parametrize("words, text, warning", WARNED.values(), ids=WARNED.keys())
def test_documents_that_are_too_short_to_learn_from_are_named(words, text, warning, run, capsys):
    assert run({words[0]: text}, *words[1:]) == 0
    said = capsys.readouterr().err
    assert re.search(warning, said) if warning else "on average" not in said


def test_a_tokenizer_that_does_not_divide_the_text_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(**{"zh.txt": CHINESE, "en.txt": LINES, "t.json": '{"<unk>": 0, "<|endoftext|>": 1}'})
    for name, long in (("zh.txt", True), ("en.txt", False)):
        for words in (
            ["--only-source", "--trainpref", name, "--destdir", f"{name}-bin"],
            ["--input", name, "--output-prefix", name, "--tokenizer", "whitespace", "--tokenizer-files", "t.json"],
        ):
            assert preprocess(*words) == 0
            said = capsys.readouterr().err
            assert bool(re.search(r"tokens have \d+ bytes .* hpclm train-tokenizer", said)) == long, said

import json
from pathlib import Path

import pytest

from hpclm import cli
from hpclm.data.indexed import IndexedDataset, sidecar
from hpclm.datasets.inputs import CHUNK, chunks, find
from tests.shared import shared

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT.parent / "shared" / "reference"
INPUTS = REFERENCE / "inputs"
needs_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason="the peers' files are not here")


def preprocess(*words):
    return cli.main(["preprocess", *map(str, words)])


def documents(prefix):
    dataset = IndexedDataset(prefix)
    return [bytes(dataset.tokens(i).tolist()).decode() for i in range(len(dataset))]


def same(prefix, original):
    return all(Path(f"{prefix}.{end}").read_bytes() == Path(f"{original}.{end}").read_bytes() for end in ("bin", "idx"))


@needs_reference
def test_whitespace_words_are_the_seed_scripts_bytes(tmp_path):
    words = ["--input", INPUTS / "lines.txt", "--output-prefix", tmp_path / "lines"]
    assert preprocess(*words, "--tokenizer", "whitespace", "--tokenizer-files", INPUTS / "vocab.json") == 0
    assert same(tmp_path / "lines_text_document", REFERENCE / "seed2_lines/lines_text_sentence")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Preprocess files {name: content} with the bytes tokenizer to x_text_document, in a new folder."""
    monkeypatch.chdir(tmp_path)

    def run(inputs, *words):
        for name, content in inputs.items():
            Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return preprocess("--input", *inputs, "--output-prefix", "x", "--tokenizer", "bytes", *words)

    return run


def jsonl(*texts, key="text"):
    return "".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts))


FORMATS = {
    "lines": ({"a.txt": "one\n\ntwo \r\nthrée"}, [], ["one", "two ", "thrée"], 1),
    "jsonl": ({"a.jsonl": jsonl("one\nmore", "", "天😀") + "\n"}, [], ["one\nmore", "天😀"], 1),
    "json ending": ({"a.json": jsonl("one")}, [], ["one"], 0),
    "files": (
        {"a.txt": "one\ntwo\n", "b.txt": "three", "c.txt": ""},
        ["--format", "files"],
        ["one\ntwo\n", "three"],
        1,
    ),
    "a mark at the start": ({"a.txt": b"\xef\xbb\xbfone\ntwo"}, [], ["one", "two"], 0),
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
    assert (note["documents"], note["skipped"]) == (len(expected), skipped)
    assert note["tokens"] == sum(len(text.encode()) for text in expected)
    told = capsys.readouterr().out
    assert f"{len(expected)} documents, {note['tokens']} tokens; {skipped} empty documents skipped" in told
    assert "next: more text" in told


def test_another_key_names_the_dataset_too(run):
    assert run({"a.jsonl": jsonl("one", key="body")}, "--json-key", "body") == 0
    assert documents("x_body_document") == ["one"]


def test_every_document_ends_with_the_token_when_asked(run):
    assert run({"a.txt": "ab\n\nc"}, "--append-eod") == 0
    assert IndexedDataset("x_text_document").flat.tolist() == [97, 98, 256, 99, 256]


def test_the_json_file_names_the_tokenizer_and_its_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("x y")
    Path("v.json").write_text('{"<unk>": 0, "<|endoftext|>": 1, "x": 2}')
    words = ["--input", "a.txt", "--output-prefix", "x", "--tokenizer", "whitespace", "--tokenizer-files", "v.json"]
    assert preprocess(*words) == 0
    note = sidecar("x_text_document")
    assert (note["tokenizer"]["kind"], note["tokenizer"]["size"], note["tokenizer"]["eod"]) == ("whitespace", 3, 1)
    assert note["tokenizer_files"] == [str(tmp_path / "v.json")]
    assert IndexedDataset("x_text_document").flat.tolist() == [2, 0, 1]


def test_the_dataset_does_not_depend_on_the_number_of_workers(run):
    inputs = {"a.txt": "".join(f"line {i} {'x' * (i % 90)}\n" for i in range(40_000)), "b.jsonl": jsonl(*"abc")}
    assert run(inputs) == 0
    assert len(list(chunks(find(["a.txt"], None)))) == -(-len(inputs["a.txt"]) // CHUNK) > 3
    alone = [Path(f"x_text_document.{end}").read_bytes() for end in ("bin", "idx", "json")]
    assert run(inputs, "--workers", "3", "--overwrite") == 0
    assert [Path(f"x_text_document.{end}").read_bytes() for end in ("bin", "idx", "json")] == alone


BROKEN = {
    "not JSON": (jsonl("one") + "{oops\n", "a.jsonl:2 is not JSON"),
    "not an object": ("[1]\n", "a.jsonl:1 holds a JSON list"),
    "another key": ('{"body": "x", "id": 1}\n', "a.jsonl:1 has no key 'text'; it has ['body', 'id']"),
    "not text": ('{"text": 5}\n', "a.jsonl:1: 'text' holds a JSON int, not text"),
    "half a character": ('{"text": "\\ud83d"}\n', "a.jsonl:1: 'text' holds half a character"),
    "not UTF-8": (jsonl("one").encode() + b'{"text": "\xe9"}\n', "a.jsonl:2 is not UTF-8: byte 0xe9 at 10"),
}


@pytest.mark.parametrize("content, message", BROKEN.values(), ids=BROKEN.keys())
def test_an_unreadable_line_is_named_and_nothing_is_left(content, message, run, tmp_path, capsys):
    assert run({"a.jsonl": content}) == 64
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_bad_line_that_a_worker_finds_is_named_too(run, tmp_path, capsys):
    content, message = BROKEN["not JSON"]
    assert run({"a.jsonl": content}, "--workers", 2) == 64
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize("inputs", [{"a.txt": ""}, {"a.txt": "\n\n"}, {"a.jsonl": jsonl("", "")}])
def test_an_input_without_documents_is_refused(inputs, run, tmp_path, capsys):
    assert run(inputs) == 64
    assert "no documents in a." in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == list(inputs)


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


CHINESE = "".join(chr(0x4E00 + (7 * i * i + 13 * i) % 997) for i in range(6000))


def test_text_without_spaces_and_a_vocabulary_of_words_is_warned_of(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sentences = [CHINESE[i : i + 10] for i in range(0, 6000, 10)]
    thai = CHINESE.translate({0x4E00 + i: 0x0E01 + i % 46 for i in range(997)})
    Path("th.txt").write_text("\n".join(thai[i : i + 10] for i in range(0, 6000, 10)), encoding="utf-8")
    Path("zh.txt").write_text("\n".join(sentences), encoding="utf-8")
    Path("vocab.json").write_text(json.dumps({"<unk>": 0, "<|endoftext|>": 1, "the": 2}))
    assert preprocess("--only-source", "--trainpref", "th.txt", "--destdir", "th") == 0
    assert "598 of 600 words are different ones (types/tokens 1.00); text without spaces" in capsys.readouterr().err
    words = ["--output-prefix", "x", "--tokenizer", "whitespace", "--tokenizer-files", "vocab.json", "--overwrite"]
    assert preprocess("--input", "zh.txt", *words) == 0
    assert "100% of the words are not in the vocabulary (<unk>)" in capsys.readouterr().err
    assert preprocess("--input", "zh.txt", *words, "--part", "0/1") == 0
    english = shared("data/tinyshakespeare.txt").read_text()[:60_000]
    Path("en.txt").write_text(english)
    assert preprocess("--only-source", "--trainpref", "en.txt", "--destdir", "en") == 0
    assert capsys.readouterr().err.count("text without spaces") == 1
    Path("pieces.txt").write_text("\n".join(" ".join(sentence) for sentence in sentences), encoding="utf-8")
    assert preprocess("--only-source", "--trainpref", "pieces.txt", "--destdir", "pieces") == 0
    Path("words.txt").write_text("今天 天气 很 好 。\n我们 去 公园 散步 吧 。\n", encoding="utf-8")
    assert preprocess("--only-source", "--trainpref", "words.txt", "--destdir", "words") == 0
    Path("few.txt").write_text("to be or not to be\n")
    assert preprocess("--only-source", "--trainpref", "few.txt", "--destdir", "few") == 0
    assert "text without spaces" not in capsys.readouterr().err

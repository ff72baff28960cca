"""What becomes of empty, broken and repeated documents, of sentences and of several keys."""

import errno
import gzip
import io
import json
import subprocess
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from hpclm.data.indexed import IndexedDataset, sidecar
from hpclm.preprocess.encode import EncodeJob, encode, read_texts
from hpclm.preprocess.inputs import Input, InputChunk
from hpclm.preprocess.writer import Writer
from tests.preprocess.texts import COMMAND, WITH_WORKERS, content, documents, jsonl, preprocess, write
from tests.shared import shared

BYTES = ["--output-prefix", "x", "--tokenizer", "bytes"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


EMPTY = {
    "skip": ([["a|"], ["b|"]], 1),
    "keep": ([["a|"], [], ["b|"]], 0),
}


@pytest.mark.parametrize("policy", EMPTY)
def test_an_empty_document_is_skipped_and_counted_or_kept_without_a_sequence(policy):
    expected, skipped = EMPTY[policy]
    write(**{"a.jsonl": jsonl("a", "", "b")})
    assert preprocess("--input", "a.jsonl", *BYTES, "--append-eod", "--empty", policy) == 0
    assert documents("x_text_document") == expected
    assert sidecar("x_text_document")["counts"].get("skipped", 0) == skipped


def test_kept_empty_documents_are_megatron_cores_bytes():
    inputs = shared("reference/inputs")
    words = ["--input", inputs / "docs.jsonl", "--output-prefix", "d", "--append-eod", "--empty", "keep"]
    words += ["--tokenizer-type", "GPT2BPETokenizer"]
    files = ["--vocab-file", inputs / "gpt2-tiny-vocab.json", "--merge-file", inputs / "gpt2-tiny-merges.txt"]
    assert preprocess(*words, *files) == 0
    original = shared("reference/mcore_docs") / "docs_text_document"
    assert content("d_text_document", "bin", "idx") == content(original, "bin", "idx")


def test_several_keys_are_several_datasets_each_as_if_it_were_alone():
    records = [{"title": f"t{i % 7}" * (i % 3), "text": f"text {i}" * (i % 5), "n": i} for i in range(400)]
    write(**{"a.jsonl": "\n".join(map(json.dumps, records))})
    more = ["--append-eod"]
    assert preprocess("--input", "a.jsonl", *BYTES, "--json-keys", "title", "text", *more) == 0
    for key in ("title", "text"):
        words = ["--input", "a.jsonl", "--output-prefix", "alone", "--tokenizer", "bytes", "--json-keys", key]
        assert preprocess(*words, *more) == 0
        assert content(f"x_{key}_document") == content(f"alone_{key}_document")


KEYS = {
    "twice": (["--json-keys", "text", "text"], "contains a key twice"),
    "plain text": (["b.txt", "--json-keys", "text", "title"], "b.txt is plain text"),
    "missing": (["--json-keys", "text", "title"], "a.jsonl:1 has no key 'title'"),
}


@pytest.mark.parametrize("words, message", KEYS.values(), ids=KEYS.keys())
def test_keys_that_cannot_be_are_refused(words, message, capsys):
    write(**{"a.jsonl": jsonl("one"), "b.txt": "two"})
    assert preprocess("--input", "a.jsonl", *words, *BYTES) == 64
    assert message in capsys.readouterr().err
    assert not list(Path().glob("x*"))


BAD = b'{oops\n{"text": 5}\n{"text": "\xe9"}\n[1]\n{"a": 1}\n{"text": "\\ud83d"}\n{oops\n'
REASONS = {"half a character": 1, "no key": 1, "not JSON": 2, "not UTF-8": 1, "not an object": 1, "not text": 1}


@pytest.mark.parametrize("workers", [1, 2])
def test_unreadable_lines_are_skipped_counted_and_shown_on_request(workers):
    write(**{"a.jsonl": jsonl("one").encode() + BAD + jsonl("two").encode()})
    words = ["--input", "a.jsonl", *BYTES, "--on-error", "skip", "--workers", str(workers)]
    done = subprocess.run([*WITH_WORKERS, *words], capture_output=True, text=True, check=True)
    assert documents("x_text_document") == [["one"], ["two"]]
    assert sidecar("x_text_document")["counts"]["unreadable"] == REASONS
    assert "7 unreadable lines skipped (half a character: 1, no key: 1, not JSON: 2" in done.stdout
    told = done.stderr.splitlines()
    assert len(told) == 5
    assert "skipped: a.jsonl:2 is not JSON" in told[0] and "a.jsonl:4 is not UTF-8" in told[2]


SENTENCES = {
    "stripped": ([], [["Hello there.", "Mr. Smith went home!", "New one.|"], ["Just this|"]]),
    "with newlines": (
        ["--keep-newlines"],
        [["Hello there. ", "Mr. Smith went home!\n\n", "New one.\n|"], ["Just this|"]],
    ),
    "a language by Megatron's name": (
        ["--lang", "english"],
        [["Hello there.", "Mr. Smith went home!", "New one.|"], ["Just this|"]],
    ),
}


@pytest.mark.parametrize("words, expected", SENTENCES.values(), ids=SENTENCES.keys())
def test_a_document_can_be_a_sequence_for_each_sentence_with_one_end(words, expected):
    write(**{"a.jsonl": jsonl("Hello there. Mr. Smith went home!\n\nNew one.\n", "", "Just this")})
    assert preprocess("--input", "a.jsonl", *BYTES, "--append-eod", "--split-sentences", *words) == 0
    assert documents("x_text_sentence") == expected


def test_sentences_lose_nothing_of_real_text():
    for name, language in (("medical-zh.jsonl", "zh"), ("tinyshakespeare.txt", "en")):
        source = shared(f"data/{name}")
        split = ["--split-sentences", "--keep-newlines", "--language", language]
        assert preprocess("--input", source, *BYTES, *split, "--overwrite") == 0
        assert preprocess("--input", source, *BYTES, "--overwrite") == 0
        sentences, whole = IndexedDataset("x_text_sentence"), IndexedDataset("x_text_document")
        assert content("x_text_sentence", "bin") == content("x_text_document", "bin")
        assert len(sentences.documents) == len(whole.documents)
        assert len(sentences) > len(whole)


@pytest.mark.parametrize("ending, pack", [("gz", gzip.compress), ("zst", zstandard.ZstdCompressor().compress)])
def test_compressed_files_give_the_same_dataset_and_truncated_ones_give_none(ending, pack, capsys):
    text = jsonl(*(f"document {i} {hash((1, i))}" for i in range(5000)))
    write(**{"a.jsonl": text, f"b.jsonl.{ending}": pack(text.encode()), f"c.jsonl.{ending}": pack(text.encode())[:-9]})
    assert preprocess("--input", "a.jsonl", *BYTES) == 0
    assert preprocess("--input", f"b*.{ending}", "--output-prefix", "y", "--tokenizer", "bytes") == 0
    assert content("x_text_document") == content("y_text_document")
    assert preprocess("--input", f"c*.{ending}", "--output-prefix", "z", "--tokenizer", "bytes") == 64
    assert f"c.jsonl.{ending} is truncated" in capsys.readouterr().err
    assert not list(Path().glob("z*"))


def test_standard_input_is_an_input():
    text = jsonl("one", "two")
    subprocess.run([*COMMAND, "--input", "-", "--format", "jsonl", *BYTES], input=text.encode(), check=True)
    assert documents("x_text_document") == [["one"], ["two"]]


def chunk(text, format="jsonl"):
    lines = [text] if format == "files" else io.BytesIO(text).readlines()
    return InputChunk(Input("a", format, "", len(text), 0), lines, 1, 0, len(text))


JSON = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=5),
    lambda inner: (
        some.lists(inner, max_size=3) | some.dictionaries(some.sampled_from(["text", "b", "é"]), inner, max_size=3)
    ),
    max_leaves=6,
)
LINE = some.one_of(
    some.dictionaries(some.sampled_from(["text", "b"]), some.text(max_size=8) | JSON, max_size=2)
    .map(json.dumps)
    .map(str.encode),
    JSON.map(lambda value: json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")),
    some.binary(max_size=12),
    some.sampled_from(
        [b"", b" \t", "　".encode(), b'{"text": "x"}\r', b'{"text": NaN}', b'{"text": "\\ud800"}', b"[" * 2000]
    ),
    some.sampled_from(
        [b'{"text": "\x00"}', b'{"text": 1e999, "text": "y"}', b'\xef\xbb\xbf{"text": "z"}', b'{"text": "a",}']
    ),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(some.lists(LINE, max_size=6), some.sampled_from(["jsonl", "lines", "files"]))
def test_lines_are_read_as_pythons_json_reads_them(lines, format):
    piece = chunk(b"\n".join(lines), format)
    texts, errors = read_texts(piece, ("text",), "skip")
    careful = [by_python(line, format) for line in piece.lines]
    assert texts[0] == [text for text in careful if text not in (None, BLANK)]
    assert [number for number, _ in errors] == [number for number, text in enumerate(careful) if text is None]


BLANK = object()


def by_python(line, format):
    """The text of a line, BLANK, or None if it is unreadable."""
    try:
        text = line.decode()
        if format != "jsonl":
            return text.removesuffix("\n").rstrip("\r") if format == "lines" else text
        if not text.strip():
            return BLANK
        text = json.loads(text)["text"]
        return text if isinstance(text, str) and text.encode().decode() == text else None
    except (ValueError, RecursionError, KeyError, TypeError):
        return None


def test_a_tokenizer_with_a_wrong_size_is_detected(tmp_path, monkeypatch, capsys):
    write(**{"a.txt": "one", "liar.py": LIAR})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert preprocess("--input", "a.txt", "--output-prefix", "x", "--tokenizer", "liar:Liar") == 64
    assert "returned ids 70000 to 70000 in a.txt, but its size is 10" in capsys.readouterr().err
    assert not list(Path().glob("x*"))


LIAR = """
import numpy
class Liar:
    size, eod, ends_itself = 10, None, False
    fingerprint = {"kind": "liar:Liar", "files": {}, "size": 10, "eod": None}
    def __init__(self, files, options=None): pass
    def encode(self, text): return [70000]
    def decode(self, ids): return ""
    def encode_batch(self, texts): return numpy.array([70000] * len(texts)), numpy.ones(len(texts), int)
"""


def test_a_line_of_many_megabytes_is_one_document():
    job = EncodeJob("bytes", ())
    text = b"x" * (20 << 20)
    [column] = encode(chunk(b'{"text": "' + text + b'"}\n'), job).columns
    assert (column.sizes.tolist(), column.documents.tolist(), column.tokens.dtype.itemsize) == ([20 << 20], [1], 2)


def test_where_one_key_cannot_be_finished_no_key_has_a_dataset(monkeypatch, capsys):
    write(**{"a.jsonl": '{"a": "one", "b": "two"}\n'})
    finish, calls = Writer.finish, []

    def full_the_second_time(self):
        calls.append(self)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", "x_b_document.idx")
        finish(self)

    monkeypatch.setattr(Writer, "finish", full_the_second_time)
    words = ["--input", "a.jsonl", "--json-keys", "a", "b", "--output-prefix", "x", "--tokenizer", "bytes"]
    assert preprocess(*words) == 1
    assert "No space left on device; no dataset was written" in capsys.readouterr().err
    assert not list(Path().glob("x_*"))


def test_a_dataset_that_appears_meanwhile_is_not_replaced(monkeypatch, capsys):
    write(**{"a.txt": "one\n"})
    finish = Writer.finish

    def overtaken(self):
        finish(self)
        with Writer(self._final[0].with_suffix(""), "u2") as other:
            other.add_document([7])

    def once(self):
        monkeypatch.setattr(Writer, "finish", finish)
        overtaken(self)

    monkeypatch.setattr(Writer, "finish", once)
    assert preprocess("--input", "a.txt", *BYTES) == 64
    assert "was written by another process in the meantime" in capsys.readouterr().err
    assert IndexedDataset("x_text_document").flat.tolist() == [7]


def test_numbers_of_any_length_in_other_fields_are_no_matter():
    write(**{"a.jsonl": '{"text": "one", "n": ' + "9" * 10_000 + "}\n"})
    assert preprocess("--input", "a.jsonl", *BYTES) == 0
    assert documents("x_text_document") == [["one"]]

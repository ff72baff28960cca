"""What a file holds is decided by its name and its beginning, and where these disagree nothing is guessed."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pytest
import zstandard

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.commands import generate
from hpclm.inference import texts
from hpclm.preprocess.inputs import chunks, find
from tests.preprocess.texts import documents, jsonl, preprocess, write

OBJECTS = jsonl("hello one", "hello two").encode()
LONG = jsonl("x" * 50_000, "hello two").encode()
PLAIN = b"hello one\nhello two\n"
zst = zstandard.ZstdCompressor().compress


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


NAMES = [
    "a.jsonl", "a.JSONL", "a.json", "a.ndjson", "a.NDJSON", "a.jsonlines", "a.jl", "a.ldjson", "a.jsonl.1", "a.jsonl.01.2",
    "a.jsonl-00000-of-00002", "a.jsonl_3", "a.jsonl.part3", "a-00000-of-00002.ndjson", "part-00000", "a", "a.00", "a.b/part-7",
]  # fmt: skip
PACKINGS = {"": bytes, ".gz": gzip.compress, ".GZ": gzip.compress, ".zst": zst, ".zstd": zst, ".gz.1": gzip.compress}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("packing", PACKINGS)
def test_json_lines_are_read_as_such_under_every_name_that_they_have(name, packing):
    Path(name).parent.mkdir(exist_ok=True)
    write(**{name + packing: PACKINGS[packing](LONG)})
    [source] = find([name + packing], None)
    assert source.format == "jsonl"
    assert b"".join(line for chunk in chunks([source]) for line in chunk.lines) == LONG


@pytest.mark.parametrize("name", ["a.jsonl", "a", "a.bin"])
@pytest.mark.parametrize("pack", [gzip.compress, zst])
def test_a_compressed_file_is_decompressed_without_a_name_that_says_so(name, pack):
    write(**{name: pack(OBJECTS)})
    [source] = find([name], "jsonl")
    assert b"".join(line for chunk in chunks([source]) for line in chunk.lines) == OBJECTS


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.bak", "a.jsonl.aa", "a.log.1", "a.md", "a.txt.gz"])
@pytest.mark.parametrize("content", [OBJECTS, LONG, OBJECTS + b"{oops\n"], ids=["short", "long", "with a bad line"])
def test_json_lines_under_the_name_of_a_text_stop_until_a_person_says_what_is_meant(name, content, capsys):
    write(**{name: gzip.compress(content) if name.endswith(".gz") else content})
    words = ["--input", name, "--output-prefix", "x", "--tokenizer", "bytes", "--on-error", "skip"]
    assert cli.main(["preprocess", *words]) == 64
    assert f"{name} holds JSON lines, but is not named .jsonl; give --format jsonl" in capsys.readouterr().err
    assert not list(Path().glob("x*"))
    assert preprocess(*words, "--format", "jsonl") == 0
    assert documents("x_text_document")[-1] == ["hello two"]
    assert preprocess(*words, "--format", "lines", "--overwrite") == 0
    assert documents("x_text_document")[1] == [content.splitlines()[1].decode()]


PLAINLY = {
    "a brace": b"{ this is no JSON }\n{ nor is this }\n",
    "code": b'{\n    "a": 1,\n    b\n}\n',
    "lists": b'["a", "b"]\n["c"]\n',
    "text": PLAIN,
    "a long line": b"x" * 100_000,
    "a long brace": b"{" + b"x" * 100_000,
    "a few zeros": b"x" * 5000 + b"\0\n",
    "Chinese": "天地玄黄\n".encode() * 3000,
}


@pytest.mark.parametrize("name", ["a.txt", "a", "a.1", "a.md", "a.py", "a.txt-00001", "a.TXT.gz", "a.txt.zst"])
@pytest.mark.parametrize("content", PLAINLY.values(), ids=PLAINLY.keys())
def test_text_that_only_resembles_json_is_one_document(name, content):
    write(**{name: PACKINGS[Path(name).suffix](content) if Path(name).suffix in PACKINGS else content})
    assert [source.format for plain in ("files", "lines") for source in find([name], None, plain=plain)] == [
        "files",
        "lines",
    ]


REFUSED = {
    "a.jsonl.xz": lzma.compress(OBJECTS),
    "a.txt.bz2": bz2.compress(PLAIN),
    "a.pdf": b"%PDF-1.7\n" + b"%\xe2\xe3\n" * 3,
    "a.idx": b"MMIDIDX\0\0" + bytes(100),
    "a.txt": "hello\nthere".encode("utf-16"),
    "a.utf16": "hello\nthere".encode("utf-16-le"),
    "latin.txt.gz": gzip.compress("Grüße\n".encode("latin-1")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_text_is_refused(name):
    write(**{name: REFUSED[name]})
    with pytest.raises(ConfigError, match=f"{name} is not text in UTF-8.*`file {name}` says what it is"):
        find([name], None)


def test_a_table_is_read_as_one_under_every_name():
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    feather = pytest.importorskip("pyarrow.feather")
    rows = pyarrow.table({"text": ["hello one", "hello two"]})
    parquet.write_table(rows, "a.parquet")
    feather.write_feather(rows, "a.feather")
    content, other = Path("a.parquet").read_bytes(), Path("a.feather").read_bytes()
    write(
        **{"b.PARQUET": content, "c.parquet.1": content, "d": content, "e.txt": content, "f.ARROW": other, "g": other}
    )
    for name in ("a.parquet", "b.PARQUET", "c.parquet.1", "d", "e.txt", "a.feather", "f.ARROW", "g"):
        [source] = find([name], None)
        lines = [json.loads(line)["text"] for chunk in chunks([source]) for line in chunk.lines]
        assert (source.storage, lines) == ("table", ["hello one", "hello two"]), name
        with pytest.raises(ConfigError, match="the rows of a table are read as --format jsonl"):
            find([name], "lines")


def test_files_of_a_pattern_and_a_folder_are_all_read_as_what_they_are(capsys):
    Path("f").mkdir()
    write(
        **{"f/a.ndjson": jsonl("one"), "f/b.jsonl": jsonl("two"), "f/c.jsonl.1": jsonl("three"), "f/README": "no data"}
    )
    for number, name in enumerate(["f", "f/*.*"]):
        assert preprocess("--input", name, "--output-prefix", number, "--tokenizer", "bytes") == 0
        assert documents(f"{number}_text_document") == [["one"], ["two"], ["three"]]
    write(**{"f/d.jsonl.xz": lzma.compress(OBJECTS)})
    assert preprocess("--input", "f", "--output-prefix", "x", "--tokenizer", "bytes") == 64
    assert "f/d.jsonl.xz is not text in UTF-8" in capsys.readouterr().err


def test_options_of_fairseq_do_not_read_json_as_plain_lines(capsys):
    write(**{"a.ndjson": OBJECTS})
    assert preprocess("--only-source", "--trainpref", "a.ndjson") == 64
    assert (
        "a.ndjson holds JSON lines, but fairseq's options read plain text; give --input a.ndjson instead"
        in capsys.readouterr().err
    )


def prompts(*words):
    given = generate.parser().values(["run", *words])
    return list(texts.prompts(given["prompt"], given["prompts"], given["format"]))


def test_prompts_and_evaluated_texts_are_read_by_the_same_rule():
    text = '{"prompt": "hello"}\n'
    for name in ("a.ndjson", "a.JSONL", "a.jsonl.1", "part-0"):
        write(**{name: text})
        assert prompts("--prompts", name) == ["hello"]
        assert texts.is_json_lines(name, text, None, "text")
    write(**{"a.txt": text})
    with pytest.raises(ConfigError, match=r"a\.txt holds JSON lines.* --format lines to read it as it is"):
        prompts("--prompts", "a.txt")
    with pytest.raises(ConfigError, match=r"standard input holds JSON lines.* --format text"):
        texts.is_json_lines("-", text, None, "text")
    assert prompts("--prompts", "a.txt", "--format", "jsonl") == ["hello"]
    assert prompts("--prompts", "a.txt", "--format", "lines") == [text.strip()]
    assert not texts.is_json_lines("page.html", "<html>\n", None, "text")

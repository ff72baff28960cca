"""Parquet, Arrow and folders of Hugging Face's datasets: the tokens are those of the same texts as JSONL."""

import gzip
import json
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import orjson
import pytest
import zstandard

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.data.indexed import IndexedDataset
from hpclm.preprocess.inputs import chunks, find
from tests.preprocess import chats

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import feather, ipc, parquet  # noqa: E402

TEXTS = [f"Zeile {number} é\n天" + "x" * (number % 90) for number in range(700)]
COLUMNS = {"text": TEXTS, "score": [float("nan")] * 700, "raw": [b"\xff"] * 700, "title": [t[:9] for t in TEXTS]}


def preprocess(*inputs, prefix, more=()):
    words = ["preprocess", "--input", *map(str, inputs), "--output-prefix", str(prefix), "--tokenizer", "bytes"]
    return cli.main([*words, "--append-eod", *more])


def tokens(prefix, key="text"):
    found = IndexedDataset(f"{prefix}_{key}_document")
    return found.sizes.tolist(), np.asarray(found.flat).tolist()


def lines(texts):
    return b"".join(orjson.dumps({"text": text, "title": text[:9]}) + b"\n" for text in texts)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jsonl")
    (folder / "a.jsonl").write_bytes(lines(TEXTS))
    assert preprocess(folder / "a.jsonl", prefix=folder / "x") == 0
    return tokens(folder / "x")


def streamed(table, path, rows=300):
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, rows)


def filed(table, path):
    with ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, 300)


KINDS = {
    "parquet": lambda table, path: parquet.write_table(table, path, row_group_size=300),
    "arrow": streamed,
    "feather": lambda table, path: feather.write_feather(table, path, compression="zstd"),
    "file.arrow": filed,
}


@pytest.mark.parametrize("ending, write", KINDS.items(), ids=KINDS.keys())
def test_the_rows_of_a_table_are_documents(ending, write, wanted, tmp_path, capsys):
    path = tmp_path / f"a.{ending}"
    write(pyarrow.table(COLUMNS), path)
    assert preprocess(path, prefix=tmp_path / "x", more=["--column", "text", "title", "--workers", "2"]) == 0
    assert tokens(tmp_path / "x") == wanted
    assert tokens(tmp_path / "x", "title")[0] == [len(title.encode()) + 1 for title in COLUMNS["title"]]
    for column, told in {
        "Text": "has no column 'Text'; it has ['text', 'score', 'raw', 'title']",
        "score": "not text",
    }.items():
        assert preprocess(path, prefix=tmp_path / "y", more=["--json-keys", column]) == 64
        assert f"{path}" in (said := capsys.readouterr().err) and told in said
    for cut in (-8, 300):
        short = tmp_path / f"cut.{ending}"
        short.write_bytes(path.read_bytes()[:cut])
        assert preprocess(short, prefix=tmp_path / "y") == 64
        assert f"{short} is truncated, corrupt, or not a" in capsys.readouterr().err
    assert not list(tmp_path.glob("y_*"))


def test_a_binary_column_is_text_and_what_is_not_utf_8_is_refused_by_its_row(wanted, tmp_path, capsys):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": [text.encode() for text in TEXTS]}), path)
    assert preprocess(path, prefix=tmp_path / "x") == 0
    assert tokens(tmp_path / "x") == wanted
    parquet.write_table(pyarrow.table({"text": [b"one", b"caf\xe9\n", b"two"]}), path)
    assert preprocess(path, prefix=tmp_path / "y") == 64
    assert f"{path}:2 is not UTF-8: byte 0xe9 at 3" in capsys.readouterr().err
    assert preprocess(path, prefix=tmp_path / "y", more=["--on-error", "skip"]) == 0
    assert tokens(tmp_path / "y")[0] == [4, 4]
    parquet.write_table(pyarrow.table({"text": [{"nested": b"\xe9"}]}), path)
    assert preprocess(path, prefix=tmp_path / "z") == 64
    assert f"{path}:1 is not UTF-8" in capsys.readouterr().err


ODD = pyarrow.array([1 << 60], pyarrow.timestamp("us"))  # after the year 9999
ODD_COLUMNS = {"far": ODD, "zone": ODD.cast(pyarrow.timestamp("us", "Nowhere/Land")), "id": [1]}
CHATS = {
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
    "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}],
}


@pytest.mark.parametrize("ending, write", KINDS.items(), ids=KINDS.keys())
def test_only_the_columns_that_count_are_read(ending, write, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = f"a.{ending}"
    Path("t.json").write_text(chats.tokenizer())
    Path("c.jinja").write_text(chats.PLAIN["chatml"])
    words = [
        "preprocess",
        "--tokenizer",
        "json",
        "--tokenizer-files",
        "t.json",
        "--chat-template",
        "c.jinja",
        "--context",
        "99",
    ]

    def chat(columns):
        write(pyarrow.table(columns), path)
        return cli.main([*words, "--chat", path, "--output-prefix", "x", "--overwrite"]), capsys.readouterr().err

    for key, turns in CHATS.items():
        assert chat({key: [turns], "tools": pyarrow.nulls(1), **ODD_COLUMNS}) == (0, "")
    assert len(IndexedDataset("x_chat")) == 1
    code, said = chat({"messages": [CHATS["messages"]], "tools": ["[]"]})
    assert code == 64 and "has 'tools', which hpclm does not render" in said
    code, said = chat({"talk": [CHATS["messages"]], "id": [1]})
    assert code == 64 and "has no column 'messages' or 'conversations' or " in said and "it has ['talk', 'id']" in said
    for name in ("far", "zone"):
        write(pyarrow.table({"text": [{"when": value} for value in ODD_COLUMNS[name]]}), path)
        assert preprocess(path, prefix="y") == 64
        assert f"{path} holds a value that cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_table_is_not_read_at_once(ending, tmp_path):
    draw = np.random.default_rng(0)
    table = pyarrow.table({"text": [draw.bytes(2_000).hex() for _ in range(8_000)]})
    if ending == "parquet":
        parquet.write_table(table, tmp_path / "a.parquet", row_group_size=250)
    else:
        streamed(table, tmp_path / "a.arrow", 250)
    before, most = pyarrow.total_allocated_bytes(), 0
    tracemalloc.start()  # what pyarrow reads of a file is Python's, what it decodes is its own
    for chunk in chunks(find([str(tmp_path / f"a.{ending}")], None, ["text"])):
        assert len(chunk.lines) < 400
        most = max(most, pyarrow.total_allocated_bytes() - before)
    most += tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 16e6 < table.nbytes / 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What ``datasets`` saves: one dataset in three files, and one of two splits."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("saved")
    whole = datasets.Dataset.from_dict({"text": TEXTS[::-1], "label": [0] * 700})
    turned = whole.select(range(699, -1, -1))  # rows in another order than they are stored
    turned.save_to_disk(folder / "one", num_shards=3)
    datasets.DatasetDict(train=whole, test=whole.select(range(9))).save_to_disk(folder / "splits")
    return folder


def test_a_folder_that_datasets_saved_is_read_in_its_order(saved, wanted, tmp_path):
    assert preprocess(saved / "one", prefix=tmp_path / "x") == 0
    assert tokens(tmp_path / "x") == wanted
    for part in ("1/2", "0/2"):
        assert preprocess(saved / "one", prefix=tmp_path / "parts", more=["--part", part]) == 0
    assert tokens(tmp_path / "parts") == wanted


def test_a_dataset_of_several_splits_is_refused_with_the_folders_to_give(saved, tmp_path, capsys):
    assert preprocess(saved / "splits", prefix=tmp_path / "x") == 64
    said = capsys.readouterr().err
    assert f"holds several splits; give one: {saved}/splits/test, {saved}/splits/train" in said
    assert preprocess(saved / "splits/test", prefix=tmp_path / "x") == 0


def test_an_incomplete_copy_of_a_saved_dataset_is_refused(saved, tmp_path, capsys):
    copy = shutil.copytree(saved / "one", tmp_path / "copy")
    last = sorted(copy.glob("*.arrow"))[-1]
    last.unlink()
    assert preprocess(copy, prefix=tmp_path / "x") == 64
    assert f"{copy} is not complete: {last.name}" in capsys.readouterr().err
    state = copy / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "_data_files": 1}))
    assert preprocess(copy, prefix=tmp_path / "x") == 64
    assert "state.json is not what datasets writes" in capsys.readouterr().err


def test_a_folder_of_shards_of_any_kind_is_read_by_name(wanted, tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "a-00000.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines(TEXTS[:100])))
    (folder / "a-00001.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS[100:300])))
    parquet.write_table(pyarrow.table({"text": TEXTS[300:600]}), folder / "a-00002.parquet")
    streamed(pyarrow.table({"text": TEXTS[600:]}), folder / "a-00003.arrow")
    for other in ("README.md", "dataset_infos.json", ".cached.jsonl"):
        (folder / other).write_text("about the data")
    assert preprocess(folder, prefix=tmp_path / "x") == 0
    assert tokens(tmp_path / "x") == wanted


def test_a_folder_of_splits_or_without_data_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("wiki-train-00000-of-00002.parquet", "wiki-test-00000-of-00001.parquet"):
        (tmp_path / "data" / name).touch()
    with pytest.raises(ConfigError, match=r"several splits; give one as a pattern: '.*/\*test\*', '.*/\*train\*'"):
        find([str(tmp_path / "data")], None)
    with pytest.raises(
        ConfigError, match=r"has no \.jsonl, .*, \.txt file.*; its folders are not searched: give one of data"
    ):
        find([str(tmp_path)], None)
    with pytest.raises(ConfigError, match="the rows of a table are read as --format jsonl"):
        find([str(tmp_path / "data/*train*")], "lines")
    (tmp_path / "note.txt").write_text("a document")
    (tmp_path / "about.md").touch()
    [source] = find([str(tmp_path)], None)
    assert source.name == str(tmp_path / "note.txt") and source.format == "files"

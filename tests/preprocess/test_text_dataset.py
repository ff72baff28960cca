"""What ``data=`` names: a dataset, or a text that becomes one beside the run."""

import shlex

import pytest

from hpclm import config as configs
from hpclm.base.errors import ConfigError
from hpclm.preprocess.text_dataset import named_dataset, of_text, refuse_second_data
from tests.data.layouts import pack


@pytest.fixture
def run(tiny):
    return configs.load(None, tiny("runs/a"))


@pytest.mark.parametrize("end", ["", ".bin", ".idx"])
def test_a_dataset_may_be_named_by_each_of_its_files(end, run, tmp_path):
    pack(tmp_path / "x.y", "megatron", [[1, 2]], [0, 1])
    found = named_dataset(f"{tmp_path}/x.y{end}", None, run)
    assert found.prefix == tmp_path / "x.y" and found.text is None and found.preprocess == "" and found.written
    assert found.settings(run)[-1] == f"data.prefix={tmp_path}/x.y"
    with pytest.raises(
        ConfigError, match=f"tokenizer='bytes' has no effect: the dataset {tmp_path}/x.y has its tokenizer"
    ):
        named_dataset(f"{tmp_path}/x.y{end}", "bytes", run)


def test_a_text_becomes_a_dataset_of_its_name_beside_the_run(run, tmp_path):
    (tmp_path / "my text.v2.txt").write_text("so it goes\n" * 400)
    found = named_dataset(f"{tmp_path}/my text.v2.txt", None, run)
    assert found.prefix.name == "my-text_text_document" and found.prefix.parent.parent == tmp_path / "runs/datasets"
    assert found.prefix.parent.name.startswith("my-text-") and not found.written
    assert found.settings(run)[-2:] == [f"data.prefix={found.prefix}", "model.vocab_size=257"]
    words = ["--input", f"{tmp_path}/my text.v2.txt", "--output-prefix", f"{tmp_path}/runs/datasets/my-text"]
    assert shlex.split(found.preprocess) == ["hpclm", "preprocess", *words, "--tokenizer", "bytes", "--append-eod"]
    found.write()
    assert found.written and named_dataset(f"{tmp_path}/my text.v2.txt", None, run).prefix == found.prefix
    found.write()  # there is nothing to do
    (tmp_path / "my text.v2.txt").write_text("so it goes on\n" * 400)
    assert named_dataset(f"{tmp_path}/my text.v2.txt", None, run).prefix != found.prefix


def test_a_text_of_the_same_content_is_the_same_dataset(run, tmp_path):
    (tmp_path / "t.txt").write_text("a")
    one = of_text(tmp_path / "t.txt", "hash", None, run)
    (tmp_path / "t.txt").write_text("ab")
    assert of_text(tmp_path / "t.txt", "hash", None, run).prefix == one.prefix
    assert of_text(tmp_path / "t.txt", "other", None, run).prefix != one.prefix


@pytest.mark.parametrize(
    "data, tokenizer, said",
    [
        (" ", None, "data is empty; give the prefix of a dataset, or a text file"),
        ("nowhere.txt", None, "there is no such text, and no dataset .*nowhere.txt.idx; looked in "),
        (
            "t.txt",
            "gpt2",
            "tokenizer='gpt2' must be 'bytes', a tokenizer.json, a sentencepiece .model file, or package.module:Name",
        ),
    ],
)
def test_what_names_no_data_is_refused(data, tokenizer, said, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("a")
    with pytest.raises(ConfigError, match=said):
        named_dataset(data, tokenizer, run)


def test_data_are_named_once():
    refuse_second_data("x", ["data.split", "model.layers"])
    with pytest.raises(ConfigError, match=r"data=x and data.prefix both select the data; omit one of them"):
        refuse_second_data("x", ["data.split", "data.prefix", "data.train"])

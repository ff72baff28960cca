"""A run makes the folder of its tokenizer when it begins."""

import json
from dataclasses import replace

import pytest

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.data import tokenizer_folder, tokenizer_writer, tokenizers
from hpclm.training import run_tokenizer

BYTES = tokenizers.build_tokenizer("bytes", []).fingerprint


@pytest.fixture
def run(tmp_path):
    """Settings of a run whose words are those of words.json."""
    (tmp_path / "words.json").write_text(json.dumps({"<unk>": 0, "<|endoftext|>": 1, "a": 2}))
    (tmp_path / "run").mkdir()
    words = ["data.source=indexed", f"data.prefix={tmp_path}/d", "data.tokenizer=whitespace"]
    return config.load(None, [*words, f"data.tokenizer_files=[{tmp_path}/words.json]", f"out={tmp_path}/run"])


def test_it_is_made_when_the_run_begins_and_left_alone_when_it_resumes(run, tmp_path):
    fingerprint = tokenizer_folder.of_data(run.data).build().fingerprint
    run_tokenizer.keep(run, fingerprint, 0)
    place = tmp_path / "run/tokenizer"
    made = tokenizer_folder.read(place)
    assert made.ends == [1] and made.build().encode("a") == [2, 1]
    (place / "chat_template.jinja").write_text("changed by its owner")
    (tmp_path / "words.json").unlink()
    run_tokenizer.keep(run, fingerprint, 7)
    assert tokenizer_folder.read(place).template == "changed by its owner"


def test_another_tokenizer_than_that_of_the_data_is_refused(run, tmp_path):
    with pytest.raises(ConfigError, match=r"the tokenizer of the data has changed: .*; restore its files, or set"):
        run_tokenizer.keep(run, BYTES, 0)
    run_tokenizer.keep(run, None, 0)  # nothing is known of the data's
    assert not (tmp_path / "run/tokenizer").exists()


def test_a_folder_that_cannot_be_written_is_an_error_with_a_way_out(run, tmp_path):
    (tmp_path / "run/tokenizer").write_text("in the way")
    with pytest.raises(ConfigError, match="choose another out, or free some space"):
        run_tokenizer.keep(run, tokenizer_folder.of_data(run.data).build().fingerprint, 0)


def test_weights_that_have_learned_another_tokenizer_are_warned_of(run, tmp_path, caplog):
    bytes_ = tokenizers.build_tokenizer("bytes", [])
    tokenizer_writer.write(tmp_path / "base/tokenizer", tokenizer_folder.of_files("bytes", []), bytes_)
    begun = replace(run, checkpoint=replace(run.checkpoint, init_from=str(tmp_path / "base")))
    run_tokenizer.keep(begun, tokenizer_folder.of_data(run.data).build().fingerprint, 0)
    assert "base have learned another tokenizer: " in caplog.text

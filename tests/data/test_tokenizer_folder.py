"""The folder of a tokenizer: what it holds, which one a run uses, and what several datasets have in common."""

import json
from pathlib import Path

import pytest

from hpclm.base.errors import ConfigError
from hpclm.config import DataConfig
from hpclm.data import tokenizer_folder, tokenizer_writer, tokenizers
from hpclm.data.tokenizer_folder import TokenizerFolder

BYTES = tokenizers.build_tokenizer("bytes", [])
OF_BYTES = tokenizer_writer.with_ends(TokenizerFolder("bytes"), BYTES)
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def dataset(tmp_path):
    """The prefix of a dataset with this folder."""

    def made(name, folder=OF_BYTES, tokenizer=BYTES.fingerprint):
        prefix = tmp_path / name
        Path(f"{prefix}.json").write_text(json.dumps({"tokenizer": tokenizer}))
        if folder is not None:
            tokenizer_writer.write(tokenizer_folder.beside(prefix), folder, BYTES)
        return str(prefix)

    return made


def of_data(**settings):
    return tokenizer_folder.of_data(DataConfig(source="indexed", **settings))


def tuned(*ends, template=TEMPLATE, **tokens):
    config = {**OF_BYTES.config, **tokens}
    return TokenizerFolder("bytes", config=config, template=template).with_further_ends([256, *ends])


def test_a_folder_is_read_as_it_was_written(tmp_path):
    folder = tuned(3, bos_token="é")
    tokenizer_writer.write(tmp_path / "t", folder, BYTES)
    back = tokenizer_folder.read(tmp_path / "t")
    assert (back.kind, back.files, back.template, back.ends) == ("bytes", (), TEMPLATE, [256, 3])
    assert back.tokens["bos_token"] == "é" and back.ids == {
        "bos_token_id": None,
        "eos_token_id": [256, 3],
        "pad_token_id": None,
    }
    assert back.build().fingerprint == BYTES.fingerprint
    tokenizer_writer.write(tmp_path / "t", OF_BYTES, BYTES)
    assert tokenizer_folder.read(tmp_path / "t").template is None
    (tmp_path / "t/hpclm.json").write_text('{"kind": 3}')
    with pytest.raises(ConfigError, match=r"hpclm\.json was not written by hpclm; remove .*, and set data.tokenizer"):
        tokenizer_folder.read(tmp_path / "t")


def test_a_run_has_its_own_tokenizer_or_that_of_its_datasets_or_of_its_settings(dataset, tmp_path):
    letters = tmp_path / "vocab.json"
    letters.write_text(json.dumps({"<unk>": 0, "<|endoftext|>": 1, "a": 2}))
    named = dict(tokenizer="whitespace", tokenizer_files=[str(letters)])
    assert of_data(prefix=dataset("d"), **named).kind == "bytes"
    assert of_data(prefix=dataset("bare", None), **named).kind == "whitespace"
    run = tmp_path / "run"
    tokenizer_writer.write(run / "tokenizer", *both("whitespace", letters))
    letters.unlink()
    folder = tokenizer_folder.of_run(run, DataConfig(source="indexed", prefix=dataset("d")))
    assert folder.build().encode("a") == [2, 1]
    with pytest.raises(ConfigError, match=r"vocab\.json"):
        of_data(**named)
    (run / "tokenizer/vocab.json").unlink()
    with pytest.raises(ConfigError, match=r"run/tokenizer/vocab\.json does not exist"):
        tokenizer_folder.of_run(run, DataConfig()).build()
    with pytest.raises(
        ConfigError, match=r"data.tokenizer=json has no effect: the run has its own tokenizer in .*/run"
    ):
        tokenizer_folder.refuse_second(run, ["model.context=8", "data.tokenizer=json"])
    tokenizer_folder.refuse_second(tmp_path, ["data.tokenizer=json"])


def both(kind, path):
    tokenizer = tokenizers.build_tokenizer(kind, [str(path)])
    return tokenizer_folder.of_files(kind, [str(path)]), tokenizer


def test_a_file_in_a_folder_stands_for_the_folder(tmp_path):
    letters = tmp_path / "vocab.json"
    letters.write_text(json.dumps({"<unk>": 0, "<|endoftext|>": 1, "a": 2}))
    folder, tokenizer = both("whitespace", letters)
    assert folder.template is None and not folder.config
    tokenizer_writer.write(tmp_path / "t", TokenizerFolder("whitespace", (str(letters),), template="x"), tokenizer)
    inside = str(tmp_path / "t/vocab.json")
    assert tokenizer_folder.of_files("whitespace", [inside]).template == "x"
    assert tokenizer_folder.of_files("whitespace", [inside], "a").eod == "a"
    assert tokenizer_folder.of_files("json", [inside]).template is None


def test_a_run_without_a_known_tokenizer_is_told_how_to_name_one(dataset, tmp_path):
    with pytest.raises(ConfigError, match=r"trained on synthetic data \(data.source\), so it has no tokenizer"):
        tokenizer_folder.of_data(DataConfig(source="synthetic"))
    with pytest.raises(ConfigError, match=r"bare\.tokenizer is missing: restore it, or set data.tokenizer and"):
        lost = {"kind": "whitespace", "files": {"v.json": "0" * 32}, "size": 3, "eod": 1}
        of_data(prefix=dataset("bare", None, lost))
    (tmp_path / "foreign.json").write_text(json.dumps({"content": {}}))
    with pytest.raises(ConfigError, match=r"neither the run nor its dataset names a tokenizer; set data.tokenizer and"):
        of_data(prefix=str(tmp_path / "foreign"))


def test_a_dataset_does_not_decide_which_code_is_run(dataset):
    prefix = dataset("d", TokenizerFolder("mine:T"))
    with pytest.raises(ConfigError, match=r"names the user-defined tokenizer 'mine:T'; if you trust it, set data.tok"):
        of_data(prefix=prefix)
    assert of_data(prefix=prefix, tokenizer="mine:T").kind == "mine:T"


def test_datasets_of_one_template_have_the_ends_of_all(dataset):
    prefixes = [dataset("plain"), dataset("a", tuned(3, 5)), dataset("b", tuned(4, 3, pad_token="p"))]
    shared = tokenizer_folder.of_datasets(prefixes, None)
    assert (shared.template, shared.ends) == (TEMPLATE, [256, 3, 5, 4])
    assert tokenizer_folder.of_datasets(prefixes[:1], None).template is None
    assert tokenizer_folder.of_datasets([], None) is None


@pytest.mark.parametrize("other", [tuned(template=TEMPLATE + "!"), tuned(bos_token="[B]")])
def test_datasets_whose_templates_write_different_text_are_refused(other, dataset):
    first, second = dataset("a", tuned()), dataset("b", other)
    with pytest.raises(ConfigError, match=f"datasets {first} and {second} were made with different chat templates"):
        tokenizer_folder.of_datasets([first, second], None)


def test_only_the_special_tokens_that_a_template_names_count():
    folder = TokenizerFolder(config={"bos_token": "<s>", "eos_token": "</s>"}, template="{{ bos_token }} eos_tokens")
    assert folder.rendered_with[1] == {"bos_token": "<s>"}
    assert not tokenizer_folder.names("{{ eosxtoken }}", "eos.token")


@pytest.mark.parametrize("value, ids", [(3, [3]), ([3, 4], [3, 4]), (None, []), (True, []), ([-1, "x", 2], [2])])
def test_ids_of_a_settings_file_are_one_or_several(value, ids):
    assert tokenizer_folder.listed(value) == ids and tokenizer_folder.first(value) == (ids[0] if ids else None)

"""How text of a run is begun and ended, with a tokenizer of one's own whose entries are characters."""

import json

import pytest

from hpclm.base.errors import ConfigError
from hpclm.data import tokenizers
from hpclm.data.chat_record import ChatRecord
from hpclm.preprocess import run_text, special_tokens
from hpclm.preprocess.run_text import RunText


class Letters:
    """Entries are letters; $ is the end, ^ the beginning."""

    size = 128

    def __init__(self, eod=36, ends_itself=False):
        self.eod, self.ends_itself = eod, ends_itself
        self.fingerprint = tokenizers.fingerprint("letters", [], self.size, eod)

    def encode(self, text):
        return [*map(ord, text), *[self.eod] * self.ends_itself]

    def encode_batch(self, texts):
        return tokenizers.flat([self.encode(text) for text in texts])

    def decode(self, ids):
        return "".join(map(chr, ids))


def of(tokenizer=None, imported=None, vocabulary=128, **more):
    return RunText(tokenizer or Letters(), imported or {}, imported is not None, vocabulary, **more)


def test_a_text_that_is_read_has_not_ended():
    assert of(Letters(ends_itself=True)).encode("ab$$") == [97, 98]
    assert of(Letters()).encode("ab$") == [97, 98, 36]  # it was written there
    assert of(Letters(ends_itself=True)).encode("") == []


def test_an_id_past_the_networks_entries_is_refused():
    assert of(vocabulary=99).encode("b") == [98] and of(vocabulary=99).encode("") == []
    with pytest.raises(ConfigError, match=r"the tokenizer gives id 99, but the run's model.vocab_size is 99"):
        of(vocabulary=99).encode("abc")
    with pytest.raises(ConfigError, match="half a character"):
        of().encode("\ud800")


def test_the_template_is_added_unless_the_text_begins_with_it():
    text = of(before=(94,), after=(36,))
    assert text.encode("a") == [94, 97, 36] and text.encode("^a") == [94, 97]
    assert text.encode("^a", template=True) == [94, 94, 97, 36] and text.encode("a", template=False) == [97]


def test_an_empty_prompt_begins_with_the_end_of_the_document_before_it():
    assert of().start("") == [36] and of().start("a") == [97]
    with pytest.raises(ConfigError, match="the prompt is empty, and the tokenizer has no end-of-document token"):
        of(Letters(eod=None)).start("")
    assert of(Letters(eod=None), {"bos_token_id": 94}).start("") == [94]


def test_a_run_of_ones_own_begins_with_its_end_of_documents_and_an_imported_one_as_its_folder_says():
    assert of().ids == {"bos_token_id": 36, "eos_token_id": 36, "pad_token_id": None}
    assert of(imported={}).ids == {"bos_token_id": None, "eos_token_id": 36, "pad_token_id": None}
    assert of(imported={"bos_token_id": 94, "pad_token_id": 1}).ids["bos_token_id"] == 94
    chat = ChatRecord("{{ bos_token }}", {"bos_token": "^"}, {"!": 33, "$": 36})
    assert of(chat=chat).ids["eos_token_id"] == [36, 33] and of(chat=chat).ends == {33, 36}


def test_an_imported_model_may_generate_all_its_entries_and_others_those_of_their_tokenizer():
    assert of(vocabulary=200).generated == 128 and of(vocabulary=200, imported={}).generated == 200


def test_special_tokens_and_entries_without_text_are_left_out_of_an_answer():
    text = of(vocabulary=200)
    assert text.hidden == {36}
    assert text.decode([97, 36, 128, 199, 98]) == "a$b" and text.decode([97, 36, 128, 98], special=False) == "ab"


@pytest.mark.parametrize(
    "tokens, end, text, answers, ends",
    [
        ({}, None, None, (), None),
        ({}, 3, None, (), 3),
        ({"eos_token_id": 2}, 3, None, (), 3),
        ({"eos_token_id": 2, "eos_token": "e"}, 3, "e", (), [2, 3]),
        ({"eos_token_id": 2, "eos_token": "e"}, 3, "x", (), 3),
        ({"eos_token_id": [2, 3]}, 3, None, (), [2, 3]),
        ({"eos_token_id": 2}, None, None, (2,), 2),
        ({"eos_token_id": 2}, None, None, (4, 2), [2, 4]),
        ({}, None, None, (4,), 4),
        ({}, 3, None, (4, 5), [3, 4, 5]),
    ],
)
def test_ends_are_those_of_the_folder_of_the_data_and_of_answers(tokens, end, text, answers, ends):
    found = special_tokens.ids({**tokens, "pad_token_id": 7}, end, text, answers)
    assert found == {"bos_token_id": None, "eos_token_id": ends, "pad_token_id": 7}


@pytest.mark.parametrize(
    "name, value, sane",
    [
        ("add_bos_token", True, True),
        ("add_bos_token", 1, False),
        ("bos_token", "<s>", True),
        ("any_token", "", False),
        ("eos_token_id", [1, 2], True),
        ("eos_token_id", [], False),
        ("bos_token_id", [1], False),
        ("pad_token_id", 0, True),
        ("pad_token_id", -1, False),
        ("pad_token_id", True, False),
        ("other_id", 1, False),
    ],
)
def test_special_tokens_have_values_of_their_kind(name, value, sane):
    assert special_tokens.is_sane(name, value) == sane


def test_special_tokens_are_those_beside_the_tokenizer_and_what_is_none_is_left_out(tmp_path, caplog):
    for folder in ("beside", "more", "run/tokenizer"):
        (tmp_path / folder).mkdir(parents=True)
    paths = [str(tmp_path / "beside/t.json"), str(tmp_path / "more/t.json")]
    (tmp_path / "more/special_tokens.json").write_text(
        '{"pad_token_id": 5}'
    )  # only the first file of a tokenizer has them beside it
    assert special_tokens.of_run(tmp_path / "run", paths) is None
    (tmp_path / "run/tokenizer/special_tokens.json").write_text(json.dumps({"bos_token_id": 1, "add_bos_token": 3}))
    assert special_tokens.of_run(tmp_path / "run", paths) == {"bos_token_id": 1}
    (tmp_path / "beside/special_tokens.json").write_text("{")
    assert special_tokens.of_run(tmp_path / "run", paths) == {"bos_token_id": 1} and "it is ignored" in caplog.text
    (tmp_path / "beside/special_tokens.json").write_text("{}")
    assert special_tokens.of_run(tmp_path / "run", paths) == {}
    (tmp_path / "run/tokenizer/generation_config.json").write_text('{"num_beams": 2}')
    assert special_tokens.chat_of_run(tmp_path / "run", paths) == (None, {"num_beams": 2})


def test_settings_of_generation_that_would_change_the_text_are_named():
    given = {
        "num_beams": 4,
        "min_length": 0,
        "repetition_penalty": 1.2,
        "stop_strings": [],
        "temperature": 0.3,
        "guidance_scale": None,
    }
    assert run_text.without_effect(given) == ["num_beams=4", "repetition_penalty=1.2"]

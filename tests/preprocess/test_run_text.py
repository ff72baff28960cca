"""How text of a run is begun and ended, with a tokenizer of one's own whose entries are characters."""

import json
from dataclasses import replace

import pytest

from hpclm.base.errors import ConfigError
from hpclm.data import tokenizer_writer, tokenizers
from hpclm.data.tokenizer_folder import TokenizerFolder
from hpclm.preprocess import run_text


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


def of(tokenizer=None, imported=False, vocabulary=128, tokens=None, before=(), after=(), **ids):
    folder = TokenizerFolder("letters", imported=imported, config=tokens or {}, generation=ids)
    return replace(run_text.of_folder(folder, vocabulary, tokenizer or Letters()), before=before, after=after)


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
    assert of(Letters(eod=None), bos_token_id=94).start("") == [94]


def test_a_run_of_ones_own_begins_with_its_end_of_documents_and_an_imported_one_as_its_folder_says():
    assert of().folder.ids == {"bos_token_id": 36, "eos_token_id": 36, "pad_token_id": None}
    assert of(imported=True).folder.ids == {"bos_token_id": None, "eos_token_id": 36, "pad_token_id": None}
    assert of(imported=True, bos_token_id=94, pad_token_id=1).folder.ids["bos_token_id"] == 94


def test_an_imported_model_may_generate_all_its_entries_and_others_those_of_their_tokenizer():
    assert of(vocabulary=200).generated == 128 and of(vocabulary=200, imported=True).generated == 200


def test_special_tokens_and_entries_without_text_are_left_out_of_an_answer():
    text = of(vocabulary=200)
    assert text.hidden == {36}
    assert text.decode([97, 36, 128, 199, 98]) == "a$b" and text.decode([97, 36, 128, 98], special=False) == "ab"


BYTES = tokenizers.build_tokenizer("bytes", [])
END = "<|endoftext|>"


@pytest.mark.parametrize(
    "before, named, ends",
    [(None, None, 256), (2, None, 256), (2, END, [2, 256]), ([2, 256], None, [2, 256]), ([2, 3], "x", 256)],
)
def test_the_end_of_documents_replaces_other_ends_unless_the_folder_names_it(before, named, ends):
    folder = TokenizerFolder(
        "bytes", config={"eos_token": named}, generation={"eos_token_id": before, "pad_token_id": 7}
    )
    found = tokenizer_writer.with_ends(folder, BYTES)
    assert (found.ids["eos_token_id"], found.ids["pad_token_id"]) == (ends, 7)
    assert tokenizer_writer.with_ends(found, BYTES) == found


def words(tmp_path, *more):
    path = tmp_path / "vocab.json"
    vocabulary = ["<unk>", END, "<s>", "</s>", "<turn>", *more]
    path.write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": None,
                "post_processor": None,
                "decoder": None,
                "model": {
                    "type": "WordLevel",
                    "unk_token": "<unk>",
                    "vocab": {word: id for id, word in enumerate(vocabulary)},
                },
            }
        )
    )
    tokenizer = tokenizers.build_tokenizer("json", [str(path)])
    return TokenizerFolder("json", (str(path),)), tokenizer


def test_a_tuned_model_writes_the_tokens_that_it_was_rendered_with(tmp_path):
    folder, tokenizer = words(tmp_path)
    folder = tokenizer_writer.with_ends(folder, tokenizer)
    tuned = tokenizer_writer.tuned(
        folder, tokenizer, "{{ bos_token }}", {"bos_token": "<s>", "x_token": "lost"}, ["<turn>"]
    )
    assert tuned.tokens == {"bos_token": "<s>", "eos_token": END} and tuned.ids["bos_token_id"] == 2
    assert tuned.ends == [1, 4] and tuned.template == "{{ bos_token }}"
    plain = tokenizer_writer.tuned(folder, tokenizer, "x", {"bos_token": "<s>"}, [])
    assert plain.tokens["bos_token"] == END and plain.ids["eos_token_id"] == 1


def test_a_run_keeps_the_template_and_ends_of_the_run_that_it_starts_from(tmp_path):
    folder, tokenizer = words(tmp_path)
    raw = tokenizer_writer.with_ends(folder, tokenizer)
    generation = {"temperature": 0.7, "eos_token_id": [3, 4], "bos_token_id": 2}
    base = replace(folder, imported=True, config={"eos_token": "</s>"}, generation=generation, template="T")
    kept = tokenizer_writer.begun_from(base, raw, tokenizer)
    assert (kept.template, kept.generation["temperature"], kept.imported) == ("T", 0.7, True)
    assert kept.ends == [1, 3, 4] and kept.ids["bos_token_id"] == 2
    tuned = tokenizer_writer.tuned(raw, tokenizer, "U", {}, ["<turn>"])
    assert tokenizer_writer.begun_from(base, tuned, tokenizer).template == "U"
    assert tokenizer_writer.begun_from(TokenizerFolder(), raw, tokenizer) == raw
    (tmp_path / "other").mkdir()
    other, its = words(tmp_path / "other", "more")
    moved = json.loads((tmp_path / "other/vocab.json").read_text())
    moved["model"]["vocab"] |= {"</s>": 5, "more": 3}
    (tmp_path / "other/vocab.json").write_text(json.dumps(moved))
    its = other.build()
    raw = tokenizer_writer.with_ends(other, its)
    assert tokenizer_writer.begun_from(base, raw, its) == raw  # its tokens have other ids

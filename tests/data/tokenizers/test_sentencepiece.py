"""sentencepiece models: the library's own ids, and T5's extra ones."""

import json

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from hpclm.data.tokenizers import Options, build, sentencepieces
from hpclm.errors import ConfigError
from tests.data.tokenizers.test_tokenizers import CORPUS, TEXTS, lists
from tests.shared import shared


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def model(request, tmp_path_factory):
    """A .model as T5's: white space collapses, and a text starts with one."""
    path = tmp_path_factory.mktemp("sentencepiece") / "x"
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(path),
        model_type=request.param,
        vocab_size=45,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return f"{path}.model"


def test_the_ids_are_the_librarys_own():
    path = str(shared("data/cpm-30k.model"))
    rows = shared("data/medical-zh.jsonl").read_text("utf-8").splitlines()[:2000]
    texts = [text for row in rows for text in json.loads(row).values() if isinstance(text, str)] + TEXTS
    tokenizer = build("sentencepiece", [path])
    assert lists(tokenizer, texts) == SentencePieceProcessor(model_file=path).encode(texts)
    assert tokenizer.eod == SentencePieceProcessor(model_file=path).piece_to_id("</s>")


def test_extra_ids_come_last_and_backwards_as_in_t5(model):
    plain, tokenizer = build("sentencepiece", [model]), build("sentencepiece", [model], Options(extra_ids=100))
    assert tokenizer.size == plain.size + 100
    first, last = tokenizer.size - 1, tokenizer.size - 100
    assert tokenizer.encode("<extra_id_0>") == [first] and tokenizer.encode("<extra_id_99>") == [last]
    text = "the <extra_id_0> sat on <extra_id_1> mat <extra_id_99>"
    ids = tokenizer.encode(text)
    assert [id for id in ids if id >= plain.size] == [first, first - 1, last]
    assert ids[: ids.index(first)] == plain.encode("the")
    assert ids[ids.index(first) + 1 : ids.index(first - 1)] == plain.encode("sat on")
    assert tokenizer.decode(ids) == text
    assert lists(tokenizer, [text, "the cat", text]) == [ids, plain.encode("the cat"), ids]


def test_only_the_extra_ids_are_encoded_as_themselves(model):
    tokenizer = build("sentencepiece", [model], Options(extra_ids=3))
    zero, one = tokenizer.size - 1, tokenizer.size - 2
    for text in ["a<extra_id_0>b", "<extra_id_0>\n<extra_id_1>", "<extra_id_0><extra_id_1>x", "  <extra_id_0>  "]:
        assert [id for id in tokenizer.encode(text) if id > tokenizer.size - 4] == [zero, one][: text.count("<")]
    for text in ["<extra_id_3>", "<extra_id_00>", "<extra_id_", "extra_id_0"]:
        assert max(tokenizer.encode(text)) < tokenizer.size - 3


def test_text_without_extra_ids_is_encoded_as_without_them(model):
    plain, tokenizer = build("sentencepiece", [model]), build("sentencepiece", [model], Options(extra_ids=100))
    assert lists(tokenizer, [*CORPUS, *TEXTS]) == lists(plain, [*CORPUS, *TEXTS])


def test_extra_ids_may_end_documents_and_are_not_appended_twice(model, tmp_path):
    tokenizer = build("sentencepiece", [model], Options(eod="<extra_id_1>", extra_ids=2))
    assert tokenizer.eod == tokenizer.size - 2
    (tmp_path / "more.model").write_bytes(tokenizer.model.serialized_model_proto())
    with pytest.raises(ConfigError, match=r"already has <extra_id_0> and 1 more; leave out extra_ids"):
        build("sentencepiece", [str(tmp_path / "more.model")], Options(extra_ids=2))


def test_a_model_without_an_end_names_its_pieces(tmp_path):
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(tmp_path / "x"),
        vocab_size=45,
        hard_vocab_limit=False,
        eos_id=-1,
        control_symbols=["<doc>"],
        minloglevel=2,
    )
    path = str(tmp_path / "x.model")
    assert build("sentencepiece", [path]).eod is None
    assert build("sentencepiece", [path], Options(eod="<doc>")).eod == 2
    with pytest.raises(ConfigError, match=r"'<dok>' is not in .*x.model.*it has .*'<doc>'.*Did you mean '<doc>'\?"):
        build("sentencepiece", [path], Options(eod="<dok>"))


def test_a_library_that_makes_no_arrays_gives_the_same_ids(model):
    class Older:
        """An older sentencepiece, which makes lists only."""

        def encode(self, texts, num_threads, out_type=int):
            if out_type == "numpy":
                raise RuntimeError("unknown out_type=numpy")
            return SentencePieceProcessor(model_file=model).encode(texts, num_threads=num_threads)

    found = sentencepieces.pieces(Older(), CORPUS)
    assert [part.tolist() for part in found] == [
        part.tolist() for part in build("sentencepiece", [model]).encode_batch(CORPUS)
    ]

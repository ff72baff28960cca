"""sentencepiece models: the library's own ids, and T5's extra ones."""

import json

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from hpclm.base.errors import ConfigError
from hpclm.data.tokenizers import build_tokenizer
from tests.preprocess.tokenizers.test_tokenizers import CORPUS, TEXTS, lists
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
    tokenizer = build_tokenizer("sentencepiece", [path])
    assert lists(tokenizer, texts) == SentencePieceProcessor(model_file=path).encode(texts)
    assert tokenizer.eod == SentencePieceProcessor(model_file=path).piece_to_id("</s>")


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
    assert build_tokenizer("sentencepiece", [path]).eod is None
    assert build_tokenizer("sentencepiece", [path], "<doc>").eod == 2
    with pytest.raises(ConfigError, match=r"'<dok>' is not in .*x.model.*it has .*'<doc>'.*Did you mean '<doc>'\?"):
        build_tokenizer("sentencepiece", [path], "<dok>")


def test_a_library_that_makes_no_arrays_gives_the_same_ids(model):
    class Older:
        """An older sentencepiece, which makes lists only."""

        def encode(self, texts, num_threads, out_type=int):
            if out_type == "numpy":
                raise RuntimeError("unknown out_type=numpy")
            return SentencePieceProcessor(model_file=model).encode(texts, num_threads=num_threads)

    tokenizer = build_tokenizer("sentencepiece", [model])
    tokenizer.model = Older()
    found = tokenizer.encode_batch(CORPUS)
    assert [part.tolist() for part in found] == [
        part.tolist() for part in build_tokenizer("sentencepiece", [model]).encode_batch(CORPUS)
    ]

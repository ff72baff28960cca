"""BERT's tokenizer, held against BERT's own code in Python, which transformers carries, and against transformers' own."""

import json
import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpclm.base.errors import ConfigError
from hpclm.data.tokenizers import build_tokenizer
from tests.preprocess.tokenizers.test_tokenizers import CORPUS, TEXTS, lists
from tests.shared import shared

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
KINDS = {"wordpiece": False, "wordpiece_lower": True}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """A vocab.txt of all letters and common beginnings and ends of words."""
    letters = sorted({*map(chr, range(33, 127)), *"".join(CORPUS), *"éÉüßàçñ，。！？的一是不"})
    ends = ["##s", "##ing", "##ed", "##er", "##'", "##t", "##at", "##123"]
    words = ["the", "The", "and", "of", "to", "cat", "un", "believ", "##able", *("##" + letter for letter in letters)]
    path = tmp_path_factory.mktemp("wordpiece") / "vocab.txt"
    path.write_text("\n".join([*SPECIALS, *letters, *words, *ends]) + "\n", "utf-8")
    return str(path)


@pytest.fixture(scope="module")
def theirs(vocabulary):
    """Lower case or not -> ids of a text by BERT's own code."""
    bert = pytest.importorskip("transformers.models.bert.tokenization_bert_legacy")
    ids = bert.load_vocab(vocabulary)

    def encode(text, lower):
        words = bert.BasicTokenizer(do_lower_case=lower).tokenize(text)
        pieces = bert.WordpieceTokenizer(ids, "[UNK]", max_input_chars_per_word=100)
        return [ids[piece] for word in words for piece in pieces.tokenize(word)]

    return encode


@pytest.mark.parametrize("kind", KINDS)
def test_the_corpora_have_berts_ids(kind, vocabulary, theirs):
    rows = shared("data/medical-zh.jsonl").read_text("utf-8").splitlines()[:300]
    texts = [text for row in rows for text in json.loads(row).values() if isinstance(text, str)]
    texts += [*shared("data/tinyshakespeare.txt").read_text().split("\n\n")[:500], *CORPUS, *TEXTS, "x" * 101, "Él ÉTÉ"]
    tokenizer = build_tokenizer(kind, [vocabulary])
    found = lists(tokenizer, texts)
    assert found == [theirs(text, KINDS[kind]) for text in texts]
    bert = pytest.importorskip("transformers").BertTokenizer(vocabulary, do_lower_case=KINDS[kind])
    assert found == bert(texts, add_special_tokens=False)["input_ids"]


def composed(text):
    """``text`` in the form that the code in Python, unlike BERT's first and transformers' own, brings it into."""
    return unicodedata.normalize("NFC", text)


# What a later Unicode classes or lowers otherwise is the libraries' own affair.
PLAIN = st.sampled_from(
    [
        *map(chr, range(32, 127)),
        *"\t\n\r\u00a0\u3000\u200b\x00éÉüßàçñ，。！？的一是不",
        "e\u0301",
        "cat",
        "unbelievable",
    ]
)


@settings(max_examples=300, deadline=None)
@given(text=st.lists(PLAIN, max_size=40).map("".join).map(composed))
def test_fuzzed_text_has_berts_ids(text, vocabulary, theirs):
    for kind, lower in KINDS.items():
        assert build_tokenizer(kind, [vocabulary]).encode(text) == theirs(text, lower)


def test_a_special_token_inside_a_text_is_ordinary_characters(vocabulary):
    tokenizer = build_tokenizer("wordpiece", [vocabulary])
    assert tokenizer.eod == SPECIALS.index("[SEP]")
    ids = tokenizer.encode("[SEP] [PAD]")
    assert min(ids) >= len(SPECIALS)
    assert re.sub(r"\s", "", tokenizer.decode(ids)) == "[SEP][PAD]"


def test_a_vocabulary_without_the_unknown_word_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("the\n[SEP]\n")
    with pytest.raises(ConfigError, match=r"vocab.txt has no line \[UNK\]"):
        build_tokenizer("wordpiece", [str(tmp_path / "vocab.txt")])

"""fairseq's dictionaries, held against files that fairseq wrote."""

import pytest
from sentencepiece import SentencePieceTrainer

from hpclm.base.errors import ConfigError
from hpclm.data.indexed import IndexedDataset
from hpclm.data.tokenizers import build_tokenizer
from hpclm.preprocess.tokenizers.fairseq import dictionary_of
from tests.preprocess.tokenizers.test_tokenizers import CORPUS, lists
from tests.shared import shared


def lines():
    with shared("reference/inputs/lines.txt").open(encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file]


def built(tmp_path, content, *more):
    (tmp_path / "dict.txt").write_text(content, "utf-8")
    return build_tokenizer("fairseq", [str(tmp_path / "dict.txt"), *more])


def test_the_dictionary_of_a_text_is_fairseqs():
    assert dictionary_of(lines()).encode() == shared("reference/fairseq_bin/dict.txt").read_bytes()
    assert dictionary_of(iter(["\n".join(lines())])) == dictionary_of(lines())


def test_the_ids_of_a_text_are_fairseqs():
    tokenizer = build_tokenizer("fairseq", [str(shared("reference/fairseq_bin/dict.txt"))])
    ids, lengths = tokenizer.encode_batch(lines())
    theirs = IndexedDataset(shared("reference/fairseq_bin/train.idx").with_suffix(""))
    assert lengths.tolist() == theirs.sizes.tolist() and ids.tolist() == theirs.flat.tolist()
    assert tokenizer.encode(" a\tb\u3000 \n") == [tokenizer.ids.get("a", 3), tokenizer.ids.get("b", 3), 2]


PAD = "madeupword0000 0\nmadeupword0001 0\nmadeupword0002 0\n"
MADE = {
    "by count, then by alphabet": (["b a c b", "a c d"], "a 2\nb 2\nc 2\nd 1\n"),
    "padded": (["a"], f"a 1\n{PAD}"),
    "padded past what is there": (["madeupword0001 a"], "a 1\nmadeupword0001 1\nmadeupword0000 0\nmadeupword0002 0\n"),
    "without the specials": (["<s> <unk> </s> <pad> a b c d"], "a 1\nb 1\nc 1\nd 1\n"),
}


@pytest.mark.parametrize("texts, content", MADE.values(), ids=MADE.keys())
def test_a_dictionary_is_made(texts, content):
    assert dictionary_of(texts) == content


def test_unknown_words_are_unk_and_a_text_comes_back_as_words(tmp_path):
    tokenizer = built(tmp_path, "the 9\ncat 3\n")
    assert (tokenizer.size, tokenizer.eod) == (6, 2)
    assert tokenizer.encode("the  cat flew <pad>") == [4, 5, 3, 1, 2]
    assert tokenizer.decode([4, 5, 3, 2]) == "the cat <unk> </s>"


def test_a_symbol_that_comes_twice_needs_the_flag(tmp_path):
    with pytest.raises(ConfigError, match=r"dict.txt:3: 'the' is a duplicate of id 4; .*#fairseq:overwrite"):
        built(tmp_path, "the 9\ncat 3\nthe 1\n")
    with pytest.raises(ConfigError, match="'<unk>' is a duplicate of id 3"):
        built(tmp_path, "<unk> 9\n")
    tokenizer = built(tmp_path, "the 9\ncat 3\nthe 1 #fairseq:overwrite\n")
    assert tokenizer.size == 7 and tokenizer.encode("the cat") == [6, 5, 2]


@pytest.mark.parametrize("line", ["word", "word many", "", " 3", "3"])
def test_a_line_that_is_no_symbol_and_count_is_named(line, tmp_path):
    with pytest.raises(ConfigError, match=r"dict.txt:2 contains .*, not a symbol, a space and a count"):
        built(tmp_path, f"the 9\n{line}\n")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("fairseq") / "x"
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(path),
        vocab_size=45,
        hard_vocab_limit=False,
        user_defined_symbols=["a\tb"],
        minloglevel=2,
    )
    return f"{path}.model"


def test_pieces_of_a_sentencepiece_model_are_looked_up_in_the_dictionary_of(model, tmp_path):
    pieces = build_tokenizer("sentencepiece", [model])
    spelled = [" ".join(pieces.model.encode(text, out_type=str)) for text in CORPUS]
    content = dictionary_of(spelled)
    words, tokenizer = built(tmp_path, content), built(tmp_path, content, model)
    assert lists(tokenizer, CORPUS) == [tokenizer.encode(text) for text in CORPUS] == lists(words, spelled)
    assert [tokenizer.decode(ids) for ids in lists(tokenizer, CORPUS)] == CORPUS
    assert lists(tokenizer, ["", "the"]) == [[2], words.encode(" ".join(pieces.model.encode("the", out_type=str)))]


def test_a_piece_that_is_unknown_or_holds_white_space_is_what_fairseq_reads_on_the_line(model, tmp_path):
    tokenizer = built(tmp_path, "\u2581the 3\nZ 2\na 1\nb 1\n", model)
    texts = ["the Z", "the a\tb"]
    assert tokenizer.encode(texts[0])[-2:] == [5, 2]
    assert tokenizer.encode(texts[1])[-3:] == [6, 7, 2]
    assert lists(tokenizer, texts) == [tokenizer.encode(text) for text in texts]

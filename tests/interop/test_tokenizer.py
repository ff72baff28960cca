"""The tokenizer goes along with the weights, both ways, and gives the same ids."""

import json
import random

import pytest

from hpclm.checkpoint import trained
from hpclm.convert import main
from hpclm.data import tokenizers
from tests.interop import made

WORDS = [
    "so",
    "it",
    "goes",
    "and",
    "then",
    "a",
    "small",
    "model",
    "reads",
    "text,",
    "12",
    "345",
    "éà",
    "—",
    "日本",
    "don't\t",
]
DRAW = random.Random(1)
TEXTS = [" ".join(DRAW.choices(WORDS, k=DRAW.randrange(3, 30))) for _ in range(300)]
ODD = ["two  spaces", "", "trail ", "new\nline", "emoji 😀 x", "ÀÉ", "don't"]
NETWORK = dict(made.LLAMA, vocab_size=400, vocab_multiple=1)


def convert(*words):
    return main([str(word) for word in words])


@pytest.fixture(params=["json", "gpt2", "wordpiece", "bpe", "unigram"])
def kind(request):
    return request.param


@pytest.fixture
def files(kind, tmp_path):
    """Our kind, and files of it."""
    if kind in ("bpe", "unigram"):
        path = tmp_path / "x.model"
        path.write_bytes(tokenizers.train_sentencepiece(TEXTS, kind, 300))
        return "sentencepiece", [path]
    if kind == "wordpiece":
        path = tmp_path / "vocab.txt"
        letters = sorted({c for text in TEXTS for c in text if not c.isspace()})
        path.write_text("\n".join(["[UNK]", "[SEP]", *letters, *(f"##{c}" for c in letters), "model", "small"]) + "\n")
        return kind, [path]
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizers.train_bpe(TEXTS, 300))
    if kind == "json":
        return kind, [path]
    model = json.loads(path.read_text())["model"]
    (tmp_path / "v.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "m.txt").write_text("#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in model["merges"]))
    return kind, [tmp_path / "v.json", tmp_path / "m.txt"]


def test_transformers_gives_the_same_ids_and_an_import_takes_the_tokenizer_along(kind, files, tmp_path, caplog):
    ours, paths = files
    tokenizer = tokenizers.build(ours, [str(path) for path in paths])
    made.run(tmp_path / "run", NETWORK, source="indexed", tokenizer=ours, tokenizer_files=[str(path) for path in paths])
    convert(tmp_path / "run", tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["eos_token_id"] == tokenizer.eod is not None
    if kind == "unigram":
        assert "spiece.model is no BPE" in caplog.text and not (tmp_path / "hf/tokenizer_config.json").exists()
    else:
        transformers = pytest.importorskip("transformers")
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", model_max_length=10**6)
        assert theirs.eos_token_id == tokenizer.eod
        for text in TEXTS[:50] + ODD:
            assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text), text
    convert(tmp_path / "hf", tmp_path / "back")
    data = trained.settings(tmp_path / "back", []).data
    back = tokenizers.of_run(data)
    assert all(str(tmp_path / "back/tokenizer") in path for path in data.tokenizer_files)
    assert back.eod == tokenizer.eod and all(back.encode(text) == tokenizer.encode(text) for text in TEXTS[:50] + ODD)


def test_a_tokenizer_without_a_form_or_a_usable_file_is_told_and_left_out(tmp_path, caplog):
    made.run(tmp_path / "run", NETWORK, source="indexed", tokenizer="bytes")
    convert(tmp_path / "run", tmp_path / "hf")
    assert "the bytes tokenizer (257 entries) has no Hugging Face form" in caplog.text
    (tmp_path / "hf/tokenizer.json").write_text("{}")
    convert(tmp_path / "hf", tmp_path / "back")
    assert "is left out: tokenizer json cannot use" in caplog.text
    assert not (tmp_path / "back/tokenizer").exists()
    assert trained.settings(tmp_path / "back", []).data.tokenizer is None
    (tmp_path / "hf/tokenizer.json").write_bytes(tokenizers.train_bpe([f"{n**4:x}" for n in range(2000)], 420))
    convert(tmp_path / "hf", tmp_path / "more")
    assert "it has 420 entries, and the network 400" in caplog.text

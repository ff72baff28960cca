"""The tokenizer goes along with the weights, both ways, and gives the same ids."""

import io
import json
import random

import pytest

from hpclm import cli
from hpclm.data import tokenizer_folder, tokenizers
from hpclm.inference import run_settings
from hpclm.preprocess.tokenizers.huggingface import train_bpe
from hpclm.preprocess.tokenizers.sentencepieces import train_sentencepiece
from tests.forks import hpclm
from tests.interop import made
from tests.shared import shared

main = cli.function("convert")

WORDS = [
    "so", "it", "goes", "and", "then", "a", "small", "model", "reads", "text,", "12", "345", "éà", "—", "日本",
    "don't\t",
]  # fmt: skip
DRAW = random.Random(1)
TEXTS = [" ".join(DRAW.choices(WORDS, k=DRAW.randrange(3, 30))) for _ in range(300)]
ODD = [
    "two  spaces", "", "trail ", " lead", "line\nbreak", "emoji 😀 x", "ÀÉ ﬁne ①", "don't", "so<sep>it goes",
    "--- ...", "\n", "▁so", "E\u0301COLE, A\u030angstro\u0308m, \u017f\u0307",
]  # fmt: skip
NETWORK = dict(made.LLAMA, vocab_size=400, vocab_multiple=1)


def convert(*words):
    return main([str(word) for word in words])


# sentencepiece's own trainer, with its defaults where nothing else is said
TRAINED = {
    "bpe": dict(model_type="bpe"),
    "bpe, bytes": dict(model_type="bpe", byte_fallback=True),
    "bpe, no space before": dict(model_type="bpe", add_dummy_prefix=False),
    "bpe, no normaliser": dict(model_type="bpe", normalization_rule_name="identity", remove_extra_whitespaces=False),
    "bpe, lower case": dict(model_type="bpe", normalization_rule_name="nmt_nfkc_cf"),
    "bpe, own pieces": dict(model_type="bpe", user_defined_symbols=["<sep>", "goes"]),
    "unigram": dict(model_type="unigram"),
    "word": dict(model_type="word"),
}
RUN_BY_SENTENCEPIECE = ("bpe, bytes", "bpe, lower case", "bpe, own pieces", "unigram", "our unigram", "word")
"""bpe, bytes: the two libraries replace stacked accents in different ways, and unknown characters are not one <unk> here. bpe,
lower case: decomposed capitals are composed, but not folded there."""


@pytest.fixture(params=["json", "gpt2", "wordpiece", "our bpe", "our unigram", *TRAINED])
def kind(request):
    return request.param


def by_its_own_trainer(texts, **options):
    from sentencepiece import SentencePieceTrainer

    made = io.BytesIO()
    size = 18 if options["model_type"] == "word" else 90 + 256 * options.get("byte_fallback", False)
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=made,
        vocab_size=size,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return made.getvalue()


@pytest.fixture
def files(kind, tmp_path):
    """Our kind, and files of it."""
    path = tmp_path / "x.model"
    if kind.startswith("our"):
        path.write_bytes(train_sentencepiece(TEXTS, kind.split()[1], 300))
        return "sentencepiece", [path]
    if kind in TRAINED:
        path.write_bytes(by_its_own_trainer(TEXTS, **TRAINED[kind]))
        return "sentencepiece", [path]
    if kind == "wordpiece":
        path = tmp_path / "vocab.txt"
        letters = sorted({c for text in TEXTS for c in text if not c.isspace()})
        path.write_text("\n".join(["[UNK]", "[SEP]", *letters, *(f"##{c}" for c in letters), "model", "small"]) + "\n")
        return kind, [path]
    path = tmp_path / "tokenizer.json"
    path.write_bytes(train_bpe(TEXTS, 300))
    if kind == "json":
        return kind, [path]
    model = json.loads(path.read_text())["model"]
    (tmp_path / "v.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "m.txt").write_text("#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in model["merges"]))
    return kind, [tmp_path / "v.json", tmp_path / "m.txt"]


def test_transformers_gives_the_same_ids_and_an_import_takes_the_tokenizer_along(kind, files, tmp_path, caplog):
    ours, paths = files
    tokenizer = tokenizers.build_tokenizer(ours, [str(path) for path in paths])
    made.run(tmp_path / "run", NETWORK, source="indexed", tokenizer=ours, tokenizer_files=[str(path) for path in paths])
    convert(tmp_path / "run", tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["eos_token_id"] == config["bos_token_id"] == tokenizer.eod is not None
    assert "will return other ids" not in caplog.text
    assert (tmp_path / "hf/tokenizer.json").exists() == (kind not in RUN_BY_SENTENCEPIECE)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", model_max_length=10**6)
    assert theirs.eos_token_id == theirs.bos_token_id == tokenizer.eod and len(theirs) == tokenizer.size
    for text in TEXTS[:50] + ODD:
        assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text), text
    some = tokenizer.encode(TEXTS[0])
    assert theirs.decode(some, clean_up_tokenization_spaces=False).strip() == tokenizer.decode(some).strip()
    convert(tmp_path / "hf", tmp_path / "back")
    data = run_settings.inference_settings(tmp_path / "back", []).data
    back = tokenizer_folder.of_run(tmp_path / "back", data).build()
    assert all(str(tmp_path / "back/tokenizer") in path for path in data.tokenizer_files)
    assert back.eod == tokenizer.eod and all(back.encode(text) == tokenizer.encode(text) for text in TEXTS[:50] + ODD)


def test_a_tokenizer_that_cannot_be_converted_is_skipped_with_a_warning(tmp_path, caplog):
    words, pieces = tmp_path / "dict.txt", tmp_path / "x.model"
    words.write_text("so 3\n")
    pieces.write_bytes(train_sentencepiece(TEXTS, "unigram", 300))
    made.run(
        tmp_path / "run", NETWORK, source="indexed", tokenizer="fairseq", tokenizer_files=[str(words), str(pieces)]
    )
    convert(tmp_path / "run", tmp_path / "hf")
    assert "the fairseq tokenizer (dict.txt" in caplog.text and "has no Hugging Face form" in caplog.text
    (tmp_path / "hf/tokenizer.json").write_text("{}")
    convert(tmp_path / "hf", tmp_path / "back")
    assert "is left out: tokenizer json cannot use" in caplog.text
    assert not (tmp_path / "back/tokenizer/tokenizer.json").exists()
    assert run_settings.inference_settings(tmp_path / "back", []).data.tokenizer is None
    (tmp_path / "hf/tokenizer.json").write_bytes(train_bpe([f"{n**4:x}" for n in range(2000)], 420))
    convert(tmp_path / "hf", tmp_path / "more")
    assert "it has 420 entries, but the network has 400" in caplog.text


@pytest.mark.parametrize("option, warned", [("dropout", True), ("truncation", False)])
def test_a_warning_says_that_transformers_will_return_other_ids(option, warned, tmp_path, caplog):
    path = tmp_path / "tokenizer.json"
    tree = json.loads(train_bpe(TEXTS, 300))
    if option == "dropout":  # merges are left out at random
        tree["model"]["dropout"] = 0.5
    else:  # transformers does not truncate unless it is asked to
        tree["truncation"] = dict(direction="Right", max_length=2, strategy="LongestFirst", stride=0)
    path.write_text(json.dumps(tree))
    made.run(tmp_path / "run", NETWORK, source="indexed", tokenizer="json", tokenizer_files=[str(path)])
    convert(tmp_path / "run", tmp_path / "hf")
    warnings = [line for line in caplog.messages if "transformers will return other ids for some texts: " in line]
    assert len(warnings) == warned and all(" here and " in line for line in warnings)


def test_a_pattern_on_which_the_library_panics_is_an_error(tmp_path):
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    model = Tokenizer(models.BPE({"a": 0, "b": 1, "<|endoftext|>": 2}, []))
    model.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "a" * 40 + "b"}) + "\n")
    words = ["--output-prefix", tmp_path / "x", "--tokenizer", "json", "--tokenizer-files", tmp_path / "tokenizer.json"]
    done = hpclm("preprocess", "--input", tmp_path / "x.jsonl", *words, check=64)
    assert "the tokenizer fails on a text: Onig: Regex search error" in done.stderr and "File" not in done.stderr
    assert not list(tmp_path.glob("x_*"))


def test_a_real_model_of_chinese_gives_the_same_ids_there(tmp_path, caplog):
    transformers = pytest.importorskip("transformers")
    path = shared("data/cpm-30k.model")
    made.run(
        tmp_path / "run",
        dict(made.LLAMA, vocab_size=30000),
        source="indexed",
        tokenizer="sentencepiece",
        tokenizer_files=[str(path)],
    )
    convert(tmp_path / "run", tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", model_max_length=10**6)
    ours = tokenizers.build_tokenizer("sentencepiece", [str(path)])
    lines = shared("data/medical-zh.jsonl").read_text("utf-8").splitlines()[:30]
    for text in [json.loads(line)["text"] for line in lines] + ODD:
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text), text


IDS = {"bos_token_id": 301, "eos_token_id": [302, 303], "pad_token_id": 7}


def test_ids_and_texts_of_special_tokens_come_back_from_an_import(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(train_bpe(TEXTS, 390))
    made.run(tmp_path / "run", NETWORK, source="indexed", tokenizer="json", tokenizer_files=[str(path)])
    convert(tmp_path / "run", tmp_path / "hf")
    text = json.loads(path.read_text())["model"]["vocab"]
    words = {id: word for word, id in text.items()}
    named = {
        "bos_token": words[301],
        "pad_token": {"__type": "AddedToken", "content": words[7], "lstrip": False},
        "add_bos_token": True,
    }
    for file, more, gone in (
        ("config.json", {"bos_token_id": 5, "eos_token_id": 6}, ()),
        ("generation_config.json", IDS, ()),
        ("tokenizer_config.json", named, ("eos_token",)),
    ):
        tree = json.loads((tmp_path / "hf" / file).read_text()) | more
        (tmp_path / "hf" / file).write_text(
            json.dumps({name: value for name, value in tree.items() if name not in gone})
        )
    convert(tmp_path / "hf", tmp_path / "back")
    data = run_settings.inference_settings(tmp_path / "back", []).data
    assert (
        data.eod == words[302] and tokenizer_folder.of_run(tmp_path / "back", data).build().eod == 302
    )  # of what config.json says, the first
    convert(tmp_path / "back", tmp_path / "again")
    for file in ("config.json", "generation_config.json"):
        assert {name: json.loads((tmp_path / "again" / file).read_text())[name] for name in IDS} == IDS
    there = json.loads((tmp_path / "again/tokenizer_config.json").read_text())
    assert (there["bos_token"], there["eos_token"], there["pad_token"]) == (words[301], words[302], words[7])
    assert there["add_bos_token"] is False  # transformers goes by the template of tokenizer.json, which adds nothing


@pytest.mark.parametrize("named, id", [({}, None), ({"bos_token": "the"}, 280)])
def test_an_export_names_no_begin_of_a_text_that_the_imported_tokenizer_does_not(named, id, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(train_bpe(TEXTS, 390))
    made.run(tmp_path / "run", NETWORK, source="indexed", tokenizer="json", tokenizer_files=[str(path)])
    convert(tmp_path / "run", tmp_path / "hf")
    if named:
        named = {
            "bos_token": next(word for word, at in json.loads(path.read_text())["model"]["vocab"].items() if at == id)
        }
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        tree = json.loads((tmp_path / "hf" / file).read_text())
        kept = {name: value for name, value in tree.items() if not name.startswith("bos_")}
        (tmp_path / "hf" / file).write_text(json.dumps(kept | (named if file == "tokenizer_config.json" else {})))
    convert(tmp_path / "hf", tmp_path / "back")
    convert(tmp_path / "back", tmp_path / "again")
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "again" / file).read_text()).get("bos_token_id") == id
    assert json.loads((tmp_path / "again/tokenizer_config.json").read_text()).get("bos_token") == named.get("bos_token")
    convert(tmp_path / "back", tmp_path / "again.gguf")


def test_special_ids_are_kept_without_a_tokenizer_unless_the_run_has_another_end(tmp_path, caplog):
    made.run(tmp_path / "run", NETWORK)
    convert(tmp_path / "run", tmp_path / "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text())["eos_token_id"] is None
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | IDS))
    (tmp_path / "hf/generation_config.json").unlink()
    convert(tmp_path / "hf", tmp_path / "back")
    convert(tmp_path / "back", tmp_path / "again")
    assert IDS.items() <= json.loads((tmp_path / "again/config.json").read_text()).items()
    made.run(tmp_path / "other", NETWORK, fingerprint={"data": {"tokenizer": {"eod": 9}}})
    (tmp_path / "other/tokenizer").mkdir()
    (tmp_path / "other/tokenizer/generation_config.json").write_text(json.dumps(IDS))
    convert(tmp_path / "other", tmp_path / "more")
    more = json.loads((tmp_path / "more/config.json").read_text())
    assert {name: more[name] for name in IDS} == IDS | {"eos_token_id": 9}


def test_the_end_of_a_document_is_known_though_the_tokenizers_files_are_gone(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(train_bpe(TEXTS, 300))
    known = {"data": {"tokenizer": tokenizers.build_tokenizer("json", [str(path)]).fingerprint}}
    made.run(
        tmp_path / "run", NETWORK, fingerprint=known, source="indexed", tokenizer="json", tokenizer_files=[str(path)]
    )
    path.unlink()
    convert(tmp_path / "run", tmp_path / "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text())["eos_token_id"] == 0

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.config.data import DataConfig
from hpclm.data import tokenizer_folder, tokenizer_writer
from hpclm.data.tokenizers import build_tokenizer, describe, end, flat, mismatch
from hpclm.preprocess.tokenizers.huggingface import switch_off, train_bpe
from hpclm.preprocess.tokenizers.plain import Bytes
from hpclm.preprocess.tokenizers.sentencepieces import train_sentencepiece
from hpclm.preprocess.writer import Writer
from tests.forks import hpclm

SHARED = Path(__file__).parents[3].parent / "shared"
DATA = SHARED / "data"
GPT2 = [str(DATA / "gpt2-vocab.json"), str(DATA / "gpt2-merges.txt")]
CORPUS = ["the cat sat on the mat", "the dog sat on the cat, again and again", "天地玄黄 宇宙洪荒"] * 20
TEXTS = ["the cat", "", " ", "  two  spaces\n\n\tand a tab", "天地 😀 é", "<|endoftext|> and </s> in a text"]
needs_shared = pytest.mark.skipif(not DATA.is_dir(), reason="the shared vocabularies are not here")


def lists(tokenizer, texts):
    """``encode_batch`` as lists."""
    ids, lengths = tokenizer.encode_batch(texts)
    assert ids.dtype.kind in "iu" and lengths.dtype == np.int64 and lengths.shape == (len(texts),)
    assert ids.shape == (lengths.sum(),)
    ends = np.cumsum(lengths)
    return [ids[end - length : end].tolist() for end, length in zip(ends, lengths)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Kind -> files of a small tokenizer of each kind."""
    folder = tmp_path_factory.mktemp("tokenizers")
    bpe = train_bpe(CORPUS, 300)
    (folder / "t.json").write_bytes(bpe)
    model = json.loads(bpe)["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, model["merges"])) + "\n")
    (folder / "x.model").write_bytes(train_sentencepiece(CORPUS, "bpe", 330))
    words = ["<unk>", "<|endoftext|>", "the", "cat", "sat"]
    (folder / "words.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "dict.txt").write_text("the 40\ncat 20\nsat 20\n\u2581the 9\n")
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "ca", "##t", "天", "The"]) + "\n"
    )
    names = {
        "bytes": [],
        "fairseq": ["dict.txt"],
        "gpt2": ["vocab.json", "merges.txt"],
        "json": ["t.json"],
        "sentencepiece": ["x.model"],
        "whitespace": ["words.json"],
        "wordpiece": ["vocab.txt"],
        "wordpiece_lower": ["vocab.txt"],
    }
    return {kind: [str(folder / name) for name in files] for kind, files in names.items()}


KINDS = ["bytes", "fairseq", "gpt2", "json", "sentencepiece", "whitespace", "wordpiece", "wordpiece_lower"]


@pytest.mark.parametrize("kind", ["bytes", "gpt2", "sentencepiece", "json"])
def test_a_text_comes_back_from_its_ids_and_holds_no_end_of_document_but_in_a_tokenizer_json(kind, made):
    tokenizer = build_tokenizer(kind, made[kind])
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert (tokenizer.eod in ids) == (kind == "json" and "<|endoftext|>" in text)
        assert all(type(id) is int and 0 <= id < tokenizer.size for id in ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_encoded_as_its_texts_are(kind, made):
    tokenizer = build_tokenizer(kind, made[kind])
    assert lists(tokenizer, TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    assert lists(tokenizer, []) == []
    assert lists(tokenizer, [""]) == [tokenizer.encode("")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_that_ends_every_text_says_so(kind, made):
    tokenizer = build_tokenizer(kind, made[kind])
    assert tokenizer.ends_itself == (kind in ("whitespace", "fairseq"))
    assert [ids[-1:] == [tokenizer.eod] for ids in lists(tokenizer, TEXTS)] == [tokenizer.ends_itself] * len(TEXTS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_fingerprint_follows_the_content_of_the_files(kind, made, tmp_path):
    tokenizer = build_tokenizer(kind, made[kind])
    fingerprint = tokenizer.fingerprint
    assert json.loads(json.dumps(fingerprint)) == fingerprint
    assert (fingerprint["kind"], fingerprint["size"], fingerprint["eod"]) == (kind, tokenizer.size, tokenizer.eod)
    assert list(fingerprint["files"]) == [Path(file).name for file in made[kind]]
    copies = [tmp_path / Path(file).name for file in made[kind]]
    for copy, file in zip(copies, made[kind], strict=True):
        copy.write_bytes(Path(file).read_bytes())
    assert build_tokenizer(kind, list(map(str, copies))).fingerprint == fingerprint
    if copies and kind not in ("sentencepiece", "fairseq"):
        copies[0].write_bytes(copies[0].read_bytes() + b"\n")
        assert build_tokenizer(kind, list(map(str, copies))).fingerprint != fingerprint


def test_words_become_ids_and_every_text_ends(made):
    tokenizer = build_tokenizer("whitespace", made["whitespace"])
    assert (tokenizer.size, tokenizer.eod) == (5, 1)
    assert tokenizer.encode(" the  cat\u3000flew \n") == [2, 3, 0, 1]
    assert tokenizer.encode("") == [1]
    assert tokenizer.decode([2, 3, 0, 1]) == "the cat <unk> <|endoftext|>"


def test_bytes_are_bytes_and_a_broken_character_does_not_stop_the_decoding():
    tokenizer = build_tokenizer("bytes", [])
    assert (tokenizer.size, tokenizer.eod) == (257, 256)
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert tokenizer.decode([0x61, 0xC3, 256, 0x62]) == "a\ufffd<|endoftext|>b"


def test_a_tokenizer_jsons_truncation_padding_and_template_are_left_out(made, tmp_path, caplog):
    settings = json.loads(Path(made["json"][0]).read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    settings["padding"] = {
        "strategy": "BatchLongest",
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    start = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    settings["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (tmp_path / "t.json").write_text(json.dumps(settings))
    plain, fussy = build_tokenizer("json", made["json"]), build_tokenizer("json", [str(tmp_path / "t.json")])
    assert lists(fussy, TEXTS) == lists(plain, TEXTS)
    assert (
        "t.json: switched off, so that a text always has the same ids: truncation to 2 tokens; padding" in caplog.text
    )


def sampled(folder):
    """A tokenizer.json with BPE dropout, long enough that it hardly ever gives a text the same ids twice."""
    tree = json.loads(train_bpe(CORPUS, 300))
    tree["model"]["dropout"] = 0.5
    (folder / "sampled.json").write_text(json.dumps(tree))
    return str(folder / "sampled.json")


def test_bpe_dropout_is_switched_off_and_said_once(made, tmp_path, caplog):
    path = sampled(tmp_path)
    tokenizers = [build_tokenizer("json", [path]) for _ in range(2)]
    text = CORPUS[0] * 20
    assert {tuple(one.encode(text)) for one in tokenizers * 3} == {
        tuple(build_tokenizer("json", made["json"]).encode(text))
    }
    assert tokenizers[0].marked(text, [])[0].tolist() == lists(tokenizers[1], [text])[0] == tokenizers[0].encode(text)
    [said] = [line for line in caplog.messages if "switched off" in line]
    assert said.startswith(path) and "model.dropout=0.5, which draws ids at random" in said
    assert mismatch(tokenizers[0].fingerprint, build_tokenizer("json", [path]).fingerprint) is None


def test_what_a_tokenizer_warns_of_is_not_repeated_by_each_worker(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(CORPUS))
    words = ["--input", tmp_path / "a.txt", "--output-prefix", tmp_path / "a", "--workers", "2"]
    done = hpclm("preprocess", *words, "--tokenizer", "json", "--tokenizer-files", sampled(tmp_path), check=0)
    assert done.stderr.count("switched off") == 1


def test_unigram_sampling_is_switched_off():
    from tokenizers import Tokenizer, models

    if not hasattr(models.Unigram, "alpha"):
        pytest.skip("this version of tokenizers does not sample")
    pieces = [("<unk>", 0.0), ("a", -1.0), ("b", -1.0), ("c", -1.0), ("ab", -1.5), ("bc", -1.5), ("abc", -1.6)]
    model = Tokenizer(models.Unigram(pieces, 0, False))
    model.model.alpha = 0.5
    assert len({tuple(model.encode("abc" * 9).ids) for _ in range(20)}) > 1
    assert switch_off(model) == ["model.alpha=0.5, which draws ids at random"]
    assert len({tuple(model.encode("abc" * 9).ids) for _ in range(20)}) == 1
    assert switch_off(model) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_dataset_of_a_tokenizer_with_dropout_is_the_same_each_time(workers, tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in CORPUS * 5))
    words = ["--tokenizer", "json", "--tokenizer-files", sampled(tmp_path), "--workers", workers]
    for name in "ab":
        done = hpclm("preprocess", "--input", tmp_path / "x.jsonl", "--output-prefix", tmp_path / name, *words, check=0)
        assert done.stderr.count("model.dropout=0.5") == 1
    assert (tmp_path / "a_text_document.bin").read_bytes() == (tmp_path / "b_text_document.bin").read_bytes()


def test_a_template_that_repeats_the_text_is_refused(made, tmp_path):
    settings = json.loads(Path(made["json"][0]).read_text())
    text = {"Sequence": {"id": "A", "type_id": 0}}
    settings["post_processor"] = dict(type="TemplateProcessing", single=[text, text], pair=[text], special_tokens={})
    settings["post_processor"]["pair"] = [text, {"Sequence": {"id": "B", "type_id": 0}}]
    (tmp_path / "t.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"t\.json: its post_processor turns the \d+ tokens of a text into \d+"):
        build_tokenizer("json", [str(tmp_path / "t.json")])


class Sampling(Bytes):
    """A tokenizer of a person's own that draws at random."""

    def encode(self, text):
        return [id for id in super().encode(text) if random.random() < 0.9]


def test_a_tokenizer_of_ones_own_that_draws_at_random_is_refused():
    with pytest.raises(ConfigError, match="Sampling gives other ids each time it encodes a text"):
        build_tokenizer(f"{__name__}:Sampling", [])


@needs_shared
def test_gpt2s_ids_are_the_ones_transformers_makes():
    theirs = pytest.importorskip("transformers").GPT2TokenizerFast(*GPT2)
    tokenizer = build_tokenizer("gpt2", GPT2)
    assert (tokenizer.size, tokenizer.eod) == (50257, 50256)
    lines = (DATA / "medical-zh.jsonl").read_text("utf-8").splitlines()[:50]
    texts = [(DATA / "tinyshakespeare.txt").read_text()[:50_000], *TEXTS[:-1], *lines]
    assert lists(tokenizer, texts) == [theirs(text)["input_ids"] for text in texts]


@pytest.mark.parametrize("kind", KINDS)
def test_the_wrong_number_of_files_is_refused(kind, made):
    with pytest.raises(ConfigError, match=f"tokenizer {kind} takes"):
        build_tokenizer(kind, [*made[kind], "one-more", "and-another"])


NEED_FILES = [kind for kind in KINDS if kind != "bytes"]


@pytest.mark.parametrize("kind", NEED_FILES)
def test_a_missing_file_is_named(kind, made, tmp_path):
    files = [*made[kind][:-1], str(tmp_path / "nowhere")]
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        build_tokenizer(kind, files)


@pytest.mark.parametrize("content", [b"", b"garbage", b"{}", b"[1, 2]", b'{"a": "b"}', b"\xff\xfe\x00"])
@pytest.mark.parametrize("kind", NEED_FILES)
def test_a_file_of_another_kind_is_refused_by_name(kind, content, made, tmp_path):
    (tmp_path / "garbage").write_bytes(content)
    with pytest.raises(ConfigError, match="garbage"):
        build_tokenizer(kind, [str(tmp_path / "garbage"), *made[kind][1:]])


def test_merges_of_another_vocabulary_are_refused(made, tmp_path):
    (tmp_path / "merges.txt").write_text("#version: 0.2\nzz qq\n")
    with pytest.raises(ConfigError, match="cannot use"):
        build_tokenizer("gpt2", [made["gpt2"][0], str(tmp_path / "merges.txt")])


def test_an_unknown_kind_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"unknown tokenizer 'byte'.*Did you mean 'bytes'"):
        build_tokenizer("byte", [])


def test_a_class_of_ones_own_is_a_tokenizer_too():
    assert build_tokenizer("hpclm.preprocess.tokenizers.plain:Bytes", []).size == 257


def test_the_libraries_are_not_loaded_before_they_are_needed():
    script = (
        "import sys; from hpclm.commands import preprocess; from hpclm.preprocess import train_tokenizer\n"
        "print({'torch', 'sentencepiece', 'tokenizers', 'gigatoken', 'tqdm'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "set()\n"


ENDS = {
    "bytes": {None: 256, "<|endoftext|>": 256},
    "fairseq": {None: 2, "</s>": 2},
    "gpt2": {None: 0, "!": 1},
    "json": {None: 0, "!": 1},
    "sentencepiece": {None: 2, "<s>": 1},
    "whitespace": {None: 1, "cat": 3},
    "wordpiece": {None: 3, "[CLS]": 2},
    "wordpiece_lower": {None: 3, "[CLS]": 2},
}


@pytest.mark.parametrize("kind", ENDS)
def test_the_end_of_a_document_is_the_kinds_own_or_the_one_that_is_named(kind, made):
    tokenizers = {word: build_tokenizer(kind, made[kind], word) for word in ENDS[kind]}
    assert {word: tokenizer.eod for word, tokenizer in tokenizers.items()} == ENDS[kind]
    assert [end(tokenizer) for tokenizer in tokenizers.values()] == list(ENDS[kind].values())


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_that_is_not_in_the_vocabulary_is_refused_with_what_there_is(kind, made):
    with pytest.raises(ConfigError, match="'<nowhere>'") as error:
        build_tokenizer(kind, made[kind], "<nowhere>")
    there = {
        "wordpiece": "'[SEP]'",
        "wordpiece_lower": "'[SEP]'",
        "bytes": "<|endoftext|>",
        "whitespace": "<|endoftext|>",
    }
    assert there.get(kind, "</s>" if kind in ("fairseq", "sentencepiece") else "<|endoftext|>") in str(error.value)


def test_a_vocabulary_without_an_end_says_how_to_name_one(made, tmp_path):
    (tmp_path / "vocab.txt").write_text("[UNK]\nthe\n")
    tokenizer = build_tokenizer("wordpiece", [str(tmp_path / "vocab.txt")])
    assert tokenizer.eod is None
    with pytest.raises(ConfigError, match=r"vocab.txt .*2 entries.* has no end-of-document token; set data\.eod"):
        end(tokenizer)


def test_options_that_are_not_the_defaults_are_a_part_of_the_fingerprint(made):
    plain = build_tokenizer("sentencepiece", made["sentencepiece"])
    more = build_tokenizer("sentencepiece", made["sentencepiece"], "<s>")
    assert "options" not in plain.fingerprint
    assert more.fingerprint["options"] == {"eod": "<s>"}
    assert (more.size, more.eod) == (plain.size, 1)


def test_two_tokenizers_mean_the_same_ids_or_the_difference_is_named(made, tmp_path):
    known = {kind: build_tokenizer(kind, files).fingerprint for kind, files in made.items()}
    (tmp_path / "renamed.json").write_bytes(Path(made["json"][0]).read_bytes())
    assert mismatch(known["json"], build_tokenizer("json", [str(tmp_path / "renamed.json")]).fingerprint) is None
    said = mismatch(known["wordpiece"], known["json"])
    assert describe(known["wordpiece"]) in said and describe(known["json"]) in said
    assert "kind wordpiece against json" in said and "size 9 against 300" in said and "the content of the files" in said
    hash = known["json"]["files"]["t.json"]
    assert describe(known["json"]) == f"json tokenizer (t.json {hash[:8]}; 300 entries)"
    moved = known["json"] | {"eod": 7}
    assert mismatch(known["json"], moved).endswith("differ in eod 0 against 7")
    assert [mismatch(one, one) for one in known.values()] == [None] * len(known)


def test_two_files_of_one_name_both_count(made, tmp_path):
    vocab, merges = (Path(file).read_bytes() for file in made["gpt2"])
    for folder, content in (("a", vocab), ("b", merges)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_bytes(content)
    fingerprint = build_tokenizer("gpt2", [str(tmp_path / "a" / "file"), str(tmp_path / "b" / "file")]).fingerprint
    assert (
        len(fingerprint["files"]) == 2
        and mismatch(fingerprint, build_tokenizer("gpt2", made["gpt2"]).fingerprint) is None
    )


def test_a_datasets_tokenizer_is_built_again_with_its_end(made, tmp_path):
    tokenizer = build_tokenizer("sentencepiece", made["sentencepiece"], "<s>")
    folder = tokenizer_folder.of_files("sentencepiece", made["sentencepiece"], "<s>")
    tokenizer_writer.write(tmp_path / "d.tokenizer", folder, tokenizer)
    again = tokenizer_folder.of_data(DataConfig(prefix=str(tmp_path / "d"))).build()
    assert mismatch(again.fingerprint, tokenizer.fingerprint) is None and again.eod == tokenizer.eod


class Own:
    """A tokenizer of a person's own, which says how it was built."""

    size = eod = fingerprint = None

    def __init__(self, *given):
        self.given = given

    def encode(self, text): ...

    encode_batch = decode = encode


def test_a_class_of_ones_own_is_given_options_only_where_some_are_set():
    kind = f"{__name__}:Own"
    assert build_tokenizer(kind, ["a"]).given == (["a"],)
    assert build_tokenizer(kind, ["a"], "x").given == (["a"], "x")


def test_lists_of_ids_are_laid_end_to_end():
    ids, lengths = flat([[1, 2], [], [3]])
    assert (ids.tolist(), lengths.tolist()) == ([1, 2, 3], [2, 0, 1])
    assert [part.tolist() for part in flat([])] == [[], []]


def test_no_tokenizer_opens_a_socket(made):
    script = (
        "import sys\n"
        "def refuse(event, arguments):\n"
        "    if event.startswith('socket.'): raise SystemExit(f'{event} {arguments}')\n"
        "sys.addaudithook(refuse)\n"
        "from hpclm.data.tokenizers import build_tokenizer\n"
        f"for kind, files in {made}.items():\n"
        "    tokenizer = build_tokenizer(kind, files)\n"
        "    tokenizer.decode(tokenizer.encode_batch(['the cat'])[0].tolist())\n"
        "print('done')"
    )
    apart = ["unshare", "--map-root-user", "--net"]  # a network namespace with nothing in it
    offline = apart if subprocess.run([*apart, "true"], capture_output=True).returncode == 0 else []
    assert subprocess.run([*offline, sys.executable, "-c", script], capture_output=True, text=True).stdout == "done\n"


def test_a_dataset_does_not_decide_which_code_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    note = {"tokenizer": {"kind": "subprocess:call", "files": {}, "size": 9, "eod": 2}}
    with Writer("x", "u2") as writer:
        writer.note = note
        writer.add_document([1, 2])
    Path("x.tokenizer").mkdir()
    Path("x.tokenizer/hpclm.json").write_text('{"kind": "subprocess:call", "files": ["touch", "ran"]}')
    with pytest.raises(ConfigError, match=r"names the user-defined tokenizer 'subprocess:call'"):
        tokenizer_folder.of_data(DataConfig(prefix="x"))

    assert cli.main(["data", "inspect", "x"]) == 0  # shows ids, and says why
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "kind, message",
    [
        ("builtins:dict", "part of Python's standard library"),
        ("os:system", "part of Python's standard library"),
        (f"{__name__}:test_lists_of_ids_are_laid_end_to_end", "is not a class"),
        ("tests.runs:Ranks", "has no encode"),
    ],
)
def test_a_class_that_is_no_tokenizer_is_refused(kind, message):
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(kind, [])

"""gigatoken's ids are those of the tokenizers library: on the corpora, on all of Unicode, on fuzzed text, on odd vocabularies."""

import json
import logging
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from hpclm.data.tokenizers import build_tokenizer
from hpclm.preprocess.tokenizers import gigatokens, huggingface
from hpclm.preprocess.tokenizers.huggingface import train_bpe
from tests.shared import SHARED

GPT2 = [str(SHARED / "data" / name) for name in ("gpt2-vocab.json", "gpt2-merges.txt")]
TINY = [str(SHARED / "reference" / "inputs" / f"gpt2-tiny-{name}") for name in ("vocab.json", "merges.txt")]
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared vocabularies are not here")
unsuitable = gigatokens.why_unsuitable()
pytestmark = [needs_shared, pytest.mark.skipif(unsuitable is not None, reason=str(unsuitable))]

CORPUS = ["the cat sat on the mat", "it's a dog, isn't it? 1234", "天地玄黄 宇宙洪荒"] * 20
RANGES = [[int(code, 16) for code in item.split("-")] for item in gigatokens.ADDED.split()]
ADDED = {chr(code) for first, *last in RANGES for code in range(first, (last or [first])[0] + 1)}
UNICODE = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
COMMON = [character for character in UNICODE if character not in ADDED]
CONTEXTS = [
    "a{}b", " {}", "{0}{0}1", "{}'s", "\n{}", "{}\n", "  {}  x", "1{}2", "!{}?", "x {0}{0} y", "'{}s", "\u0301{}",
    "中{}文",
]  # fmt: skip


def files(folder, vocabulary, merges):
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    return [str(folder / "vocab.json"), str(folder / "merges.txt")]


@pytest.fixture(scope="module")
def gpt2():
    return build_tokenizer("gpt2", GPT2)


@pytest.fixture(scope="module")
def seams(tmp_path_factory):
    """A vocabulary in which every two characters of one word are joined, so that its ids show where words were cut.

    Its pairs are the last byte of one character with the first of another; no character is joined in itself.
    """
    byte = {raw: mapped for raw, mapped in zip(range(33, 127), map(chr, range(33, 127)))}
    byte |= {raw: chr(raw) for raw in (*range(161, 173), *range(174, 256))}
    byte |= {raw: chr(256 + i) for i, raw in enumerate(raw for raw in range(256) if raw not in byte)}
    ends, starts = range(0xC0), [*range(0x80), *range(0xC2, 0xF5)]
    merges = [(byte[a], byte[b]) for a in ends for b in starts]
    words = [*byte.values(), *(a + b for a, b in merges)]
    folder = tmp_path_factory.mktemp("seams")
    return build_tokenizer("gpt2", files(folder, {word: id for id, word in enumerate(words)}, merges))


def same(tokenizer, texts):
    """Both libraries agree on every text, alone and in a batch; says on which they do not."""
    assert tokenizer.fast is not None
    wanted, found = tokenizer.exact(texts), tokenizer.encode_batch(texts)
    if not all(map(np.array_equal, wanted, found)):
        rows = [np.split(ids, np.cumsum(lengths)[:-1]) for ids, lengths in (wanted, found)]
        return [text for text, a, b in zip(texts, *rows) if not np.array_equal(a, b)][:3]
    return True


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.whole)])
def test_the_corpora_have_the_same_ids(every, gpt2):
    lines = (SHARED / "data" / "medical-zh.jsonl").read_text("utf-8").splitlines()
    texts = [text for line in lines for text in json.loads(line).values() if isinstance(text, str)]
    plays = (SHARED / "data" / "tinyshakespeare.txt").read_text()
    tiny = [
        json.loads(line)["text"] for line in (SHARED / "reference/inputs/docs.jsonl").read_text("utf-8").splitlines()
    ]
    plays = plays[: len(plays) // every]
    for some in (texts[::every], [plays], plays.split("\n\n"), tiny):
        assert same(gpt2, some) is True
    assert same(build_tokenizer("gpt2", TINY), [*tiny, plays]) is True


def blocks(contexts, characters):
    """Texts of 256 characters each, every one in all ``contexts``."""
    for start in range(0, len(characters), 256):
        yield "".join(f"{context.format(c)}\n" for c in characters[start : start + 256] for context in contexts)


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.whole)])
def test_every_character_of_the_planes_in_use_is_cut_off_at_the_same_places(every, seams):
    assert len(ADDED) == 4657  # the others, nearly all of Unicode, are encoded by gigatoken
    used = [c for c in COMMON if c < "\U00040000" or "\U000e0000" <= c < "\U000e1000"]
    texts = list(blocks(["{0}'s a{0}1"], used[::every]))
    assert not seams.fast.needs_exact("".join(texts))
    assert same(seams, texts) is True


@pytest.mark.parametrize(
    "context, every", [("a{}b", 8), *(pytest.param(c, 1, marks=pytest.mark.whole) for c in CONTEXTS)]
)
def test_every_character_of_unicode_has_the_same_ids_among_all_kinds_of_neighbours(context, every, gpt2, seams):
    texts = list(blocks([context], COMMON[::every]))
    assert same(gpt2, texts) is True
    assert same(seams, texts) is True


def test_a_character_that_the_libraries_see_differently_has_the_ids_of_tokenizers(gpt2, seams):
    for tokenizer in (gpt2, seams):
        texts = [text for c in sorted(ADDED) for text in (f"{c}'s", f"the a{c}b")]
        assert same(tokenizer, texts) is True
        assert same(tokenizer, [*CORPUS, *texts[:100:9], *CORPUS]) is True


PIECES = [
    "'s", "'S", "'re", "'ll", "’s", "don't", "I'm", "'", "''", "<|endoftext|>", "</s>", " ", "  ", "\n", "\r\n", "\t",
    "\u00a0", "\u3000", "\u2028", "\u200b", "\x85", "\x1c", "\x00", "\ufeff", "\u1680", "e\u0301", "\u0301", "\u20e3",
    "👩\u200d🔬", "🏴\U000e0067\U000e007f", "🇨🇳", "❤️", "你好", "हिन्दी", "عربي", "ไทย", "한국", "𝔘𝔫𝔦", "1", "٣", "²", "½",
    "Ⅷ", "๕", "𝟘", "㊿", "1,234.5", "a", "Word", "ß", "ǅ", "_", "-", "...", "\ufffd", "\U0010ffff",
]  # fmt: skip
WORDS = st.one_of(st.sampled_from(PIECES), st.text(max_size=8), st.characters(exclude_categories=["Cs"]))
RUNS = st.builds(lambda word, times: word * times, WORDS, st.sampled_from([1, 1, 1, 2, 3, 40, 1000]))
TEXTS = st.lists(st.lists(RUNS, max_size=15).map("".join), max_size=5)


@settings(max_examples=50, deadline=None)
@given(texts=TEXTS)
def test_fuzzed_text_has_the_same_ids(texts, gpt2, seams):
    for tokenizer in (gpt2, seams):
        assert same(tokenizer, texts) is True
        assert [tokenizer.encode(text) for text in texts] == [tokenizer.exact([text])[0].tolist() for text in texts]


def odd(seed):
    """A made-up BPE: merges in any order, of parts that come later or never, twice, words without merges, ids with gaps."""
    draw = random.Random(seed)
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    parts, merges = list("abcde'Ġ1ä¸Ń"), []
    for _ in range(draw.randint(1, 40)):
        a, b = draw.choice(parts), draw.choice(parts)
        if len(a + b) < 12:
            merges.append((a, b))
            words += [a + b] if a + b not in words else []
            parts.append(a + b)
    words += {"".join(draw.choices("abcde", k=draw.randint(2, 6))) for _ in range(10)} - set(words)
    draw.shuffle(merges)
    ids = draw.sample(range(2 * len(words)), len(words))
    texts = ["".join(draw.choices("aaabbbcccdde e'1 中\n", k=draw.choice([3, 30, 3000]))) for _ in range(30)]
    return dict(zip(words, ids)), merges, texts


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_odd_vocabularies_have_the_same_ids(seed):
    vocabulary, merges, texts = odd(seed)
    with tempfile.TemporaryDirectory() as folder:
        assert same(build_tokenizer("gpt2", files(Path(folder), vocabulary, merges)), texts) is True


def changed(tmp_path, change):
    made = json.loads(train_bpe(CORPUS, 320))
    change(made)
    (tmp_path / "t.json").write_text(json.dumps(made))
    return build_tokenizer("json", [str(tmp_path / "t.json")])


def added(content, **flags):
    plain = dict(id=320, special=True, single_word=False, lstrip=False, rstrip=False, normalized=False)
    return lambda made: made["added_tokens"].append(plain | dict(content=content) | flags)


LIKE_GPT2 = {
    "as it is learned": lambda made: None,
    "with a special token": added("[X]"),
    "with one that takes the white space along": added("[X]", lstrip=True, rstrip=True),
    "with one that is a word of the text": added("cat", special=False, single_word=True),
    "with one that the vocabulary has too": added("the", special=False, normalized=True),
}


@pytest.mark.parametrize("change", LIKE_GPT2.values(), ids=LIKE_GPT2.keys())
def test_a_tokenizer_json_like_gpt2s_is_fast_and_has_the_same_ids(change, tmp_path):
    tokenizer = changed(tmp_path, change)
    assert same(tokenizer, [*CORPUS, "a [X] b[X]", "cat cats cat", "<|endoftext|> the", ""]) is True


def many(made):
    for i in range(40):
        added(f"[{i}]", id=320 + i)(made)


UNLIKE_GPT2 = {
    "too many added tokens": many,
    "a normaliser": lambda made: made.update(normalizer={"type": "NFC"}),
    "a space before the text": lambda made: made["pre_tokenizer"].update(add_prefix_space=True),
    "no words": lambda made: made["pre_tokenizer"].update(use_regex=False),
    "other words": lambda made: made.update(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [made["pre_tokenizer"]]}
    ),
    "whole words first": lambda made: made["model"].update(ignore_merges=True),
    "a byte too few": lambda made: (made["model"]["vocab"].pop("ÿ"), made["model"].update(unk_token="<|endoftext|>")),
}


@pytest.mark.parametrize("change", UNLIKE_GPT2.values(), ids=UNLIKE_GPT2.keys())
def test_a_tokenizer_json_that_is_otherwise_is_encoded_by_tokenizers(change, tmp_path):
    assert changed(tmp_path, change).fast is None


WITHOUT = {
    "other versions": lambda patch: patch.setitem(gigatokens.COMPARED, "tokenizers", "0.19"),
    "not installed": lambda patch: patch.setitem(sys.modules, "gigatoken.gigatoken_rs", None),
    "other ids": lambda patch: patch.setattr(huggingface, "bare", lambda model: other_vocabulary()),
}


def other_vocabulary():
    other = Tokenizer(models.BPE.from_file(*TINY))
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return other.to_str()


@pytest.mark.parametrize("case", WITHOUT)
def test_where_gigatoken_cannot_be_trusted_the_ids_are_the_same_and_the_log_says_so(case, gpt2, monkeypatch, caplog):
    WITHOUT[case](monkeypatch)
    slow = build_tokenizer("gpt2", GPT2)
    assert slow.fast is None and slow.fingerprint == gpt2.fingerprint
    assert all(map(np.array_equal, slow.encode_batch(CORPUS), gpt2.encode_batch(CORPUS)))
    [record] = caplog.records
    assert record.levelno == logging.WARNING and "encoding with tokenizers, many times slower" in record.message


@pytest.mark.whole
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say how much memory is held")
def test_memory_does_not_grow_with_the_words_that_were_met():
    script = (
        "import re, numpy as np; from hpclm.data.tokenizers import build_tokenizer\n"
        "def held(): return int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]) * 1024\n"
        f"tokenizer, draw = build_tokenizer('gpt2', {GPT2}), np.random.default_rng(0)\n"
        "for number in range(120):\n"
        "    if number == 70: before = held()\n"
        "    raw = draw.integers(97, 123, 500_000, dtype=np.uint8); raw[draw.random(500_000) < 0.15] = 32\n"
        "    ids, lengths = tokenizer.encode_batch([raw[i : i + 5000].tobytes().decode() for i in range(0, 500_000, 5000)])\n"
        "    assert tokenizer.decode(ids[: lengths[0]].tolist()) == raw[:5000].tobytes().decode()\n"
        "print(before, held())"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    before, after = map(int, told.split())
    assert after < 400e6 and after - before < 30e6  # 150 MB more if the words of 50 rounds were kept

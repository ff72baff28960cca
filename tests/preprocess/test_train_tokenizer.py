"""Tokenizers learned from all of the text there is."""

import gzip
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpclm import cli
from hpclm.data import tokenizers
from hpclm.preprocess.tokenizers.huggingface import with_words_divided
from hpclm.preprocess.tokenizers.sentencepieces import PART, parts_of_line
from hpclm.preprocess.train_tokenizer import TextSample, fitting_size
from tests.preprocess.texts import jsonl, write
from tests.runs import exit_code
from tests.shared import ROOT

ENGLISH = ["the cat sat on the mat and the dog sat on the log"] * 3000
CHINESE = ["深度学习模型的训练需要大量的数据和计算资源"] * 3000


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(*words):
    return cli.main(["train-tokenizer", *map(str, words)])


def figures(told):
    """(bytes per token, tokens per character, documents measured, documents seen)"""
    pattern = r"([\d.]+) bytes per token, ([\d.]+) tokens per character on ([\d,]+) of ([\d,]+) documents"
    found = re.search(pattern, told).groups()
    return *map(float, found[:2]), *(int(number.replace(",", "")) for number in found[2:])


KINDS = {
    "byte-level bpe": ["--output", "t.json"],
    "sentencepiece bpe": ["--output", "t.model", "--kind", "bpe"],
    "sentencepiece unigram": ["--output", "t.model", "--kind", "unigram"],
}


@pytest.mark.parametrize("words", KINDS.values(), ids=KINDS.keys())
def test_it_learns_from_all_inputs_and_measures_on_all_of_them(words, capsys):
    write(**{"a.jsonl": jsonl(*ENGLISH), "b.jsonl.gz": gzip.compress(jsonl(*CHINESE).encode())})
    assert train("--input", "[ab].*", "--vocab-size", 293, *words, "--json-key", "text") == 0
    told = capsys.readouterr().out
    size, ratio, measured, seen = figures(told)
    assert (measured, seen) == (1000, 6000)
    tokenizer = tokenizers.build_tokenizer("json" if "t.json" in words else "sentencepiece", [words[1]])
    assert f"{words[1]}: {tokenizer.size:,} entries" in told
    lengths = {language: len(tokenizer.encode(texts[0])) for language, texts in (("en", ENGLISH), ("zh", CHINESE))}
    only_english = lengths["en"] / len(ENGLISH[0])
    only_chinese = lengths["zh"] / len(CHINESE[0])
    assert min(only_english, only_chinese) < ratio < max(only_english, only_chinese)
    assert 1 < size < 60
    assert [tokenizer.decode(tokenizer.encode(texts[0])) for texts in (ENGLISH, CHINESE)] == [ENGLISH[0], CHINESE[0]]
    assert tokenizer.size <= 293 and tokenizer.eod is not None
    words = ["--input", "[ab].*", "--vocab-size", 293, *words]
    assert train(*words) == 64 and "give --overwrite" in capsys.readouterr().err
    assert train(*words, "--overwrite") == 0
    assert "next: hpclm preprocess --input '[ab].*' --json-keys text --output-prefix" in told


def test_standard_input_teaches_too():
    command = [sys.executable, ROOT / "tools/train_tokenizer.py", "--input", "-", "--format", "lines"]
    command += ["--output", "t.json", "--vocab-size", "270"]
    done = subprocess.run(command, input="\n".join(ENGLISH), capture_output=True, text=True, check=True)
    assert figures(done.stdout)[3] == 3000


def test_a_line_that_cannot_be_read_stops_it(capsys):
    write(**{"a.jsonl": jsonl(*ENGLISH[:50]) + "{oops\n" + jsonl(*ENGLISH[:50])})
    words = ["--input", "a.jsonl", "--output", "t.json", "--vocab-size", 270]
    assert train(*words) == 64
    assert "a.jsonl:51 is not JSON" in capsys.readouterr().err
    assert not list(Path().glob("t.json*"))


def test_sentencepiece_learns_from_a_random_sample_which_is_always_the_same():
    write(**{"a.txt": "\n".join(ENGLISH + CHINESE)})
    words = ["--input", "a.txt", "--output", "t.model", "--vocab-size", 320]
    assert train(*words, "--sentences", 500) == 0
    once = Path("t.model").read_bytes()
    assert train(*words, "--sentences", 500, "--overwrite") == 0
    assert Path("t.model").read_bytes() == once
    tokenizer = tokenizers.build_tokenizer("sentencepiece", ["t.model"])
    assert len(tokenizer.encode(CHINESE[0])) < len(CHINESE[0])  # which come last


@pytest.mark.parametrize("content", ["", "\n\n", "\u2585\n"])
def test_sentencepiece_says_that_there_is_no_text(content, capsys):
    write(**{"a.txt": content})
    assert train("--input", "a.txt", "--output", "t.model", "--vocab-size", 300) == 64
    assert "error: no text in" in capsys.readouterr().err


HAN = [chr(0x4E00 + number * 7) for number in range(40)]
SENTENCE = "".join(HAN) + "。"
LONG_LINES = {
    "sentences": SENTENCE * 12_000,
    "no sentences": "".join(HAN) * 12_000,
    "words": f"{''.join(HAN)} " * 12_000,
    "a reserved character": f"{SENTENCE * 40}\u2585",
}


@pytest.mark.parametrize("line", LONG_LINES.values(), ids=LONG_LINES.keys())
def test_sentencepiece_learns_from_lines_that_its_library_would_drop(line):
    write(**{"a.jsonl": jsonl(line, *ENGLISH[:200])})
    assert train("--input", "a.jsonl", "--output", "t.model", "--vocab-size", 330) == 0
    tokenizer = tokenizers.build_tokenizer("sentencepiece", ["t.model"])
    assert len(tokenizer.encode("".join(HAN))) < 2 * len(HAN)  # of bytes it would be three a character


@pytest.mark.parametrize("line", LONG_LINES.values(), ids=LONG_LINES.keys())
def test_the_parts_of_a_long_line_are_all_of_it_and_end_with_a_sentence_or_a_word(line):
    parts = list(parts_of_line(line))
    assert all(len(part) <= PART for part in parts)
    assert " ".join(parts).split() == line.split() if " " in line else "".join(parts) == line.replace("\u2585", "")
    if "。" in line:
        assert all(part.endswith("。") for part in parts)


@pytest.mark.parametrize("line", ["short", "x" * 1000, "a b. c", " led by a space", "天" * 5000])
def test_a_line_that_is_not_too_long_is_left_as_it_is(line):
    assert list(parts_of_line(line)) == [line]


def test_latin_sentences_end_parts():
    parts = list(parts_of_line("He sat on 3.14 mats. Did she? Yes! " * 40_000))
    assert {part[-1] for part in parts} <= {".", "?", "!", " "} and not any(part.startswith(" ") for part in parts)
    assert "14 mats" not in {part[:7] for part in parts}


DIVIDED = {
    "a word": ("x" * 2500, ["x" * 1024, "x" * 1024, "x" * 452]),
    "within a text": ("a " + "天" * 1030 + "。b", ["a " + "天" * 1024, "天" * 6 + "。b"]),
    "digits and signs": ("7" * 1025 + "-" * 1025, ["7" * 1024, "7" + "-" * 1024, "-"]),
    "no long word": ("天地。" * 9000 + "word " * 9000, ["天地。" * 9000 + "word " * 9000]),
    "empty": ("", [""]),
}


@pytest.mark.parametrize("text, parts", DIVIDED.values(), ids=DIVIDED.keys())
def test_words_that_would_take_a_bpe_hours_are_divided_and_no_others(text, parts):
    assert list(with_words_divided([text])) == parts


@pytest.mark.parametrize("limit, seen", [(10, 0), (10, 7), (10, 10), (10, 1000)])
def test_a_random_sample_is_a_subset_of_limited_size(limit, seen):
    sample = TextSample(limit)
    for item in range(seen):
        sample.add(item)
    assert (sample.seen, len(sample.items), len(set(sample.items))) == (seen, min(limit, seen), min(limit, seen))
    assert set(sample.items) <= set(range(seen))


def test_a_sample_takes_as_much_from_the_start_as_from_the_end():
    sample = TextSample(2000)
    for item in range(40_000):
        sample.add(item)
    for quarter in range(4):
        taken = sum(item // 10_000 == quarter for item in sample.items)
        assert 400 < taken < 600


REFUSED = {
    "--output t.txt": "must end in .json",
    "--output t.json --kind unigram": "needs an --output that ends in .model",
    "--output t.json --sentences 5": "--sentences has no effect",
    "--output t.json --json-key k": "--json-key k has no effect",
    "--output t.json --vocab-size 256": "must be at least 257",
    "--output t.model --vocab-size 9999": "--vocab-size 9999 is too large for this text, which is enough for",
    "--output t.model --kind unigram --vocab-size 9999": "--vocab-size 9999 is too large",
    "--output t.model --vocab-size 1": "--vocab-size 1 is too small",
    "--output t.model --vocab-size 10": "--vocab-size 10 is too small: the 256 bytes",
    "--output t.model --vocab-size 260": "give at least --vocab-size 27",
    "--output t.model --vocab-size 0": "--vocab-size 0 must be from 1",
    "--output t.model --vocab-size 2147483648": "must be from 1 to 2147483647",
    "--output t.model --sentences 100": "--sentences 100 must be from 101",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_learned_is_refused_and_nothing_is_written(words, capsys):
    write(**{"a.txt": "\n".join(ENGLISH[:60])})
    wrong = any(text in words for text in ("t.txt", "t.json --kind", "t.json --sentences"))  # whatever the text is
    assert exit_code(["train-tokenizer", "--input", "a.txt", "--vocab-size", "300", *words.split()]) == (
        2 if wrong else 64
    )
    assert REFUSED[words] in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["a.txt"]


def test_without_a_size_the_vocabulary_fits_the_text(capsys):
    write(**{"a.txt": "\n".join(f"{line} {number % 89}" for number, line in enumerate(ENGLISH))})
    assert train("--input", "a.txt", "--output", "t.json") == 0
    told = capsys.readouterr()
    assert tokenizers.build_tokenizer("json", ["t.json"]).size <= 512
    assert "fewer than --vocab-size 512, because the text has no more pairs" in told.out
    assert "next: hpclm train small data=a.txt tokenizer=t.json" in told.out and "rarely" not in told.err
    assert train("--input", "a.txt", "--output", "t.model") == 64
    assert "give --vocab-size, such as 8000, for t.model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "size, fits", {100: 512, 10**5: 512, 11 * 10**5: 1024, 5 * 10**6: 2048, 10**9: 32768, 10**13: 32768}.items()
)
def test_the_size_that_fits_grows_with_the_root_of_the_text(size, fits):
    assert fitting_size(size) == fits


def test_a_vocabulary_whose_entries_hardly_occur_is_named_with_one_that_fits(capsys):
    write(**{"a.txt": "\n".join(f"a{number * 7919 % 100003} b{number}" for number in range(3000))})
    assert train("--input", "a.txt", "--output", "t.json", "--vocab-size", 2000) == 0
    assert "too rarely to be learned well; --vocab-size 512 fits 0.0" in capsys.readouterr().err

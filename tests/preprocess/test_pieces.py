"""A file that is one document is read in pieces, which have the tokens of the whole."""

import gzip
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard

from hpclm import cli
from hpclm.data.indexed import IndexedDataset, sidecar
from hpclm.preprocess import inputs
from hpclm.preprocess.encode import EncodeJob, may_cut, tokenizer_of
from hpclm.preprocess.inputs import Share, chunks, find
from tests.preprocess.texts import documents, jsonl, preprocess, write

DRAW = random.Random(1)
WORDS = [
    "the",
    "cat's",
    "12",
    "dogs,",
    "don't",
    "(we)",
    "see:",
    "天地玄黄",
    "naïve",
    "—",
    "x=y;",
    "\t",
    "",
    "end.",
    "OK!",
    "é",
]
LINES = [" ".join(DRAW.choices(WORDS, k=DRAW.choice([0, 1, 5, 40]))) for _ in range(3000)]
TEXTS = {
    "lines": "\n".join(LINES),
    "lines of Windows": "\r\n".join(LINES),
    "blank lines": "\n\n".join(LINES),
    "indented": "\n".join("    " * (number % 4) + line for number, line in enumerate(LINES)),
    "a single line": " ".join(LINES),
    "Chinese": "".join("天地玄黄宇宙洪荒"[DRAW.randrange(8)] + "，" * (DRAW.random() < 0.1) for _ in range(40_000)),
    "Chinese lines": "\n".join("天地玄黄宇宙洪荒"[DRAW.randrange(8)] * DRAW.randrange(9) for _ in range(9000)),
}
TOKENIZERS = {
    "bytes": [],
    "json": ["--output", "t.json", "--vocab-size", "350"],
    "sentencepiece": ["--output", "t.model", "--vocab-size", "350"],
}
FILES = [(kind, "a.txt", bytes) for kind in TOKENIZERS]
FILES += [("json", "a.txt.gz", gzip.compress), ("json", "a.zst", zstandard.compress)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "a.txt").write_text("\n".join(TEXTS.values())[:200_000])
    for words in filter(None, TOKENIZERS.values()):
        assert (
            cli.main(
                ["train-tokenizer", "--input", str(folder / "a.txt"), "--output", str(folder / words[1]), *words[2:]]
            )
            == 0
        )
    return {name: [str(folder / words[1])] if words else [] for name, words in TOKENIZERS.items()}


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inputs, "CHUNK", 1 << 14)


OFTEN = ("blank lines", "Chinese lines")


@pytest.mark.parametrize(
    "kind, name, pack, text",
    [
        pytest.param(*file, text, id=f"{file[0]}, {file[1]}, {of}", marks=[pytest.mark.whole] * (of not in OFTEN))
        for file in FILES
        for of, text in TEXTS.items()
    ],
)
def test_pieces_have_the_tokens_of_the_whole(kind, name, pack, text, trained):
    write(**{name: pack(text.encode())})
    job = EncodeJob(kind, tuple(trained[kind]))
    pieces = list(chunks(find([name], None), may_cut=may_cut(job)))
    assert len(pieces) > 3 and sum(piece.consumed for piece in pieces) == Path(name).stat().st_size
    assert b"".join(piece.lines[0] for piece in pieces) == text.encode()
    assert [piece.closes for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    words = ["--tokenizer", kind, *(["--tokenizer-files", *trained[kind]] if trained[kind] else []), "--append-eod"]
    assert preprocess("--input", name, "--output-prefix", "x", *words) == 0
    dataset = IndexedDataset("x_text_document")
    assert (len(dataset), dataset.document_count) == (1, 1)
    expected = tokenizer_of(job).encode_batch([text])[0].tolist()
    assert dataset.flat.tolist() == [*expected, tokenizer_of(job).eod]


def test_files_in_pieces_and_others_are_documents_in_order():
    long = "\n".join(LINES)
    write(**{"a.txt": "one\n", "b.txt": long, "c.txt": "", "d.jsonl": jsonl("two"), "e.txt": long[:40_000]})
    words = [
        "--output-prefix",
        "x",
        "--tokenizer",
        "bytes",
        "--append-eod",
        "--input",
        "a.txt",
        "b.txt",
        "c.txt",
        "d.jsonl",
        "e.txt",
    ]
    assert preprocess(*words) == 0
    assert documents("x_text_document") == [["one\n|"], [long + "|"], ["two|"], [long[:40_000] + "|"]]
    alone = Path("x_text_document.bin").read_bytes(), Path("x_text_document.idx").read_bytes()
    for part in ("0/3", "1/3", "2/3"):
        assert preprocess(*words, "--part", part, "--overwrite") == 0
    assert (Path("x_text_document.bin").read_bytes(), Path("x_text_document.idx").read_bytes()) == alone
    shares = [
        chunk for part in range(3) for chunk in chunks(find(["b.txt"], None), Share(part, 3), may_cut=lambda *_: True)
    ]
    assert b"".join(chunk.lines[0] for chunk in shares).decode() == long


@pytest.mark.parametrize("bad", [b"caf\xe9 au lait", "天".encode()[:2]], ids=["a byte", "a cut end"])
def test_a_text_that_is_not_utf8_near_its_end_is_refused_or_left_out_as_a_whole(bad, capsys):
    text = "\n".join(LINES).encode()
    write(**{"a.txt": text + bad, "b.txt": "fine"})
    words = ["--input", "a.txt", "b.txt", "--output-prefix", "x", "--tokenizer", "bytes"]
    assert preprocess(*words) == 64
    place = len(text) + (bad.index(b"\xe9") if b"\xe9" in bad[1:] else 0)
    assert f"error: a.txt is not UTF-8: byte {(text + bad)[place]:#x} at {place};" in capsys.readouterr().err
    assert not list(Path().glob("x*"))
    assert preprocess(*words, "--on-error", "skip") == 0
    assert documents("x_text_document") == [["fine"]] and sidecar("x_text_document")["counts"]["unreadable"] == {
        "not UTF-8": 1
    }


COUNTING = """
class Words:
    size, eod, fingerprint = 3, 2, {"kind": "counting:Words", "files": {}, "size": 3, "eod": 2}
    def __init__(self, files): pass
    def encode(self, text): return [len(text) % 2] * bool(text.strip())
    def encode_batch(self, texts):
        from hpclm.data.tokenizers import flat
        return flat([self.encode(text) for text in texts])
    def decode(self, ids): return ""
"""


def test_a_tokenizer_of_the_users_own_gets_the_whole_text(monkeypatch):
    write(**{"counting.py": COUNTING, "a.txt": "\n".join(LINES)})
    monkeypatch.syspath_prepend(".")
    assert preprocess("--input", "a.txt", "--output-prefix", "x", "--tokenizer", "counting:Words") == 0
    assert IndexedDataset("x_text_document").flat.tolist() == [len("\n".join(LINES)) % 2]


@pytest.mark.whole
def test_a_large_text_needs_little_memory():
    lines = np.random.default_rng(1).integers(97, 123, (1 << 14, 64), np.uint8)
    lines[:, -1] = 10
    with Path("a.txt").open("wb") as file:
        file.writelines(lines.tobytes() for _ in range(400))
    code = (
        "import resource, sys\n"
        "from hpclm.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
        "sys.exit(code)"
    )
    words = ["preprocess", "--input", "a.txt", "--output-prefix", "x", "--tokenizer", "bytes"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) < 300 << 10  # KiB

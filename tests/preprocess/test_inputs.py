import gzip
import random
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.preprocess.inputs import CHUNK, Share, chunks, find

LINES = "".join(f"line {i} {'天😀x' * (i % 70)}\n" for i in range(20_000)).encode()


def joined(chunks):
    return b"".join(line for chunk in chunks for line in chunk.lines)


def framed(raw):
    """A .zst of several frames, as pzstd writes, with one that says to be skipped."""
    half, compress = len(raw) // 2, zstandard.ZstdCompressor().compress
    skipped = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    return skipped + compress(raw[:half]) + compress(raw[half:])


PACKINGS = {
    "plain": ("a.txt", lambda raw: raw),
    "gzip": ("a.txt.gz", gzip.compress),
    "gzip, several members": ("a.txt.gz", lambda raw: gzip.compress(raw[:1000]) + gzip.compress(raw[1000:])),
    "zstandard": ("a.txt.zst", zstandard.ZstdCompressor().compress),
    "zstandard, several frames": ("a.txt.zst", framed),
    "zstandard, of unknown length": ("a.txt.zst", lambda raw: b"".join(_streamed(raw))),
}


def _streamed(raw):
    frame = zstandard.ZstdCompressor().compressobj()
    return [frame.compress(raw), frame.flush()]


@pytest.mark.parametrize("name, pack", PACKINGS.values(), ids=PACKINGS.keys())
@pytest.mark.parametrize("raw", [LINES, b"one\ntwo", b"\n\n", b"x"], ids=["long", "no newline", "blank", "one byte"])
def test_a_file_is_read_in_whole_lines_with_any_compression(name, pack, raw, tmp_path):
    path = tmp_path / name
    path.write_bytes(pack(raw))
    [source] = find([str(path)], "lines")
    found = list(chunks([source]))
    assert joined(found) == raw
    assert sum(chunk.consumed for chunk in found) == path.stat().st_size
    assert all(line.endswith(b"\n") for line in found[0].lines[:-1])
    assert all(len(joined([chunk])) < 2 * CHUNK for chunk in found)
    assert [chunk.location(0) for chunk in found] == [f"{path}:{chunk.first}" for chunk in found]
    assert [chunk.first for chunk in found] == [1 + joined(found[:i]).count(b"\n") for i in range(len(found))]


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst"])
@pytest.mark.parametrize("kept", [0, 1, 5, 0.5, 0.99, -1], ids=str)
def test_a_truncated_compressed_file_is_an_error_that_names_it(name, kept, tmp_path):
    path = tmp_path / name
    packed = PACKINGS["gzip" if name.endswith("gz") else "zstandard"][1](LINES)
    path.write_bytes(packed[: int(kept * len(packed)) if 0 < kept < 1 else kept])
    with pytest.raises(ConfigError, match=r"a\.txt\.(gz|zst) is (truncated|empty)"):
        list(chunks(find([str(path)], None)))


@pytest.mark.parametrize("name", ["a.gz", "a.zst"])
def test_a_file_that_does_not_match_its_suffix_is_an_error(name, tmp_path):
    (tmp_path / name).write_bytes(b"just text\n" * 100)
    with pytest.raises(ConfigError, match="corrupt, or no"):
        list(chunks(find([str(tmp_path / name)], None)))


def test_patterns_are_expanded_in_order_and_names_with_signs_are_taken_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("c.txt", "a.txt", "b.jsonl", "[x].txt", "deep/er/d.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("x")
    Path("folder.txt").mkdir()
    paths = [source.path for source in find(["[x].txt", "?.txt", "b.jsonl", "deep/**/*.txt"], None)]
    assert paths == ["[x].txt", "a.txt", "c.txt", "b.jsonl", "deep/er/d.txt"]
    with pytest.raises(ConfigError, match=r"input \*\.gz matches no file"):
        find(["a.txt", "*.gz"], None)


def test_a_line_longer_than_many_chunks_is_not_split(tmp_path):
    raw = b"short\n" + b"x" * (9 * CHUNK + 7) + b"\nlast"
    (tmp_path / "a.txt").write_bytes(raw)
    lines = [line for chunk in chunks(find([str(tmp_path / "a.txt")], "lines")) for line in chunk.lines]
    assert b"".join(lines) == raw
    assert [len(line) for line in lines] == [6, 9 * CHUNK + 8, 4]


def test_a_very_long_line_is_in_memory_about_twice(tmp_path):
    with (tmp_path / "a.txt").open("wb") as file:
        file.writelines(b"x" * (1 << 20) for _ in range(300))
    code = (
        "import resource\n"
        "from hpclm.preprocess.inputs import chunks, find\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert sum(len(chunk.lines[0]) for chunk in chunks(find(['a.txt'], 'lines'), longest=1 << 30)) == 300 << 20\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / (300 << 10))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2.3


def bomb_zst(path, megabytes):
    frame = zstandard.ZstdCompressor(level=3).compressobj()
    with path.open("wb") as file:
        file.writelines(frame.compress(bytes(1 << 20)) for _ in range(megabytes))
        file.write(frame.flush())


def bomb_gz(path, megabytes):
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.writelines(bytes(1 << 20) for _ in range(megabytes))


def sparse(path, megabytes):
    with path.open("wb") as file:
        file.truncate(megabytes << 20)


@pytest.mark.parametrize("format", ["jsonl", "lines", "files"])
@pytest.mark.parametrize("name, make", [("b.zst", bomb_zst), ("b.gz", bomb_gz), ("b", sparse)])
def test_a_file_without_newlines_is_refused_within_bounded_memory(name, make, format, tmp_path):
    make(tmp_path / name, 600)
    assert name == "b" or (tmp_path / name).stat().st_size < 4 << 20
    code = (
        "import resource, sys\n"
        "from hpclm.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (450 << 20, 450 << 20))\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = ["preprocess", "--input", name, "--format", format, "--output-prefix", "p", "--tokenizer", "bytes"]
    words += ["--longest-line", "100"]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 64, done.stderr
    place = name if format == "files" else f"{name}:1"
    assert f"error: {place} has more than 100 MB" in done.stderr and "--longest-line" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name, pack", PACKINGS.values(), ids=PACKINGS.keys())
def test_the_longest_line_is_exact_and_a_longer_one_is_named(name, pack, tmp_path):
    path, longest = tmp_path / name, 3 * CHUNK
    for length, fine in ((longest, True), (longest + 1, False)):
        raw = LINES + b"x" * length + b"\nlast\n"
        path.write_bytes(pack(raw))
        found = find([str(path)], "lines")
        if fine:
            assert joined(chunks(found, longest=longest)) == raw
        else:
            with pytest.raises(ConfigError, match=f"{path}:20001 has more than"):
                list(chunks(found, longest=longest))


@pytest.mark.parametrize("seed", range(20))
def test_shares_take_every_line_once_and_in_order(seed, tmp_path):
    draw = random.Random(seed)
    inputs = []
    for number in range(draw.randint(1, 5)):
        lines = [b"%d-%d" % (number, i) + b"x" * draw.choice([0, 3, 40]) for i in range(draw.choice([0, 1, 7, 30]))]
        raw = b"\n".join(lines) + draw.choice([b"", b"\n"])
        name, pack = draw.choice([PACKINGS["plain"], PACKINGS["plain"], PACKINGS["gzip"], PACKINGS["zstandard"]])
        path = tmp_path / f"{number}{name}"
        path.write_bytes(pack(raw))
        inputs += find([str(path)], draw.choice(["lines", "lines", "files"]))
    whole = joined(chunks(inputs))
    parts = draw.choice([2, 3, 8, 40])
    assert b"".join(joined(chunks(inputs, Share(part, parts))) for part in range(parts)) == whole
    files = sum(source.format == "files" for source in inputs)
    found = [c for part in range(parts) for c in chunks(inputs, Share(part, parts)) if c.source.format == "files"]
    assert len(found) == files


def test_line_numbers_are_right_in_every_share(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"".join(b"%d\n" % (i + 1) * (i % 3 == 0) + b"%d\n" % 0 * (i % 3 != 0) for i in range(3000)))
    lines = path.read_bytes().split(b"\n")
    for part in range(7):
        for chunk in chunks(find([str(path)], "lines"), Share(part, 7)):
            number = int(chunk.location(0).rsplit(":", 1)[1])
            assert chunk.lines[0] == lines[number - 1] + b"\n"
            assert joined([chunk]) in path.read_bytes()


@pytest.mark.parametrize(
    "names, other",
    [
        (["*.jsonl", "a.jsonl"], ""),
        ([".", "."], ""),
        (["a.jsonl", "../data/a.jsonl"], "a.jsonl"),
        (["a.jsonl", "link.jsonl"], "a.jsonl"),
        (["more", "a.jsonl"], "more/hard.jsonl"),
    ],
)
def test_a_file_that_is_named_twice_is_refused(names, other, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "data"
    (folder / "more").mkdir(parents=True)
    monkeypatch.chdir(folder)
    Path("a.jsonl").write_text('{"text": "a"}\n')
    Path("copy.jsonl").write_text('{"text": "a"}\n')  # which is another file
    if names[1] == "link.jsonl":
        Path("link.jsonl").symlink_to("a.jsonl")
    Path("more/hard.jsonl").hardlink_to("a.jsonl")
    said = rf"{names[1]} is an input twice, also as {other};" if other else r"a\.jsonl is an input twice;"
    with pytest.raises(ConfigError, match=said):
        find(names, None)
    for words in (
        ["preprocess", "--output-prefix", "x", "--tokenizer", "bytes", "--input"],
        [
            "preprocess",
            "--output-prefix",
            "x",
            "--tokenizer",
            "json",
            "--tokenizer-files",
            "t.json",
            "--context",
            "9",
            "--chat",
        ],
        ["train-tokenizer", "--output", "t.json", "--input"],
    ):
        assert cli.main([*words, *names]) == 64
        assert "is an input twice" in capsys.readouterr().err
    Path("valid.txt").write_text("a\n")
    assert (
        cli.main(["preprocess", "--only-source", "--trainpref", "valid.txt", "--validpref", "valid.txt,./valid.txt"])
        == 64
    )
    assert "./valid.txt is an input twice, also as valid.txt" in capsys.readouterr().err


def test_standard_input_needs_a_format_and_is_read_once():
    with pytest.raises(ConfigError, match="needs --format"):
        find(["-"], None)
    with pytest.raises(ConfigError, match="given twice"):
        find(["-", "-"], "lines")

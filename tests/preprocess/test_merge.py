import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.data.indexed import IndexedDataset, sidecar
from hpclm.preprocess import hashing
from hpclm.preprocess.merge import merge
from hpclm.preprocess.writer import Writer
from tests.data.layouts import append, pack
from tests.data.test_indexed import REFERENCE, needs_reference

TOKENIZER = {"kind": "bytes", "files": {}, "size": 257, "eod": 256}
LINES = [[1, 2, 3], [4], [], [5, 6]]


def content(prefix):
    return [Path(f"{prefix}.{end}").read_bytes() for end in ("bin", "idx")]


def write(prefix, documents, dtype="u2", tokenizer=TOKENIZER, **counts):
    """Documents are lists of sequences."""
    with Writer(prefix, dtype) as writer:
        append(writer, documents)
        if tokenizer:
            writer.note = {"tokenizer": tokenizer, "tokens": writer.tokens, **counts}
    return str(prefix)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@needs_reference
@pytest.mark.parametrize("second, dtype", [("int32", None), ("int64", "int32")])
def test_a_merge_is_the_bytes_of_megatrons(second, dtype, tmp_path):
    merge(tmp_path / "ours", [REFERENCE / "mcore_builder" / name for name in ("int32", second)], dtype=dtype)
    assert content(tmp_path / "ours") == content(REFERENCE / "mcore_builder/merged_int32")


@needs_reference
@pytest.mark.parametrize("name", ["mcore_docs/docs_text_document", "mcore_builder/multimodal", "fairseq_bin/train"])
def test_a_merge_of_one_dataset_is_its_copy(name, tmp_path):
    merge(tmp_path / "ours", [REFERENCE / name])
    assert content(tmp_path / "ours") == content(REFERENCE / name)


@needs_reference
@pytest.mark.parametrize(
    "name, through", [("fairseq_bin/train", "megatron"), ("seed2_lines/lines_text_sentence", "fairseq")]
)
def test_a_layout_and_back_is_the_same_bytes(name, through, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    back = {"megatron": "fairseq", "fairseq": "megatron"}[through]
    assert cli.main(["data", "convert", str(REFERENCE / name), "there", "--layout", through]) == 0
    assert cli.main(["data", "convert", "there.idx", "back", "--layout", back]) == 0
    assert IndexedDataset("there").layout == through
    assert content("back") == content(REFERENCE / name)


def test_what_fairseqs_layout_cannot_store_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pack("sentences", "megatron", LINES, [0, 1, 1, 4])
    pack("pictures", "megatron", LINES, [0, 1, 2, 3, 4], modes=[0, 1, 0, 1])
    for name, why in {"sentences": "document 1 has 0 sequences", "pictures": "has modes"}.items():
        assert cli.main(["data", "convert", name, "new", "--layout", "fairseq"]) == 64
        said = capsys.readouterr().err
        assert why in said and "choose --layout megatron" in said
        assert not Path("new.bin").exists()


DTYPES = {
    "the widest": (["u2", "i4"], "megatron", "int32"),
    "one that holds both": (["u1", "i1"], "megatron", "int16"),
    "signed, where Megatron knows no other": (["u4"], "megatron", "int32"),
    "unsigned, where fairseq does": (["u4"], "fairseq", "uint32"),
    "what there is": (["u8", "i8"], "megatron", "int64"),
}


@pytest.mark.parametrize("dtypes, layout, expected", DTYPES.values(), ids=DTYPES)
def test_a_merge_has_a_type_that_holds_the_tokens_of_all(dtypes, layout, expected, tmp_path):
    parts = [pack(tmp_path / dtype, "fairseq", [[1, 2], [k]], dtype=dtype) for k, dtype in enumerate(dtypes)]
    made = merge(tmp_path / "all", parts, layout=layout)
    assert (made.dtype.name, made.layout) == (expected, layout)
    assert made.flat.tolist() == [token for k in range(len(dtypes)) for token in (1, 2, k)]


def test_a_token_that_the_type_asked_for_cannot_hold_is_refused_and_leaves_nothing(tmp_path):
    parts = [write(tmp_path / "a", [[[1]]]), write(tmp_path / "b", [[[300]]])]
    with pytest.raises(ConfigError, match="300 do not fit in uint8"):
        merge(tmp_path / "all", parts, dtype="uint8")
    assert not [name for name in names(tmp_path) if name.startswith("all")]


def without_content(prefix):
    """What a note says besides the hash of the dataset's own content."""
    return {key: value for key, value in sidecar(prefix).items() if key != "content"}


def test_the_counts_of_the_inputs_are_summed(tmp_path):
    parts = [
        write(tmp_path / "a", [[[1], [2, 3]]], counts={"skipped": 2}),
        write(tmp_path / "b", [[[4]], []], counts={"skipped": 3}),
    ]
    merge(tmp_path / "all", parts)
    expected = {"tokenizer": TOKENIZER, "documents": 3, "tokens": 4, "counts": {"skipped": 5}}
    assert without_content(tmp_path / "all") == expected


OTHERS = {
    "another size": (TOKENIZER | {"size": 300}, "different tokenizers"),
    "another file": (TOKENIZER | {"files": {"v.json": "ab12"}}, "different tokenizers"),
    "no note": (None, "is unknown, but that of"),
}


@pytest.mark.parametrize("other, why", OTHERS.values(), ids=OTHERS)
def test_datasets_of_different_tokenizers_are_not_merged_unasked(other, why, tmp_path, capsys):
    parts = [write(tmp_path / "a", [[[1]]]), write(tmp_path / "b", [[[2]]], tokenizer=other)]
    words = ["data", "merge", str(tmp_path / "all"), *parts]
    assert cli.main(words) == 64
    said = capsys.readouterr().err
    assert why in said and parts[0] in said and parts[1] in said
    assert cli.main([*words, "--no-note"]) == 0
    assert IndexedDataset(tmp_path / "all").flat.tolist() == [1, 2]
    assert without_content(tmp_path / "all") == {}


def test_a_dataset_is_not_replaced_unless_asked_and_never_by_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write("a", [[[1]]]), write("b", [[[2]]])
    Path("link.bin").symlink_to("a.bin")
    for words in (["a", "a", "b"], ["./a", "b", "a", "--overwrite"], ["link", "a", "--overwrite"]):
        assert cli.main(["data", "merge", *words]) == 64
        assert "is both input and output" in capsys.readouterr().err
    assert cli.main(["data", "merge", "b", "a"]) == 64
    assert "b.bin and b.idx and b.json exists" in capsys.readouterr().err
    assert cli.main(["data", "merge", "b", "a", "--overwrite"]) == 0
    assert (IndexedDataset("a").flat.tolist(), IndexedDataset("b").flat.tolist()) == ([1], [1])


def test_a_shell_pattern_names_each_dataset_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("part1", [[[1]]]), write("part2", [[[2]]])
    assert cli.main(["data", "merge", "all", *names(tmp_path)]) == 0
    assert IndexedDataset("all").flat.tolist() == [1, 2]
    assert cli.main(["data", "merge", "twice", "part1", "part1"]) == 0
    assert IndexedDataset("twice").flat.tolist() == [1, 1]


def test_modes_are_for_all_or_for_none(tmp_path):
    with_modes = pack(tmp_path / "a", "megatron", [[1]], [0, 1], modes=[3])
    plain = pack(tmp_path / "b", "megatron", [[2]], [0, 1])
    with pytest.raises(ConfigError, match="b has no modes, but others have"):
        merge(tmp_path / "all", [with_modes, plain])
    assert merge(tmp_path / "all", [with_modes, with_modes]).modes.tolist() == [3, 3]


def test_there_may_be_more_parts_than_files_may_be_open(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(file.name) for file in Path("/proc/self/fd").iterdir()}
    free = [number for number in range(10_000) if number not in taken]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[60], limit[1]))
    try:
        parts = [write(tmp_path / str(k), [[[k]]]) for k in range(120)]
        assert merge(tmp_path / "all", parts).flat.tolist() == list(range(120))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)


def test_a_corrupt_input_is_named_and_nothing_is_written(tmp_path):
    parts = [write(tmp_path / "a", [[[1]]]), write(tmp_path / "b", [[[2, 3]]])]
    Path(f"{parts[1]}.bin").write_bytes(bytes(2))
    with pytest.raises(ConfigError, match=r"b\.bin is 2 bytes long"):
        merge(tmp_path / "all", parts)
    assert names(tmp_path) == [f"{name}.{end}" for name in "ab" for end in ("bin", "idx", "json")]


def test_ranges_of_documents_are_complete_and_in_order_for_any_lengths(tmp_path):
    big, rng = hashing.TOKENS, np.random.default_rng(0)
    documents = np.concatenate((np.zeros(5, int), rng.integers(0, 3, 400_000), [1] * 3, np.zeros(9, int)))
    sizes = rng.integers(0, 9, documents.sum())
    sizes[[3, 70_000, len(sizes) - 1]] = [big * 2, big - 1, big]
    with Writer(tmp_path / "x", "u1") as writer:
        writer.extend(np.arange(sizes.sum(), dtype="u8").astype("u1"), sizes, documents)
    dataset = IndexedDataset(tmp_path / "x")
    found = list(hashing._document_ranges(dataset))
    assert [begin for begin, _ in found] == [0, *(end for _, end in found[:-1])] and found[-1][1] == len(documents)
    tokens = [dataset.place(int(dataset.documents[end])) - dataset.place(int(dataset.documents[a])) for a, end in found]
    assert all(count <= big or end - begin == 1 for count, (begin, end) in zip(tokens, found))
    merge(tmp_path / "y", [tmp_path / "x"])
    assert content(tmp_path / "y") == content(tmp_path / "x")


def test_memory_does_not_grow_with_the_dataset(tmp_path):
    script = (
        "import resource, sys, numpy as np; from hpclm.preprocess.writer import Writer; from hpclm import cli\n"
        "n, ones = int(sys.argv[1]), np.ones(100_000, 'i8')\n"
        "with Writer('x', 'i4') as writer:\n"
        "    for _ in range(n): writer.extend(ones, ones, ones)\n"
        "cli.main(['data', 'inspect', 'x']), cli.main(['data', 'merge', 'y', 'x', 'x'])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    peaks = []
    for n in (5, 40):  # 10 and 80 MB of index
        folder = tmp_path / str(n)
        folder.mkdir()
        words = [sys.executable, "-c", script, str(n)]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
        peaks.append(float(done.stdout.split()[-1]))
    assert peaks[1] - peaks[0] < 30

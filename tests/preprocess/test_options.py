"""Megatron's and fairseq's command lines."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpclm.commands import preprocess as command
from hpclm.config import DataConfig, RunConfig, dump
from hpclm.data.indexed import IndexedDataset, sidecar
from tests.preprocess.texts import content, jsonl, preprocess, write
from tests.shared import ROOT, shared


def parse(words):
    return command.parser().call(command.request, words)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(**{"a.txt": "b a b\n\na c\n", "v.txt": "b b c\n", "t.txt": "a\n"})


SEED = """python tools/preprocess_data.py \
    --input data/oscar-en-10k.jsonl \
    --output-prefix data/meg-gpt2-oscar-en-10k \
    --dataset-impl mmap \
    --tokenizer-type GPT2BPETokenizer \
    --merge-file data/gpt2-merges.txt \
    --vocab data/gpt2-vocab.json \
    --append-eod \
    --workers 4
"""


def test_the_recipes_command_writes_bigsciences_bytes_with_only_the_files_exchanged():
    inputs = shared("reference/inputs")
    assert " ".join(SEED.split()) in " ".join(next(shared("seeds").glob("004*")).read_text().replace("\\", "").split())
    Path("data").mkdir()
    exchanged = {
        "python": sys.executable,
        "tools/preprocess_data.py": ROOT / "tools/preprocess_data.py",
        "data/oscar-en-10k.jsonl": inputs / "docs.jsonl",
        "data/gpt2-merges.txt": inputs / "gpt2-tiny-merges.txt",
        "data/gpt2-vocab.json": inputs / "gpt2-tiny-vocab.json",
    }
    subprocess.run([exchanged.get(word, word) for word in shlex.split(SEED)], check=True)
    original = shared("reference/bigscience_docs") / "docs_text_document"
    assert content("data/meg-gpt2-oscar-en-10k_text_document", "bin", "idx") == content(original, "bin", "idx")


TYPES = {
    "GPT2BPETokenizer --vocab-file v --merge-file m": ("gpt2", ("v", "m")),
    "GPT2BPETokenizer --vocab v --merge-file m": ("gpt2", ("v", "m")),
    "BertWordPieceLowerCase --vocab-file v": ("wordpiece_lower", ("v",)),
    "BertWordPieceCase --vocab v": ("wordpiece", ("v",)),
    "SentencePieceTokenizer --tokenizer-model v": ("sentencepiece", ("v",)),
}


@pytest.mark.parametrize("words", TYPES)
def test_megatrons_types_are_our_kinds(words):
    more = "--lang english --split-sentences"
    request = parse(f"--input a.txt --output-prefix x --tokenizer-type {words} {more}".split())
    assert (request.job.tokenizer, request.job.files, request.job.language) == (*TYPES[words], "en")


BYTES = "--input a.txt --output-prefix x --tokenizer bytes"
PAIR = "--trainpref a.txt --destdir d"
WRONG = {
    f"{BYTES} --dataset-impl lazy": "invalid choice",
    f"{BYTES} --workers 0": "argument --workers: '0' is not a whole number of at least 1",
    f"{BYTES} --language en": "go with --split-sentences",
    f"{BYTES} --keep-newlines": "go with --split-sentences",
    f"{BYTES} --part 2/2": "--part 2/2 must be I/N",
    f"{BYTES} --part one": "--part one must be I/N",
    f"{BYTES} --vocab-file v": "go with --tokenizer-type",
    f"{BYTES} --tokenizer-type GPT2BPETokenizer": "--tokenizer-type excludes --tokenizer",
    f"{BYTES} --only-source --trainpref a.txt": "exclude fairseq's --trainpref",
    "--input a.txt --output-prefix x": "give --tokenizer KIND and --tokenizer-files FILE...; kinds: bytes, fairseq, gpt2, json, sent",
    "--input a.txt --output-prefix x --tokenizer-files f": "go with --tokenizer KIND",
    "--input a.txt --tokenizer bytes": "give --input FILE... and --output-prefix P",
    "--input a.txt --output-prefix x --tokenizer-type BertWordPieceCase": "needs --vocab-file",
    "--input a.txt --output-prefix x --tokenizer-type BertWordPieceCase --vocab v --merge-file m": "have no effect",
    PAIR: "give --only-source",
    f"{PAIR} --only-source --tokenizer bytes --srcdict a.txt": "--srcdict has no effect with --tokenizer",
    "--only-source --destdir d": "give --trainpref FILE",
    "--only-source --destdir d --validpref v.txt": "words are counted in the text of --trainpref, which is missing",
    "--only-source --destdir d --trainpref a.txt,v.txt": "allow one training text",
}


@pytest.mark.parametrize("words", WRONG)
def test_arguments_that_cannot_be_honoured_are_wrong_arguments(words, capsys):
    with pytest.raises(SystemExit) as left:
        preprocess(*words.split())
    assert left.value.code == 2
    assert WRONG[words] in capsys.readouterr().err
    assert not Path("d").exists() and not list(Path().glob("x*"))


@pytest.mark.parametrize("workers", [1, 2])
def test_fairseqs_command_writes_fairseqs_bytes(workers):
    lines = shared("reference/inputs") / "lines.txt"
    words = ["--only-source", "--trainpref", lines, "--destdir", "d", "--workers", workers]
    assert preprocess(*words) == 0
    original = shared("reference/fairseq_bin")
    assert content("d/train", "bin", "idx") == content(original / "train", "bin", "idx")
    assert Path("d/dict.txt").read_bytes() == (original / "dict.txt").read_bytes()


def tokens(prefix):
    return np.fromfile(f"{prefix}.bin", "<u2").tolist()


FAIRSEQ = "--only-source --trainpref a.txt --validpref v.txt,t.txt --testpref t.txt --destdir d"


def test_fairseqs_splits_get_fairseqs_names(capsys):
    assert preprocess(*FAIRSEQ.split()) == 0
    assert sorted(path.name for path in Path("d").glob("*.idx")) == ["test.idx", "train.idx", "valid.idx", "valid1.idx"]
    assert Path("d/dict.txt").read_text() == "a 2\nb 2\nc 1\nmadeupword0000 0\n"
    assert tokens("d/train") == [5, 4, 5, 2, 2, 4, 6, 2]
    assert [path.read_bytes() for path in (Path("d/valid1.bin"), Path("d/test.bin"))] == [bytes([4, 0, 2, 0])] * 2
    assert sidecar("d/valid")["tokenizer"]["kind"] == "fairseq"
    shutil.rmtree("d")
    write(**{name: text * 60 for name, text in (("a.txt", "b a b\n\na c\n"), ("v.txt", "b b c\n"), ("t.txt", "a\n"))})
    capsys.readouterr()
    assert preprocess(*FAIRSEQ.split()) == 0
    words = ["data.train=[d/train]", "data.valid=[d/valid]", "data.test=[d/test]", "data.validation=[valid1=d/valid1]"]
    next_command = shlex.split(capsys.readouterr().out.partition("next: ")[2])
    assert next_command[:8] == ["hpclm", "train", "small", *words, "model.vocab_size=8"]


def test_a_given_dictionary_is_used_and_copied_to_the_datasets():
    write(**{"given.txt": "c 9\na 1\n"})
    assert preprocess("--only-source", "--validpref", "v.txt", "--destdir", "d", "--srcdict", "given.txt") == 0
    assert Path("d/dict.txt").read_text() == "c 9\na 1\n"
    assert tokens("d/valid") == [3, 3, 4, 2]


def test_fairseqs_form_takes_other_tokenizers_too():
    assert preprocess(*FAIRSEQ.split(), "--tokenizer", "bytes", "--append-eod") == 0
    dataset = IndexedDataset("d/train")
    assert dataset.flat.tolist() == [*b"b a b", 256, *b"a c", 256]
    assert dataset.documents.tolist() == [0, 1, 2]
    assert not Path("d/dict.txt").exists()


def test_fairseqs_datasets_are_replaced_only_with_overwrite(capsys):
    assert preprocess(*FAIRSEQ.split()) == 0
    assert preprocess(*FAIRSEQ.split()) == 64
    assert "d/train.idx and d/valid.idx and d/valid1.idx and d/test.idx exist" in capsys.readouterr().err
    write(**{"a.txt": "other words\n"})
    assert preprocess("--only-source", "--trainpref", "a.txt", "--destdir", "d") == 64
    for path in Path("d").glob("*.idx"):
        path.unlink()
    assert preprocess(*FAIRSEQ.split()) == 64
    assert "d/dict.txt exists and has different words" in capsys.readouterr().err
    assert preprocess(*FAIRSEQ.split(), "--overwrite") == 0
    assert "other" in Path("d/dict.txt").read_text()


def test_fairseqs_form_in_several_processes_is_refused(capsys):
    assert preprocess(*FAIRSEQ.split(), "--part", "0/2") == 64
    assert "run in one process, not 2" in capsys.readouterr().err


def test_help_is_instant_and_a_small_file_takes_no_torch():
    code = (
        "import sys; from hpclm import cli; sys.argv = ['x']\n"
        "code = cli.function('preprocess')(['--input', 'a.txt', '--output-prefix', 'x', '--tokenizer', 'bytes'])\n"
        "print(code, {'torch', 'zstandard', 'sqlite3', 'sentencex', 'tokenizers', 'sentencepiece'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 set()"


def test_a_run_s_tokenizer_is_that_of_its_dataset_where_its_settings_name_none(capsys):
    write(**{"vocab.json": '{"<unk>": 0, "<|endoftext|>": 1, "高": 2, "血压": 3}', "t.jsonl": jsonl("高 血压")})
    files = ["--tokenizer", "whitespace", "--tokenizer-files", "vocab.json"]
    assert preprocess("--input", "t.jsonl", "--output-prefix", "old", *files) == 0
    Path("run").mkdir()
    dump(RunConfig(data=DataConfig(prefix="old_text_document")), Path("run/config.yaml"))
    words = ["--input", "t.jsonl", "--tokenizer", "run", "--output-prefix"]
    assert preprocess(*words, "new") == 0 and content("new_text_document") == content("old_text_document")
    Path("vocab.json").write_text('{"<unk>": 0, "<|endoftext|>": 1, "高": 3, "血压": 2}')
    assert preprocess(*words, "again") == 64
    assert "--tokenizer run: the tokenizer of dataset old_text_document has changed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind, names, wanted",
    [
        ("GPT2BPETokenizer", ["--vocab-file", "--merge-file"], "gpt2"),
        ("BertWordPieceLowerCase", ["--vocab-file"], "wordpiece_lower"),
        ("BertWordPieceCase", ["--vocab-file"], "wordpiece"),
        ("SentencePieceTokenizer", ["--tokenizer-model"], "sentencepiece"),
    ],
)
def test_megatrons_tokenizers_are_ours_with_their_files_in_order(kind, names, wanted):
    files = [word for name in names[::-1] for word in (name, name[2:])]
    job = parse(["--input", "a.txt", "--output-prefix", "x", "--tokenizer-type", kind, *files]).job
    assert (job.tokenizer, job.files) == (wanted, tuple(name[2:] for name in names))

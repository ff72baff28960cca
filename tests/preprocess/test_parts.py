"""Several processes take a part each, and the dataset is what one process writes."""

import os
import random
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard

from hpclm.base.errors import HpclmError
from hpclm.base.files import write_text
from hpclm.preprocess.writer import Writer
from tests import forks
from tests.preprocess.texts import COMMAND, content, jsonl, preprocess, write
from tests.runs import PATIENCE

BYTES = ["--output-prefix", "x", "--tokenizer", "bytes"]
FILES = [f"x_text_document.{end}" for end in ("bin", "idx", "json")]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def corpus(seed=0, lines=3000):
    """Inputs of several kinds with empty, repeated and broken documents."""
    draw = random.Random(seed)
    texts = [
        draw.choice("abcdé") * draw.choice([0, 1, 5, 90]) + str(draw.randint(0, 40)) * (i % 3) for i in range(lines)
    ]
    third = lines // 3
    packed = zstandard.ZstdCompressor().compress(jsonl(*texts[third : third + 50]).encode())
    broken = jsonl(*texts[-third:]).encode().replace(b'"text": "b', b'"text": 5, "b": "', 40)
    write(**{"a.jsonl": jsonl(*texts[:third]), "b.jsonl.zst": packed, "c.jsonl": broken, "d.jsonl": "", "e.jsonl": "{"})
    return ["--input", "[a-e].jsonl*", "--on-error", "skip"]


def left():
    """What is left in the folder of the parts."""
    [folder] = Path().glob("*.parts")
    return sorted(path.name for path in folder.iterdir())


def ended(processes):
    return [process.wait(PATIENCE) for process in processes]


def start(words, parts, dies=None):
    """A process for each part, all at once; that of the part ``dies`` is killed in the middle of its writing."""
    return [
        forks.Hpclm("preprocess", *words, "--part", f"{part}/{parts}", cwd=".", before=dying if part == dies else None)
        for part in range(parts)
    ]


def dying(extend=Writer.extend):
    """Have this process killed once it has written some tokens."""

    def killed(self, *words):
        extend(self, *words)
        os.kill(os.getpid(), signal.SIGKILL)

    Writer.extend = killed


POLICIES = {
    "plain": [],
    "kept empty ones": ["--empty", "keep", "--append-eod"],
    "sentences": ["--split-sentences", "--append-eod"],
    "two keys": ["--json-keys", "text", "title"],
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "parts", [pytest.param(2, marks=pytest.mark.whole), 3, pytest.param(11, marks=pytest.mark.whole)]
)
def test_parts_one_after_another_are_what_one_process_writes(policy, parts, capsys):
    words = [*corpus(), *BYTES, *POLICIES[policy]]
    if policy == "two keys":
        write(**{"two.jsonl": "".join(f'{{"text": "{"x" * i}", "title": "{"y" * (i % 4)}"}}\n' for i in range(500))})
        words += ["--input", "two.jsonl"]
    assert preprocess(*words, "--part", "0/1") == 0
    names = sorted({path.stem for path in Path().glob("x_*")})
    assert len(names) == 1 + (policy == "two keys")
    alone = [content(name) for name in names]
    for path in Path().glob("x_*.*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for part in random.Random(parts).sample(range(parts), parts):
        assert not list(Path().glob("x_*.idx"))
        assert preprocess(*words, "--part", f"{part}/{parts}") == 0
    assert [content(name) for name in names] == alone
    assert left() == ["joined.json"]
    assert "next: hpclm train" in capsys.readouterr().out


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.whole) for seed in (1, 2))])
def test_parts_at_the_same_time_are_what_one_process_writes(seed):
    words = [*corpus(seed), *BYTES]
    assert preprocess(*words) == 0
    alone = content("x_text_document")
    for name in FILES:
        Path(name).unlink()
    assert ended(start(words, 4)) == [0] * 4
    assert content("x_text_document") == alone
    assert left() == ["joined.json"]


def test_a_killed_part_is_rewritten_and_the_others_are_reused():
    words = [*corpus(lines=6000), *BYTES]
    assert preprocess(*words) == 0
    alone = content("x_text_document")
    for name in FILES:
        Path(name).unlink()
    assert ended(start(words, 3, dies=1)) == [0, -signal.SIGKILL, 0]
    assert not Path("x_text_document.idx").exists()
    kept = {path: path.stat().st_mtime_ns for path in Path().glob("*.parts/*.idx")}
    assert len(kept) == 2
    assert preprocess(*words, "--part", "0/3") == 0
    assert {path: path.stat().st_mtime_ns for path in Path().glob("*.parts/*.idx")} == kept
    assert preprocess(*words, "--part", "1/3") == 0
    assert content("x_text_document") == alone
    assert left() == ["joined.json"]


CHANGES = {
    "the input": lambda words: write(**{"a.jsonl": jsonl("other", "words")}),
    "the options": lambda words: words.append("--append-eod"),
    "damage": lambda words: os.truncate(next(Path().glob("*.parts/*-0-of-2.bin")), 10),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_part_of_another_job_or_a_corrupt_part_is_not_used(change):
    words = [*corpus(), *BYTES]
    assert preprocess(*words, "--part", "0/2") == 0
    change(words)
    assert preprocess(*words, "--part", "1/2") == 0
    assert not Path("x_text_document.idx").exists()
    assert preprocess(*words, "--part", "0/2") == 0
    assert left() == ["joined.json"]
    joined = content("x_text_document")
    assert preprocess(*words, "--overwrite") == 0
    assert content("x_text_document") == joined


def test_processes_that_come_late_or_again_find_the_work_done_and_nothing_is_replaced(capsys):
    write(**{"a.txt": "one\ntwo\nthree\n", "b.txt": "other\nwords\n"})
    words = ["--input", "a.txt", *BYTES]
    for part in range(3):
        assert preprocess(*words, "--part", f"{part}/3") == 0
    written = {name: Path(name).stat().st_mtime_ns for name in FILES}
    for more in ([], ["--overwrite"]):
        capsys.readouterr()
        assert preprocess(*words, *more, "--part", "1/3") == 0
        assert "already written by this job" in capsys.readouterr().out
    assert {name: Path(name).stat().st_mtime_ns for name in FILES} == written and left() == ["joined.json"]
    assert preprocess("--input", "b.txt", *BYTES, "--part", "0/2") == 64  # another job may not replace it
    assert preprocess("--input", "b.txt", *BYTES, "--overwrite") == 0
    assert preprocess(*words, "--part", "1/3") == 64  # nor the first job what has replaced it
    assert preprocess(*words, "--overwrite", "--part", "1/3") == 0


def killed(*_):
    raise HpclmError("as if it were killed")


def test_complete_parts_are_joined_once_by_processes_that_start_together(monkeypatch):
    words = [*corpus(lines=300), *BYTES]
    assert preprocess(*words) == 0
    alone = content("x_text_document")
    for _ in range(3):
        for path in Path().glob("x_*.*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        with monkeypatch.context() as patch:
            patch.setattr("hpclm.preprocess.parts._join", killed)
            codes = [preprocess(*words, "--part", f"{part}/4") for part in range(4)]
        assert codes == [0, 0, 0, 1] and len(left()) == 4 * 3
        assert ended(start(words, 4)) == [0] * 4
        assert content("x_text_document") == alone and left() == ["joined.json"]


def test_a_process_that_starts_while_another_one_publishes_the_datasets_waits_for_it(monkeypatch):
    words = [*corpus(lines=300), *BYTES]
    assert preprocess(*words, "--part", "0/2") == 0
    late = []

    def publish(path, text):
        late.append(forks.Hpclm("preprocess", *words, "--part", "0/2", cwd="."))
        with suppress(subprocess.TimeoutExpired):
            late[0].wait(4)
        write_text(path, text)

    monkeypatch.setattr("hpclm.preprocess.parts.write_text", publish)
    assert preprocess(*words, "--part", "1/2") == 0
    assert ended(late) == [0]


def test_a_bad_line_is_named_by_its_number_in_the_whole_file(capsys):
    write(**{"a.jsonl": jsonl(*"abcdefgh") + "{oops\n" + jsonl("i")})
    assert preprocess("--input", "a.jsonl", *BYTES, "--part", "1/2") == 64
    assert "a.jsonl:9 is not JSON" in capsys.readouterr().err


REFUSED = {
    "standard input": (["--input", "-", "--format", "lines"], "cannot be divided over 2 processes"),
    "no token": (["--input", "empty.txt"], "no documents in empty.txt"),
    "a dataset of that name": (["--input", "a.txt"], "x_text_document.idx exists"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_options_of_several_processes_are_refused(case, capsys):
    words, message = REFUSED[case]
    write(**{"a.txt": "one\ntwo\n", "empty.txt": ""})
    if case == "a dataset of that name":
        assert preprocess("--input", "empty.txt", "a.txt", *BYTES) == 0
    codes = [preprocess(*words, *BYTES, "--part", part) for part in ("0/2", "1/2")]
    assert codes[1] == 64
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "variables",
    [
        {
            **{
                "SLURM_JOB_ID": "1",
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": "{}",
                "SLURM_LOCALID": "0",
                "SLURM_NODEID": "0",
            },
            **{"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "a"},
        },
        {"OMPI_COMM_WORLD_RANK": "{}", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "{}"}
        | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        {"TORCHELASTIC_RUN_ID": "x", "RANK": "{}", "WORLD_SIZE": "2", "LOCAL_RANK": "{}", "LOCAL_WORLD_SIZE": "2"},
    ],
    ids=["srun", "mpirun", "torchrun"],
)
def test_a_launchers_processes_find_their_parts(variables):
    write(**{"a.txt": "one\ntwo\nthree\n"})
    for rank in range(2):
        told = {name: value.format(rank) for name, value in variables.items()}
        forks.hpclm("preprocess", "--input", "a.txt", *BYTES, env={**os.environ, **told}, cwd=".", check=0)
    joined = content("x_text_document")
    assert preprocess("--input", "a.txt", *BYTES, "--overwrite") == 0
    assert content("x_text_document") == joined


@pytest.mark.mpi
@pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun is not installed")
def test_mpirun_writes_what_one_process_writes():
    words = [*corpus(), *BYTES]
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", *COMMAND, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    joined = content("x_text_document")
    assert preprocess(*words, "--overwrite") == 0
    assert content("x_text_document") == joined


def test_a_part_that_is_corrupted_before_joining_is_detected(capsys):
    write(**{"a.jsonl": jsonl(*["some text"] * 100)})
    words = ["--input", "a.jsonl", *BYTES]
    assert preprocess(*words, "--part", "0/2") == 0
    [tokens] = Path().glob("*.parts/*.bin")
    tokens.write_bytes(bytes(tokens.stat().st_size))
    assert preprocess(*words, "--part", "1/2") == 64
    assert f"{tokens} is corrupt" in capsys.readouterr().err
    assert not Path("x_text_document.idx").exists()

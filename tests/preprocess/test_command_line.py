"""data= and tokenizer= on the command line: what they make of a text, and what is refused before anything is written."""

import json
import signal
from functools import partial
from pathlib import Path

import pytest

import hpclm
from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.data import split_by
from hpclm.data.tokenizers import flat
from hpclm.launch import arguments, process
from hpclm.node import preemption
from hpclm.preprocess import command_line
from hpclm.rundir import config_history
from tests.runs import hpclm as run_hpclm

TINY = {"model.layers": 1, "model.hidden": 16, "model.attention.heads": 2, "model.context": 16, "evaluate.every": 0}
WORDS = [f"{key}={value}" for key, value in TINY.items()]
TRAIN = ["small", *WORDS, "budget.steps=1", "engine.device=cpu"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("text.jsonl").write_text("".join(json.dumps({"text": f"Once upon a time, {n}."}) + "\n" for n in range(99)))
    return tmp_path


class Letters:
    """A tokenizer of bytes; ``interrupt`` is called before it encodes."""

    size, eod, ends_itself = 257, 256, False

    def __init__(self, files):
        self.fingerprint = {"kind": type(self).__name__, "files": {}, "size": 257, "eod": 256}

    def interrupt(self):
        return None

    def encode(self, text):
        return list(text.encode())

    def encode_batch(self, texts):
        self.interrupt()
        return flat([self.encode(text) for text in texts])

    def decode(self, ids):
        return bytes(id for id in ids if id < 256).decode(errors="replace")


class Interrupted(Letters):
    """A signal comes while the text is tokenized."""

    number = signal.SIGINT

    def interrupt(self):
        signal.raise_signal(self.number)


class Overtaken(Letters):
    """Another run, which started at the same time, is done with the text first."""

    others = 1

    def interrupt(self):
        if Overtaken.others:
            Overtaken.others = 0
            command_line.resolved_settings(["small", "data=text.jsonl", f"tokenizer={__name__}:Overtaken"])


def test_a_text_gives_the_settings_that_it_gives_in_python_and_is_tokenized_once(here, capsys):
    words = [*TRAIN, "out=runs/a", "budget.epochs=null", "data=text.jsonl"]
    run = command_line.resolved_settings(words)
    assert "99 documents" in capsys.readouterr().out and run.model.vocab_size == 257
    trained = hpclm.train("small", TINY, data="text.jsonl", steps=1, device="cpu", out="runs/a").settings
    assert arguments.whole(trained) == arguments.whole(
        split_by.resolved(run, partial(config_history.split_by, Path(run.out)))
    )
    again = command_line.resolved_settings(["data=text.jsonl", *words[1:-1], words[0]])
    assert arguments.whole(again) == arguments.whole(trained)  # which has begun, and keeps how its data is divided
    assert command_line.resolved_settings([*words, "model.vocab_size=300"]).model.vocab_size == 300
    assert "documents" not in capsys.readouterr().out
    prefix = run.data.prefix
    for name in (prefix, f"{prefix}.idx", f"{prefix}.bin", str(Path(prefix).absolute())):
        assert (
            Path(command_line.resolved_settings(["small", f"data={name}"]).data.prefix).resolve()
            == Path(prefix).resolve()
        )
    assert command_line.resolved_settings(["small", f"data={{prefix: {prefix}}}"]).data.prefix == prefix
    assert len([*Path("runs/datasets").iterdir()]) == 1


def test_a_text_takes_the_place_of_the_data_of_a_settings_file(here):
    Path("mine.yaml").write_text("data: {train: [a], valid: [b], validation: [c=c]}\nbudget: {steps: 1}\n")
    run = command_line.resolved_settings(["mine.yaml", "data=text.jsonl"])
    assert run.data.train == run.data.valid == run.data.validation == []
    assert Path(f"{run.data.prefix}.idx").exists()


@pytest.mark.parametrize(
    "words, said",
    {
        "data=nowhere.txt": r"there is no such text, and no dataset nowhere\.txt\.idx; looked in",
        "data=nowhere*.txt": "matches no file",
        "data=": "data is empty",
        "data=empty.txt": "no documents in empty.txt",
        "tokenizer=bytes": "has no effect without data=",
        "data=text.jsonl tokenizer=gpt2": "must be 'bytes', a tokenizer.json, a sentencepiece .model file, or package",
        "data=text.jsonl tokenizer=nowhere.json": "nowhere.json does not exist",
        "data=text.jsonl tokenizer=nowhere:Tok": "nowhere",
        "data=text.jsonl data.prefix=x": "data=text.jsonl and data.prefix both select the data",
        "data=text.jsonl data.blend=[x]": "data=text.jsonl and data.blend both select the data",
        "data=text.jsonl modle.layers=1": "Did you mean 'model.layers'",
        "data=text.jsonl out=text.jsonl": "run directory text.jsonl is a file",
        "data=text.jsonl out=full/run": "folder of datasets full/datasets/.* cannot be written",
        "data=text.jsonl budget.steps=null budget.epochs=null": "no budget",
        "data=text.jsonl parallel.tensor=2": "parallel.tensor=2",
    }.items(),
)
def test_what_cannot_train_is_refused_before_anything_is_written(here, words, said):
    Path("empty.txt").touch()
    Path("full").mkdir()
    Path("full/datasets").touch()
    before = sorted(here.rglob("*"))
    with pytest.raises(ConfigError, match=said):
        cli.function("train")([*TRAIN, *words.split()])
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("number, ended", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_leaves_no_part_of_a_dataset(number, ended, here, monkeypatch):
    monkeypatch.setattr(Interrupted, "number", number)
    before = sorted(here.rglob("*"))
    with preemption.handling(preemption.StartSignals()):  # as in a process of hpclm train
        with pytest.raises(ended):
            command_line.resolved_settings(["small", "data=text.jsonl", f"tokenizer={__name__}:Interrupted"])
        assert isinstance(signal.getsignal(number), preemption.StartSignals)
    assert sorted(here.rglob("*")) == before


def test_of_two_runs_that_start_at_once_one_uses_the_dataset_of_the_other(here):
    run = command_line.resolved_settings(["small", "data=text.jsonl", f"tokenizer={__name__}:Overtaken"])
    assert Overtaken.others == 0 and Path(f"{run.data.prefix}.idx").exists()


def test_of_several_ranks_none_tokenizes(here, monkeypatch):
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    first = "2 processes cannot tokenize .* hpclm preprocess --input text.jsonl --output-prefix runs/datasets/text .* hpclm submit"
    with pytest.raises(ConfigError, match=first):
        cli.function("train")([*TRAIN, "data=text.jsonl"])
    assert not Path("runs").exists()
    written = command_line.resolved_settings([*TRAIN, "data=text.jsonl"])
    assert command_line.resolved_settings([*TRAIN, "data=text.jsonl"], [], process.check_before_dataset) == written


def test_a_dry_run_writes_nothing_and_says_what_becomes_of_the_text(here, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/bin")
    before = sorted(here.rglob("*"))
    words = [*TRAIN, "data=text.jsonl", "--cluster", "slurm", "--dry-run"]
    assert cli.function("submit")(words) == 0
    shown = capsys.readouterr()
    assert "the text of data= is first tokenized into" in shown.err and "#SBATCH" in shown.out
    assert sorted(here.rglob("*")) == before
    with pytest.raises(ConfigError, match=r"model\.attention\.heads=2 must be a multiple of parallel\.tensor=3"):
        cli.function("submit")([*words, "--gpus", "3", "parallel.tensor=3"])
    with pytest.raises(ConfigError, match=r"model\.attention\.heads=2 must be a multiple of parallel\.tensor=3"):
        cli.function("submit")([*words[:-1], "--gpus", "3", "parallel.tensor=3"])
    assert sorted(here.rglob("*")) == before


def test_a_settings_file_with_a_text_says_where_it_is_given(here):
    Path("mine.yaml").write_text("data: text.jsonl\nbudget: {steps: 1}\n")
    with pytest.raises(ConfigError, match=r"data='text\.jsonl' must be a section.*command line of hpclm train"):
        command_line.resolved_settings(["mine.yaml"])


@pytest.mark.whole
def test_the_same_command_continues_the_run(here):
    command = ["train", *TRAIN, "data=text.jsonl", "out=runs/a"]
    assert run_hpclm(*command, cwd=here).returncode == 0
    again = run_hpclm(*command, "budget.steps=2", cwd=here)
    assert again.returncode == 0 and "resumes from step 1" in again.stderr and "documents" not in again.stdout

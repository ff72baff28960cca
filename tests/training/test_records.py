"""What an attempt records of itself, and says of the one before."""

import logging
from pathlib import Path

import pytest

from hpclm import config
from hpclm.config import DataConfig
from hpclm.config.data import absolute
from hpclm.node.job import OwnJob
from hpclm.training import records
from tests.events import note


def test_paths_of_the_data_are_recorded_so_that_they_mean_the_same_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = dict(tokenizer="json", tokenizer_files=["t"])
    data = DataConfig(blend=["0.3", "a", "0.7", "/b"], validation=["x=c"], index_cache="i", **tokenizer)
    whole = absolute(data)
    assert whole.blend == ["0.3", f"{tmp_path}/a", "0.7", "/b"] and whole.validation == [f"x={tmp_path}/c"]
    assert (whole.prefix, whole.index_cache, whole.tokenizer_files) == (None, f"{tmp_path}/i", [f"{tmp_path}/t"])
    split = absolute(DataConfig(train=["a"], valid=["2", "b"], test=["c"]))
    assert (split.train, split.valid, split.test) == ([f"{tmp_path}/a"], ["2", f"{tmp_path}/b"], [f"{tmp_path}/c"])
    assert absolute(DataConfig(prefix="p")).prefix == f"{tmp_path}/p"


@pytest.mark.parametrize(
    "before, line, change",
    [
        ({"digest": "a", "git": "1"}, {"digest": "b", "git": "2"}, "git 1, now 2"),
        ({"digest": "a", "git": "1"}, {"digest": "b", "git": "1"}, "files have changed, at git 1"),
        ({"digest": "a", "git": None}, {"digest": "b", "git": None}, "files have changed"),
        ({"digest": "a", "git": "1"}, {"digest": "a", "git": "2"}, None),
        ({}, {"digest": "b", "git": "2"}, None),
    ],
)
def test_other_code_than_that_of_the_last_attempt_is_told(before, line, change, caplog):
    records.warn_of_other_code(before, line)
    begin = "the code is not the one that the last attempt ran"
    assert [text.partition(";")[0] for text in caplog.messages] == [f"{begin}: {change}"] * (change is not None)


@pytest.mark.parametrize(
    "step, job, left",
    [
        (5, OwnJob("Slurm", "7", 1), None),  # the start before has gone back to it
        (5, OwnJob("Slurm", "7", 0), 5),
        (5, OwnJob("Slurm", "8", 1), 5),
        (6, OwnJob("Slurm", "7", 1), 6),
        (5, None, 5),
        (None, OwnJob("Slurm", "7", 1), None),
    ],
)
def test_a_job_goes_back_once_however_often_it_is_started(step, job, left, tmp_path):
    note(tmp_path, "began", back_to=5, job_id="7", restart=0)
    assert records.requested_step(tmp_path, step, job or OwnJob()) == left


@pytest.mark.parametrize("step", [0, 5])
def test_settings_that_have_changed_are_told_with_what_they_were_and_those_of_the_first_step_warned_of(
    step, tmp_path, caplog
):
    for name, words in {
        "old.yaml": ["optim.lr=1e-3", "data.tokenizer_files=[t]"],
        "config.yaml": ["optim.lr=2e-3", "data.tokenizer_files=[../a/t]", "model.init_std=0.1", "stop_at=7"],
    }.items():
        run = config.load(None, ["data.tokenizer=json", "data.prefix=/p", "budget.steps=9", *words])
        config.dump(run, tmp_path / name)
    last, line = {"config": "old.yaml", "folder": "/a"}, {"config": "config.yaml", "folder": "/b"}
    with caplog.at_level(logging.INFO):
        records.log_changes(tmp_path, last, line, step)
    told, *warned = caplog.messages
    assert told == "settings have changed since the last attempt: " + ", ".join(
        ["stop_at=7 (was null)", "model.init_std=0.1 (was 0.02)", "optim.lr=0.002 (was 0.001)"]
    )
    idle = "model.init_std=0.1 has no effect: the run resumes from step 5 and restores its state"
    assert warned == [idle] * (step == 5)


def test_paths_are_compared_part_by_part_from_the_folder_of_their_attempt():
    folder = Path("/a")
    assert records._from_folder(folder, "job.mounts", ["x:/y"]) == [["/a/x", "/y"]]
    assert records._from_folder(folder, "data.prefix", "../p") == ["/p"]
    assert records._from_folder(folder, "optim.lr", 0.1) == 0.1

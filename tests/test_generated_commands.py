"""Commands that hpclm writes, on the screen and into files, work as they are typed where it was called."""

import os
import re
import shlex

import pytest

from tests.forks import Hpclm, hpclm
from tests.runs import until

TEXT = "".join(
    f'{{"text": "Story {i}: once upon a time there was a number, and it was {i * i}."}}\n' for i in range(200)
)
SMALL = ["model.layers=1", "model.hidden=32", "model.attention.heads=2", "model.context=16", "evaluate.batches=1"]
SHORT = [*SMALL, "batch.global_size=4", "budget={steps: 6}", "evaluate.every=0", "checkpoint.every=2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder where people work on one machine, whose commands start runs on it."""
    folder = tmp_path_factory.mktemp("a place")
    (folder / "stories.jsonl").write_text(TEXT)
    (folder / "site.yaml").write_text("job: {cluster: local}\n")
    return folder


@pytest.fixture
def typed(place, monkeypatch):
    """Type a command in that folder, and see that it ends with 0; what it says."""
    monkeypatch.setenv("HPCLM_SITE", str(place / "site.yaml"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def command(*words, check=0):
        done = hpclm(*words, cwd=place, check=check)
        return done.stdout + done.stderr

    return command


def commands(text):
    """The commands in a text, as words without hpclm."""
    found = (part for line in text.splitlines() for part in re.findall(r"(?:^|[ (])hpclm ([a-z].*)", line))
    return [
        shlex.split(re.split(r" · | {2,}hpclm |; ", command)[0])
        for part in found
        for command in part.split(" · hpclm ")
    ]


@pytest.fixture(scope="module")
def story(place):
    """What the way from a text to a model says, each command being the one that the last had named."""
    env = {**os.environ, "HPCLM_SITE": str(place / "site.yaml"), "OMP_NUM_THREADS": "1"}
    tokenizer = ["train-tokenizer", "--input", "stories.jsonl", "--output", "my files/t.json", "--vocab-size", "300"]
    said = [hpclm(*tokenizer, cwd=place, env=env, check=0)]
    [words] = commands(said[-1].stdout)
    assert words[0] == "train"
    said.append(hpclm(*words, *SHORT, cwd=place, env=env, check=0))
    return [done.stdout + done.stderr for done in said]


def test_each_step_names_the_next_one_up_to_the_text_of_the_model(story, typed):
    named = commands(story[-1].splitlines()[-1])
    assert [words[0] for words in named] == ["report", "generate"]
    assert "report.html" in typed(*named[0])
    assert typed(*named[1], "--tokens", "2").startswith("...")
    [page] = commands(typed("status", "small"))
    assert page == ["report", "runs/small"]


def test_a_run_that_stopped_names_the_command_that_continues_it(story, typed, place):
    typed("train", "runs/small/config.yaml", "out=runs/half", "stop_at=4")
    looked, continued = commands(typed("status", "half"))
    assert looked[0] == "logs" and "stopped at step 4" in typed(*looked)
    refused = typed("resume", "half", check=64)
    assert commands(refused) == [continued] == [["resume", "runs/half", "stop_at=null"]]
    assert "done at step 6" in typed(*continued)


def test_a_run_that_was_interrupted_names_the_command_that_continues_it(story, typed, place):
    longer = ["out=runs/long", "budget.steps=100000"]
    with Hpclm("train", "runs/small/config.yaml", *longer, cwd=place) as run:
        until(lambda: (place / "runs/long/checkpoints/step-00000002").exists())
        said = commands(typed("cancel", "long"))
        assert run.wait() == 85
    assert said == [["resume", "runs/long"]]
    assert said[0] in commands(typed("status", "long"))
    with Hpclm(*said[0], cwd=place, merged=True) as run:
        until(lambda: "resumes from step" in (place / "runs/long/log.txt").read_text())


def test_an_import_names_a_command_that_uses_it_and_a_card_has_code_that_runs_here(
    story, typed, place, monkeypatch, capsys
):
    pytest.importorskip("transformers")
    typed("convert", "runs/small", "hf models/mine")
    [words] = commands(typed("convert", "hf models/mine", "runs/back"))
    assert words[:2] == ["generate", "runs/back"]
    assert typed(*words, "--tokens", "2").startswith("...")
    [code] = re.findall(r"```python\n(.*?)```", (place / "hf models/mine/README.md").read_text(), re.S)
    monkeypatch.chdir(place)
    monkeypatch.setattr("builtins.input", lambda _: "Story 1")
    exec(code, {})
    assert capsys.readouterr().out.startswith("Story 1")


def test_a_dataset_names_a_command_that_trains_on_it_and_one_that_adds_missing_hashes(story, typed, place):
    made = typed(
        "preprocess", "--input", "stories.jsonl", "--output-prefix", "DATASET", "--tokenizer", "bytes", "--append-eod"
    )
    [words] = commands(made)
    typed(*words, *SHORT, "out=runs/of-dataset")
    for end in ("bin", "idx"):
        (place / f"bare.{end}").write_bytes((place / f"DATASET_text_document.{end}").read_bytes())
    verified, inspected = (commands(typed("data", verb, "bare")) for verb in ("verify", "inspect"))
    assert verified == inspected == [["data", "verify", "--record", "bare"]]
    typed(*verified[0])
    assert "the content has not changed since" in typed("data", "verify", "bare")


def test_the_last_words_of_a_run_name_no_command_that_would_be_refused(typed, place):
    assert [words[0] for words in commands(typed("train", "debug", "budget.steps=2"))] == ["report"]

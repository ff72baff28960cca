"""~ and $NAME in the options and arguments that hold paths, as in settings; and what hpclm passes to itself stays what it is."""

from pathlib import Path

import pytest

import hpclm
from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.config import compose, load
from hpclm.launch import container, resume, setup
from hpclm.node import environment
from hpclm.rundir import runs

COMMANDS = [
    "train {}",
    "train out={} data.source=synthetic budget.steps=1",
    "submit {} --dry-run",
    "submit --config {} --dry-run",
    "submit --hostfile {} --dry-run",
    "submit --exclude-bad {} --dry-run",
    "submit --sweep out={},b --dry-run",
    "planner {}",
    "config {}",
    *(f"{verb} {{}}" for verb in ("status", "logs", "report", "cancel", "checkpoints", "resume", "sync", "top")),
    *("request {} save", "request {} stop", "status --runs {}", "report x --output {}", "resume x {}"),
    *("evaluate {}", "evaluate x --text {}", "evaluate x --data {}", "evaluate x --tasks a --tasks-path {}"),
    *("generate {}", "generate x --prompts {}"),
    *("convert {} out", "convert x {}"),
    *(
        "data inspect {}",
        "data inspect x --tokenizer {}",
        "data inspect x --tokenizer-files {}",
    ),
    *(
        "data verify {}",
        "data merge {} a b",
        "data merge out a {}",
        "data convert {} out --layout fairseq",
    ),
    *(
        "preprocess --input {} --output-prefix p --tokenizer bytes",
        "preprocess --input x --output-prefix {} --tokenizer bytes",
    ),
    *(
        "preprocess --input x --output-prefix p --tokenizer {}",
        "preprocess --tokenizer-files {}",
        "preprocess --chat {}",
    ),
    *(
        "preprocess --chat-template {}",
        "preprocess --vocab-file {}",
        "preprocess --merge-file {}",
        "preprocess --destdir {}",
    ),
    *(
        "preprocess --tokenizer-model {}",
        "preprocess --trainpref {}",
        "preprocess --validpref a,{}",
        "preprocess --testpref {}",
    ),
    *("preprocess --srcdict {}", "train-tokenizer --input {} --output t.json", "train-tokenizer --input x --output {}"),
]


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DATA", str(tmp_path / "data"))
    monkeypatch.delenv("UNSET_NAME", raising=False)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def said(words, capfd):
    try:
        code = cli.main(words)
    except SystemExit as end:
        code = end.code
    return code, "".join(capfd.readouterr())


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unset_variable_in_a_path_is_refused_by_name_before_anything_is_written(command, surroundings, capfd):
    code, text = said([word.format("$UNSET_NAME/x") for word in command.split()], capfd)
    assert code in (2, 64) and "the environment variable UNSET_NAME is not set here" in text, text
    assert not list((surroundings / "here").iterdir())


@pytest.mark.parametrize("typed, meant", {"~/no": "home/no", "$DATA/no": "data/no", "./~/no": "here/~/no"}.items())
@pytest.mark.parametrize("command", ["train {}", "data inspect {}", "data verify {}", "convert {} out"])
def test_a_path_that_does_not_exist_is_named_as_it_was_understood(command, typed, meant, surroundings, capfd):
    code, text = said([word.format(typed) for word in command.split()], capfd)
    assert code == 64 and str(surroundings / meant) in text, text


def test_preprocess_writes_to_the_home_folder_and_train_and_submit_read_there(surroundings, capfd):
    home = surroundings / "home"
    home.mkdir()
    (home / "text.txt").write_text("a b c\n" * 50)
    words = [
        "preprocess",
        "--input",
        "~/text.txt",
        "--output-prefix",
        "$HOME/p",
        "--tokenizer",
        "bytes",
        "--append-eod",
    ]
    assert said(words, capfd)[0] == 0
    assert (home / "p_text_document.idx").is_file() and not list((surroundings / "here").iterdir())
    assert load(None, ["data.prefix=~/p_text_document"]).data.prefix == str(home / "p_text_document")


def test_the_script_of_a_job_has_the_paths_that_were_meant(surroundings):
    words = ["job.container=~/i.sif", "job.mounts=['$DATA:/data']", "out=~/runs/x"]
    run = load(None, words)
    script = " ".join(container.words(run))
    assert f"{surroundings}/home/i.sif" in script and f"{surroundings}/data:/data" in script and "~" not in script
    assert f"conda activate {surroundings}/home/e " in "\n".join(
        setup.lines(load(None, ["job.conda=~/e"]), Path("c.yaml"))
    )


@pytest.mark.parametrize("name", ["~", "$DATA", "${DATA}", "a b"])
def test_a_run_in_a_folder_of_such_a_name_can_be_continued(name, surroundings):
    folder = surroundings / "here" / name
    folder.mkdir()
    compose.dump(load(None, ["name=x"]), folder / "config.yaml")
    words = resume.words(runs.read_run(folder), [])
    settings = [word for word in words if not word.startswith("--") and ("/" in word or "=" in word)]
    assert environment.settings_with_site(settings).out == str(folder)
    assert hpclm.open(f"./{name}".replace("$", "\\$")).path == folder
    *_, word = setup.supervisor(load(None, []).job, folder / "config.yaml")
    assert environment.settings_with_site([word]).name == "x"


def test_the_site_file_may_be_in_the_home_folder(surroundings):
    assert environment.site_file({"HPCLM_SITE": "~/site.yaml"}) == surroundings / "home/site.yaml"
    with pytest.raises(ConfigError, match="UNSET_NAME"):
        environment.site_file({"HPCLM_SITE": "$UNSET_NAME/site.yaml"})

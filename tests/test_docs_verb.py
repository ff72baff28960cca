"""hpclm docs and hpclm help: what they show, and what they suggest."""

import re

import pytest

from hpclm import cli, parser, shipped
from hpclm.config import documentation, fields
from tests.runs import exit_code


def shown(capsys, *words, code=0):
    assert cli.main(words) == code
    out, err = capsys.readouterr()
    return err if code else out


def test_every_page_is_listed_and_shown(capsys):
    listed = shown(capsys, "docs").splitlines()
    for name, path in shipped.pages().items():
        if not name.startswith("index"):
            assert any(re.match(rf"{re.escape(name)}  +\S", line) for line in listed), name
            assert shown(capsys, "docs", name) == path.read_text()
    assert shown(capsys, "docs", "docs/recipes/fairseq.md#data") == shown(capsys, "docs", "fairseq")


def test_a_setting_and_a_section_are_explained_as_in_the_reference(capsys):
    keys, rows = fields.keys(), documentation.reference().splitlines()
    for key in keys[::20]:
        head, kind, *text = shown(capsys, "docs", key).splitlines()
        default = kind.partition("; default: ")[2]
        row = next(line for line in rows if line.startswith(f"- `{key}={default}`"))
        assert head == key and row.endswith(f": {' '.join(map(str.strip, text))}"), key
    assert shown(capsys, "docs", "job.options.mail-type") == shown(capsys, "docs", "job.options")
    assert shown(capsys, "docs", "log") == shown(capsys, "docs", "log.") == "\n".join(
        shown(capsys, "docs", key) for key in keys if key.startswith("log.")
    )  # fmt: skip


@pytest.mark.parametrize(
    "topic, said",
    [
        ("relibility", "Did you mean 'reliability'?"),
        ("learning_rate", "Here it is optim.lr."),
        ("optim.lrr", "Here it is optim.lr."),
        ("status", "hpclm help status shows the options"),
        ("xyzzy", "hpclm docs lists the pages.\n"),
    ],
)
def test_an_unknown_topic_gets_a_suggestion(topic, said, capsys):
    assert said in shown(capsys, "docs", topic, code=64)


def test_another_text_names_the_pages_that_have_it(capsys):
    [_, named] = shown(capsys, "docs", "oom", code=64).split("pages with this text: ")
    assert "troubleshooting" in named and "data" not in named  # which has "room"


def test_help_is_the_same_as_the_option(capsys):
    assert shown(capsys, "help") == shown(capsys, "--help") == shown(capsys)
    for words in (["help", "status"], ["status", "--help"]):
        with pytest.raises(SystemExit):
            cli.main(words)
    assert len({*capsys.readouterr().out.split("usage: ")} - {""}) == 1
    assert "Did you mean 'status'?" in shown(capsys, "help", "statsu", code=2)


def test_help_groups_the_verbs(capsys):
    lines = shown(capsys, "help").splitlines()
    heads = [line.split()[0] for line in lines if re.match(r"[a-z]+ +[a-z-]+  +[a-z]", line)]
    assert heads == ["start", "watch", "change", "data", "models", "help"]
    assert max(map(len, lines)) <= 120


def test_stop_and_cancel_differ_in_one_line_that_help_and_the_page_share(capsys):
    for verb in ("request", "cancel"):
        with pytest.raises(SystemExit):
            cli.main([verb, "--help"])
        assert parser.STOP_OR_CANCEL in " ".join(capsys.readouterr().out.split())
    assert parser.STOP_OR_CANCEL in " ".join(shown(capsys, "docs", "commands").replace("`", "").split())


def test_a_request_is_the_last_word(capsys):
    assert exit_code(["request", "stop", "runs/x"]) == 2
    assert "the run comes first: hpclm request RUN stop\n" in capsys.readouterr().err

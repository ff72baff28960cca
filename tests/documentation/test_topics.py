"""hpclm docs and hpclm help: what they show, and what they suggest."""

import re

import pytest

from hpclm import cli, parser
from hpclm.base import shipped
from hpclm.config import fields
from hpclm.documentation import search, topics
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
    keys, rows = fields.keys(), topics.reference().splitlines()
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
        ("optim.lrr", "Did you mean 'optim.lr'?"),
        ("xyzzy", "no page or setting has 'xyzzy'; hpclm docs lists the pages.\n"),
    ],
)
def test_an_unknown_topic_gets_a_suggestion(topic, said, capsys):
    assert said in shown(capsys, "docs", topic, code=64)


FOUND = {
    # words: the pages that come first, and a line that is shown
    ("oom",): (["troubleshooting"], "`out of memory` (93), OOM | use a setting"),
    ("deepspeed", "json"): (["migrating"], "A DeepSpeed JSON"),
    ("deepspeed json",): (["migrating"], "A DeepSpeed JSON"),
    ("silent", "corruption"): (["reliability"], "Silent corruption"),
    ("tokenizers",): (["data"], "Tokenizers"),
    ("wandb",): (["sinks"], "pip install 'hpclm[wandb]'"),
    ("检查点",): (["tutorial.zh"], "检查点"),
    ("learning_rate",): ([], "learning_rate is here: optim.lr"),
    ("callback",): (["your-own-code"], "settings (hpclm docs train.callbacks explains it)"),
    ("early stopping",): (["your-own-code"], "A callback, early stopping"),
    ("freeze",): (["finetune"], "Freeze weights"),
    ("ema",): (["generate"], "keeps an exponential moving average of the weights (EMA)"),
    ("status",): (["commands"], "hpclm help status shows the options of this command."),
    ("momentum",): (
        [],
        "settings (hpclm docs optim.momentum explains it)\n    optim.momentum  Muon's momentum.",
    ),
}


@pytest.mark.parametrize("words", FOUND, ids=" ".join)
def test_words_are_found_in_pages_the_best_first(words, capsys):
    pages, line = FOUND[words]
    text = shown(capsys, "docs", *words)
    assert line in text and max(map(len, text.splitlines())) <= 220
    listed = re.findall(r"^(\S+): .*; hpclm docs (\S+)\)$", text, re.MULTILINE)
    assert all(name == opens for name, opens in listed) and [name for name, _ in listed][: len(pages)] == pages
    for name, _ in listed[:1]:
        assert shown(capsys, "docs", name) == shipped.pages()[name].read_text()


def test_words_are_weighed_title_then_headings_then_text(tmp_path):
    texts = {
        "text": "# A\n" + "save save save\n",
        "heading": "# B\n## To save\nx\n",
        "title": "# Save\nx\n",
        "part": "# C\nunsaved\n",  # no word begins like it
        "both": "# D\n```\n# no heading: save now\n```\n",
    }
    pages = {}
    for name, text in texts.items():
        pages[name] = tmp_path / name
        pages[name].write_text(text)
    assert [place.page for place in search.places(["save"], pages)] == ["title", "heading", "text", "both"]
    [both] = search.places(["save", "now"], pages)
    assert (both.page, both.heading, both.line) == ("both", "", "no heading: save now")
    assert search.places(["nothing"], pages) == []


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

"""The documentation: its commands are understood, its messages exist, and the tutorial works as typed."""

import ast
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from hpclm import cli, config
from hpclm.base import shipped
from hpclm.commands import submit
from hpclm.config.fields import keys
from hpclm.config.settings import is_override
from hpclm.launch import arguments
from hpclm.node import failures
from hpclm.parser import Parser
from hpclm.preprocess import command_line
from tests.events import began
from tests.runs import ROOT

PAGES = [ROOT / "README.md", ROOT / "README.zh.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = {"|", ">", "&&"}


def commands(path):
    """The lines of a page's bash blocks, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", path.read_text(), re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in (re.sub(r"\s+# .*", "", line) for line in lines) if line and not line.startswith("#")]


def assert_printed(path, output):
    """The ``console`` blocks of a page are in the output of its commands, in this order; numbers and ``...`` stand for any."""
    at = 0
    for block in re.findall(r"```console\n(.*?)```", path.read_text(), re.S):
        for line in filter(lambda line: line != "...", block.splitlines()):
            literal, *pairs = re.split(r"(\d[\d.,:]*|\.\.\.)", line)
            anything = [".*" if part == "..." else r"\d[\d.,:e+-]*" for part in pairs[::2]]
            pattern = re.escape(literal) + "".join(a + re.escape(b) for a, b in zip(anything, pairs[1::2], strict=True))
            found = re.compile(pattern).search(output, at)
            assert found, f"{line!r} is not printed after {output[max(at - 500, 0) : at]!r}"
            at = found.end()


def verbs(path):
    """The words of each command of hpclm on a page: verb and arguments."""
    for line in commands(path):
        words = shlex.split(line.removesuffix(" ...").replace("$(", "(").replace("...", "x"), comments=True)
        if "hpclm" in words:  # srun, a pipe or variables may come before it
            after = words[words.index("hpclm") + 1 :]
            yield line, after[: next((at for at, word in enumerate(after) if word in SHELL), None)]
        elif words[:2] == ["python", "-m"] and words[2].startswith("hpclm."):
            yield line, [words[2].removeprefix("hpclm."), *words[3:]]
        elif words[:2] == ["python", "tools/preprocess_data.py"]:
            yield line, ["preprocess", *words[2:]]


COMMANDS = [(path.relative_to(ROOT).as_posix(), line, words) for path in PAGES for line, words in verbs(path)]


@pytest.fixture(autouse=True)
def variables_of_the_reader(monkeypatch):
    """The variables in commands, which a shell would replace before hpclm sees them."""
    for _, line, _ in COMMANDS:
        for name in re.findall(r"\$\{?([A-Za-z_]\w*)", line):
            monkeypatch.setenv(name, os.environ.get(name) or f"/{name}")


QUOTED = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|\$\{\w+[^}]*\}|\$[?*]""")
SETTING = re.compile(rf"(?<![\w.'\"])(?:{'|'.join(map(re.escape, keys()))})=[^\s`]*")


def refused_by_zsh(command):
    """The words of a command that zsh would take for patterns; a pattern of files, which it replaces by their names, is meant."""
    words = QUOTED.sub("x", command).split()
    return [word for word in words if re.search(r"[][{}?]|=.*\*", word)]


def texts(path):
    """The texts in a file of Python, with X for what is filled in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_are_quoted_for_zsh(path):
    typed = commands(path)
    if path.name != "settings.md":  # a list of defaults
        spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", path.read_text(), flags=re.S))
        typed += [span for span in spans if span.startswith("hpclm ") or SETTING.search(span)]
    assert [word for command in typed for word in refused_by_zsh(command)] == []


def test_the_settings_in_messages_and_help_are_quoted_for_zsh():
    files = sorted((ROOT / "hpclm").rglob("*.py"))
    advised = [
        (path.name, text, word)
        for path in files
        for text in texts(path)
        for word in SETTING.findall(text)
        if word != text
    ]
    assert len(advised) > 100
    assert [(name, text) for name, text, word in advised if refused_by_zsh(word)] == []


def test_what_zsh_refuses_is_known():
    for word in ("log.sinks=[wandb]", "job.env={}", "x=a*", "data.valid=[$folder/valid]", "what?"):
        assert refused_by_zsh(f"hpclm train {word}") == [word]
        assert not refused_by_zsh(f"hpclm train '{word}' {'${HOME}'} configs/*.yaml")


class Understood(Exception):
    """The verb's parser has taken the words."""


def of_first_run(words):
    """The command without the options of a sweep, with the settings of its first run."""
    options = ("--sweep", "--parallel")
    swept = [value for option, value in pairwise(words) if option == "--sweep"]
    kept = [word for before, word in pairwise(["", *words]) if word not in options and before not in options]
    return [*kept, *arguments.variants(swept)[0].overrides]


@pytest.mark.parametrize("page, line, words", COMMANDS, ids=[f"{page}-{words[0]}" for page, _, words in COMMANDS])
def test_a_command_in_the_documentation_is_understood(page, line, words, monkeypatch, tmp_path, capsys):
    def stop(parse):
        def parsed(self, *args, **kwargs):
            parse(self, *args, **kwargs)
            raise Understood

        return parsed

    if words in (["--version"], ["help"]):
        assert cli.main(words) == 0
        return
    with monkeypatch.context() as patch:
        patch.setattr(Parser, "values", stop(Parser.values))
        patch.setattr(failures, "run", lambda verb, argv: verb(argv))
        with pytest.raises(Understood):
            cli.main(words)
    words = of_first_run(words)
    settings = [word for word in words if is_override(word) and not command_line.names_data([word])]
    settings = [word for word in settings if not word.startswith("tokenizer=")]
    presets = [word for word in words[1:] if word.removeprefix("configs/").removesuffix(".yaml") in shipped.presets()]
    if words[0] in ("train", "submit", "resume", "planner", "config") and (settings or presets):
        config.load(presets[0] if presets else None, settings)


STARTS = [(page, words) for page, _, words in COMMANDS if words[0] in ("train", "submit")]
STARTS = [(page, words) for page, words in STARTS if not words[1].startswith("runs/")]  # which has its settings


@pytest.mark.parametrize("page, words", STARTS, ids=[f"{page}-{' '.join(words)}" for page, words in STARTS])
def test_a_run_of_the_documentation_lacks_nothing_and_its_batch_can_be_divided(page, words, monkeypatch, tmp_path):
    """On as many processes as it says."""
    monkeypatch.chdir(ROOT)
    if command_line.names_data(words):
        monkeypatch.chdir(tmp_path)
        Path("text.txt").write_text("To be, or not to be\n" * 200)
        words = [re.sub("^tokenizer=.*", "tokenizer=bytes", word) for word in words]
    if words[0] == "submit":
        run = arguments.compose(submit.parser().call(submit.request, words[1:]), arguments.Variant())
    else:
        run, _ = command_line.planned(of_first_run(words)[1:])
    assert run.missing() == []
    run.plan(run.job.nodes * run.job.gpus)


@pytest.mark.parametrize("page", ["fairseq", "megatron-deepspeed"])
def test_the_preprocessing_of_a_recipe_works_as_typed(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("head.txt", "train.txt"):
        Path(name).write_text("to be or not to be\n" * 30)
    if page == "fairseq":  # Chinese, of so many characters that the vocabulary is not too large
        draw = random.Random(1)
        lines = ["".join(chr(0x4E00 + draw.randrange(4000)) for _ in range(20)) for _ in range(2000)]
        Path("train.txt").write_text("\n".join(lines))
        Path("valid.txt").write_text("\n".join(lines[:50]))
    Path("vocab.json").write_text(json.dumps({"<unk>": 0, "<|endoftext|>": 1, "to": 2, "be": 3, "or": 4, "not": 5}))
    for words in (words for _, words in verbs(ROOT / "docs" / "recipes" / f"{page}.md")):
        if words[0] == "train-tokenizer":
            assert cli.main(words) == 0
        elif words[0] == "preprocess":
            assert cli.main([*words, "--workers", "1"]) == 0
            assert "next: " in capsys.readouterr().out.splitlines()[-1]


def texts_of_the_source():
    """Every text in hpclm's sources, with … where a value is inserted."""
    for path in (ROOT / "hpclm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"%[-.\d]*[sdf]", "…", node.value)


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_program():
    rows = re.findall(r"^\| (`.*?) \| ", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    messages = [message for row in rows for message in re.findall(r"`(.*?)`", row)]
    source = "\n".join(texts_of_the_source()) + "\nout of memory"  # which is PyTorch's
    assert len(messages) > 12
    for message in messages:
        for piece in (part.strip(" .;:") for part in message.split("...")):
            assert piece in source, f"{message!r}: the program never says {piece!r}"


CHINESE = [path for path in PAGES if path.name.endswith(".zh.md")]


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: page.name)
def test_a_chinese_page_has_the_commands_of_the_english_one(page):
    english = [without_text(line) for line in commands(page.with_name(page.name.replace(".zh", "")))]
    assert english and english == [without_text(line) for line in commands(page)]


def test_the_chinese_readme_leads_to_every_page_of_the_english_one():
    english, chinese = (
        {link.replace(".zh.md", ".md") for link in re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text())}
        for name in ("README.md", "README.zh.md")
    )
    assert len(english) > 20 and english <= chinese


@pytest.mark.parametrize("page", CHINESE, ids=lambda page: page.name)
def test_chinese_lines_break_after_punctuation_only(page):
    """A browser shows the break as a space, which is wrong within a phrase."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    lines = re.findall(r"^([^|\n]+)\n(?=[^\s|#-])", text, re.M)
    assert [line for line in lines if line[-1] not in "。；：，、！？）…*"] == []


def without_text(line):
    """A command without the prompt for a model, which is in the language of the page."""
    return re.sub(r'--prompt "[^"]*"', "--prompt", line)


@pytest.mark.whole
def test_the_tutorial_works_as_typed(cluster, tmp_path):
    """In one shell, as a person types it; installing, and the cluster, are there already."""
    lines = commands(ROOT / "docs" / "tutorial.md")
    typed = [line for line in lines if not re.match(r"tools/setup|source|sudo|eval", line)]
    assert len(lines) - len(typed) == 5
    bin_folder = Path(sys.executable).parent
    (tmp_path / "home").mkdir()
    env = {
        **cluster.env,
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
    }
    script = "set -euo pipefail\n" + "".join(f"echo '$' {shlex.quote(line)}; {line}\n" for line in typed)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert_printed(ROOT / "docs" / "tutorial.md", done.stdout)
    assert len(began(tmp_path / "runs" / "again")) == 2 and shutil.which("hpclm", path=env["PATH"])
    assert (tmp_path / "runs" / "again" / "report.html").is_file()

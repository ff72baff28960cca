"""Completion in real shells: what a Tab makes of a line."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
from contextlib import suppress

import pytest

from hpclm import cli
from tests.rundir.test_runs import make
from tests.runs import PATIENCE

INIT = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(< "$SCRIPT")"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -U compinit; compinit -u -D; eval "$(< "$SCRIPT")"'),
    "zsh, from a file": (["zsh", "-f", "-i"], 'autoload -U compinit; compinit -u -D; source "$SCRIPT"'),
}
LINES = {  # typed, with <TAB>: the arguments that the program gets
    "gener<TAB> my-<TAB> --temp<TAB> 0": ["generate", "my-first-run", "--temperature", "0"],
    "train gpt2-124<TAB> opti<TAB>nonf<TAB>9 --fr<TAB> 3": [
        "train",
        "gpt2-124m",
        "optim.nonfinite_limit=9",
        "--from",
        "3",
    ],
    "submit --part<TAB> p --exclude-b<TAB> my-<TAB> recipes/bigs<TAB>": [
        "submit",
        "--partition",
        "p",
        "--exclude-bad",
        "my-first-run",
        "recipes/bigscience",
    ],
    "report my-<TAB> --runs other sec<TAB>": ["report", "my-first-run", "--runs", "other", "second run"],
    "status --runs other sec<TAB> lr<TAB>": ["status", "--runs", "other", "second run", "lr=3"],
    "resume my-<TAB> --parti<TAB> p optim.weight_dec<TAB>0": [
        "resume",
        "my-first-run",
        "--partition",
        "p",
        "optim.weight_decay=0",
    ],
    "reque<TAB> my-<TAB> sto<TAB> --wai<TAB> 1": ["request", "my-first-run", "stop", "--wait", "1"],
    "data insp<TAB> --tokenizer-f<TAB> tar<TAB>": ["data", "inspect", "--tokenizer-files", "target"],
    "convert my-<TAB> tar<TAB> --dt<TAB>b<TAB>": ["convert", "my-first-run", "target", "--dtype", "bf16"],
    "generate runs/my-<TAB>": ["generate", "runs/my-first-run"],
    "help preproc<TAB>": ["help", "preprocess"],
    "docs relia<TAB>": ["docs", "reliability"],
    "completion z<TAB>": ["completion", "zsh"],
}


@pytest.mark.parametrize("shell", INIT)
def test_a_tab_completes_verbs_options_runs_presets_settings_and_files(shell, tmp_path, capsys):
    command, init = INIT[shell]
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed")
    assert cli.main(["completion", command[0]]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    for folder in ("runs/my-first-run", "other/second run", "other/lr=3"):
        make(tmp_path / folder, config_yaml="name: x\n")
    (tmp_path / "target").mkdir()
    typed = [init, 'hpclm() { printf "<%s>" "$@"; echo .; }', *(f"hpclm {line}" for line in LINES), "exit"]
    outer, inner = pty.openpty()
    env = {**os.environ, "SCRIPT": "./script", "TERM": "dumb", "HOME": str(tmp_path), "INPUTRC": "/dev/null"}
    with subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=env, cwd=tmp_path) as process:
        os.close(inner)
        os.write(outer, "".join(f"{line}\n" for line in typed).replace("<TAB>", "\t").encode())
        said = b""
        with suppress(OSError):  # it has ended
            while select.select([outer], [], [], PATIENCE)[0]:
                said += os.read(outer, 1 << 16)
        process.kill()
    os.close(outer)
    got = [re.findall("<(.*?)/?>", line) for line in said.decode().splitlines() if line.endswith(">.")]
    assert got == [*LINES.values()], said.decode()[-3000:]


def test_without_shtab_the_extra_that_has_it_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 64
    assert "needs shtab, which is not installed: pip install 'hpclm[completion]'" in capsys.readouterr().err

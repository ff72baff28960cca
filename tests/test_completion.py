"""Completion in real shells: what a Tab makes of a line."""

import os
import pty
import re
import select
import shutil
import subprocess
from contextlib import suppress

import pytest

from hpclm import cli
from tests.rundir.test_runs import make
from tests.runs import PATIENCE

INIT = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'source "$SCRIPT"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -U compinit; compinit -u -D; source "$SCRIPT"'),
}
LINES = {  # typed, with <TAB>: the arguments that the program gets
    "gener<TAB> my-<TAB> --temp<TAB> 0": ["generate", "my-first-run", "--temperature", "0"],
    "train gpt2-124<TAB> opti<TAB>nonf<TAB>9 engine.prec<TAB>f<TAB>32": [
        "train",
        "gpt2-124m",
        "optim.nonfinite_limit=9",
        "engine.precision=fp32",
    ],
    "report --runs other sec<TAB>": ["report", "--runs", "other", "second run"],
    "resume my-<TAB> --parti<TAB> p": ["resume", "my-first-run", "--partition", "p"],
    "data insp<TAB> --hist<TAB> x": ["data", "inspect", "--histogram", "x"],
    "convert my-<TAB> tar<TAB> --dt<TAB>b<TAB>": ["convert", "my-first-run", "target", "--dtype", "bf16"],
    "help preproc<TAB>": ["help", "preprocess"],
    "docs relia<TAB>": ["docs", "reliability"],
    "completion z<TAB>": ["completion", "zsh"],
}


@pytest.mark.parametrize("shell", INIT)
def test_a_tab_completes_verbs_options_runs_presets_settings_and_values(shell, tmp_path, capsys):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    assert cli.main(["completion", shell]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    for folder in ("runs/my-first-run", "other/second run"):
        make(tmp_path / folder, config_yaml="name: x\n")
    (tmp_path / "target").mkdir()
    command, init = INIT[shell]
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

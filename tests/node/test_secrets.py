import json
import os
import shlex

import pytest

from hpclm.node.secrets import Redactor, is_secret, problems
from tests.runs import hpclm

ENV = {
    "HF_TOKEN": "hf_canary'12\"3\\",
    "WANDB_API_KEY": "wandb-canary",
    "MY_CREDENTIALS": "short",
    "SSH_PRIVATE_KEY": "-----BEGIN KEY-----\nAAAcanaryAAA\n-----END KEY-----",
    "http_proxy": "http://me:proxy-canary@proxy:3128",
    "TOKENIZERS_PARALLELISM": "false-positive",
    "KEY_FILE": "/etc/hostname",
    "PATH": "/usr/bin",
}
redact = Redactor(ENV)


@pytest.mark.parametrize("name", ["HF_TOKEN", "wandb_api_key", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "SLURM_JWT"])
def test_names_of_secrets_are_recognised_in_any_case(name):
    assert is_secret(name) and is_secret(name.swapcase())


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "tokens", "tokens_per_second", "tokenizer_files", "PATH"])
def test_common_names_with_token_are_no_secrets(name):
    assert not is_secret(name)


@pytest.mark.parametrize(
    "text",
    {
        "plain": ENV["HF_TOKEN"],
        "json": json.dumps({"x": ENV["HF_TOKEN"]}),
        "repr": repr({"x": ENV["HF_TOKEN"]}),
        "in a URL": "https://host/?token=hf_canary%2712%223%5C",
        "in a word": f"xx{ENV['WANDB_API_KEY']}yy",
        "a line of a key": "x\nAAAcanaryAAA\ny",
        "the password of a URL": "password proxy-canary",
        "a URL in no variable": "see https://me:other-canary@host/path",
        "a password with an @": "see https://me:p@canary@host/path",
        "a token in the place of the user": "https://ghp_canary0123456789abcdef@github.com/x",
    }.values(),
)
def test_a_secret_is_hidden_however_it_is_spelled(text):
    assert "canary" not in redact(text) and "***" in redact(text)


@pytest.mark.parametrize(
    "text", ["false-positive", "short of", "ssh://git@github.com/x", "/etc/hostname", "12:30 a@b", "tokens 12"]
)
def test_other_text_is_unchanged(text):
    assert redact(text) == text


@pytest.mark.parametrize(
    "words",
    [
        ["HF_TOKEN=canary"],
        ["--token", "canary"],
        ["--api-key=canary"],
        ["--export=ALL,HF_TOKEN=canary,X=1"],
        ["job.env={A: b, WANDB_API_KEY: canary}"],
        ["job.env.DB_PASSWORD=canary"],
        ["name=https://me:canary@host"],
    ],
)
def test_a_command_line_is_recorded_without_its_secrets(words):
    assert "canary" not in redact.command(words) and "***" in redact.command(words)


def test_settings_of_tokens_stay_on_a_command_line():
    words = ["budget.tokens=1000000", "data.tokenizer=json", "budget={tokens: 5}", "--tokenizer", "json", "a b"]
    assert shlex.split(redact.command(words)) == words


def test_settings_that_contain_a_secret_are_named_without_their_values():
    settings = {
        "name": "run",
        "budget": {"tokens": 5},
        "data": {"tokenizer": "json", "blend": ["1", "https://me:canary@host"]},
        "job": {"env": {"HF_TOKEN": "canary", "A": "b"}, "setup": [f"export X={ENV['WANDB_API_KEY']}"], "options": {}},
    }
    found = problems(settings, ENV)
    assert [problem.split()[0] for problem in found] == ["data.blend.1", "job.env.HF_TOKEN", "job.setup.0"]
    assert "canary" not in "".join(found) and "the password of a URL" in found[0] and "$WANDB_API_KEY" in found[2]


CANARIES = {"HF_TOKEN": "canary-hf-0123", "WANDB_API_KEY": "canary'wandb", "https_proxy": "http://u:canary-proxy@h:1"}

FAILING = """
import os
def schedule(position, length, optim):
    if position > 5:
        raise RuntimeError(f"cannot log in with {os.environ['HF_TOKEN']} at {os.environ['https_proxy']}")
    return 1.0
"""


def everything(folder):
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("fails", [False, True], ids=["that is done", "that fails with a traceback"])
def test_no_file_of_a_run_contains_a_secret(fails, tiny, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    env = os.environ | CANARIES | {"PYTHONPATH": str(tmp_path)}
    words = ["optim.schedule=failing:schedule"] if fails else []
    done = hpclm("train", *tiny("run", *words), env=env, cwd=tmp_path, check=1 if fails else 0)
    kept = everything(tmp_path / "run")
    assert b'"step": 4,' in kept and b"canary" not in kept
    assert "canary" not in done.stdout + done.stderr
    if fails:
        assert "cannot log in with *** at http://u:***@h:1" in done.stderr and "failing.py" in done.stderr
        assert b"cannot log in with *** at" in (tmp_path / "run" / "log.txt").read_bytes()


@pytest.mark.parametrize(
    "word",
    ["name=canary-hf-0123", "name=https://me:canary@host", "job.env={MY_PASSWORD: canary}", "optim.lr=canary-hf-0123"],
)
def test_a_secret_in_a_setting_is_refused_and_not_repeated(word, tiny, tmp_path):
    done = hpclm("train", *tiny("run"), word, env=os.environ | CANARIES, check=64)
    assert "canary" not in done.stdout + done.stderr and word.split("=")[0] in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_recorded_command_contains_no_secret(tiny, tmp_path):
    import subprocess
    import sys

    code = "import sys; from hpclm import cli; sys.exit(cli.main(['train', *sys.argv[3:]]))"
    command = [sys.executable, "-c", code, "--token", "canary", *tiny("run")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    attempt = json.loads((tmp_path / "run" / "attempts.jsonl").read_text())
    assert "--token '***'" in attempt["command"] and b"canary" not in everything(tmp_path / "run")

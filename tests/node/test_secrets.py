import json
import os

import pytest

from hpclm import cli
from hpclm.node.secrets import Redactor, is_secret, problems
from tests.events import began
from tests.forks import hpclm
from tests.runs import PATIENCE

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


@pytest.mark.parametrize("name", [
    "HF_TOKEN", "wandb_api_key", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "SLURM_JWT", "GITHUB_PAT", "GHPAT", "PAT", "MYSQL_PWD",
    "HTTP_AUTH", "AUTHORIZATION", "OAUTH_X", "TEAM_HOOK", "SLACK_WEBHOOK_URL", "BEARER",
])  # fmt: skip
def test_names_of_secrets_are_recognised_in_any_case(name):
    assert is_secret(name) and is_secret(name.swapcase())


@pytest.mark.parametrize("name", [
    "TOKENIZERS_PARALLELISM", "tokens", "tokens_per_second", "tokenizer_files", "PATH", "LD_LIBRARY_PATH", "PWD", "OLDPWD",
    "GIT_AUTHOR_NAME", "XAUTHORITY", "PATTERN", "COMPAT", "MAX_TOKENS", "NCCL_IB_PKEY", "USER", "DISPATCH",
])  # fmt: skip
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
        "a token of Hugging Face": "logged in with hf_canaryABCDEFGHIJKLMNOPQRSTUVWXYZ01",
        "a token of GitHub": "ghp_canary0123456789ABCDEFGHIJKLMNOPQRST",
        "a new token of GitHub": "github_pat_11AAcanary_0123456789ABCDEFGHIJ",
        "a key of OpenAI": "sk-proj-canary0123456789ABCDEFGHIJ",
        "a JWT": "eyJhbGciOiJIUzI1NiJ9.eyJjYW5hcnkiOjF9.canarySIGNATURE",
        "a webhook of Slack": "POST https://hooks.slack.com/services/T0/B0/canary",
        "a webhook of Discord": "POST https://discord.com/api/webhooks/123/canary",
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


def test_settings_that_contain_a_secret_are_named_without_their_values():
    settings = {
        "name": "run",
        "budget": {"tokens": 5},
        "data": {"tokenizer": "json", "blend": ["1", "https://me:canary@host"]},
        "job": {"env": {"HF_TOKEN": "canary", "A": "b"}, "setup": [f"export X={ENV['WANDB_API_KEY']}"], "options": {}},
    }
    found = problems(settings, ENV)
    assert [problem.split()[0] for problem in found] == ["data.blend.1", "job.env.HF_TOKEN", "job.setup.0"]
    assert "canary" not in "".join(found) and "(https://me:***@host)" in found[0] and "$WANDB_API_KEY" in found[2]


REFUSED = {
    "a token by its form": "job.setup=[echo hf_canaryABCDEFGHIJKLMNOPQRSTUVWXYZ01 > x]",
    "such a token in another section": "name=hf_canaryABCDEFGHIJKLMNOPQRSTUVWXYZ01",
    "a hook in a command": "job.setup=[curl -d x https://hooks.slack.com/services/T0/B0/canary]",
    "a hook in job.notify": "job.notify=[https://ntfy.sh/canary]",
    "a hook that is no list": "job.notify=https://ntfy.sh/canary",
    "a variable, PAT": "job.env.GITHUB_PAT=canary",
    "a variable, PWD": "job.env.DB_PWD=canary",
    "a variable, AUTH": "job.env.HTTP_AUTH=canary",
    "a variable, HOOK": "job.env.TEAM_HOOK=canary",
    "a variable, WEBHOOK": "job.env={SLACK_WEBHOOK: canary}",
    "a user of a URL": "job.setup=['git clone https://canary0123456789@github.com/x']",
    "a Teams hook": "job.setup=['curl -d x https://example.webhook.office.com/webhookb2/canary']",
    "a Telegram bot": "job.setup=['curl https://api.telegram.org/bot123456789:canaryABCDEFGHIJKLMNOPQRS/x']",
    "a variable, DSN": "job.env={SENTRY_DSN: canary}",
    "a variable, CRED": "job.env={MY_CRED: canary}",
}


@pytest.mark.parametrize("word", REFUSED.values(), ids=REFUSED.keys())
def test_a_secret_in_a_jobs_settings_is_refused_by_name_or_by_value(word, tiny, tmp_path, capsys):
    words = [word for word in tiny("run") if not word.startswith("data.")] + ["data.source=synthetic"]
    assert cli.main(["submit", "--cluster", "slurm", "--dry-run", *words, word]) == 64
    said = "".join(capsys.readouterr())
    assert "canary" not in said and "cnry" not in said and not (tmp_path / "run").exists()
    assert "export" in said or "YAML" in said or "job.env" in said or "must be a list" in said
    assert said.count("error:") == 1, said


ACCEPTED = [
    "export HF_TOKEN=$(cat ~/.hf_token)",
    "export HF_TOKEN=`cat ~/.hf_token`",
    'export HF_TOKEN="$MY_TOKEN" DB_PWD=$OTHER',
    "export HF_TOKEN=${HF_TOKEN:?export it first}",
    '[ -n "$HF_TOKEN" ] || exit 64',
    'curl -H "Authorization: Bearer $HF_TOKEN" https://example.org/x',
    "curl -u me:$PASSWORD https://example.org/x",
    "wandb login",
    "UsageError: No API key configured. Use `wandb login` to log in",
    'wandb login --relogin --host https://wandb.example.org "$WANDB_API_KEY" || true',
    "huggingface-cli login --token $HF_TOKEN",
    "docker login --password-stdin < ~/.docker-password",
    "docker run --user 1000:1000 -v /keys:/keys image/token:latest",
    "export SSL_KEY_FILE=/etc/ssl/key.pem KEY_DIR=~/keys",
    "export HF_HUB_DISABLE_IMPLICIT_TOKEN=1 TOKENIZERS_PARALLELISM=false MAX_TOKENS=4096 NCCL_IB_PKEY=0x8001",
    "export GIT_AUTHOR_NAME=somebody PWD=/x PATH=/opt/bin:$PATH LD_LIBRARY_PATH=/lib",
    "hpclm preprocess --json-keys text --tokenizer json --input x",
    "git config credential.helper store",
    "source ~/.secrets",
]


@pytest.mark.parametrize("line", ACCEPTED)
def test_what_refers_to_a_secret_without_containing_it_is_accepted(line):
    settings = {"job": {"setup": [line], "env": {"X": line}, "options": {"comment": line}, "notify": ["$HOOK"]}}
    assert not problems(settings, {"PATH": "/usr/bin"})
    assert redact(line) == line


def test_settings_may_name_files_and_flags_under_the_names_of_secrets():
    env = {
        "SSL_KEY_FILE": "/etc/ssl/key.pem",
        "DISABLE_TOKEN": "1",
        "MY_TOKEN": "${HF_TOKEN}",
        "NCCL_IB_PKEY": "0x8001",
    }
    settings = {"job": {"env": env, "options": {"export": "ALL,HF_TOKEN"}, "notify": ["$HOOK"]}}
    assert not problems(settings, {"PATH": "/usr/bin"})


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
    command = [sys.executable, "-c", code, "--token", CANARIES["WANDB_API_KEY"], *tiny("run")]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE, env=os.environ | CANARIES)
    [attempt] = began(tmp_path / "run")
    assert "--token '***'" in attempt["command"] and b"canary" not in everything(tmp_path / "run")

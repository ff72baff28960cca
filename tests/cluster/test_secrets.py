import json
import shlex

import pytest

from hpclm.cluster.secrets import Redactor, environment, is_secret, problems

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
def test_names_of_secrets_are_known_in_any_case(name):
    assert is_secret(name) and is_secret(name.swapcase())


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "tokens", "tokens_per_second", "tokenizer_files", "PATH"])
def test_words_of_the_field_are_no_secrets(name):
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
        "a URL nobody told of": "see https://me:other-canary@host/path",
        "a password with an @": "see https://me:p@canary@host/path",
        "a token in the place of the user": "https://ghp_canary0123456789abcdef@github.com/x",
    }.values(),
)
def test_a_secret_is_hidden_however_it_is_spelled(text):
    assert "canary" not in redact(text) and "***" in redact(text)


@pytest.mark.parametrize(
    "text", ["false-positive", "short of", "ssh://git@github.com/x", "/etc/hostname", "12:30 a@b", "tokens 12"]
)
def test_other_text_stays_as_it_is(text):
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


def test_a_snapshot_of_the_environment_is_an_allow_list_without_secrets():
    told = environment(ENV | {"SLURM_JOB_ID": "12", "SLURM_JWT": "canary", "MASTER_ADDR": "h", "EDITOR": "vi"})
    assert told == {"MASTER_ADDR": "h", "PATH": "/usr/bin", "SLURM_JOB_ID": "12", "SLURM_JWT": "***"}


def test_settings_that_hold_a_secret_are_named_and_not_repeated():
    settings = {
        "name": "run",
        "budget": {"tokens": 5},
        "data": {"tokenizer": "json", "blend": ["1", "https://me:canary@host"]},
        "job": {"env": {"HF_TOKEN": "canary", "A": "b"}, "setup": [f"export X={ENV['WANDB_API_KEY']}"], "options": {}},
    }
    found = problems(settings, ENV)
    assert [problem.split()[0] for problem in found] == ["data.blend.1", "job.env.HF_TOKEN", "job.setup.0"]
    assert "canary" not in "".join(found) and "export it" in found[0]

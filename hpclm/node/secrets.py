"""Keep secrets out of a run's files and messages: values of variables with the name of a secret, passwords in URLs, known tokens.

A name counts as a secret's if it contains KEY, TOKEN, SECRET, PASS, PWD, CREDENTIAL, JWT, AUTH, BEARER or HOOK, in upper or
lower case, or ends in PAT.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

Env = Mapping[str, str]
HIDDEN = "***"
SHORTEST = 6
"""Shorter values are flags (true, 1, none), and not secrets."""

_NAME = re.compile(
    r"KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|JWT|AUTH(?!OR)|AUTHORIZATION|BEARER|HOOK"
    r"|(?<![A-Z])(CREDS?|SAS|DSN)(?![A-Z])|(?<!COM)PAT(?![A-Z])",
    re.IGNORECASE,
)
_HARMLESS = re.compile(  # budget.tokens, TOKENIZERS_PARALLELISM, NCCL_IB_PKEY
    r"((max|min|new|num|n|total)[_-])*tokens([_-]per[_-]\w+)?|[\w-]*tokeni[sz][\w-]*|\w*IB_PKEY|(OLD)?PWD",
    re.IGNORECASE,
)
_URL = re.compile(r"(\b[a-z][a-z0-9+.-]*://)(?:([^\s/:@'\"]*:)([^\s/'\"]+)|([^\s/:@'\"]{12,}))@", re.IGNORECASE)
_HOOK = re.compile(r"(https?://(?:hooks\.[\w.-]+/|[\w.:-]+/(?:[\w./-]*/)?webhook\w*/))[^\s'\"]+", re.IGNORECASE)
_TOKEN = re.compile(  # of Hugging Face, GitHub, GitLab, OpenAI, Slack, AWS, Google; JWTs
    r"\b(?:hf_\w{20,}|gh[a-z]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-(?:[a-z]+-)*\w{20,}|xox[a-z]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|bot\d{6,}:[\w-]{20,}|eyJ[\w-]{10,}\.eyJ[\w-]+\.[\w-]+)"
)
_NO_SECRET = re.compile(  # a variable, a command's output, a file, a flag
    r"[$`](?!['\"]).*|(~|\.{1,2})?/[\w./~@%${}-]*|\*\*\*|[01]|true|false|yes|no|on|off|none|null",
    re.IGNORECASE | re.DOTALL,
)


def is_secret(name: str) -> bool:
    """Whether ``name`` is the name of a variable or option that holds a secret."""
    return bool(_NAME.search(name)) and not _HARMLESS.fullmatch(name)


class Redactor:
    """Replaces every secret in a text by ``***``."""

    def __init__(self, env: Env = os.environ):
        """``env``: the variables that may hold secrets."""
        values = {value for name, value in env.items() if is_secret(name) and not os.path.exists(value)}  # noqa: PTH110
        for value in env.values():
            for _, _, password, token in _URL.findall(value):
                values |= {password, token}
        for value in list(values):
            values.update(value.splitlines())  # private keys are logged line by line
        forms = set()
        for value in values:
            text = value.strip()
            if len(text) >= SHORTEST:
                forms |= {text, quote(text, safe=""), json.dumps(text)[1:-1], repr(text)[1:-1]}
        longest_first = sorted(forms, key=lambda form: (-len(form), form))
        self._values = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # (?!) matches nothing

    def __call__(self, text: str) -> str:
        """``text`` without values of secret variables, passwords of URLs, webhooks and known kinds of tokens."""
        text = self._values.sub(HIDDEN, text)
        if "://" in text:
            text = _HOOK.sub(rf"\1{HIDDEN}", _URL.sub(rf"\1\2{HIDDEN}@", text))
        return _TOKEN.sub(HIDDEN, text)


def problems(settings: Mapping[str, Any], env: Env = os.environ) -> list[str]:
    """A message for each of the nested ``settings`` that contains a secret: a run writes its settings to a file."""
    redact = Redactor(env)
    found = []
    for key, text in _leaves(settings):
        section = key.rpartition(".")[0]
        shown = redact(text)
        if _is_secret_by_name(key, text):
            shown = HIDDEN
        if shown == text:
            continue
        variables = (f"the value of ${name}" for name in env if Redactor({name: env[name]})(text) != Redactor({})(text))
        secret = next(variables, "a secret")
        way_out = "export it as an environment variable where you start or submit the run; a job inherits it"
        if section == "job.notify":
            way_out += ", and the setting takes its name: 'job.notify=[$TEAM_HOOK]'"
        found.append(f"{key} contains {secret} ({shown}), and a run writes its settings to config.yaml; {way_out}")
    return found


def _is_secret_by_name(key: str, value: str) -> bool:
    """Whether the name of a setting says that its value, which may be in quotes, is a secret."""
    section, _, name = key.rpartition(".")
    if section == "job.notify":
        return value.startswith(("http:", "https:"))
    text = value.strip("\\\"' ")
    return section in ("job.env", "job.options") and is_secret(name) and bool(text) and not _NO_SECRET.fullmatch(text)


def _leaves(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """The texts in nested settings, with their keys, such as job.notify.0 for an item of a list."""
    for name, value in settings.items():
        if isinstance(value, list | tuple):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        elif isinstance(value, str):
            yield above + name, value

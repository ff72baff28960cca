"""Keep secrets out of what a run writes: values of environment variables named like secrets, passwords in URLs, known tokens.

A name counts as a secret's if it contains KEY, TOKEN, SECRET, PASS, PWD, CREDENTIAL, JWT, AUTH, BEARER or HOOK, in any case, or
ends in PAT.
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
"""Shorter values are flags (true, 1, none), not secrets."""

_NAME = re.compile(
    r"KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|(?<![A-Z])(?:CREDS?|SAS|DSN)(?![A-Z])|JWT|AUTH(?!OR)|AUTHORIZATION|BEARER|HOOK|(?<!COM)PAT(?![A-Z])",
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
_ELSEWHERE = re.compile(  # a variable, a command's output, a file, a flag
    r"[$`].*|(?:~|\.{1,2})?/[\w./~@%${}-]*|\*\*\*|[01]|true|false|yes|no|on|off|none|null", re.IGNORECASE | re.DOTALL
)


def is_secret(name: str) -> bool:
    """Whether a variable or option of this name holds a secret."""
    return bool(_NAME.search(name)) and not _HARMLESS.fullmatch(name)


class Redactor:
    """Replaces every secret in a text by ``***``."""

    def __init__(self, env: Env = os.environ):
        """``env``: the variables whose values are hidden."""
        values = {value for name, value in env.items() if is_secret(name) and not os.path.exists(value)}  # noqa: PTH110
        values |= {part for value in env.values() for url in _URL.findall(value) for part in url[2:]}
        values |= {line for value in values for line in value.splitlines()}  # a private key is logged line by line
        plain = {value.strip() for value in values if len(value.strip()) >= SHORTEST}
        spelled = plain | {quote(value, safe="") for value in plain}  # in a URL
        spelled |= {literal(value)[1:-1] for value in plain for literal in (json.dumps, repr)}
        longest_first = sorted(spelled, key=lambda form: (-len(form), form))
        self._values = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def __call__(self, text: str) -> str:
        """``text`` without values of secret variables, passwords of URLs, webhooks and known kinds of tokens."""
        if self._values:
            text = self._values.sub(HIDDEN, text)
        if "://" in text:
            text = _HOOK.sub(rf"\1{HIDDEN}", _URL.sub(rf"\1\2{HIDDEN}@", text))
        return _TOKEN.sub(HIDDEN, text)

    def knows(self, text: str) -> bool:
        """Whether the value of a secret variable is in ``text``."""
        return bool(self._values and self._values.search(text))


def problems(settings: Mapping[str, Any], env: Env = os.environ) -> list[str]:
    """Problems of nested ``settings`` that contain a secret; they must not, since a run writes its settings to a file."""
    held = {name: Redactor({name: value}) for name, value in env.items()}
    secret_settings = []
    for key, text in _leaves(settings):
        section, name = key.rpartition(".")[::2]
        hook = section == "job.notify" and text.startswith(("http:", "https:"))
        kinds = {
            "the password of a URL": _URL.search(text),
            "a secret, by its name": section in ("job.env", "job.options") and is_secret(name) and _is_literal(text),
            "what looks like a token": _TOKEN.search(text),
            "a webhook, whose address is a password": hook or _HOOK.search(text),
        }
        inside = [f"the value of ${name}" for name, redact in held.items() if redact.knows(text)]
        inside += [kind for kind, contained in kinds.items() if contained]
        if inside:
            way_out = "remove it, and export it as an environment variable where you start or submit the run"
            if section == "job.notify":
                way_out = way_out.removeprefix("remove it, and ") + ", and give its name: 'job.notify=[$TEAM_HOOK]'"
            elif section == "job.setup":
                way_out += " (the job inherits it), or let the command read it from a file: export NAME=$(cat FILE)"
            secret_settings.append(
                f"{key} contains {inside[0]}, and a run's settings are written to its config.yaml; {way_out}"
            )
    return secret_settings


def _leaves(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        elif isinstance(value, (list, tuple)):
            yield from _leaves({str(index): item for index, item in enumerate(value)}, f"{above}{name}.")
        elif isinstance(value, str):
            yield above + name, value


def _is_literal(value: str) -> bool:
    """Whether a value, perhaps in quotes, is the secret itself, and not a variable, a command, a file or a flag."""
    text = value.lstrip("$") if value.startswith(("$'", '$"')) else value
    text = text.strip("\\\"' ")
    return bool(text) and not _ELSEWHERE.fullmatch(text)

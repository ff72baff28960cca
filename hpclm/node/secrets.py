"""Keep secrets out of what a run writes: values of environment variables named like secrets, passwords in URLs, known tokens.

A name counts as a secret's if it contains KEY, TOKEN, SECRET, PASS, PWD, CREDENTIAL, JWT, AUTH, BEARER or HOOK, in any case, or
ends in PAT. Settings and command lines are also searched for a value that follows such a name.
"""

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

Env = Mapping[str, str]
HIDDEN = "***"
SHORTEST = 6
"""Shorter values are flags (true, 1, none), not secrets."""

_SECRET = r"KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|(?<![A-Z])(?:CREDS?|SAS|DSN)(?![A-Z])|JWT|AUTH(?!OR)|AUTHORIZATION|BEARER|HOOK|(?<!COM)PAT(?![A-Z])"
_NAME = re.compile(_SECRET, re.IGNORECASE)
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
_VALUE = r"""(?P<value>[\\$]?"[^"]*"?|[\\$]?'[^']*'?|[^\s,;{}\[\]"'|&<>)]+)"""
_SCHEME = r"(?:Bearer|Basic|Digest|Token)\s+"
_BEFORE = r"(?<![\w./$-])(?<!\$\{)"
_NAMED = rf"(?:--?|(?:[a-z]+\.)*(?:env|options)\.)?(?P<name>[\w-]*(?:{_SECRET})[\w-]*)"
_OPTION = r"(?:token|secret|pass(?:word|wd|phrase)?|pwd|pat|api-?key|auth|credentials?)"
_SAID = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # NAME=value, "name": "value"; not key=value, nor ${NAME:?...}
        rf"{_BEFORE}(?!(?-i:keys?)\b){_NAMED}(?:\\?[\"']?\s*=|\\?[\"']\s*:)\s*(?:{_SCHEME})?{_VALUE}",
        # NAME: value, A-Header: value; not a colon in prose
        rf"{_BEFORE}(?=authorization:|[\w.-]*(?-i:[A-Z_-])){_NAMED}:\s*(?:{_SCHEME})?{_VALUE}",
        r"\bBearer\s+(?P<value>[^\s'\"]{6,})",
        rf"(?<![\w-])--?[\w-]*{_OPTION}\s+(?!-){_VALUE}",
        r"\bwandb\s+login\b[^|;&#`]*?\s[\"']?(?P<value>\w{3,})(?=[\s\"'\]]|$)",
        rf"\b(?:login|sshpass)\b[^|;&#]*?\s-p\s*(?!-){_VALUE}",
        rf"\b(?:vault\s+login|add-authtoken|set\s+[\w.-]*(?:key|{_OPTION}))\s+(?!-){_VALUE}",
        rf"\blogin\([^)]*?(?:key|{_OPTION})\s*=\s*{_VALUE}",
        rf"\b(?:login|with-token|stdin)\b[^|;&#]*?<<<\s*{_VALUE}",
        rf"\b(?:echo|printf)\s+{_VALUE}\s*\|[^;&#]*?(?:login|-stdin|with-token)\b",
        rf"\bmachine\s+\S+\s+login\s+\S+\s+password\s+{_VALUE}",
        rf"\bmysql\w*\b[^|;&#]*?\s-p(?!\s){_VALUE}",
        rf"[?&](?:sig|signature)={_VALUE}",
        rf"\bcurl\b[^|;&#]*?\s(?:-u|--user|--proxy-user)[\s=]*[\"']?[\w.@+-]*:{_VALUE}",
    )
]
"""How a secret may be given in a command, a header or a setting."""
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

    def said(self, text: str) -> str:
        """``text``, which may quote settings, also without what follows the name of a secret in it."""
        return self(_without_said(text))

    def knows(self, text: str) -> bool:
        """Whether the value of a secret variable is in ``text``."""
        return bool(self._values and self._values.search(text))

    def words(self, words: Iterable[str]) -> list[str]:
        """A command line, also without secrets it contains itself: ``NAME=value``, ``--name value``, ``--name=value``."""
        redacted: list[str] = []
        follows = False
        for word in words:
            redacted.append(HIDDEN if follows and not word.startswith("-") else self.said(word))
            follows = word.startswith("--") and "=" not in word and is_secret(word.lstrip("-"))
        return redacted

    def command(self, words: Iterable[str]) -> str:
        """A command line as it would be typed, secrets hidden."""
        return shlex.join(self.words(words))


def problems(settings: Mapping[str, Any], env: Env = os.environ) -> list[str]:
    """Problems of nested ``settings`` that contain a secret; they must not, since a run writes its settings to a file."""
    held = {name: Redactor({name: value}) for name, value in env.items()}
    found = []
    for key, text in _leaves(settings):
        section, name = key.rpartition(".")[::2]
        hook = section == "job.notify" and text.startswith(("http:", "https:"))
        kinds = {
            "the password of a URL": _URL.search(text),
            "a secret, by its name": section in ("job.env", "job.options") and is_secret(name) and _is_literal(text),
            "what looks like a token": _TOKEN.search(text),
            "a webhook, whose address is a password": hook or _HOOK.search(text),
            "a secret, by the name before it": key.startswith("job.") and _without_said(text) != text,
        }
        inside = [f"the value of ${name}" for name, redact in held.items() if redact.knows(text)]
        inside += [kind for kind, contained in kinds.items() if contained]
        if inside:
            way_out = "remove it, and export it as an environment variable where you start or submit the run"
            if section == "job.notify":
                way_out = way_out.removeprefix("remove it, and ") + ", and give its name: job.notify=[$TEAM_HOOK]"
            elif section == "job.setup":
                way_out += " (the job inherits it), or let the command read it from a file: export NAME=$(cat FILE)"
            found.append(f"{key} contains {inside[0]}, and a run's settings are written to its config.yaml; {way_out}")
    return found


def _leaves(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        elif isinstance(value, (list, tuple)):
            yield from _leaves({str(index): item for index, item in enumerate(value)}, f"{above}{name}.")
        elif isinstance(value, str):
            yield above + name, value


def _without_said(text: str) -> str:
    """``text`` without secrets that follow the name of one."""
    for pattern in _SAID:
        text = pattern.sub(_hide, text)
    return text


def _hide(match: re.Match[str]) -> str:
    """The text of a match, without the value."""
    name, value = match.groupdict().get("name"), match["value"]
    if (name is not None and not is_secret(name)) or not _is_literal(value):
        return match[0]
    begin, end = (place - match.start() for place in match.span("value"))
    return f"{match[0][:begin]}{HIDDEN}{match[0][end:]}"


def _is_literal(value: str) -> bool:
    """Whether a value, perhaps in quotes, is the secret itself, and not a variable, a command, a file or a flag."""
    text = value.lstrip("$") if value.startswith(("$'", '$"')) else value
    text = re.sub(f"^{_SCHEME}", "", text.strip("\\\"' "), flags=re.IGNORECASE)
    return bool(text) and not _ELSEWHERE.fullmatch(text)

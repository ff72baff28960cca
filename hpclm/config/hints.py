"""Suggestions for unknown settings, stray words and unknown options."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import SequenceMatcher, get_close_matches
from typing import NamedTuple

from hpclm.config import elsewhere, sbatch
from hpclm.config.elsewhere import SEE
from hpclm.config.fields import keys as all_keys
from hpclm.config.fields import type_of

ALIKE = 0.6
"""Minimum similarity of two names that is not a coincidence."""
IN_SECTION = 0.35
"""Highest bonus for the section of a suggestion, in addition to the similarity of its name."""
NEAR = 0.8
"""Minimum score (similarity plus bonus) of a suggestion, and minimum similarity of a misspelt name."""
OPTION = 0.85
"""Minimum similarity of a misspelt option."""
KEY = re.compile(r"[A-Za-z_][\w.-]*")
UNIT = re.compile(r"([KMGT])(i?B)?", re.IGNORECASE)
DESCRIBE_RUNS = ("train", "submit", "resume", "planner", "config", "demo")
"""Commands that take the settings of a run. Their users may try options of other projects or of sbatch."""


class Unknown(NamedTuple):
    """An option that a command does not have."""

    command: str
    option: str
    values: Sequence[str]
    """The words after the option; empty if they may be a secret."""
    secret: bool
    """Whether its values may be a secret."""
    options: Sequence[str]
    """The options of the command."""
    others: Mapping[str, Collection[str]]
    """The other commands, with their options."""

    @property
    def value(self) -> str:
        """The first of the values; empty without any."""
        return next(iter(self.values), "")


class Advice(NamedTuple):
    """The advice for an unknown option."""

    text: str = ""
    """A sentence; may be empty."""
    settings: tuple[str, ...] = ()
    """Settings that replace the option."""
    foreign: bool = False
    """Whether another project has the option."""


def hint(key: str, keys: Sequence[str]) -> str:
    """The end of the message that ``key`` is unknown. ``keys``: the dotted keys of all settings."""
    if option := _option_of_job(key):
        return f": {option}"
    if found := elsewhere.answers(key):
        here = _of_key(key) if len(found) == 1 else ""
        return f": it is {here} here" if here else f": {elsewhere.explained(key)}; {SEE}"
    if meant := nearest(key, keys):
        return f". Did you mean {meant!r}?"
    more = " Options of sbatch are job.options.NAME." if key.startswith("job.") else ""
    return f".{more} See hpclm config --reference for all settings."


def _of_key(name: str) -> str:
    """The settings that replace another project's ``name``; empty for an unknown name, or if an answer is a sentence."""
    found = elsewhere.answers(name)
    settings = [elsewhere.typed(answer.settings) for answer in found]
    return " or ".join(settings).replace(f"={elsewhere.MISSING}", "") if all(settings) else ""


def _one_setting(name: str) -> str:
    """The setting that replaces another project's ``name``; empty if several together do (see _of_key)."""
    if any(len(answer.settings) != 1 for answer in elsewhere.answers(name)):
        return ""
    return _of_key(name)


def _option_of_job(key: str) -> str:
    """The advice for job.NAME if NAME is an option of sbatch; empty otherwise."""
    section, _, name = key.partition(".")
    option = sbatch.OPTIONS.get(name.replace("_", "-"))
    if section != "job" or option is None:
        return ""
    value = "''" if option.flag else "..."
    return option.instead or f"set job.options.{option.name}={value} (sbatch --{option.name})"


def nearest(key: str, keys: Sequence[str]) -> str:
    """The setting, section or key=value with the name and section most like ``key``; empty if no name is like it."""
    parts = key.lstrip("-").replace("-", "_").lower().split(".")
    places = _places(keys)
    names = {*places, *elsewhere.names()}
    within = ".".join([*parts[:-1], ""])  # a setting of an inner section has no counterpart elsewhere
    inside = within if within.count(".") > 1 and any(setting.startswith(within) for setting in keys) else ""
    best = (NEAR, "")
    for start in range(len(parts)):  # the name with and without its sections
        name = "_".join(parts[start:])
        close = [other for other in names if f"_{name}_" in f"_{other}_"]
        if start == len(parts) - 1:
            close += get_close_matches(name, names, n=50, cutoff=NEAR)
        for other in close:
            for section, setting in (*places.get(other, ()), ("", _one_setting(other))):
                score = _likeness(name, other) + IN_SECTION * _likeness(".".join(parts[:start]), section)
                if setting and setting.startswith(inside) and score > best[0]:
                    best = (score, setting)
    return best[1]


def _places(keys: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
    """Names of settings and inner sections (heads, attention_heads, ...) -> pairs of the section before the name and the dotted key."""
    places: dict[str, list[tuple[str, str]]] = {}
    for setting in (*keys, *{key.rpartition(".")[0]: None for key in keys if key.count(".") > 1}):
        parts = setting.split(".")
        for start in range(len(parts)):
            places.setdefault("_".join(parts[start:]), []).append((".".join(parts[:start]), setting))
    return places


def _likeness(one: str, other: str) -> float:
    """The similarity of two names, from 0 to 1; ALIKE if one name has all words of the other, 0 below."""
    ratio = SequenceMatcher(None, one, other).ratio()
    alike = ratio >= ALIKE or f"_{one}_" in f"_{other}_"
    return max(ratio, ALIKE) if one and alike else 0.0


def mistakes(stray: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Problems with ``stray``, words of the command line ``typed`` that name no settings file; empty if the intent is unclear."""
    explained: set[str] = set()
    problems = []
    for index, word in enumerate(typed):
        before = "".join(typed[max(0, index - 1) : index])
        after = "".join(typed[index + 1 : index + 2]) or "…"
        setting, _, value = word.partition("=")
        if word in explained:
            continue
        if setting == "" and KEY.fullmatch(before) and "=" in word:
            problems.append(f"write {before}={value or after}, without spaces")
            explained |= {before} if value else {before, after}
        elif word.endswith("=") and KEY.fullmatch(setting) and after in stray:
            problems.append(f"write {word}{after}, without a space")
            explained.add(after)
        elif UNIT.fullmatch(word) and re.search(r"(^|=)\d+$", before):
            option = f"{typed[index - 2]} " if before.isdigit() and index > 1 else ""
            problems.append(f"write {option}{before}{word[0].upper()}, in one word")
        elif word in stray and is_dataclass(type_of(word)):
            problems.append(f"{word} is a section; set its fields, such as {word}.{fields(type_of(word))[0].name}=…")
        elif word in stray and type_of(word) is not None and not after.startswith("="):
            problems.append(f"{word} has no value: {word}=…")
    return problems


def about_option(unknown: Unknown) -> Advice:
    """The advice for an option that a command does not have."""
    if meant := elsewhere.option_meant(unknown.command, unknown.option):
        return _of_command(unknown, meant)
    describes_run = unknown.command in DESCRIBE_RUNS
    found = _of_run(unknown) if describes_run else None
    if found:
        return found
    if having := [command for command, options in unknown.others.items() if unknown.option in options]:
        commands = " and ".join(f"hpclm {command}" for command in having[:3])
        return Advice(f"{unknown.option}: it is an option of {commands}")
    if describes_run and unknown.secret:
        variable = unknown.option.lstrip("-").replace("-", "_").upper()
        return Advice(f"export {variable} where you start or submit the run")
    near = [known for known in unknown.options if unknown.option.endswith(known[1:])]
    near = near or get_close_matches(unknown.option, unknown.options, n=1, cutoff=OPTION)
    if near:
        return _question(near[0], unknown.value)
    if describes_run and (setting := nearest(unknown.option, all_keys())):
        return Advice(f"{unknown.option}: did you mean {setting}?")
    return Advice()


def _of_command(unknown: Unknown, meant: str) -> Advice:
    """The advice from ``meant``: an option, a setting as key=, or a sentence (see elsewhere.option_meant)."""
    if meant.startswith("--"):
        return _question(meant, unknown.value)
    if meant.endswith("="):
        return Advice(settings=(f"{meant}{unknown.value or elsewhere.MISSING}",))
    text = meant.format(command=f"hpclm {unknown.command}", value=unknown.value or "FILE")
    return Advice(f"{unknown.option}: {text}")


def _of_run(unknown: Unknown) -> Advice | None:
    """The advice if exactly this name is a setting, an option of hpclm submit or sbatch, or another project's option; None otherwise."""
    option = unknown.option
    if option in unknown.others.get("submit", ()):
        return Advice(f"{option}: it is an option of hpclm submit")
    own = _own(unknown)
    found = {} if "." in option and own else elsewhere.answers(option, unknown.values)
    if own and not found:
        return Advice(settings=own)
    if own and elsewhere.keys(own) not in [elsewhere.keys(answer.settings) for answer in found]:
        found = {elsewhere.Answer(own, ""): ["hpclm"], **found}
    if len(found) == 1 and (settings := next(iter(found)).settings):
        return _of_submit(unknown, settings) or Advice(settings=settings, foreign=True)
    if found:
        return Advice(f"{option}: {elsewhere.listed(found)}", foreign=True)
    if advice := sbatch.advice(option, unknown.value):
        return Advice(f"{option}: {advice}")
    return None


def _own(unknown: Unknown) -> tuple[str, ...]:
    """The only setting with this name, with or without its section, as key=value; empty for several settings or none."""
    name = unknown.option.removeprefix("--").replace("-", "_")
    keys = all_keys()
    same = [key for key in keys if name == key] or [key for key in keys if key.rpartition(".")[2] == name]
    if len(same) != 1:
        return ()
    return (f"{same[0]}={elsewhere.written(same[0], unknown.values)}",)


def _of_submit(unknown: Unknown, settings: Sequence[str]) -> Advice | None:
    """The advice to use an option of hpclm submit, if the first setting belongs to job; None otherwise."""
    option = "--" + settings[0].partition("=")[0].removeprefix("job.")
    if not settings[0].startswith("job."):
        return None
    if option in unknown.options:
        return _question(option, unknown.value)
    return Advice(f"use hpclm submit {option} {unknown.value or 'N'}")


def _question(option: str, value: str) -> Advice:
    return Advice(f"did you mean {f'{option} {value}'.strip()}?")

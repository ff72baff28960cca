"""Suggestions for unknown settings, stray words and unknown options."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import NamedTuple

from hpclm.config import elsewhere, sbatch
from hpclm.config.elsewhere import SEE
from hpclm.config.fields import keys as all_keys
from hpclm.config.fields import type_of

NEAR = 0.8
"""Minimum similarity of a misspelt name."""
SLIP = 0.92
"""Minimum similarity of a name within its section, before names of other sections and projects count."""
OPTION = 0.85
"""Minimum similarity of a misspelt option."""
KEY = re.compile(r"[A-Za-z_][\w.-]*")
UNIT = re.compile(r"([KMGT])(i?B)?", re.IGNORECASE)
DESCRIBE_RUNS = ("train", "submit", "resume", "planner", "config", "demo")
"""Commands that take the settings of a run to train, so that their users may think of other projects' options and of sbatch's."""


class Unknown(NamedTuple):
    """An option that a command does not have."""

    command: str
    option: str
    values: Sequence[str]
    """The words after it; empty if they may be a secret."""
    secret: bool
    """Whether it may hold a secret."""
    options: Sequence[str]
    """The options that the command has."""
    others: Mapping[str, Collection[str]]
    """The other commands and their options."""

    @property
    def value(self) -> str:
        """The first of the values; empty without any."""
        return self.values[0] if self.values else ""


class Advice(NamedTuple):
    """The answer to an unknown option."""

    text: str = ""
    """A sentence."""
    settings: tuple[str, ...] = ()
    """Settings that take the place of the option."""
    foreign: bool = False
    """Whether it is an option of another project."""


def hint(key: str, keys: Sequence[str]) -> str:
    """The end of a message about ``key``, which is not in ``keys`` (dotted keys)."""
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
    """The settings that another project's ``name`` becomes; empty without any, or if an answer is a sentence."""
    found = elsewhere.answers(name)
    settings = [elsewhere.typed(answer.settings) for answer in found]
    return " or ".join(settings).replace(f"={elsewhere.MISSING}", "") if all(settings) else ""


def _one_setting(name: str) -> str:
    """As _of_key, but empty if another project's name becomes several settings."""
    return _of_key(name) if all(len(answer.settings) == 1 for answer in elsewhere.answers(name)) else ""


def _option_of_job(key: str) -> str:
    """The advice for job.NAME if NAME is an option of sbatch; else empty."""
    section, _, name = key.partition(".")
    option = sbatch.OPTIONS.get(name.replace("_", "-"))
    if section != "job" or option is None:
        return ""
    value = "''" if option.flag else "..."
    return option.instead or f"set job.options.{option.name}={value} (sbatch --{option.name})"


def nearest(key: str, keys: Sequence[str]) -> str:
    """The setting of ``keys`` that is most like ``key``, or key=value; empty if no name is like it."""
    parts = key.lstrip("-").replace("-", "_").lower().split(".")
    # a letter too few or too many, before a setting of another section that has this name: model.expert, not parallel.expert
    below = [setting for setting in keys if setting.startswith(f"{parts[0]}.")]
    below += [setting.rpartition(".")[0] for setting in below if setting.count(".") > 1]  # sections in the section
    inside = {setting.partition(".")[2]: setting for setting in below}
    if slip := get_close_matches(".".join(parts[1:]), [*inside], n=1, cutoff=SLIP):
        return inside[slip[0]]
    section = ".".join(parts[:-1])
    here = {setting.rpartition(".")[2]: setting for setting in keys if setting.rpartition(".")[0] == section}
    longer = [setting for name, setting in here.items() if f"_{parts[-1]}_" in f"_{name}_"]
    if longer:  # model.experts.z_loss: model.experts.router_z_loss, not optim.z_loss
        return min(longer, key=len)
    if here and "." in section:
        return ""
    for start in range(len(parts)):  # with and without its sections: fp16.enabled is not our checkpoint.enabled
        name = "_".join(parts[start:])
        if meant := _one_setting(name) or _setting_named(name, parts, keys):
            return meant
    known = {name for setting in keys for name in _names(setting)} | {*elsewhere.names()}
    near = get_close_matches(parts[-1], sorted(known), n=1, cutoff=NEAR)
    return (_one_setting(near[0]) or _setting_named(near[0], parts, keys)) if near else ""


def _names(setting: str) -> list[str]:
    """Names of a setting without its first sections: model_attention_heads, attention_heads, heads."""
    parts = setting.split(".")
    return ["_".join(parts[start:]) for start in range(len(parts))]


def _setting_named(name: str, parts: Sequence[str], keys: Sequence[str]) -> str:
    """The setting that ends with ``name``, in the section that is like that of ``parts``, or in the first."""
    same = [setting for setting in keys if name in _names(setting)]
    sections = {setting.rpartition(".")[0]: setting for setting in reversed(same)}
    near = get_close_matches(".".join(parts[:-1]), [*sections], n=1)
    return sections[near[0]] if near else next(iter(same), "")


def mistakes(stray: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Problems with the ``stray`` words of the command line ``typed``, which name no settings file; empty if the intent is unclear."""
    explained: set[str] = set()
    problems = []
    for index, word in enumerate(typed):
        before, after = typed[index - 1] if index else "", typed[index + 1] if index + 1 < len(typed) else "…"
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
    """The answer to an option that a command does not have."""
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
    """The answer from the table of options that other commands have."""
    if meant.startswith("--"):
        return _question(meant, unknown.value)
    if meant.endswith("="):
        return Advice(settings=(f"{meant}{unknown.value or elsewhere.MISSING}",))
    text = meant.format(command=f"hpclm {unknown.command}", value=unknown.value or "FILE")
    return Advice(f"{unknown.option}: {text}")


def _of_run(unknown: Unknown) -> Advice | None:
    """The setting, the option of hpclm submit or the option of sbatch that has exactly this name here or in another project."""
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
    """The one setting with this name, with or without its section, as key=value; empty if several have it, or none."""
    name = unknown.option.removeprefix("--").replace("-", "_")
    keys = all_keys()
    same = [name] if name in keys else [key for key in keys if key.rpartition(".")[2] == name]
    return (f"{same[0]}={elsewhere.written(same[0], unknown.values)}",) if len(same) == 1 else ()


def _of_submit(unknown: Unknown, settings: Sequence[str]) -> Advice | None:
    """The option of hpclm submit for a setting of the job."""
    option = "--" + settings[0].partition("=")[0].removeprefix("job.")
    if not settings[0].startswith("job."):
        return None
    if option in unknown.options:
        return _question(option, unknown.value)
    return Advice(f"use hpclm submit {option} {unknown.value or 'N'}")


def _question(option: str, value: str) -> Advice:
    return Advice(f"did you mean {f'{option} {value}'.strip()}?")

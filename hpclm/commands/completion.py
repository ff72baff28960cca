"""``hpclm completion``: scripts with which a shell completes verbs, options, names of runs, presets and settings.

A script has everything but the names of runs in it, so that no Python starts at a Tab; options are read from each verb's --help.
"""

import re
import shlex
import typing
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO

from hpclm import cli, shipped, terminal
from hpclm.commands.docs import topics
from hpclm.config import fields
from hpclm.terminal import say

OPTION = re.compile(r"^ {2}(-\S.*?)(?: {2,}|$)", re.MULTILINE)
POSITIONAL = re.compile(r"^ {2}([^\s-].*?)(?: {2,}|$)", re.MULTILINE)
COMMAND = re.compile(r"^ {4}([a-z-]+)(?: {2,}|$)", re.MULTILINE)
CHOICES = re.compile(r"\{(.*?)\}")

COMMON = r"""# Completion of hpclm. Made by "hpclm completion SHELL"; make it again after an upgrade.

_hpclm_runs() {  # FOLDER: the names of the runs below it
  local mark
  for mark in "$1"/*/config.yaml "$1"/*/*/config.yaml "$1"/*/*/*/config.yaml; do
    [ -e "$mark" ] || continue
    mark=${mark%/config.yaml}
    printf '%s\n' "${mark#"$1"/}"
  done
}

_hpclm_settings() {  # WORD: sections, settings of one, or values of one
  case "$1" in
  *=*) printf '%s\n' @VALUES ;;
  *.*) printf '%s\n' @KEYS ;;
  *) printf '%s\n' @SECTIONS ;;
  esac
}

_hpclm_candidates() {  # VERB PREVIOUS WORD RUNS: what may stand there, a line each; nothing for files
  case "$1 $2" in
@VALUED
  esac
  case "$3" in
  -*)
    case "$1" in
@OPTIONS
    esac
    return ;;
  esac
  case "$1" in
@POSITIONALS
  esac
}
"""
BASH = r"""
_hpclm() {
  local line=${COMP_LINE:0:COMP_POINT} runs=runs word verb current previous i
  local -a words
  read -a words <<< "$line"  # without -r: a name may have "\ "
  [[ $line == *[[:space:]] ]] && words+=("")
  current=${words[${#words[@]} - 1]} previous=${words[${#words[@]} - 2]} verb=${words[1]}
  case ${#words[@]} in 2) verb= ;; *) [[ $verb == data && ${#words[@]} -gt 3 ]] && verb="data ${words[2]}" ;; esac
  for ((i = 2; i < ${#words[@]} - 1; i++)); do
    [[ ${words[i]} == --runs ]] && runs=${words[i + 1]}
  done
  COMPREPLY=()
  while IFS= read -r word; do
    [[ $word == "$current"* ]] && printf -v word %q "$word" && COMPREPLY+=("$word")
  done < <(_hpclm_candidates "$verb" "$previous" "$current" "$runs")
  [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace 2> /dev/null
  if [[ $current == *=* && $COMP_WORDBREAKS == *=* ]]; then  # bash completes only what follows the sign
    for i in "${!COMPREPLY[@]}"; do COMPREPLY[i]=${COMPREPLY[i]#"${current%"${current##*=}"}"}; done
  fi
}
complete -o bashdefault -o default -F _hpclm hpclm
"""
ZSH = r"""
_hpclm() {
  setopt local_options no_nomatch
  local runs=runs verb=${words[2]} word
  local -a whole open
  (( CURRENT == 2 )) && verb=
  [[ $verb == data ]] && (( CURRENT > 3 )) && verb="data ${words[3]}"
  (( ${words[(I)--runs]} )) && runs=${words[${words[(I)--runs]} + 1]}
  while IFS= read -r word; do
    case $word in *[=.]) open+=("$word") ;; *) whole+=("$word") ;; esac
  done < <(_hpclm_candidates "$verb" "${words[CURRENT - 1]}" "$PREFIX" "$runs")
  compadd -S '' -- $open
  compadd -- $whole
  (( compstate[nmatches] )) || _files
}
if [[ ${funcstack[1]} == _hpclm ]]; then _hpclm "$@"; else compdef _hpclm hpclm; fi
"""
SHELLS = {"bash": COMMON + BASH, "zsh": "#compdef hpclm\n" + COMMON + ZSH}


@dataclass(frozen=True)
class Usage:
    """What --help says of a verb, or of a verb and its command."""

    verb: str
    options: dict[str, str]
    """Each option, and what it takes; empty if nothing."""
    positionals: list[str]
    commands: list[str]


def main(argv: list[str]) -> int:
    """``hpclm completion``."""
    parser = terminal.ArgumentParser(
        prog="hpclm completion",
        description='Print a script for completion. bash: eval "$(hpclm completion bash)" in ~/.bashrc. '
        "zsh: the same with zsh, after compinit, in ~/.zshrc.",
    )
    parser.add_argument("shell", choices=list(SHELLS), help="bash or zsh")
    args = parser.parse_args(argv)
    say(script(SHELLS[args.shell]), end="")
    return 0


def script(template: str) -> str:
    """A script, with what hpclm has now."""
    usages, keys = list(_usages()), fields.keys()
    sections = (key.partition(".")[0] + ("." if "." in key else "=") for key in keys)
    parts = {
        "VALUES": _words(_values(keys)),
        "KEYS": _words(f"{key}=" for key in keys if "." in key),
        "SECTIONS": _words(dict.fromkeys(sections)),
        "VALUED": "\n".join(_valued(usages)),
        "OPTIONS": "\n".join(
            f"    {shlex.quote(each.verb)}) {_print(each.options)} ;;" for each in usages if each.options
        ),
        "POSITIONALS": "\n".join(f"  {shlex.quote(each.verb)}) {_takes(each)} ;;" for each in usages),
    }
    return re.sub(r"@([A-Z]+)", lambda match: parts[match[1]], template)


def _usages() -> Iterator[Usage]:
    """Of hpclm itself, of each verb, and of the commands of verbs."""
    yield Usage("", {"--help": "", "--version": ""}, [], [*cli.VERBS, "help"])
    yield Usage("help", {}, [], list(cli.VERBS))
    for verb in cli.VERBS:
        usage = _usage([verb])
        yield usage
        yield from (_usage([verb, command]) for command in usage.commands)


def _usage(words: list[str]) -> Usage:
    said = StringIO()
    with redirect_stdout(said), suppress(SystemExit):
        cli.main([*words, "--help"])
    options: dict[str, str] = {}
    for spellings in OPTION.findall(said.getvalue()):
        named = dict(each.partition(" ")[::2] for each in spellings.split(", "))
        options |= dict.fromkeys(named, list(named.values())[-1])
    _, _, rest = said.getvalue().partition("\npositional arguments:\n")
    section = rest.partition("\n\n")[0]
    positionals = POSITIONAL.findall(section)
    if "..." in positionals:  # resume passes the rest to submit
        options = _usage(["submit"]).options | options
    return Usage(" ".join(words), options, positionals, COMMAND.findall(section))


def _values(keys: Iterable[str]) -> Iterator[str]:
    """key=value for each setting that takes one of few values."""
    for key in keys:
        kind = fields.required(fields.type_of(key))
        choices = ("true", "false") if kind is bool else typing.get_args(kind) if _is_choice(kind) else ()
        yield from (f"{key}={choice}" for choice in choices)


def _is_choice(kind: object) -> bool:
    return typing.get_origin(kind) is typing.Literal


def _valued(usages: Iterable[Usage]) -> Iterator[str]:
    """Cases for the word after an option that takes one."""
    files = []
    for usage in usages:
        for option, takes in usage.options.items():
            case = shlex.quote(f"{usage.verb} {option}")
            if choices := CHOICES.match(takes):
                yield f"  {case}) {_print(choices[1].split(','))}; return ;;"
            elif takes == "RUN":
                yield f'  {case}) _hpclm_runs "$4"; return ;;'
            elif takes:
                files.append(case)
    yield f"  {'|'.join(files)}) return ;;"


def _takes(usage: Usage) -> str:
    """The shell's words for what a verb takes besides options."""
    if usage.commands:
        return _print(usage.commands)
    takes = []
    for name in usage.positionals:
        if choices := CHOICES.match(name):
            takes.append(_print(choices[1].split(",")))
        elif name == "TOPIC":
            takes.append(_print(topics()))
        elif name in ("run", "RUN", "SOURCE"):
            takes.append('_hpclm_runs "$4"')
        elif "key=value" in name or name == "...":
            takes += [_print(shipped.presets())] * ("FILE" in name)
            takes.append('_hpclm_settings "$3"')
    return "; ".join(takes) or ":"


def _print(words: Iterable[str]) -> str:
    return f"printf '%s\\n' {_words(words)}"


def _words(words: Iterable[str]) -> str:
    return " ".join(map(shlex.quote, words))


if __name__ == "__main__":
    raise SystemExit(cli.run(main))

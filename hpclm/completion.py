"""Scripts for shells that complete commands, options, presets, settings and names of runs.

shtab writes them from the parsers of all commands; the shell functions here add names of runs, settings and presets. The script contains
all names except those of runs, which the shell looks up, so that completion starts no Python.
"""

import re
import shlex
from collections.abc import Iterable

from hpclm.base import extras, shipped
from hpclm.config import fields
from hpclm.parser import Parser

ZSH_FIXES = {
    r'^( *")\(\*\)::?': r"\1*:",  # otherwise zsh completes only the first word of a repeated argument
    r':"$': r':_files"',  # complete other arguments with files, as in bash
    r"== eval \]\]": "== (eval|file) ]]",  # the user may also source the script
}
"""Corrections of shtab's script for zsh: pattern -> replacement."""
COMMON = r"""
_hpclm_run_names() {  # of the runs below the folder of --runs
  local folder=runs previous= word mark
  for word in "${words[@]}"; do
    [ "$previous" = --runs ] && folder=$word
    previous=$word
  done
  for mark in "$folder"/*/config.yaml "$folder"/*/*/config.yaml "$folder"/*/*/*/config.yaml; do
    [ -e "$mark" ] || continue
    mark=${mark%/config.yaml}
    printf '%s\n' "${mark#"$folder"/}"
  done
}
_hpclm_keys() {  # WORD: sections, or after a dot their settings
  case "$1" in
  *.*) printf '%s\n' @KEYS ;;
  *) printf '%s\n' @SECTIONS ;;
  esac
}
"""
BASH = r"""
_hpclm_runs() {
  local name
  _hpclm_run_names | while IFS= read -r name; do [[ $name == "$1"* ]] && printf '%q\n' "$name"; done
}
_hpclm_requests() { _hpclm_runs "$1"; compgen -W "save stop" -- "$1"; }
_hpclm_settings() { compgen -W "$(_hpclm_keys "$1")" -- "$1"; }
_hpclm_presets() { compgen -W "@PRESETS" -- "$1"; _hpclm_settings "$1"; }
_hpclm_topics() { compgen -W "@TOPICS" -- "$1"; }
"""
BASH_END = r"""
_hpclm() {  # calls shtab's function with words that may contain = and :
  local line=${COMP_LINE:0:COMP_POINT} current i
  local -a words
  read -a words <<< "$line"  # without -r: a name may have "\ "
  [[ $line == *[[:space:]] ]] && words+=("")
  local -a COMP_WORDS=("${words[@]}")
  local COMP_CWORD=$((${#words[@]} - 1))
  current=${words[COMP_CWORD]}
  _shtab_hpclm
  [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace 2> /dev/null
  if [[ $current == *=* && $COMP_WORDBREAKS == *=* ]]; then  # bash replaces only what follows the sign
    for i in "${!COMPREPLY[@]}"; do COMPREPLY[i]=${COMPREPLY[i]#"${current%"${current##*=}"}"}; done
  fi
}
complete -o bashdefault -o default -F _hpclm hpclm
"""
ZSH = r"""
_hpclm_runs() {
  setopt local_options no_nomatch
  compadd -- ${(f)"$(_hpclm_run_names)"}
  (( compstate[nmatches] )) || _files
}
_hpclm_requests() { compadd -- save stop; _hpclm_runs; }
_hpclm_settings() { compadd -S '' -- $(_hpclm_keys "$PREFIX"); }
_hpclm_presets() {
  compadd -- @PRESETS
  _hpclm_settings
  (( compstate[nmatches] )) || _files
}
_hpclm_topics() { compadd -- @TOPICS; }
"""
PREAMBLES = {"bash": COMMON + BASH, "zsh": COMMON + ZSH}


def script(shell: str, commands: Parser, topics: Iterable[str]) -> str:
    """The script for ``shell``; ConfigError if shtab is not installed.

    ``commands``: a parser with every command as a subcommand. ``topics``: the topics of hpclm docs.
    """
    with extras.needed_for("hpclm completion"):
        import shtab
    keys = fields.keys()
    sections = (key.partition(".")[0] + ("." if "." in key else "=") for key in keys)
    preamble = PREAMBLES[shell]
    for name, words in (
        ("@KEYS", (f"{key}=" for key in keys if "." in key)),
        ("@SECTIONS", dict.fromkeys(sections)),
        ("@PRESETS", shipped.presets()),
        ("@TOPICS", topics),
    ):
        preamble = preamble.replace(name, _quoted(words))
    text = shtab.complete(commands, shell, preamble=preamble)
    if shell == "bash":
        return text + BASH_END
    for pattern, correction in ZSH_FIXES.items():
        text = re.sub(pattern, correction, text, flags=re.MULTILINE)
    return text


def _quoted(words: Iterable[str]) -> str:
    return " ".join(map(shlex.quote, words))

"""Translates Megatron's options or nanoGPT's configuration into a settings file, with the option next to each setting."""

import ast
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hpclm.base import files
from hpclm.base.errors import ConfigError
from hpclm.config import RunConfig, elsewhere
from hpclm.config.checks import value_at
from hpclm.config.elsewhere import LEFT_OUT, MEGATRON, NANOGPT
from hpclm.config.fields import as_yaml, keys, required, type_of
from hpclm.config.section import all_fields
from hpclm.config.setting import declared
from hpclm.config.supports import SUPPORTS
from hpclm.interop import shell
from hpclm.interop.megatron import options
from hpclm.interop.shell import Flag

CHANGES_RESULTS = ("model", "data", "batch", "budget", "optim", "scaler", "engine", "parallel", "seed")
"""Sections of settings that change a run's results."""
HARMLESS = (LEFT_OUT, "it follows", "options of")
DEFAULT = "{}'s default"
TOKENIZERS = {
    "GPT2BPETokenizer": "gpt2",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "BertWordPieceCase": "wordpiece",
    "BertWordPieceLowerCase": "wordpiece_lower",
    "HuggingFaceTokenizer": "json",
    "PretrainedFromHF": "json",
}
"""Maps Megatron's tokenizers to those of hpclm preprocess."""
TOKENIZER_FILES = ("--vocab-file", "--merge-file", "--tokenizer-model", "--tokenizer-name-or-path")
OPERATORS = {
    ast.Mult: operator.mul,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}


@dataclass
class Translation:
    """Settings, each with its origin, and options that did not become settings."""

    settings: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    """Options that a person must decide on."""
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = True
    """Whether all options that change results were translated."""

    def ask(self, text: str, changes_results: bool = True) -> None:
        """Add an option that a person must decide on."""
        self.unknown.append(text)
        self.complete = self.complete and not changes_results


def translated(words: Sequence[str]) -> tuple[str, bool]:
    """The settings file for a script, nanoGPT's configuration or Megatron's options; and whether all options that change results were
    translated."""
    is_python = False
    if len(words) == 1 and Path(words[0]).exists():
        source = words[0]
        is_python = source.endswith(".py")
        text = files.read_text(Path(source)).replace("\r\n", "\n")
    elif any(word.lstrip().startswith("--") for word in words):
        text = " ".join(words)
        source = "options"
    else:
        raise ConfigError(
            f"{' '.join(words) or 'an empty text'} is neither a script nor options of Megatron (--num-layers 12 ...)"
        )
    if is_python:
        project, flags = NANOGPT, _assignments(text, source)
    else:
        project, flags = MEGATRON, shell.flags(text)
    if not flags:
        raise ConfigError(
            f"{source} has no options of Megatron; give the script that starts its training, or the options themselves"
        )
    result = _translate(project, flags)
    if is_python:
        _with_batches(result, flags)
    else:
        _with_width(result, flags)
        _with_tokenizer(result, flags)
        _with_engine(result)
    _without_idle(result)
    if "model.vocab_size" not in result.settings:
        result.notes.append("model.vocab_size must be the tokenizer's; 50257 is GPT-2's")
    if "batch.global_size" not in result.settings:
        result.notes.append("batch.global_size is not given: Megatron then takes batch.micro_size x replicas")
    return _written(result, source, project), result.complete


def _translate(project: str, flags: Sequence[Flag]) -> Translation:
    result = Translation()
    order = list(elsewhere.tables()["projects"][project])
    rank = {elsewhere.normal(name): at for at, row in enumerate(order) for name in row.split()}
    # argparse uses the last one
    last = {elsewhere.normal(flag.name): flag for flag in flags if not flag.name.startswith("$")}
    words: list[str] = []
    for text in (flag.text for flag in flags if flag.name.startswith("$")):
        result.ask(f"{text}: its value is not known before the script runs")
    for name in sorted(last, key=lambda name: rank.get(name, len(rank))):
        flag = last[name]
        answer = elsewhere.answer_of(project, name, flag.values) or elsewhere.answer_of("DeepSpeed", name, flag.values)
        if answer is None:
            _unknown(result, flag, name)
        elif answer.reason.startswith(HARMLESS):
            result.left_out.append(f"{flag.text}: {answer.reason}")
        elif answer.reason:
            result.ask(f"{flag.text}: {answer.reason}")
        elif not flag.known or any(setting.endswith(f"={elsewhere.MISSING}") for setting in answer.settings):
            sets = " ".join(elsewhere.keys(answer.settings))
            why = "has no counterpart" if flag.known else "is not known before the script runs"
            result.ask(f"{flag.text}: the value of {sets} {why}", sets.startswith(CHANGES_RESULTS))
        else:
            words += _new(result, flag, answer.settings)
    given = dict(word.split("=", 1) for word in words)
    defaults = list(_defaults(project, given))
    result.settings = elsewhere.merged([*defaults, *words])
    for key in elsewhere.keys(defaults):
        result.origins.setdefault(key, DEFAULT.format(project.partition("-LM")[0]))
    return result


def _unknown(result: Translation, flag: Flag, name: str) -> None:
    """Record an option without a row; hpclm may still know that it does not change results."""
    plain = name.removeprefix("no_").removeprefix("disable_")
    if options.is_without_effect(plain):
        result.left_out.append(f"{flag.text}: changes no results")
        return
    why = "hpclm does not have it" if options.is_known(plain) else "hpclm does not know this option"
    result.ask(f"{flag.text}: {why}")


def _new(result: Translation, flag: Flag, settings: Sequence[str]) -> list[str]:
    """The settings of an option that no earlier option has set."""
    new = []
    for setting in settings:
        key = setting.partition("=")[0]
        short = key.partition("[")[0]
        if key == short and key in result.origins:
            if key != "optim.unit":
                result.left_out.append(f"{flag.text}: {key} is set by {result.origins[key]}")
            continue
        origins = [result.origins[short]] if short in result.origins else []
        result.origins[short] = ", ".join([*origins, flag.text])
        new.append(setting)
    return new


def _defaults(project: str, given: Mapping[str, str]) -> Iterator[str]:
    """Defaults of ``project`` that differ from hpclm's and have an effect here."""
    rows = [row for row in elsewhere.tables()["defaults"][project] if row.partition("=")[0] not in given]
    settings = {**dict(row.split("=", 1) for row in rows), **given}
    warms_up = {"optim.warmup", "optim.warmup_fraction"} & settings.keys()
    for row in rows:
        key = row.partition("=")[0]
        lacks_fp16 = key.startswith("scaler.") and settings["engine.precision"] != "fp16"
        lacks_warmup = key == "optim.warmup_start" and not warms_up
        lacks_decay = key == "optim.min_lr" and settings["optim.schedule"] == "constant"
        lacks_mask = key == "batch.loss_norm" and settings.get("data.eod_mask_loss") != "true"
        if not (lacks_fp16 or lacks_warmup or lacks_decay or lacks_mask):
            yield row


def _without_idle(result: Translation) -> None:
    """Leave out settings that a run would refuse because they have no effect with the others."""
    for key, entry in all_fields(RunConfig):
        for condition in declared(entry).only_with:
            value = yaml.safe_load(result.settings.get(condition.key, "null"))
            if value is None:
                value = value_at(RunConfig(), condition.key)
            if key in result.settings and not condition.holds(value):
                del result.settings[key]
                result.left_out.append(f"{result.origins[key]}: {key} has no effect {condition.unmet(value)}")


def _with_width(result: Translation, flags: Sequence[Flag]) -> None:
    """Add the width that Megatron computes for a gated MLP."""
    names = {flag.name for flag in flags}
    hidden = result.settings.get("model.hidden", "")
    if "model.ffn" in result.settings or not hidden.isdecimal() or not names & {"--swiglu", "--glu-activation"}:
        return
    width = 4 * int(hidden)
    if "--swiglu" in names:
        width = int(width * 2 / 3 / 64) * 64
    result.settings["model.ffn"] = str(width)
    result.origins["model.ffn"] = "Megatron's width of a gated MLP"


def _with_tokenizer(result: Translation, flags: Sequence[Flag]) -> None:
    """Add a note with the command that makes a dataset with the tokenizer."""
    given = {flag.name: " ".join(flag.values) for flag in flags}
    kind = TOKENIZERS.get(given.get("--tokenizer-type", ""))
    named = [given[name] for name in TOKENIZER_FILES if name in given]
    if kind is not None:
        if kind == "json":
            named = [f"{path.rstrip('/')}/tokenizer.json" for path in named]
        result.notes.append(
            f"A dataset: hpclm preprocess --input FILE --output-prefix data/mine --tokenizer {kind} --tokenizer-files {' '.join(named)}"
        )


def _with_engine(result: Translation) -> None:
    """Choose an engine that supports pipeline stages, and experts divided over ranks if there are any."""
    stage = result.settings.get("engine.zero_stage", "0")
    experts = result.settings.get("parallel.expert", "1") != "1"
    if result.settings.get("parallel.pipeline", "1") == "1" or "engine.name" in result.settings:
        return
    able = [name for name, row in SUPPORTS.items() if stage in map(str, row.pipeline_stages)]
    engine = next((name for name in able if SUPPORTS[name].splits_by_replica or not experts), None)
    if engine:
        result.settings["engine.name"] = engine
        result.origins["engine.name"] = f"has parallel.pipeline with engine.zero_stage={stage}"


def _assignments(text: str, source: str) -> list[Flag]:
    """The assignments in nanoGPT's configuration, without running it; a value that is not literal keeps its source after a $."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{source} is not Python: {error}") from None
    values: dict[str, Any] = {}
    flags = []
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        name = node.targets[0].id
        try:
            values[name] = _literal(node.value, values)
        except ValueError:
            flags.append(Flag(name, (f"$({ast.unparse(node.value)})",)))
        else:
            flags.append(Flag(name, (str(values[name]),)))
    return flags


def _literal(node: ast.expr, values: Mapping[str, Any]) -> Any:
    """The value of an expression of literals, known names and arithmetic; ValueError for any other."""
    if isinstance(node, ast.Name) and node.id in values:
        return values[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left = _literal(node.left, values)
        right = _literal(node.right, values)
        if isinstance(left, int | float) and isinstance(right, int | float) and right:
            return OPERATORS[type(node.op)](left, right)
        raise ValueError
    return ast.literal_eval(node)


def _with_batches(result: Translation, flags: Sequence[Flag]) -> None:
    """Add nanoGPT's global batch: samples of a step over all accumulation steps and processes."""
    given = {flag.name: flag.values[0] for flag in flags}
    micro = given.get("batch_size", "12")
    accumulated = given.get("gradient_accumulation_steps", "40")
    if micro.isdecimal() and accumulated.isdecimal():
        result.settings["batch.global_size"] = str(int(micro) * int(accumulated))
        result.origins["batch.global_size"] = f"batch_size {micro} x gradient_accumulation_steps {accumulated}"


def _written(result: Translation, source: str, project: str) -> str:
    """The text of the settings file."""
    lines = [f"# Settings for {source}, by hpclm config --from-megatron."]
    lines += [f"# {note}" for note in result.notes]
    if result.unknown:
        lines += ["", "# Not translated; check each of these:", *(f"#   {text}" for text in result.unknown)]
    section: str | None = None
    for key in (key for key in keys() if key in result.settings):
        name, _, inner = key.rpartition(".")
        line = f"{inner}: {_yaml(key, result.settings[key])}  # {result.origins[key]}"
        if name != section:
            section = name
            lines.append("")
            if name:
                lines.append(f"{name}:")
        if name:
            line = f"  {line}"
        lines.append(line)
    if result.left_out:
        lines += ["", f"# Options of {project} that need no setting:", *(f"#   {text}" for text in result.left_out)]
    return "\n".join(lines) + "\n"


def _yaml(key: str, value: str) -> str:
    """A value in YAML."""
    kind = required(type_of(key))
    if kind is str:
        return as_yaml(value)
    if kind == list[str]:
        return as_yaml(value.strip("[]").split(","))
    return value

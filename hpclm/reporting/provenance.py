"""The origin of a run, according to its files: model, data, settings, command, code, versions and hardware."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.base.terminal import many
from hpclm.config import ModelConfig, RunConfig, compose
from hpclm.config.phases import in_phase
from hpclm.config.run_file import HISTORY, NAME
from hpclm.model import count
from hpclm.reporting import datasets_read
from hpclm.reporting.history import History
from hpclm.rundir import events, runs
from hpclm.rundir.rows import Row

PLACES = ("out", "name", "job", "cluster")
"""Settings of a run's place, which do not affect its computation."""
OF_DATA = ("source", "prefix", "blend", "train", "valid", "validation", "tokenizer", "tokenizer_files")
UNCOMPARABLE = (*(f"data.{name}" for name in OF_DATA), "data.split", "data.split_by", "model.vocab_size")
"""Settings that determine the meaning of a loss."""
IDLE = re.compile(r"(log|profile)\..*|checkpoint\.(?!init_from).*|stop_at|exit_.*|kill_switch")
"""Settings that do not affect results."""
VERSION = re.compile(rf"{HISTORY}/\d+\.yaml")
Settings = Mapping[str, Any]
"""Dotted key -> value."""


def settings_of_run(out: Path) -> Settings:
    """The settings of the last attempt of the run in ``out``, without PLACES; empty if it never started or if the file is damaged.

    config.yaml may already have the settings of a job that has not trained yet.
    """
    used = str(runs.read_run(out).attempt.get("config", ""))
    version = NAME
    if VERSION.fullmatch(used) and (out / used).is_file():
        version = used
    with suppress(ConfigError):
        return {
            key: value for key, value in compose.flat_of_run(out, version).items() if key.split(".")[0] not in PLACES
        }
    return {}


def shown(value: object) -> str:
    """The value of a setting as text."""
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def changed(used: Settings) -> dict[str, Any]:
    """The settings that differ from the defaults."""
    defaults = compose.written(RunConfig())
    return {key: value for key, value in used.items() if value != defaults.get(key)}


def differing(by_run: Mapping[str, Settings]) -> dict[str, dict[str, Any]]:
    """Setting -> run -> value, for settings that differ between runs."""
    keys = dict.fromkeys(key for settings in by_run.values() for key in settings)
    rows = {key: {name: settings[key] for name, settings in by_run.items() if key in settings} for key in keys}
    return {key: row for key, row in rows.items() if len({str(value) for value in row.values()}) > 1}


def facts(history: History, used: Settings) -> dict[str, str]:
    """All facts about the run, by title."""
    row: Row = {}
    checked: Row = {}
    with suppress(OSError):
        if history.attempts:
            row = events.whole(history.out, history.attempts[-1].row)
        for event in events.of_kind(events.read_events(history.out), "preflight")[-1:]:
            checked = events.whole(history.out, event)
    titled: dict[str, str] = {}
    with suppress(ConfigError):
        settings = compose.of_run(history.out, [])
        phase = max((row["phase"] for row in history.phases), default=0)
        model = in_phase(settings, min(phase, len(settings.data.phases))).model
        titled = {"model": _model(model), "tokens": _tokens(history, model)}
    titled |= {
        "data": _data(used),
        **datasets_read.facts(history.phases, used),
        "command": _text(row, "command"),
        "folder": _text(row, "folder"),
        "code": ", ".join(_code(row)),
        "versions": _versions(row),
        "hardware": "; ".join(_hardware(row, checked)),
    }
    return {title: text for title, text in titled.items() if text}


def _model(model: ModelConfig) -> str:
    shape = (
        f"{model.layers} layers, hidden size {model.hidden}, {model.attention.heads} heads, context {model.context:,}"
    )
    return f"{count.described_size(model)}: {shape}, vocabulary {model.vocab_size:,}"


def _tokens(history: History, model: ModelConfig) -> str:
    samples = max((row.get("samples") or 0 for row in history.recent), default=0)
    if not samples:
        return ""
    tokens = sum(int(values[-1]) for _, values in datasets_read.tokens_read(history.phases).values())
    return f"{tokens or samples * model.context:,} seen, in {samples:,} samples"


def _data(used: Settings) -> str:
    values = {name: used.get(f"data.{name}") for name in OF_DATA}
    return " ".join(f"{name}={shown(value)}" for name, value in values.items() if value)


def _code(row: Row) -> Iterator[str]:
    for title, key in (("hpclm", "hpclm"), ("git", "git"), ("digest of the files", "digest")):
        value = _text(row, key)
        if value:
            yield f"{title} {value}"


def _versions(row: Row) -> str:
    versions = row.get("versions")
    used = {"Python": row.get("python")}
    if isinstance(versions, dict):
        used |= versions
    return ", ".join(f"{name} {value}" for name, value in used.items() if value)


def _hardware(row: Row, checked: Row) -> Iterator[str]:
    ranks = [rank for rank in checked.get("ranks") or [] if isinstance(rank, dict)]
    devices = Counter(str(rank["device_name"]) for rank in ranks if rank.get("device_name"))
    hosts = row.get("hosts") or []
    yield from (f"{number} × {name}" for name, number in devices.most_common(4))
    if hosts:
        yield f"{many(row.get('size') or len(hosts), 'process')} on {some(hosts, 4)}"
    for title, key in (("driver", "driver"), ("CUDA", "cuda"), ("NCCL", "nccl")):
        values = [_text(rank, key) for rank in ranks if rank.get(key)]
        if values and values[0]:
            yield f"{title} {values[0]}"


def some(hosts: Sequence[object], most: int) -> str:
    """The first hosts, and the number of further ones."""
    shown = ", ".join(map(str, hosts[:most]))
    if len(hosts) > most:
        shown += f" and {len(hosts) - most} more"
    return shown


def _text(row: Row, key: str) -> str:
    value = row.get(key)
    return value if isinstance(value, str) else ""

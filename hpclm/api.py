"""The interface for Python, besides ``hpclm.train``; hpclm/__init__.py loads it when it is used."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from hpclm import cli
from hpclm.config import RunConfig
from hpclm.errors import ConfigError
from hpclm.reporting import history
from hpclm.rundir import runs

Prompt = TypeVar("Prompt", str, list[str])


def settings(*words: str) -> RunConfig:
    """Settings from a preset or settings file and overrides, as on the command line: settings("debug", "budget.steps=50").

    ConfigError lists everything that is wrong with them.
    """
    return cli.settings(words)


def metrics(run: str | Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, in the order of steps: one for each step, for each evaluation, and for scores at tasks."""
    out = Path(run)
    if not runs.is_run(out):
        raise ConfigError(f"{out} is not a run directory")
    found = history.read(out)
    return sorted(map(dict, (*found.steps, *found.evaluations, *found.tasks)), key=lambda row: int(row["step"]))


def generate(
    run: str | Path,
    prompt: Prompt,
    *overrides: str,
    tokens: int = 100,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float = 1.0,
    stop: Sequence[str] = (),
    seed: int = 0,
    batch: int = 16,
) -> Prompt:
    """The text with which a run's newest model continues ``prompt``, without the prompt; a list of prompts gives a list.

    ``overrides``: key=value settings that differ from the run's own. The options are those of ``hpclm generate``.
    """
    from hpclm.inference.completion import Completer, Limits
    from hpclm.inference.sampling import Sampling

    limits = Limits(tokens, tuple(stop))
    sampling = Sampling(temperature, top_k, top_p, seed)
    prompts = [prompt] if isinstance(prompt, str) else prompt
    completer = Completer(Path(run), list(overrides))
    texts = [each.text for each in completer.complete_all(prompts, batch, limits, sampling)]
    if isinstance(prompt, str):
        return texts[0]
    return texts

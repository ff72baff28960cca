"""What ``hpclm submit`` is asked for, and the settings that this gives: one run, or one for each value of a sweep."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpclm import config, paths, shipped
from hpclm.config import RunConfig
from hpclm.config.compose import is_override
from hpclm.config.job import TEMPLATES
from hpclm.diagnostics import report
from hpclm.errors import ConfigError
from hpclm.node import environment
from hpclm.training import records

DEFAULT = shipped.folder("configs") / "debug.yaml"


@dataclass(frozen=True)
class Request:
    """What ``hpclm submit`` is asked for."""

    settings: Sequence[str]
    """A settings file or preset, if any, and key=value."""
    options: Sequence[str] = ()
    """What options say of the job, as job.key=value; it wins over ``settings``."""
    typed: Sequence[str] = ()
    """All arguments, for messages and the record of the run."""
    sweep: Sequence[str] = ()
    """key=a,b,c each."""
    exclude_bad: Sequence[str] = ()
    """Run directories whose bad nodes are excluded."""
    dry_run: bool = False
    interactive: bool = False
    debug: bool = False
    pdb: bool = False
    ranks: str | None = None
    """Ranks to be simulated, instead of a script that is shown."""
    gpus_kind: str = "H100"
    again: bool = False
    resume_step: int | None = None


@dataclass(frozen=True)
class Variant:
    """One run of a sweep."""

    overrides: tuple[str, ...] = ()
    suffix: str = ""
    """Added to the run's name and directory: -lr-0.001-seed-2."""


def compose(request: Request, variant: Variant) -> RunConfig:
    """The settings of one run, with absolute paths."""
    words = [*request.settings, *request.options]
    if not any(not config.compose.is_override(word) for word in request.settings):
        words.insert(0, paths.literal(DEFAULT))
    run = environment.settings([*words, *variant.overrides], request.typed)
    if variant.suffix:
        run = replace(run, name=run.name + variant.suffix, out=run.out + variant.suffix)
    job, bad = run.job, report.bad_nodes(request.exclude_bad)
    if bad:
        between = "@" if job.hostfile else ","  # DeepSpeed's syntax, or Slurm's
        job = replace(job, exclude=between.join(dict.fromkeys([*filter(None, [job.exclude]), *bad])))
    return whole(replace(run, job=job))


def whole(run: RunConfig) -> RunConfig:
    """``run`` with absolute paths."""

    def absolute(path: str) -> str:
        return str(Path(path).absolute())

    job = run.job
    job = replace(job, hostfile=job.hostfile and absolute(job.hostfile), venv=job.venv and absolute(job.venv))
    if job.template not in TEMPLATES:
        job = replace(job, template=absolute(job.template))
    run = replace(run, kill_switch=run.kill_switch and absolute(run.kill_switch))
    return replace(run, out=absolute(run.out), job=job, data=records.absolute(run.data))


def variants(words: Sequence[str]) -> list[Variant]:
    """The runs for ``words``, each key=a,b,c; one without words. ConfigError if two would have the same name."""
    axes = [[(key, value) for value in values] for key, values in map(_axis, words)]
    combinations = [_variant(chosen) for chosen in itertools.product(*axes)]
    names = [
        (variant.suffix, *(o for o in variant.overrides if o.startswith(("out=", "name=")))) for variant in combinations
    ]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ConfigError(
            f"--sweep {' '.join(words)}: two runs would be called {''.join(twice).lstrip('-')}; change a value"
        )
    return combinations


def _axis(word: str) -> tuple[str, list[str]]:
    key, _, text = word.partition("=")
    values = list(_split(text))
    if not is_override(word) or not all(values):
        raise ConfigError(f"--sweep {word!r} is not key=a,b,c, such as optim.lr=1e-4,3e-4")
    return key.strip(), values


def _split(text: str) -> Iterator[str]:
    """``text`` split at commas, except inside brackets."""
    depth, part = 0, ""
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth <= 0:
            yield part.strip()
            part = ""
        else:
            part += character
    yield part.strip()


def _variant(chosen: Sequence[tuple[str, str]]) -> Variant:
    named = [(key.rpartition(".")[2], value) for key, value in chosen if key not in ("out", "name")]
    suffix = "".join(f"-{key}-{re.sub(r'[^A-Za-z0-9._+-]+', '_', value)}" for key, value in named)
    return Variant(tuple(f"{key}={value}" for key, value in chosen), suffix)

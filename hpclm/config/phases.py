"""Phases of a run (data.phases): from a number of tokens on, other datasets, learning rates or settings of the network.

A phase is a change of settings. Its settings are those of the phase before with that change, so everything that works for a run
works for a phase.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypedDict

from hpclm.base.errors import ConfigError
from hpclm.base.terminal import many
from hpclm.config.checks import typed
from hpclm.config.plan import Position, Reading
from hpclm.config.section import build_section, default_of, leaves

Phase = TypedDict(
    "Phase",
    {
        "from": int,
        "again": bool,
        "data.train": list[str],
        "optim.schedule": str,
        "optim.lr": float,
        "optim.min_lr": float,
        "optim.warmup": float,
        "optim.warmup_fraction": float,
        "optim.warmup_start": float,
        "optim.schedule_length": int,
        "optim.power": float,
        "optim.period": int,
        "optim.restarts": bool,
        "optim.wsd_decay": int,
        "optim.wsd_style": str,
        "optim.weight_decay": float,
        "optim.z_loss": float,
        "batch.global_size": int,
        "model.context": int,
        "model.rope.base": float,
        "model.rope.scaling": dict[str, str],
        "model.rope.window_scaled": bool,
    },
    total=False,
)
"""An entry of data.phases: the number of tokens before the phase, and the settings that it may change."""
OWN = ("from", "again")
"""The entries of a phase that are not settings."""
SETTINGS = tuple(key for key in Phase.__annotations__ if key not in OWN)
NO_SHAPE = ("optim.lr", "optim.min_lr", "optim.weight_decay", "optim.z_loss")
SHAPE = tuple(key for key in SETTINGS if key.startswith("optim.") and key not in NO_SHAPE)
"""The settings of the shape of a schedule, which a phase that names optim.schedule begins anew."""
IN_PLACE = ("data.train", "optim.lr", "optim.min_lr", *SHAPE)
"""The settings that change while the ranks run; for the others they start again from a checkpoint."""


def changes(run: Any, phase: int) -> dict[str, Any]:
    """The settings that ``phase`` changes, with their new values. Phase 0 is the run's own settings."""
    entry: Mapping[str, Any] = run.data.phases[phase - 1]
    changed = {key: value for key, value in entry.items() if key not in OWN}
    if "optim.schedule" in changed:
        entries = {f"optim.{field.name}": field for field in fields(run.optim)}
        changed = {key: default_of(entries[key]) for key in SHAPE} | changed
    if "batch.global_size" in changed:
        changed["batch.rampup"] = None
    return changed


def in_phase(run: Any, phase: int) -> Any:
    """The settings of ``run`` in ``phase``, without data.phases; ConfigError if they contradict each other."""
    if not run.data.phases:
        return run
    values = _values(run, phase)
    settings, problems = build_section(type(run), values, ())
    if problems:
        raise ConfigError(problems)
    return settings


def _values(run: Any, phase: int) -> dict[str, Any]:
    values = dict(leaves(run)) | {"data.phases": []}
    for number in range(1, phase + 1):
        values |= changes(run, number)
    return values


def problems(run: Any) -> Iterator[str]:
    """The problems of data.phases, and of the settings in each phase."""
    if not run.data.phases:
        return
    own = set(build_section(type(run), _values(run, 0), ())[1])
    before = run.batch.rampup[2] * run.model.context if run.batch.rampup else 0
    for number, entry in enumerate(run.data.phases, 1):
        said = f"data.phases: {typed(entry)}"
        unknown = [key for key in entry if key not in Phase.__annotations__]
        begin = entry.get("from")
        if unknown:
            yield f"{said}: {', '.join(unknown)} cannot change in a phase; from, again, {', '.join(SETTINGS)} can"
            return
        if begin is None or begin <= before:
            reason = ", the end of batch.rampup" if run.batch.rampup and number == 1 else ""
            yield f"{said} needs from, the number of tokens after which the phase begins, more than {before:,}{reason}"
            return
        before = begin
        if len(entry) == 1 + ("again" in entry and not entry["again"]):
            yield f"{said} changes nothing; give again: true, or one of {', '.join(SETTINGS)}"
        if "model.context" in entry and run.model.positions == "learned":
            yield f"{said}: model.positions=learned has a weight for each position, so model.context cannot change"
        if not run.checkpoint.enabled and any(key not in (*OWN, *IN_PLACE) for key in entry):
            yield f"{said} begins with a start from a checkpoint, and checkpoint.enabled=false saves none"
        _, wrong = build_section(type(run), _values(run, number), ())
        yield from (f"data.phases, from {begin:,} tokens on: {problem}" for problem in wrong if problem not in own)


@dataclass(frozen=True)
class Timeline:
    """When each phase of a run begins.

    A phase begins with the first step that begins at or after its number of tokens. What has been read already is part of the position,
    so that another batch size or a later change of the phases does not move it.
    """

    run: Any
    """A RunConfig."""
    position: Position = Position()

    @cached_property
    def settings(self) -> tuple[Any, ...]:
        """The settings of each phase."""
        return tuple(in_phase(self.run, phase) for phase in range(len(self.run.data.phases) + 1))

    @cached_property
    def begins(self) -> tuple[Reading, ...]:
        """The beginning of each phase; ``sources`` is known for those that have been read. ConfigError if a phase should have begun
        before the position, and has not been read."""
        begins = list(self.position.read or (Reading(),))
        if len(begins) > len(self.settings):
            raise ConfigError(
                f"data.phases has {many(len(self.settings) - 1, 'phase')}, but {len(begins) - 1} have been read, which must not change"
            )
        here = self._here(begins[-1], len(begins) - 1)
        known = len(begins)
        for phase in range(known, len(self.settings)):
            wanted = self.run.data.phases[phase - 1]["from"]
            before = self.settings[phase - 1]
            context = before.model.context
            plan = before.plan(before.parallel.smallest)
            target = here.samples - (here.tokens - wanted) // context
            if phase == known and wanted <= here.tokens - plan.batch_size(here.samples) * context:
                raise ConfigError(
                    f"data.phases: a phase from {wanted:,} tokens on cannot begin any more, because {here.tokens:,} tokens have been read; "
                    "let it begin there, or go back to an earlier checkpoint (--from STEP)"
                )
            if target > here.samples:
                steps = plan.steps_within(target - 1, here.samples) + 1
                samples = plan.samples_after(steps, here.samples)
                tokens = here.tokens + (samples - here.samples) * context
                here = Reading(here.step + steps, samples, tokens, None)
            begins.append(here)
        return tuple(begins)

    def _here(self, last: Reading, phase: int) -> Reading:
        """The position, which is in ``phase``; ``last``: the beginning of that phase."""
        samples = self.position.samples
        tokens = last.tokens + (samples - last.samples) * self.settings[phase].model.context
        return Reading(self.position.step, samples, tokens, None if samples > last.samples else last.sources)

    def phase(self, samples: int) -> int:
        """The phase of the step that begins after ``samples`` samples."""
        return max(number for number, begin in enumerate(self.begins) if begin.samples <= samples)

    def tokens(self, samples: int) -> int:
        """Tokens read in the first ``samples`` samples."""
        phase = self.phase(samples)
        begin = self.begins[phase]
        return begin.tokens + (samples - begin.samples) * int(self.settings[phase].model.context)

    def schedule(self, samples: int) -> tuple[Any, Reading]:
        """The settings ``optim`` of the step that begins after ``samples`` samples, and where their schedule begins: with the last phase
        that names optim.schedule."""
        phase = self.phase(samples)
        entries = self.run.data.phases[:phase]
        first = max((number for number, entry in enumerate(entries, 1) if "optim.schedule" in entry), default=0)
        return self.settings[phase].optim, self.begins[first]

    def restarts(self, phase: int) -> bool:
        """Whether the ranks have to start again for ``phase``."""
        return phase > 0 and any(key not in IN_PLACE for key in changes(self.run, phase))

    def next_restart(self, samples: int) -> int:
        """The first phase after ``samples`` samples that needs another start of the ranks; the number of phases without one."""
        later = range(self.phase(samples) + 1, len(self.begins))
        return next((phase for phase in later if self.restarts(phase)), len(self.begins))

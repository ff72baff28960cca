"""A branch: a new run that goes on from a checkpoint of another run, its trunk, with other settings."""

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from hpclm import config as configs
from hpclm.base.errors import ConfigError
from hpclm.checkpoint import directory
from hpclm.checkpoint import manifest as manifests
from hpclm.checkpoint.fingerprint import differences, fingerprint
from hpclm.checkpoint.manifest import Progress
from hpclm.config import RunConfig
from hpclm.config.checks import typed
from hpclm.config.data import absolute
from hpclm.config.phases import Timeline
from hpclm.config.section import leaves
from hpclm.interop.run import copy_tokenizer, fresh
from hpclm.rundir import events

FREE = ("phases", "max_epochs", "without")
"""Settings of data that may differ from the trunk's, except for phases that have been read."""


def branched(trunk: Path, target: Path, step: int | None, settings: list[str]) -> int:
    """Make the run ``target``, which resumes from the checkpoint of ``trunk`` at ``step`` (None: the newest) with other ``settings``
    (key=value). Returns the step.

    The checkpoint's files are shared by hard links where that is possible; neither run writes them in place. ConfigError if the checkpoint
    does not exist, or if a setting cannot change; nothing is written then.
    """
    there = {int(folder.name.removeprefix("step-")): folder for folder in directory.steps(trunk / "checkpoints")}
    if not there or (step is not None and step not in there):
        wanted = "" if step is None else f" of step {step}"
        raise ConfigError(f"{trunk} has no checkpoint{wanted}; it has {', '.join(map(str, sorted(there))) or 'none'}")
    step = max(there) if step is None else step
    before = configs.of_run(trunk, [])
    config = configs.of_run(trunk, [*settings, f"name={target.name}", f"out={target}"])
    source, manifest = directory.locate(there[step])  # its hashes are verified
    position = Progress.of(manifest.progress).position
    fixed = [*_fixed(before, config, max(len(position.read) - 1, 0))]
    if fixed:
        raise ConfigError(
            [
                "a branch has the network, data, seed and optimizer of its trunk; for a new run with others, which starts from these "
                "weights, give checkpoint.init_from, or revert:",
                *fixed,
            ]
        )
    _ = Timeline(config, position).begins  # ConfigError if a later phase should have begun before
    with fresh(target, mode=0o700) as staging:
        configs.dump(config, staging / "config.yaml")
        copy_tokenizer(trunk, staging)
        checkpoints = staging / "checkpoints"
        checkpoints.mkdir(0o700)
        _share(source, [manifests.NAME, *manifest.files], checkpoints / source.name)
        directory.mark(checkpoints)
        begun = len(events.of_kind(events.read_events(trunk), "began"))
        events.append(staging, "branched", trunk=str(trunk.absolute()), step=step, attempts=begun)
    return step


def _fixed(before: RunConfig, now: RunConfig, read: int) -> Iterator[str]:
    """The differences in settings that must not change: the checkpoint holds a state of these weights, and a position in these data.

    ``read``: how many of data.phases have been read.
    """
    one, other = (
        fingerprint(run.model, run.seed, {"phases": absolute(run.data).phases[:read]}, run.optim, run.batch.micro_size)
        for run in (before, now)
    )
    yield from differences(one, other)
    old = dict(leaves(before.data))
    for key, value in leaves(now.data):
        if value != old[key] and key not in FREE:
            yield f"data.{key} was {typed(old[key])} and is now {typed(value)}"


def _share(source: Path, names: Iterable[str], target: Path) -> None:
    """Share the files ``names`` of a folder with another one: as hard links, or as copies of another user's and on other disks."""
    target.mkdir(0o700)
    for name in names:
        file = source / name
        if file.stat().st_uid == os.geteuid():
            try:
                os.link(file, target / name)
                continue
            except OSError:  # another disk, or one without hard links
                pass
        shutil.copyfile(file, target / name)

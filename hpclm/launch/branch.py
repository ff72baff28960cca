"""A branch: a new run that goes on from a checkpoint of another run, its trunk, with other settings."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hpclm import config as configs
from hpclm.base import files
from hpclm.base.errors import ConfigError
from hpclm.checkpoint import directory
from hpclm.config import RunConfig
from hpclm.config.section import leaves
from hpclm.interop.run import fresh
from hpclm.rundir import events

FIXED = ("model", "data", "seed")
"""Settings that a branch shares with its trunk: the checkpoint fits no other network, and holds a position in the order of these data."""


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
    fixed = [*_changed(before, config)]
    if fixed:
        raise ConfigError(
            f"{', '.join(fixed)}: a branch has the network, data and seed of its trunk; for a new run with other ones, which starts from "
            "these weights, give checkpoint.init_from"
        )
    directory.locate(there[step])  # its hashes are verified
    with fresh(target, mode=0o700) as staging:
        configs.dump(config, staging / "config.yaml")
        if (trunk / "tokenizer").is_dir():
            shutil.copytree(trunk / "tokenizer", staging / "tokenizer")
        checkpoints = staging / "checkpoints"
        checkpoints.mkdir(0o700)
        _share(there[step], checkpoints / there[step].name)
        directory.mark(checkpoints)
        events.append(staging, "branched", trunk=str(trunk.absolute()), step=step)
    return step


def _changed(before: RunConfig, now: RunConfig) -> Iterator[str]:
    """The settings in FIXED that differ."""
    for name in FIXED:
        one, other = getattr(before, name), getattr(now, name)
        if name == "seed":
            pairs = [(name, one, other)]
        else:
            old = dict(leaves(one))
            pairs = [(f"{name}.{key}", old.get(key), value) for key, value in leaves(other)]
        yield from (key for key, old_value, value in pairs if old_value != value)


def _share(source: Path, target: Path) -> None:
    """Share the files of a checkpoint with another folder: as hard links, or as copies of another user's and on other disks."""
    target.mkdir(0o700)
    for file in source.iterdir():
        if file.stat().st_uid == os.geteuid():
            try:
                os.link(file, target / file.name)
                continue
            except OSError:  # another disk, or one without hard links
                pass
        shutil.copyfile(file, target / file.name)
        files.sync(target / file.name)

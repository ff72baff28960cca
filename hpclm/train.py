"""The verb ``hpclm train``; what it does is in loop.py, which is loaded once the settings are known to be good."""

import argparse
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from hpclm import cli, log
from hpclm.cluster import bootstrap, placement, secrets, team, threads
from hpclm.config import RunConfig
from hpclm.errors import ConfigError, HpclmError
from hpclm.job import folder


def main(argv: list[str]) -> int:
    """``hpclm train``."""
    parser = argparse.ArgumentParser(
        prog="hpclm train",
        description="Train a model. The same command goes on with a run that was stopped, killed or preempted.",
        epilog=cli.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("settings", nargs="+", metavar="FILE | key=value", help="one settings file, and overrides")
    args = parser.parse_args(argv)
    return start(cli.settings(args.settings))


def start(settings: RunConfig, alone: bool = False) -> int:
    """Find this process's peers and train with them; ``alone``: without peers, inside a job of several tasks too."""
    wrong = settings.missing() + secrets.problems(asdict(settings))
    if wrong:
        raise ConfigError(wrong)
    world = bootstrap.detect(alone=alone)
    log.setup(world.rank, redact=secrets.Redactor(), marked=world.launcher == "local")
    if world.local_size > 1:
        threads.limit(placement.threads(world.local_size))
    if world.size == 1 or world.launcher in bootstrap.OF_MPI:  # MPI wants to finish what it began
        return together(settings, world)
    try:
        code = cli.run(lambda _: together(settings, world), [])
    except SystemExit as end:  # of a rank for which another speaks
        code = end.code if isinstance(end.code, int) else 1
    # what an exception still holds of the process group would abort the interpreter's own way out
    with suppress(OSError):  # nobody may be listening any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def together(settings: RunConfig, world: bootstrap.World) -> int:
    """Join the other processes of ``world`` and train; the exit code."""
    with team.join(world, settings.cluster) as ours:
        return train(settings, ours)


def train(settings: RunConfig, ours: team.Team) -> int:
    """Train as one of ``ours``; the exit code."""
    settings.plan(ours.size)  # which refuses what cannot be divided before PyTorch is loaded: that takes seconds
    if ours.leads:
        folder.check_kinds(Path(settings.out))
    import torch

    from hpclm import loop

    try:
        return loop.run(settings, ours)
    except torch.OutOfMemoryError as error:
        raise HpclmError(
            f"{str(error).splitlines()[0]} Try a smaller batch.micro_size (now {settings.batch.micro_size}), "
            f"engine.recompute=full, or a smaller model"
        ) from error


if __name__ == "__main__":
    raise SystemExit(cli.run(main))

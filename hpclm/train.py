"""The verb ``hpclm train``; what it does is in loop.py, which is loaded once the settings are known to be good."""

import argparse
from dataclasses import asdict

from hpclm import cli, log
from hpclm.cluster import secrets
from hpclm.errors import ConfigError, HpclmError


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
    settings = cli.settings(args.settings)
    wrong = settings.missing() + secrets.problems(asdict(settings))
    if wrong:
        raise ConfigError(wrong)
    log.setup(redact=secrets.Redactor())
    import torch

    from hpclm import loop

    try:
        return loop.run(settings)
    except torch.OutOfMemoryError as error:
        raise HpclmError(
            f"{str(error).splitlines()[0]} Try a smaller batch.micro_size (now {settings.batch.micro_size}), "
            f"engine.recompute=full, or a smaller model"
        ) from error


if __name__ == "__main__":
    raise SystemExit(cli.run(main))

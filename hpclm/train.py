"""The verb ``hpclm train``; what it does is in loop.py, which is loaded once the settings are known to be good."""

import argparse

from hpclm import cli, config, log


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
    settings = config.from_cli(args.settings)
    log.setup()
    from hpclm import loop

    return loop.run(settings)


if __name__ == "__main__":
    raise SystemExit(cli.run(main))

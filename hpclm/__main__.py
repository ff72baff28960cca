"""``hpclm COMMAND`` and ``python -m hpclm COMMAND``."""

import sys

from hpclm.node import import_errors


def main() -> None:
    """Watch the launcher and catch signals, then import and call the command."""
    import_errors.report_uncaught()
    from hpclm.node import parent, preemption

    verb = "".join(sys.argv[1:2])
    parent.end_with_launcher(verb)
    preemption.catch_from_the_start(verb)
    from hpclm import cli

    sys.exit(cli.main())


if __name__ == "__main__":
    main()

"""``hpclm VERB`` and ``python -m hpclm VERB``."""

import sys

from hpclm.node import preemption


def main() -> None:
    """Catch signals, then import and call the verb."""
    preemption.catch_from_the_start("".join(sys.argv[1:2]))
    from hpclm.cli import entry

    entry()


if __name__ == "__main__":
    main()

#!/usr/bin/env python
"""``hpclm convert`` as a script."""

from hpclm import cli
from hpclm.commands import convert

if __name__ == "__main__":
    raise SystemExit(cli.run(convert.main))

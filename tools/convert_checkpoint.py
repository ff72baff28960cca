#!/usr/bin/env python
"""``hpclm convert`` as a script."""

import sys

from hpclm import cli

if __name__ == "__main__":
    raise SystemExit(cli.main(["convert", *sys.argv[1:]]))

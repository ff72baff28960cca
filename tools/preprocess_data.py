#!/usr/bin/env python
"""``hpclm preprocess`` under the name that Megatron's users know."""

import sys

from hpclm import cli

if __name__ == "__main__":
    raise SystemExit(cli.main(["preprocess", *sys.argv[1:]]))

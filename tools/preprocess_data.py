#!/usr/bin/env python
"""``hpclm preprocess`` under the name that Megatron's users know."""

from hpclm import cli
from hpclm.commands import preprocess

if __name__ == "__main__":
    raise SystemExit(cli.run(preprocess.main))

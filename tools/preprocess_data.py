#!/usr/bin/env python
"""``hpclm preprocess`` under the name that Megatron's users know; each line of a plain text is a document, as in their scripts."""

import sys

from hpclm import cli

if __name__ == "__main__":
    raise SystemExit(cli.main(["preprocess", "--plain-text", "lines", *sys.argv[1:]]))

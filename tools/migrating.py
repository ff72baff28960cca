#!/usr/bin/env python3
"""Write the tables of docs/migrating.md from hpclm/config/elsewhere.yaml; the text around them stays."""

from pathlib import Path

from hpclm.config import elsewhere

PAGE = Path(__file__).parent.parent / "docs" / "migrating.md"

if __name__ == "__main__":
    PAGE.write_text(elsewhere.page(PAGE.read_text()))

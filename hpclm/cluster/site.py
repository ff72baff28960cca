"""Where the settings of this cluster are, which a person writes once for all runs."""

import os
from collections.abc import Mapping
from pathlib import Path


def path(env: Mapping[str, str] = os.environ) -> Path | None:
    """The site file, None where there is none: $HPCLM_SITE (empty: none), or hpclm/site.yaml in the user's ~/.config.

    $XDG_CONFIG_HOME stands for ~/.config where it is set. A file that HPCLM_SITE names need not exist: reading it says so.
    """
    named = env.get("HPCLM_SITE")
    if named is not None:
        return Path(named) if named else None
    folder = env.get("XDG_CONFIG_HOME", "")
    home = Path(env.get("HOME") or "/nonexistent")
    usual = (Path(folder) if folder.startswith("/") else home / ".config") / "hpclm" / "site.yaml"
    return usual if usual.exists() else None

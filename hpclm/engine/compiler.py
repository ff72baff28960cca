"""What torch.compile needs of this machine."""

import shutil
import sysconfig
from pathlib import Path

from hpclm.errors import ConfigError


def check_compiler() -> None:
    """ConfigError where what torch.compile needs is not there."""
    compiler = next(filter(shutil.which, ("g++", "clang++", "gcc")), None)
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not compiler or not header.exists():
        missing = str(header) if compiler else "a C++ compiler on the PATH"
        raise ConfigError(
            f"engine.compile=true needs {missing}, which is not there; set engine.compile=false, "
            f"or install it (Debian: apt-get install g++ python3-dev)"
        )

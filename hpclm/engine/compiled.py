"""torch.compile for the blocks of a model, where this machine can."""

import shutil
import sysconfig
from pathlib import Path

from hpclm.errors import ConfigError
from hpclm.model.stack import Stack


def compile_blocks(model: Stack) -> None:
    """Compile each block when it first runs; ConfigError where what that needs is not there."""
    compiler = next(filter(shutil.which, ("g++", "clang++", "gcc")), None)
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not compiler or not header.exists():
        missing = str(header) if compiler else "a C++ compiler on the PATH"
        raise ConfigError(
            f"engine.compile=true needs {missing}, which is not there; set engine.compile=false, "
            f"or install it (Debian: apt-get install g++ python3-dev)"
        )
    for name, layer in model.layers.items():
        if name.startswith("block"):
            layer.compile(dynamic=False)

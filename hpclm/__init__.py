"""hpclm: train GPT models on HPC clusters.

The command ``hpclm --help`` has all verbs. The interface for Python, docs/python.md, is loaded when it is used:

>>> import hpclm
>>> run = hpclm.train(hpclm.settings("debug", "budget.steps=50"))
>>> hpclm.metrics(run)[-1]["loss"]
"""

import sys

# python -m puts the current folder first, where anybody may have put a torch.py: away with it before any import, unless it is
# the clone that this file is in
if (
    sys.argv[:1] == ["-m"]
    and not (sys.flags.isolated or getattr(sys.flags, "safe_path", False))
    and sys.path[0] != __file__.removesuffix("/hpclm/__init__.py")
):
    del sys.path[0]

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["ConfigError", "HpclmError", "__version__", "generate", "metrics", "settings", "train"]

if TYPE_CHECKING:
    from hpclm import train
    from hpclm.api import generate, metrics, settings
    from hpclm.errors import ConfigError, HpclmError

_WHERE = {
    "ConfigError": "hpclm.errors",
    "HpclmError": "hpclm.errors",
    "generate": "hpclm.api",
    "metrics": "hpclm.api",
    "settings": "hpclm.api",
}


def __getattr__(name: str) -> Any:
    if name == "train":
        return import_module("hpclm.train")  # a module that can be called: see its end
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'hpclm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

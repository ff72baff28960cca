"""hpclm: train GPT models on HPC clusters.

>>> import hpclm
>>> run = hpclm.train("small", data="text.jsonl", steps=200)
>>> run.metrics, run.generate("Once upon"), run.report()

    train      train in this process, on one GPU or the CPU
    sweep      train a run for each value of a setting
    submit     queue a job that trains, on Slurm for example
    open       open a run directory
    load       the trained network as a PyTorch module
    compare    a table of several runs, the best first
    report     a page that compares several runs
    settings   settings from a preset or file, with changes
    selftest   try your own code in every layout of processes

``train``, ``submit`` and ``open`` return a Run, ``sweep`` a list of Runs. Errors are HpclmError; errors of settings and arguments are
ConfigError. docs/python.md explains more, and ``hpclm --help`` lists the commands.
"""

import sys

# python -m puts the current folder first on the path, where anybody may have put a torch.py. Remove it before any import, unless it
# is the clone with this file.
if (
    sys.argv[:1] == ["-m"]
    and not (sys.flags.isolated or sys.flags.safe_path)
    and sys.path[0] != __file__.removesuffix("/hpclm/__init__.py")
):
    del sys.path[0]

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "HpclmError",
    "Run",
    "RunConfig",
    "__version__",
    "compare",
    "load",
    "open",
    "report",
    "selftest",
    "settings",
    "submit",
    "sweep",
    "train",
]

if TYPE_CHECKING:
    from hpclm.api.functions import load, open, settings, submit, train
    from hpclm.api.run import Run
    from hpclm.api.selftest import selftest
    from hpclm.api.several import compare, report, sweep
    from hpclm.base.errors import ConfigError, HpclmError
    from hpclm.config import RunConfig

_WHERE = {
    **dict.fromkeys(("load", "open", "settings", "submit", "train"), "hpclm.api.functions"),
    **dict.fromkeys(("compare", "report", "sweep"), "hpclm.api.several"),
    "Run": "hpclm.api.run",
    "selftest": "hpclm.api.selftest",
    "RunConfig": "hpclm.config",
    **dict.fromkeys(("ConfigError", "HpclmError"), "hpclm.base.errors"),
}
"""Name -> module of the interface, which is imported on first use."""


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        try:
            return getattr(import_module(_WHERE[name]), name)
        except Exception as error:
            from hpclm.node import import_errors

            reason = import_errors.explained(error)
            if reason:
                raise ImportError(reason) from None
            raise
    raise AttributeError(f"module 'hpclm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

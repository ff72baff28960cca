"""Atomic checkpoints.

The names below are imported on first use: the store needs PyTorch, but reading manifests does not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpclm.checkpoint.init_from import begin_from
    from hpclm.checkpoint.manifest import Progress
    from hpclm.checkpoint.retention import Retention
    from hpclm.checkpoint.store import CheckpointStore

__all__ = ["CheckpointStore", "Progress", "Retention", "begin_from"]

MODULES = {"CheckpointStore": "store", "Progress": "manifest", "Retention": "retention", "begin_from": "init_from"}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)

"""Checkpoints that are either whole or absent."""

from hpclm.checkpoint.progress import Progress
from hpclm.checkpoint.store import CheckpointStore

__all__ = ["CheckpointStore", "Progress"]

"""Checkpoints that are either whole or absent."""

from hpclm.checkpoint.progress import Progress
from hpclm.checkpoint.retention import Retention
from hpclm.checkpoint.store import CheckpointStore
from hpclm.checkpoint.weights import begin_from

__all__ = ["CheckpointStore", "Progress", "Retention", "begin_from"]

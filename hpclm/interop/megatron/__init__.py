"""Checkpoints of Megatron-LM and Megatron-DeepSpeed as run directories."""

from hpclm.interop.megatron.imported import convert
from hpclm.interop.megatron.layout import recognised

__all__ = ["convert", "recognised"]

"""The weights of a checkpoint as tensors of another format."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hpclm.base.errors import ConfigError
from hpclm.base.progress import Bar
from hpclm.checkpoint.tensors import CheckpointTensors
from hpclm.interop.rules import ConversionRule, check_names
from hpclm.interop.run import RunCheckpoint, finite


class Exported:
    """Reads a checkpoint's weights and converts them, one weight in memory at a time; files stay open inside the context."""

    def __init__(self, checkpoint: RunCheckpoint, rules: Sequence[ConversionRule], allow_nan: bool):
        """ConfigError unless ``rules`` cover exactly the checkpoint's weights. ``allow_nan``: also export values that are not finite."""
        self.rules = rules
        self.allow_nan = allow_nan
        self._folder = checkpoint.folder
        self._saved = CheckpointTensors(checkpoint.folder, checkpoint.manifest)
        shapes = self._saved.shapes()
        self.shapes = {name.removeprefix("model."): shapes[name] for name in shapes if name.startswith("model.")}
        check_names([rule.ours for rule in rules], self.shapes, str(checkpoint.folder))
        self._bar = Bar(total=len(rules), unit="weight", disable=None)

    def __enter__(self) -> "Exported":
        return self

    def __exit__(self, *_: Any) -> None:
        self._saved.__exit__()
        self._bar.close()

    def planned(self) -> Iterator[tuple[str, Tensor]]:
        """Name and shape of every tensor, on the meta device, without reading data."""
        for rule in self.rules:
            yield from zip(rule.theirs, rule.split(torch.empty(self.shapes[rule.ours], device="meta")), strict=True)

    def tensors(self, rules: Iterable[ConversionRule]) -> Iterator[tuple[str, Tensor]]:
        """Name and fp32 value of the tensors converted by ``rules``; ConfigError for values that are not finite."""
        for rule in rules:
            whole = self._saved.whole(f"model.{rule.ours}")
            if not self.allow_nan and not finite(whole):
                raise ConfigError(
                    f"{self._folder}: model.{rule.ours} has values that are not finite; export another checkpoint "
                    "(hpclm checkpoints shows which are healthy), or give --allow-nan"
                )
            yield from zip(rule.theirs, rule.split(whole), strict=True)
            self._bar.update()


def cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor`` as ``dtype``; ConfigError if values are too large for it."""
    converted = tensor.to(dtype)
    if not converted.isfinite().all() and tensor.isfinite().all():
        raise ConfigError(
            f"{name} has values up to {tensor.abs().max():.3g}, which fp16 cannot represent; use --dtype bf16"
        )
    return converted

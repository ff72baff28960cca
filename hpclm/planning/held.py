"""What a traced step holds in a GPU's memory: every storage from its allocation until it is freed, and the part it belongs to.

The parts are those of PyTorch's eager mode; compiled code keeps fewer activations.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

WEIGHTS, GRADIENTS, OPTIMIZER, GATHERED = "weights", "gradients", "optimizer", "gathered"
LOGITS, ACTIVATIONS = "logits", "activations"
PARTS = (WEIGHTS, GRADIENTS, OPTIMIZER, GATHERED, LOGITS, ACTIVATIONS)
"""In the order of a report. gathered: weights of other ranks, and buffers of collectives; logits: the loss; activations: all the rest,
with what the backward pass needs for a moment."""
ADAM = ("_fused_adamw_", "_fused_adam_")
"""Operations whose first arguments are weights, gradients and the two moments."""


@dataclass
class Held:
    """The storages on the device, and how their total changed."""

    bytes_: dict[int, int] = field(default_factory=dict)
    """Of each storage that exists."""
    parts: dict[int, str] = field(default_factory=dict)
    changes: list[tuple[int, int]] = field(default_factory=list)
    """Storage, and bytes more or less, in order."""
    updated: int = 0
    """Values that Adam has updated since the last restart."""
    _numbers: dict[int, int] = field(default_factory=dict)
    _fused: dict[int, int] = field(default_factory=dict)
    """Bytes of what the current compiled region has made and perhaps never writes to memory."""
    _used: set[int] = field(default_factory=set)
    """Storages that operations have been given since the last restart. What no operation of a step touches is not on the device: models
    are first built without memory, on the meta device."""
    _region: int | None = None
    _before: set[int] = field(default_factory=set)
    """Storages at the last restart."""
    _count: int = 0

    def enter(self, region: int | None) -> None:
        """An operation of a compiled region follows, or of none: what has outlived the region before it exists."""
        if region == self._region:
            return
        for number, size in self._fused.items():
            self._set(number, size)
        self._fused.clear()
        self._region = region

    def add(self, tensors: Iterable[Tensor], part: str | None = None, fused: bool = False) -> None:
        """Tensors that an operation has made. ``fused``: with others of its compiled region, so that they exist only if something
        else uses them."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            number = self._numbers.get(storage._cdata)
            new = number is None
            if number is None:
                number = self._numbers[storage._cdata] = self._count = self._count + 1
                weakref.finalize(storage, self._freed, storage._cdata, number)
                if part is not None:
                    self.parts[number] = part
            if new and fused:
                self._fused[number] = storage.nbytes()
            elif number not in self._fused:
                self._set(number, storage.nbytes())

    def use(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that an operation is given."""
        self._used.update(self._numbers.get(tensor.untyped_storage()._cdata, 0) for tensor in tensors)

    def read(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that a matrix product or the like reads: they must exist."""
        for tensor in tensors:
            number = self._numbers.get(tensor.untyped_storage()._cdata, 0)
            if number in self._fused:
                self._set(number, self._fused.pop(number))

    def call(self, part: str, tensors: Iterable[Any]) -> None:
        """Say which part tensors belong to, whatever was said before."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_meta:
                number = self._numbers.get(tensor.untyped_storage()._cdata)
                if number is not None:
                    self.parts[number] = part

    def updates(self, args: Any) -> None:
        """The arguments of a fused Adam."""
        weights, gradients, *moments = args[:4]
        self.updated += sum(weight.numel() for weight in weights)
        for part, tensors in ((WEIGHTS, weights), (GRADIENTS, gradients), *((OPTIMIZER, m) for m in moments)):
            self.call(part, tensors)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside this context, storages that are resized, as FSDP does to free them, are seen."""
        resize: Callable[..., Any] = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            number = self._numbers.get(storage._cdata)
            if number is not None:
                self.parts[number] = GATHERED
                self._set(number, storage.nbytes())
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resized):
            yield

    def restart(self) -> None:
        """Forget the changes so far, but not what is held."""
        self.changes = [(number, size) for number, size in self.bytes_.items() if size]
        self.updated = 0
        self._used, self._before = set(), set(self.bytes_)

    def fullest(self) -> Mapping[str, int]:
        """Bytes of each part at the fullest moment since the last restart."""
        total = most = at = 0
        absent = self._before - self._used
        changes = [(number, change) for number, change in self.changes if number not in absent]
        for index, (_, change) in enumerate(changes):
            total += change
            if total > most:
                most, at = total, index
        found: Counter[str] = Counter()
        for number, change in changes[: at + 1]:
            found[self.parts.get(number, ACTIVATIONS)] += change
        return {part: found[part] for part in PARTS}

    def _set(self, number: int, size: int) -> None:
        change = size - self.bytes_.get(number, 0)
        if change:
            self.bytes_[number] = size
            self.changes.append((number, change))

    def _freed(self, key: int, number: int) -> None:
        self._numbers.pop(key, None)
        self._fused.pop(number, None)
        self._set(number, 0)
        self.bytes_.pop(number, None)

"""Records every operation of a step on a pretended GPU (hpclm.planning.pretend), with its cost and its place in hpclm."""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import CO_OPTIMIZED
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpclm.errors import HpclmError
from hpclm.planning import costs, held, pretend
from hpclm.planning.costs import Cost
from hpclm.planning.held import Held
from hpclm.planning.parts import Place, part_of

ROOT = str(Path(__file__).parents[1])
OWN = str(Path(__file__).parent)
LOSS = "model/loss.py"
ENGINE = "graph.py"
"""The file of PyTorch that starts a backward pass; frames above it on the stack belong to the forward pass."""


class Read(NamedTuple):
    """A tensor that an operation reads."""

    value: int
    """Number of the value in its storage."""
    size: int
    """Bytes."""
    offset: int
    """Of its first element in the storage: views of one storage at different offsets are different bytes."""
    stored: int
    """Bytes of the whole storage."""


@dataclass(frozen=True)
class Operation:
    """One operation on the device."""

    name: str
    kind: str
    """product, attention, collective or memory."""
    part: str
    place: Place
    cost: Cost
    micro_batch: int
    """Micro-batches begun before it; the last one also counts what follows it."""
    region: int | None = None
    """The call of a compiled function that it belongs to, if any: its kernels are fused with each other."""
    inputs: tuple[Read, ...] = ()
    outputs: tuple[tuple[int, int], ...] = ()
    """Value number and bytes of each tensor that it writes."""
    group: str = ""
    """Axis of the mesh, of a collective."""
    group_size: int = 1
    on_host: bool = False
    """A collective of tensors in CPU memory."""


@dataclass(frozen=True)
class Event:
    """A wait of the host for the device, or a seeding of a generator."""

    what: str
    place: Place
    micro_batch: int


@dataclass(eq=False)
class Recorder(TorchDispatchMode):
    """The operations while it is active."""

    groups: Mapping[tuple[int, ...], str] = field(default_factory=dict)
    """Name of the mesh's axis for each set of global ranks."""

    def __post_init__(self) -> None:
        super().__init__()
        self.held = Held()
        self.inside = 0
        self.micro_batch = 0
        self.operations: list[Operation] = []
        self.waits: list[Event] = []
        self.seeds: list[Event] = []
        self._places: dict[int, tuple[Place, int | None]] = {}  # of forward operations, by autograd's sequence number
        self._values: dict[int, int] = {}  # number of the value in each storage
        self._region: int | None = None
        self._regions = self._numbers = 0
        self._last = Place()
        self._inner = False  # whether Python code of hpclm runs inside the backward pass

    def clear(self) -> None:
        """Forget the operations so far."""
        self.micro_batch = 0
        for found in (self.operations, self.waits, self.seeds):
            found.clear()
        self.held.restart()

    def next_micro_batch(self, done: int) -> None:
        """Another micro-batch begins, after ``done`` others."""
        self.micro_batch = done

    # what pretend.gpu reports

    def wait(self, what: str) -> None:
        """The host waits for the device."""
        self.waits.append(Event(what, self._place(), self.micro_batch))

    def seed(self, what: str) -> None:
        """A random generator is seeded."""
        self.seeds.append(Event(what, self._place(), self.micro_batch))

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, each call of which is a region whose operations are fused, and whose gradients are another."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._in_region():
                return function(*args, **kwargs)

        return call

    @contextmanager
    def _in_region(self) -> Iterator[None]:
        before = self._region
        if before is None:
            self._regions += 2  # forward and backward
            self._region = self._regions
        try:
            yield
        finally:
            self._region = before

    # operations

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``operation`` on the meta device, and record it."""
        args = tuple(map(pretend.redirected, args))
        kwargs = {key: pretend.redirected(value) for key, value in (kwargs or {}).items()}
        name = costs.name_of(operation)
        kind = costs.kind_of(name, operation.namespace)
        if kind == "collective":
            return self._collective(operation, name, args, kwargs)
        if name == "_local_scalar_dense" and args[0].is_meta:
            self.wait("item")
            flag = args[0].dtype == torch.uint8 or (self.operations and self.operations[-1].name == "any")
            return 0 if flag else torch.ones((), dtype=args[0].dtype, device="cpu").item()
        given = costs.tensors((args, kwargs))
        self.held.use(t for t in given if t.is_meta)
        if name in ("_to_copy", "copy_") and self._copied_to_host(name, args, kwargs):
            return args[0] if name == "copy_" else torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        inputs = tuple(self._read(t) for t in given if t.is_meta)
        self.inside += 1
        try:
            result = operation(*args, **kwargs)
        finally:
            self.inside -= 1
        made = [t for t in costs.tensors(result) if t.is_meta]
        if kind == "free":
            self.held.add(made)
            if made and torch._C._current_autograd_node() is None:
                self._place_and_region(None)  # the gradient of a view may be an operation, such as the cat of split
            if not inputs:
                for tensor in made:
                    self._renew(tensor)
        elif made or inputs:
            one = self._record(operation, kind, args, kwargs, result, inputs)
            self._hold(one, [t for t in given if t.is_meta], made, args)
        return result

    def _record(
        self, operation: Any, kind: str, args: Any, kwargs: Any, result: Any, inputs: tuple[Read, ...]
    ) -> Operation:
        name, cost = costs.name_of(operation), costs.of(operation, kind, args, kwargs, result)
        written = {id(t): t for t in costs.tensors((costs.mutated(operation, args, kwargs), result)) if t.is_meta}
        outputs = tuple((self._renew(t), costs.size(t)) for t in written.values())
        node = torch._C._current_autograd_node()
        place, region = self._place_and_region(node)
        accumulates = node is not None and node.name().endswith("AccumulateGrad")
        if operation.namespace == "fsdp":  # around the compiled function, not in it
            part, region = "sharding", None
        elif node is not None and name in ("add", "add_") and not (self._inner or accumulates or "Add" in node.name()):
            part = "gradient sums"  # of a value that is used twice, such as the residual
        else:
            part = part_of(kind, name, place, accumulates, node is not None)
        one = Operation(name, kind, part, place, cost, self.micro_batch, region, inputs, outputs)
        self.operations.append(one)
        return one

    def _hold(self, one: Operation, read: list[Tensor], made: list[Tensor], args: Any) -> None:
        """Keep account of the memory of an operation's results."""
        self.held.enter(one.region)
        if one.kind != "memory":
            self.held.read(read)
        self.held.add(
            made, held.LOGITS if one.place.file == LOSS else None, one.kind == "memory" and one.region is not None
        )
        if one.name in held.ADAM:
            self.held.updates(args)

    def _copied_to_host(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether this is a copy from the device to the host; those that block it, in both directions, are waits."""
        to, source = (args[0].device if name == "copy_" else kwargs.get("device")), args[1 if name == "copy_" else 0]
        there = source.is_meta
        target = there if to is None else torch.device(to).type in ("meta", "cuda")
        if there == target:
            return False
        blocking = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        if blocking:
            self.wait("copy to the host" if there else "copy to the device")
        return there

    def _collective(self, operation: Any, name: str, args: Any, kwargs: Any) -> Any:
        boxed = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.ScriptObject)]
        group = next((found for value in boxed if (found := _unboxed(value)) is not None), None)
        ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else ()
        given = costs.tensors((args, kwargs))
        self.held.use(t for t in given if t.is_meta)
        self.held.read(t for t in given if t.is_meta)
        moved = max((sum(map(costs.size, costs.tensors(value))) for value in args), default=0)
        place, region = self._place_and_region(torch._C._current_autograd_node())
        on_host = not any(t.is_meta for t in given)
        cost = Cost(moved, moved, launches=0 if on_host else 1)
        inputs = tuple(self._read(t) for t in given if t.is_meta)
        outputs = tuple((self._renew(t), costs.size(t)) for t in given if t.is_meta)
        self.operations.append(
            Operation(
                name.strip("_").removesuffix("_base"), "collective", "communication", place, cost, self.micro_batch, region,
                inputs, outputs, self.groups.get(ranks, f"{len(ranks)} ranks"), len(ranks), on_host,
            )
        )  # fmt: skip
        return _answer(operation, name, args)

    # where an operation comes from

    def _place_and_region(self, node: Any) -> tuple[Place, int | None]:
        if node is None:
            place, region = self._place(), self._region
            self._places.setdefault(torch._C._autograd._get_sequence_nr() - 1, (place, region))
            return place, region
        inner = self._place(backward=True)
        self._inner = bool(inner.file)
        origin, region = self._places.get(node._sequence_nr(), (self._last, None))
        if inner.file:  # Python code that the backward pass runs: an autograd function, a hook, a recomputation
            own = region + 1 if self._region is None and region is not None else self._region
            self._places.setdefault(torch._C._autograd._get_sequence_nr() - 1, (inner, own))
            return inner, own
        if not node.name().endswith("AccumulateGrad"):
            self._last = origin
        return origin, None if region is None else region + 1

    def _place(self, backward: bool = False) -> Place:
        """The innermost line of hpclm that runs; with ``backward``, only inside the backward pass."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(ROOT) and not file.startswith(OWN):
                owner = _owner(frame)
                return Place(file[len(ROOT) + 1 :], frame.f_lineno, owner + frame.f_code.co_name)
            if backward and file.endswith(ENGINE) and frame.f_code.co_name == "_engine_run_backward":
                return Place()
            frame = frame.f_back
        return Place()

    # which values operations read and write

    def _value(self, tensor: Tensor) -> int:
        key = tensor.untyped_storage()._cdata
        return self._values[key] if key in self._values else self._renew(tensor)

    def _read(self, tensor: Tensor) -> Read:
        return Read(
            self._value(tensor), costs.size(tensor), int(tensor.storage_offset()), tensor.untyped_storage().nbytes()
        )

    def _renew(self, tensor: Tensor) -> int:
        """Number the value that has just been written to a tensor."""
        self._numbers += 1
        storage = tensor.untyped_storage()
        if storage._cdata not in self._values:  # an address: once it is free, another storage may have it
            weakref.finalize(storage, self._values.pop, storage._cdata, None)
        self._values[storage._cdata] = self._numbers
        return self._numbers


def _owner(frame: Any) -> str:
    """The class whose method runs, with a dot."""
    values = frame.f_locals
    own = values.get("self", values.get("ctx"))
    if isinstance(values, dict) and frame.f_code.co_flags & CO_OPTIMIZED:
        values.clear()  # a copy that Python keeps with the frame, and with it tensors that the function has let go
    return f"{type(own).__name__}." if own is not None else ""


def _unboxed(value: Any) -> Any:
    try:
        return dist.ProcessGroup.unbox(value)
    except RuntimeError:  # another kind of object, such as the operator of a reduction
        return None


def _answer(operation: Any, name: str, args: Any) -> Any:
    """What a collective returns: what its schema names, from its arguments."""
    returns = operation._schema.returns
    if operation.namespace == "c10d":
        work = pretend.finished_work()
        return work if len(returns) == 1 else (*(args[i] for i in range(len(returns) - 1)), work)
    if name == "wait_tensor":
        return args[0]
    raise HpclmError(f"the step cannot be traced: the collective {operation} is not supported by hpclm planner --trace")

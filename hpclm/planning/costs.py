"""What one operation costs a GPU: bytes read and written, floating-point operations, kernel launches."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

FREE = frozenset(
    [
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "empty_permuted",
        "detach",
        "alias",
        "lift_fresh",
        "_unsafe_view",
        "view",
        "_reshape_alias",
        "t",
        "transpose",
        "permute",
        "expand",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "split",
        "split_with_sizes",
        "unbind",
        "as_strided",
        "unfold",
        "is_same_size",
        "record_stream",
        "set_",
        "resize_",
        "_nested_tensor_size",
        "dim",
        "size",
        "stride",
        "isfinite_scalar",
        "chunk",
        "_local_scalar_dense",
        "lift",
        "requires_grad_",
    ]
)
"""Operations that launch no kernel: views, and memory that is not filled."""
FILLED = frozenset(["new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"])
"""Operations that only look at the shape and type of their input."""
PRODUCTS = frozenset(["mm", "addmm", "bmm", "baddbmm", "addmm_", "baddbmm_", "addbmm", "_scaled_mm", "linear"])
ATTENTION = "scaled_dot_product"
LAUNCHES = {"native_layer_norm_backward": 3, "embedding_dense_backward": 4, "sort": 4, "cumsum": 2}
"""Kernels of operations that launch several."""
LIST_CHUNKS, LIST_CHUNK, LIST_TENSORS = 320, 65536, 36
"""Chunks, values of a chunk and tensors that one kernel over lists of tensors takes (PyTorch's multi_tensor_apply)."""


@dataclass(frozen=True)
class Cost:
    """The cost of one operation."""

    read: int = 0
    """Bytes."""
    written: int = 0
    flops: float = 0.0
    launches: int = 0
    shape: tuple[int, int, int, int] | None = None
    """Batch, rows, columns and inner size of a matrix product."""
    width: int = 0
    """Size of a head, in attention."""


def size(tensor: Tensor) -> int:
    """Bytes of a tensor; what is expanded counts once."""
    return (
        prod(n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride) * tensor.element_size()
        if tensor.numel()
        else 0
    )


def tensors(values: Any) -> list[Tensor]:
    """The tensors in nested arguments."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def name_of(operation: Any) -> str:
    """The name of an operation without its overload."""
    return operation._schema.name.split("::")[-1]


def kind_of(name: str, namespace: str) -> str:
    """product, attention, collective, free, or memory for all that is limited by memory."""
    if "c10d" in namespace:
        return "collective"
    if name in FREE:
        return "free"
    if name in PRODUCTS:
        return "product"
    return "attention" if ATTENTION in name else "memory"


def of(operation: Any, kind: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Cost:
    """The cost of ``operation``, called with these arguments, from its schema and the shapes."""
    if kind == "product":
        return _product(args, kwargs, result)
    name, inputs, outputs = name_of(operation), _distinct(tensors((args, kwargs))), _distinct(tensors(result))
    changed = _distinct(tensors(mutated(operation, args, kwargs)))
    own, overwritten = {id(t) for t in inputs}, {id(t) for t in _overwritten(name, changed)}
    fresh = [t for t in outputs if id(t) not in own]
    read = 0 if name in FILLED else sum(size(t) for t in inputs if id(t) not in overwritten)
    written = sum(map(size, fresh)) + sum(map(size, changed))
    if name in ROWS:
        read, written = ROWS[name](inputs, fresh, changed)
    if name.startswith(("_foreach", "_fused")):
        return Cost(read, written, launches=_list_launches(args))
    if kind == "attention":
        flops = _flops(operation, args, kwargs, result) / (2 if _argument(operation, args, kwargs, "is_causal") else 1)
        width = next(t.shape[-1] for t in inputs if t.ndim == 4)
        return Cost(read, written, flops, 1 + 2 * ("backward" in name), width=width)
    return Cost(read, written, launches=LAUNCHES.get(name, 1))


def _distinct(found: Sequence[Tensor]) -> list[Tensor]:
    return list({id(t): t for t in found if t.is_meta}.values())


def mutated(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation writes to."""
    found = []
    for number, argument in enumerate(operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[number] if number < len(args) else kwargs.get(argument.name))
    return found


def _overwritten(name: str, changed: list[Tensor]) -> list[Tensor]:
    """The arguments that an operation writes to without reading them."""
    writes_only = name in ("zero_", "fill_", "copy_", "_foreach_zero_", "_foreach_copy_", "normal_", "bernoulli_")
    return changed if writes_only or (not name.endswith("_") and not name.startswith("_fused")) else []


def _product(args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Cost:
    """[bias,] a, b -> a x b, or added to the first argument."""
    *bias, a, b = (value for value in args if isinstance(value, Tensor))
    batch = a.shape[0] if a.ndim == 3 else 1
    shape = (batch, a.shape[-2], b.shape[-1], a.shape[-1])
    read = size(a) + size(b) + (sum(map(size, bias)) if kwargs.get("beta", 1) else 0)
    return Cost(read, size(result), 2.0 * prod(shape), 1, shape)


def _flops(operation: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
    count = flop_registry.get(operation.overloadpacket)
    return float(count(*args, **kwargs, out_val=result)) if count else 0.0


def _argument(operation: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str) -> Any:
    """The value of one argument; None if it was not given."""
    number = next((i for i, one in enumerate(operation._schema.arguments) if one.name == name), len(args))
    return args[number] if number < len(args) else kwargs.get(name)


def _list_launches(args: Sequence[Any]) -> int:
    """Kernels of an operation over lists of tensors."""
    found = next((value for value in args if isinstance(value, (list, tuple))), ())
    chunks = sum(ceil(t.numel() / LIST_CHUNK) for t in found)
    return max(ceil(chunks / LIST_CHUNKS), ceil(len(found) / LIST_TENSORS), 1)


def _rows_found(inputs: list[Tensor], fresh: list[Tensor], changed: list[Tensor]) -> tuple[int, int]:
    """Reads indices and as much as it writes."""
    out = sum(map(size, fresh))
    return out + size(min(inputs, key=lambda t: t.is_floating_point())), out


def _rows_added(inputs: list[Tensor], fresh: list[Tensor], changed: list[Tensor]) -> tuple[int, int]:
    """Reads values, indices and the places they are added to, in place."""
    source = inputs[-1]
    places = source.numel() * changed[0].element_size()
    return size(source) + places + size(inputs[1]), places


def _table_gradient(inputs: list[Tensor], fresh: list[Tensor], changed: list[Tensor]) -> tuple[int, int]:
    """Fills a table with zeros and adds rows to it."""
    rows = size(inputs[0])
    return 2 * rows + size(inputs[1]), size(fresh[0]) + rows


def _own_part(inputs: list[Tensor], fresh: list[Tensor], changed: list[Tensor]) -> tuple[int, int]:
    """Copies a rank's shards into its part of the buffer of an all-gather, which is among the inputs and results."""
    own = size(min(fresh, key=size, default=inputs[0]))
    return own, own


ROWS = {
    "all_gather_copy_in": _own_part,
    "embedding": _rows_found,
    "index_select": _rows_found,
    "gather": _rows_found,
    "scatter_add_": _rows_added,
    "index_add_": _rows_added,
    "index_put_": _rows_added,
    "_index_put_impl_": _rows_added,
    "embedding_dense_backward": _table_gradient,
}
"""Operations that touch only some rows of an argument."""

"""A weight as an engine holds it, and how that becomes blocks of a logical tensor and back."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpclm.engine import Saved, Shard
from hpclm.parallel.collectives import all_gather
from hpclm.parallel.form import Form
from hpclm.parallel.mesh import Axis, Mesh


def same(tensor: Tensor) -> Tensor:
    """``tensor`` itself: what an engine holds is all that its tensor-parallel process has."""
    return tensor


@dataclass(frozen=True)
class Held:
    """One weight, as an optimizer sees it."""

    name: str
    """Logical name."""
    parameter: nn.Parameter
    """What the optimizer moves: all of what the tensor axis leaves to this process, or this replica's part of that."""
    form: Form
    whole: Callable[[Tensor], Tensor] = same
    """This replica's part -> what all replicas hold together (a collective over the data axis)."""
    part: Callable[[Tensor], Tensor] = same
    """What all replicas hold together -> this replica's part."""
    copy: bool = False
    """Whether another pipeline stage has it too and counts it."""


def shards(held: Held, name: str, tensor: Tensor, mesh: Mesh, owner: int) -> Iterator[Shard]:
    """What this process saves of the tensor ``name``, of which ``tensor`` is this replica's part.

    Replica ``owner`` saves it; what every tensor-parallel process has, the first of them saves. A collective over the data
    axis where the replicas hold parts.
    """
    whole = held.whole(tensor)
    if held.copy or mesh.dp.rank != owner % mesh.dp.size or (held.form.dim is None and not mesh.tp.first):
        return
    if held.whole is not same:
        whole = whole.cpu()  # what was gathered is not there yet, and the device has no room for all of it
    for piece in held.form.pieces(mesh.tp):
        yield Shard(name, held.form.cut(whole, piece), held.form.shape, piece.start)


def read(held: Held, name: str, saved: Saved, tp: Axis) -> Tensor:
    """This replica's part of the saved tensor ``name``."""
    blocks = [saved.block(name, piece.start, piece.size) for piece in held.form.pieces(tp)]
    return held.part(blocks[0] if len(blocks) == 1 else torch.cat(blocks, held.form.dim or 0))


def decay_groups(all_held: Iterable[Held], everything: bool) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters that decay, and those that do not: ``everything`` does, or only matrices."""
    yes: list[nn.Parameter] = []
    no: list[nn.Parameter] = []
    for held in all_held:
        (yes if everything or len(held.form.shape) >= 2 else no).append(held.parameter)
    return yes, no


def gather_parts(part: Tensor, rows: int, dp: Axis) -> Tensor:
    """Each replica's share of ``rows`` rows, as ``torch.chunk`` cuts them -> all of them on every replica.

    The last shares may be shorter, or filled up with more rows than there are.
    """
    share = -(-rows // dp.size)
    if len(part) < share:
        part = torch.cat([part, part.new_zeros(share - len(part), *part.shape[1:])])
    return all_gather(part, dp)[:rows]


def own_part(whole: Tensor, dp: Axis) -> Tensor:
    """This replica's share of the rows of ``whole``, as ``torch.chunk`` cuts them; perhaps none."""
    share = -(-len(whole) // dp.size)
    return whole[dp.rank * share : (dp.rank + 1) * share]

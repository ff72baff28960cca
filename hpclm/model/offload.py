"""What the backward pass needs, in the CPU's memory until then."""

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

SMALL = 1 << 16  # values; a copy of fewer takes longer to begin than to make
Kept = Tensor | tuple[Tensor, torch.device]


def on_the_cpu(small: int = SMALL) -> saved_tensors_hooks:
    """While this is entered, activations that a backward pass needs are kept on the CPU; weights stay where they are.

    The copies from and to pinned memory are made in the order of the device's own work, which waits for nothing else.
    """

    def keep(tensor: Tensor) -> Kept:
        if tensor.numel() < small or not tensor.is_floating_point() or weight(tensor):
            return tensor
        place = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
        return place.copy_(tensor.detach(), non_blocking=True), tensor.device

    def bring(kept: Kept) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept[0].to(kept[1], non_blocking=True)

    return saved_tensors_hooks(keep, bring)


def weight(tensor: Tensor) -> bool:
    """Whether this is a parameter, or a parameter in another type or turned round."""
    if tensor.grad_fn is None:
        return tensor.requires_grad
    node: Node | None = tensor.grad_fn
    for _ in range(3):
        if node is None or node.name().endswith("AccumulateGrad"):
            break
        inputs = node.next_functions
        node = inputs[0][0] if len(inputs) == 1 else None
    return node is not None and node.name().endswith("AccumulateGrad")

"""Activations that are copied to the CPU and back: in which order streams wait, and when the GPU's memory is free again."""

import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from hpclm.model import offload


class Recorded(offload.Streams):
    """Streams that only record what is queued on them; copies happen at once."""

    def __init__(self):
        self.queued = []
        self.out, self.back, self.main = (Stream(name, self.queued) for name in ("out", "back", "main"))

    def computing(self):
        return self.main

    @contextmanager
    def on(self, stream):
        self.queued.append((stream.name, "copy"))
        yield


class Stream:
    def __init__(self, name, queued):
        self.name, self.queued, self.events = name, queued, 0

    def wait_stream(self, other):
        self.queued.append((self.name, "after", other.name))

    def wait_event(self, event):
        self.queued.append((self.name, "after", *event))

    def record_event(self):
        self.events += 1
        return self.name, self.events


def run(blocks, streams, small=1):
    """A forward pass through a few layers; its output, and those activations that each layer saves."""
    x, moved = torch.ones(4, 8, requires_grad=True), offload.ActivationOffload(streams, small)
    weights, y = [nn.Parameter(torch.full((8, 8), 0.1)) for _ in range(blocks)], x
    for weight in weights:
        with moved.next_block():
            y = torch.tanh(y @ weight)
    return x, weights, y, moved


def test_gradients_are_the_same_and_only_two_blocks_are_on_the_gpu_at_a_time():
    streams = Recorded()
    x, weights, y, moved = run(5, streams)
    here = [sum(saved.tensor is not None for saved in offload.alive(block)) for block in moved.blocks]
    assert here[:3] == [0, 0, 0] and all(here[3:])
    y.sum().backward()
    again = [nn.Parameter(weight.detach().clone()) for weight in weights]
    plain = torch.ones(4, 8, requires_grad=True)
    z = plain
    for weight in again:
        z = torch.tanh(z @ weight)
    z.sum().backward()
    assert torch.equal(x.grad, plain.grad)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(weights, again, strict=True))
    assert not any(offload.alive(block) for block in moved.blocks)  # nothing stays


def test_each_copy_waits_for_what_it_reads_and_each_use_for_its_copy():
    streams = Recorded()
    _, _, y, _ = run(4, streams)
    forward = streams.queued[:]
    assert forward[:2] == [("out", "after", "main"), ("out", "copy")]
    # the memory of block 0 is free once its copies are done, and only then
    assert [entry for entry in forward if entry[0] == "main"] == [
        ("main", "after", "out", 1),
        ("main", "after", "out", 2),
    ]
    streams.queued.clear()
    y.sum().backward()
    queued = streams.queued
    copies = [number for number, entry in enumerate(queued) if entry == ("back", "copy")]
    assert copies and queued[copies[0] - 2 : copies[0]] == [("back", "after", "main"), ("back", "after", "out", 2)]
    waits = [entry for entry in queued if entry[:3] == ("main", "after", "back")]
    assert sorted(waits) == [("main", "after", "back", number + 1) for number in range(len(copies))]
    first_use = queued.index(waits[0])
    assert copies[0] < first_use and len([c for c in copies if c < first_use]) >= 1


def test_an_unused_copy_is_waited_for_before_its_memory_is_free():
    streams = Recorded()
    saved = offload.Saved(
        offload.BlockActivations(0), torch.ones(1), streams, torch.device("cpu"), 0, None, arriving=("back", 7)
    )
    gone = weakref.ref(saved)
    del saved
    assert gone() is None and streams.queued == [("main", "after", "back", 7)]


def test_an_activation_that_is_changed_in_place_is_an_error():
    x, moved = torch.ones(8, requires_grad=True), offload.ActivationOffload(Recorded(), 1)
    with moved.next_block():
        z = x * 2
        y = z * z
    with torch.no_grad():
        z.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


def test_small_activations_and_weights_stay():
    *_, moved = run(3, Recorded(), small=33)
    assert not any(block.saved for block in moved.blocks)


class Slices(torch.autograd.Function):
    """Saves three slices of its input, and keeps what comes back."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(*x.detach().transpose(0, 1).chunk(3, -1))
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        Slices.found = ctx.saved_tensors
        return gradient


def test_slices_of_one_tensor_are_copied_once_and_come_back_with_their_strides():
    streams = Recorded()
    x, moved = torch.rand(4, 5, 24, requires_grad=True), offload.ActivationOffload(streams, 1)
    with moved.next_block():
        y = Slices.apply(x * x)
    for _ in range(offload.AHEAD):
        with moved.next_block():
            y = torch.tanh(y)
    assert len(offload.alive(moved.blocks[0])) == 1 and offload.alive(moved.blocks[0])[0].tensor is None
    y.sum().backward()
    for slice_, wanted in zip(Slices.found, (x * x).transpose(0, 1).chunk(3, -1)):
        assert torch.equal(slice_, wanted) and slice_.stride() == wanted.stride()


def test_a_tensor_that_is_saved_again_after_a_change_is_copied_again():
    x, moved = torch.full((8,), 3.0, requires_grad=True), offload.ActivationOffload(Recorded(), 1)
    factor = torch.ones(8)
    with moved.next_block():
        first = x * factor
        factor.add_(1)
        second = x * factor
    second.sum().backward()
    assert torch.equal(x.grad, torch.full((8,), 2.0))
    with pytest.raises(RuntimeError, match="changed in place"):
        first.sum().backward()

"""An engine's state in the hands of a test."""


def state(engine):
    """A copy of every logical tensor of an engine in one process."""
    return {shard.name: shard.tensor.clone() for shard in engine.tensors()}


class Kept:
    """Tensors as a checkpoint gives them."""

    def __init__(self, tensors):
        self.tensors = tensors

    def shapes(self):
        return {name: tuple(t.shape) for name, t in self.tensors.items()}

    def block(self, name, start, size):
        return self.tensors[name][tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]

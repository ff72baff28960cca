"""The parts of a step that a trace is summed up by."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A line of hpclm."""

    file: str = ""
    line: int = 0
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "(outside hpclm)"


BY_FUNCTION = {
    "Norm.forward": "norms",
    "MLP.forward": "activation",
    "Block.forward": "residual additions",
    "dropout": "dropout",
    "gradient_norm": "gradient norm",
    "token_weights": "step",
    "rotate": "rotary positions",
    "_rotate": "rotary positions",
}
BY_OWNER = {
    "VocabParallelEmbedding": "embeddings",
    "InputEmbedding": "embeddings",
    "_EmbeddingBackward": "embeddings",
    "Attention": "attention's layout",
}
BY_FILE = {
    "model/loss.py": "loss",
    "model/position.py": "positions and masks",
    "optim/adamw.py": "optimizer",
    "model/attention.py": "attention's layout",
    "engine/gradient_buckets.py": "gradient buckets",
    "engine/sharded_optimizer.py": "gradient buckets",
    "parallel/collectives.py": "tensor parallelism",
}
LINEAR = ("ColumnLinear.forward", "RowLinear.forward", "gathered_linear", "linear", "_LinearBackward.backward")


def part_of(kind: str, name: str, place: Place, accumulates: bool, backward: bool) -> str:
    """The part of the step that an operation belongs to."""
    if kind != "memory":
        return {"product": "matrix products", "attention": "attention"}[kind]
    if accumulates:
        return "gradient accumulation"
    function = place.function
    if function.endswith(LINEAR):
        if name == "sum":
            return "bias gradients"
        if name in ("_to_copy", "copy_"):
            return "gradient casts" if backward else "weight casts"
        return "linear layers"
    owner, _, last = function.rpartition(".")
    found = BY_FUNCTION.get(function) or BY_FUNCTION.get(last) or BY_OWNER.get(owner) or BY_FILE.get(place.file)
    return found or ("engine" if place.file.startswith("engine/") else "other")

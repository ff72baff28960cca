"""Usual causes of a difference between layouts, and remedies."""

from collections.abc import Sequence

from hpclm.trials.compare import Difference
from hpclm.trials.toy import Trial

UPDATE = (
    "the optimizer computes something of a whole weight (a norm, a mean, a maximum) from the part of it that a process holds: declare that it "
    "works on whole matrices, or compute it from the slices of all ranks"
)
INITIAL = {
    "tensor": "the initial values of a weight that tensor ranks split depend on the slice, such as a standard deviation by its fan-in: make it "
    "by new_parameter(name, InitSpec.normal(Placement(whole shape, dim), std, generator)), which fills the slice of the whole",
    "other": "initial values come from random numbers that are neither the `generator` that a block is given nor PyTorch's default one, or depend on the process",
}
SHAPE = (
    "a weight that tensor ranks split has no entry in `placements`, the dictionary of the module that it belongs to: make it by new_parameter, "
    "or declare placements[name] = Placement(whole shape, dim)"
)
FORWARD = {
    "tensor": "it acts on every tensor rank where it should act once: what scatter adds up, such as a bias added before it, counts on each rank; "
    "add it after scatter, to this rank's tokens, as copy_to_tp(weight, tp)",
    "batches": "what the block gives for a sample depends on the other samples of its micro-batch, as a batch norm does",
    "other": "what the block computes depends on the process: its rank, the other layers, or numbers that only some processes have",
}
TRAINING = {
    "batches": "in training, what the block gives for a sample depends on the other samples of its micro-batch (such as a batch norm), or on "
    "random numbers of a generator of its own: PyTorch's default generator is seeded for every layer and micro-batch, others are not",
    "other": "in training the block draws random numbers that depend on the process or on what was drawn before: use PyTorch's default "
    "generator (torch.rand_like, F.dropout), which is seeded for every layer and micro-batch, or hpclm.model.dropout.dropout",
    "tensor": "in training a value depends on what this rank's slice of the sequence has, such as a mean over it: sum it over the ranks with "
    "sum_over_tp(x, tp)",
}
GRADIENT = {
    "partial": "each tensor rank has only its own tokens' part of this gradient: use the weight as copy_to_tp(weight, tp), which sums the "
    "gradient over the ranks (hpclm.parallel.collectives)",
    "counted": "the gradient is summed over the tensor ranks although each has all of it: use the weight without copy_to_tp where every rank "
    "sees the whole sequence, after gather",
    "stages": "the engine does not divide the model into stages, or does not follow parallel.pipeline: let it declare what it can do, "
    "supports = hpclm.config.supports.Supports(its name), so that a pipeline is refused by name",
    "engine": "the engine does not average the gradients of the replicas: all-reduce them over compute.mesh.dp; the loss is weighted already, "
    "so that the sum is the mean",
    "tensor": "the weight is used on each rank's slice without copy_to_tp(weight, tp), or is split without a row in `placements`, or a "
    "collective without a gradient was called: use gather, scatter and sum_over_tp of hpclm.parallel.collectives",
    "other": "the backward pass gives each process another gradient, and nothing sums them up",
}
RESUME = (
    "a checkpoint has weights and the optimizer's declared state, and nothing else: what a block, an optimizer, a source or a schedule "
    "remembers besides is lost when the run is killed; make it a weight, or a function of the step or the samples read"
)
AGAIN = "random numbers that are not seeded, the time, or an order that changes, such as that of a set"
SCHEDULE = "a schedule is a pure function of its arguments: it must not count its calls or remember values"
SOURCE = "samples may depend on nothing but the seed and their number: not on the rank, the time, unseeded random numbers, or what was read before"
REPORT = "it is reported with a value per token on some ranks only, or computed from this rank's tokens: call report for the tokens that the block has"


def cause(kind: str, trial: Trial, differences: Sequence[Difference]) -> str:
    """The usual cause of what differs in a trial of an object of this kind."""
    stage = differences[0].stage
    hints = {difference.hint for difference in differences}
    place = "tensor" if trial.splits else "batches" if trial.other_batches else "other"
    if kind == "engine" and "parallel.pipeline=2" in trial.settings:
        return GRADIENT["stages"]
    if stage == "samples":
        return SOURCE
    if kind == "schedule":
        return SCHEDULE
    if kind == "source" and stage not in ("initial", "update"):
        return SOURCE
    if trial.name.endswith("again"):
        return AGAIN
    if trial.killed:
        return RESUME
    if stage == "report":
        return REPORT
    if "shape" in hints:
        return SHAPE
    if stage == "initial":
        return INITIAL.get(place, INITIAL["other"])
    if stage == "forward":
        return FORWARD[place]
    if stage == "training":
        return TRAINING[place]
    if stage == "gradient":
        return _of_gradient(kind, place, hints)
    if stage == "update":
        return UPDATE if kind in ("optimizer", "block") else RESUME
    return UPDATE if kind == "optimizer" else TRAINING[place]


def _of_gradient(kind: str, place: str, hints: set[str]) -> str:
    if kind == "engine":
        return GRADIENT["engine"]
    if place == "tensor":
        return GRADIENT["partial" if "partial" in hints else "counted" if "2 times" in hints else "tensor"]
    return GRADIENT["other"]

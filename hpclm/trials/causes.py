"""Usual causes of differences between layouts, and their remedies."""

from collections.abc import Sequence

from hpclm.trials.compare import Difference
from hpclm.trials.toy import LayoutTrial

UPDATE = (
    "the optimizer computes a statistic of a whole weight (a norm, a mean, a maximum) from the part that a process holds: declare "
    "`matrices` in its class instead of `splits`, or compute it from the slices of all ranks"
)
INITIAL = {
    "tensor": "tensor ranks split a weight, and its initial values depend on the slice, for example because the slice's fan-in sets the standard deviation: create it "
    "with new_parameter(name, InitSpec.normal(Placement(whole shape, dim), std, generator)), which fills the slice of the whole",
    "other": "initial values depend on the process, or on a random generator other than the block's `generator` and PyTorch's default one",
}
SHAPE = (
    "a weight that tensor ranks split has no entry in `placements`, the dictionary of its module: create it with new_parameter, "
    "or declare placements[name] = Placement(whole shape, dim)"
)
FORWARD = {
    "tensor": "a weight acts on every tensor rank but should act once: scatter sums its input over the ranks, so a bias added before scatter counts "
    "once per rank; add the bias after scatter, to this rank's tokens, as copy_to_tp(weight, tp)",
    "batches": "the block's output for a sample depends on the other samples of its micro-batch, as with a batch norm",
    "other": "the block's output depends on the process: its rank, the other layers, or numbers that only some processes have",
}
TRAINING = {
    "batches": "in training, the block's output for a sample depends on the other samples of its micro-batch (as with a batch norm), or on "
    "random numbers of another generator: only PyTorch's default generator is seeded for every layer and micro-batch",
    "other": "in training the block draws random numbers that depend on the process or on earlier draws: use PyTorch's default "
    "generator (torch.rand_like, F.dropout), which is seeded for every layer and micro-batch, or hpclm.model.dropout.dropout",
    "tensor": "in training a value depends on this rank's slice of the sequence, such as a mean over it: sum it over the ranks with "
    "sum_over_tp(x, tp)",
}
GRADIENT = {
    "partial": "each tensor rank has only the part of this gradient from its own tokens: use the weight as copy_to_tp(weight, tp), which sums the "
    "gradient over the ranks (hpclm.parallel.collectives)",
    "counted": "the gradient is summed over the tensor ranks, but each rank has the whole gradient: after gather, where every rank sees the "
    "whole sequence, use the weight without copy_to_tp",
    "stages": "the engine does not divide the model into stages, or does not follow parallel.pipeline: declare its features in "
    "supports = hpclm.config.supports.Supports(its name), so that hpclm refuses a pipeline",
    "engine": "the engine does not sum the gradients of the replicas: all-reduce them over compute.mesh.dp; the loss is already weighted, "
    "so the sum is the mean",
    "tensor": "the weight is used on each rank's slice without copy_to_tp(weight, tp), or is split without a row in `placements`, or a "
    "collective without a gradient was called: use gather, scatter and sum_over_tp of hpclm.parallel.collectives",
    "other": "the backward pass gives each process a different gradient, and nothing sums them",
}
RESUME = (
    "a checkpoint has only weights and the optimizer's declared state: other values that a block, an optimizer, a source or a schedule "
    "remembers are lost when the run is killed; make each a weight, or a function of the step or the samples read"
)
AGAIN = "unseeded random numbers, the time, or an order that changes, such as that of a set"
SCHEDULE = "a schedule is a pure function of its arguments: it must not count its calls or remember values"
SOURCE = "samples may depend only on the seed and their number: not on the rank, the time, unseeded random numbers, or earlier reads"
REPORT = "only some ranks report a value per token, or the value comes from this rank's tokens: call report for all tokens of the block"


def cause(kind: str, trial: LayoutTrial, differences: Sequence[Difference]) -> str:
    """The usual cause of ``differences`` in a trial of an object of this ``kind``."""
    stage = differences[0].stage
    hints = {difference.hint for difference in differences}
    place = "other"
    if trial.splits:
        place = "tensor"
    elif trial.other_batches:
        place = "batches"
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
        if "partial" in hints:
            return GRADIENT["partial"]
        return GRADIENT["counted" if "2 times" in hints else "tensor"]
    return GRADIENT["other"]

"""``hpclm selftest``: right code agrees in every layout, and of each usual mistake it names the weight, the layout and the cause."""

import json
import os

import numpy as np
import pytest

import hpclm as api
from hpclm import cli
from hpclm.errors import ConfigError
from hpclm.trials import causes, direct, kinds, toy
from hpclm.trials.compare import Difference, Tensors, differences
from hpclm.trials.record import ObservedEngine, Piece, Record
from hpclm.trials.run import selftest
from hpclm.trials.verdict import Result, Verdict, conclusion, lines
from tests.engine import sharded
from tests.runs import ROOT, hpclm

HERE = "tests.trials.wrong"
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
EVERY = ["one process", *(trial.name for trial in toy.LAYOUTS["block"])]

WRONG = {
    "NotCopied": ("tensor 2", "the gradient of block0.scale", "copy_to_tp"),
    "Unseeded": ("one process again", "the loss of step 1", "not seeded"),
    "BatchNorm": ("smaller micro-batches", "the loss before the first step", "other samples of its micro-batch"),
    "BiasedTwice": ("tensor 2", "block0.extra.bias", "counts on each rank"),
    "FanInOfSlice": ("tensor 2", "block0.down begins with other values", "fan-in"),
    "NotPlaced": ("tensor 2", "block0.down has the shape [32, 16], and [32, 32] in one process", "placements"),
    "remembering": ("killed and resumed", "learning rate", "pure function"),
    "source_by_rank": ("data 2", "sample 0 of the training data is another on rank 1", "not on the rank"),
    "Forgetful": ("data 2", "the gradient of", "does not average the gradients"),
}
"""Mistake -> the layout that shows it, what is named, and the cause."""
CHEAP = ("NotCopied",)


def tried(name, *words, code=0):
    """The layouts and what came of them, by the command in a separate process."""
    result = json.loads(hpclm("selftest", f"{HERE}:{name}", "--json", *words, check=code, env=ENV).stdout)
    return {verdict["layout"]: verdict for verdict in result["verdicts"]}


@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=[] if name in CHEAP else [pytest.mark.whole]) for name in WRONG]
)
def test_a_usual_mistake_is_named_with_its_layout_and_its_cause(mistake):
    layout, what, cause = WRONG[mistake]
    verdicts = tried(mistake.split()[0], "--only", layout, code=64)
    assert next(iter(verdicts.values()))["outcome"] == "agrees"  # the reference
    wrong = verdicts[layout]
    assert wrong["outcome"] == "differs" and what in wrong["details"][0] + wrong["details"][-1], wrong
    assert cause in wrong["cause"]


@pytest.mark.parametrize(
    "name, what",
    [
        ("RunningMean", "block0.mean"),
        pytest.param("OwnGenerator", "block0.generator", marks=pytest.mark.whole),
        pytest.param("Counting", "block0.calls", marks=pytest.mark.whole),
    ],
)
def test_a_block_that_keeps_what_no_checkpoint_has_is_refused_by_its_name(name, what):
    result = hpclm("selftest", f"{HERE}:{name}", check=64, env=ENV)
    assert f"training changes {what}" in result.stderr


@pytest.mark.whole
@pytest.mark.parametrize("name", ["Scaled", "Projected", "Noisy"])
def test_a_right_block_agrees_in_every_layout(name):
    verdicts = tried(name)
    assert [*verdicts] == EVERY and {verdict["outcome"] for verdict in verdicts.values()} == {"agrees"}


@pytest.mark.whole
@pytest.mark.parametrize("name", ["constant", "source", "Engine"])
def test_other_code_that_is_right_agrees_or_is_refused_by_name(name):
    outcomes = {layout: verdict["outcome"] for layout, verdict in tried(name).items()}
    assert outcomes.pop("killed and resumed") == outcomes.pop("data 2") == "agrees"
    assert {*outcomes.values()} <= {"agrees", "refused"}


@pytest.mark.whole
def test_a_layout_that_crashes_shows_its_error_and_the_others_go_on():
    verdicts = tried("Crashing", "--only", "tensor 2", "--only", "data 2", code=64)
    assert verdicts["tensor 2"]["outcome"] == "failed" and "wrong.py" in verdicts["tensor 2"]["details"][0]
    assert verdicts["data 2"]["outcome"] == "agrees"


@pytest.mark.parametrize(
    "name, kind",
    [
        ("Scaled", "block"),
        ("Engine", "engine"),
        ("constant", "schedule"),
        ("source", "source"),
    ],
)
def test_the_kind_of_an_object_is_seen_from_it(name, kind):
    assert kinds.kind_of(name, kinds.load(f"{HERE}:{name}")) == kind


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("Block", "is not module:attribute"),
        (f"{HERE}:Scalde", "cannot be loaded"),
        (f"{HERE}:CALLS", "say which with --kind block|optimizer"),
    ],
)
def test_what_cannot_be_tried_is_refused(name, wrong, capsys):
    assert cli.main(["selftest", name]) == 64
    assert wrong in capsys.readouterr().err


def test_an_unknown_layout_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="no layout 'tensor'; a block is tried with one process again, smaller"):
        selftest(f"{HERE}:Scaled", only=["tensor"])


def test_a_tokenizer_and_a_sink_are_tried_without_training():
    for name in ("Bytes", "Lines"):
        assert selftest(f"{HERE}:{name}").agrees
    lossy = selftest(f"{HERE}:Lower")
    assert (
        not lossy.agrees
        and "decode(encode('To be, or not to be')) is 'to be, or not to be'" in lossy.verdicts[0].details[0]
    )


def test_a_schedule_with_a_memory_is_found_without_training():
    from hpclm.config import OptimConfig
    from tests.trials import wrong

    assert list(direct.schedule(wrong.constant, OptimConfig())) == []
    assert "in reverse" in next(direct.schedule(wrong.remembering, OptimConfig()))


@pytest.mark.parametrize(
    "rate, right", [(0, True), (1e300, True), (np.inf, False), (np.nan, False), (-1e-9, False), ("1", False)]
)
def test_a_learning_rate_is_a_finite_number_from_0(rate, right):
    from hpclm.config import OptimConfig

    found = [*direct.schedule(lambda position, length, optim: rate, OptimConfig())]
    assert found == ([] if right else [f"at position 0 it gives {rate!r}, which is no learning rate"])


@pytest.mark.parametrize("name, draws", [("Scaled", False), ("Noisy", True)])
def test_a_process_records_its_step_and_whether_blocks_draw_random_numbers(name, draws):
    _, engine, batches, _ = sharded.made([f"model.block={HERE}:{name}", "model.dropout=0", "engine.precision=fp32"])
    observed = ObservedEngine(engine, seen := Record(), None)
    result = observed.train_step(batches.step(0), 1e-3, 0)
    assert seen.draws == draws and seen.steps[0]["lr"] == 1e-3 and seen.steps[0]["loss"] == result.loss
    names = {piece.name for piece in seen.updated}
    assert "block0.scale" in names and {piece.name for piece in seen.gradients} == names


def record(scale=1.0, loss=4.0, first=0, **more):
    """What a process records of a toy with one weight."""

    def piece(values):
        return [Piece("block0.w", np.asarray(values, np.float32), (4,), (0,))]

    steps = [{"loss": loss - number, "grad_norm": 1.0, "lr": 1e-3} for number in range(first, 4)]
    values = np.arange(1.0, 5.0)
    taken = dict(
        initial=piece(values), gradients=piece(values * scale), updated=piece(values + 1), final=piece(values + 2)
    )
    return Record(first, steps, **{**taken, "evaluated": {"": 4.0, "block0.w": 4.1}, **more})


def stages(*trial, exact=False, random=False):
    return [difference.stage for difference in differences([record()], trial, exact, random)]


def test_the_first_stage_that_differs_is_named():
    assert stages(record()) == []
    assert stages(record(initial=[Piece("block0.w", np.ones(4, np.float32), (4,), (0,))])) == ["initial"]
    assert stages(record(evaluated={"": 4.0, "block0.w": 4.2})) == ["forward"]
    assert stages(record(loss=4.1)) == ["training"]
    assert stages(record(loss=4.1), random=True) == []
    assert stages(record(scale=1.01)) == ["gradient"]
    assert stages(record(updated=record().final)) == ["update"]
    assert stages(record(final=record().updated)) == ["later"]
    assert stages(record(first=2, loss=4.0 + 1e-12), exact=True) == ["later"]
    assert stages(record(first=2)) == []


def test_a_gradient_of_which_each_rank_has_a_part_is_known_by_its_sum():
    [difference] = differences([record()], [record(0.25), record(0.75)], exact=False, random=False)
    assert (difference.weight, difference.hint) == ("block0.w", "partial")
    assert "copy_to_tp" in causes.cause("block", toy.TENSOR, [difference])
    assert Tensors.of([record().initial, record().initial]).disagreement("block0.w") == 0


def test_every_stage_has_a_cause_in_every_layout():
    for kind, layouts in toy.LAYOUTS.items():
        for trial in layouts:
            for stage in (
                "initial",
                "forward",
                "training",
                "gradient",
                "update",
                "later",
                "report",
                "samples",
            ):
                assert causes.cause(kind, trial, [Difference(stage, "")])


def test_a_result_is_shown_by_layout_with_each_cause_once():
    wrong = Verdict("tensor 2", "differs", ("the gradient of w is off",), "copy it")
    result = Result(
        "mine:Block", "block", (Verdict("one process", "agrees"), wrong, wrong, Verdict("fsdp2", "refused", ("no",)))
    )
    assert repr(result).count("copy it") == 1 and "as above" in repr(result) and not result.agrees
    assert (
        conclusion(result)
        == "mine:Block (model.block) does not agree with one process: tensor 2, tensor 2; fsdp2 is refused"
    )
    assert lines(result.verdicts[0]) == ["  one process             agrees"]


def test_python_has_the_same_test():
    lossy = api.selftest(f"{HERE}:Lower", {"model.hidden": 64})
    assert not lossy.agrees and lossy.kind == "tokenizer" and "does not agree" in repr(lossy)
    with pytest.raises(ConfigError, match="has no attribute 'Scalde'"):
        api.selftest(f"{HERE}:Scalde")

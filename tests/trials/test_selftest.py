"""``hpclm selftest``: right code agrees in every layout, and of each usual mistake it names the weight, the layout and the cause."""

import json
import os
import signal

import numpy as np
import pytest

import hpclm as api
from hpclm import cli
from hpclm.base.errors import ConfigError, HpclmError
from hpclm.trials import causes, direct, kinds, processes, run, toy
from hpclm.trials.compare import Difference, TrialTensors, differences
from hpclm.trials.rank import failure_of
from hpclm.trials.record import ObservedEngine, Record, WeightPiece
from hpclm.trials.run import selftest
from hpclm.trials.verdict import UNCOMPARED, LayoutVerdict, Result, conclusion, lines
from tests.engine import sharded
from tests.runs import ROOT, hpclm

HERE = "tests.trials.wrong"
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
EVERY = ["one process", *(trial.name for trial in toy.LAYOUTS["block"])]

WRONG = {
    "NotCopied": ("tensor 2", "the gradient of block0.scale", "copy_to_tp"),
    "Unseeded": ("one process again", "the loss of step 1", "unseeded random numbers"),
    "BatchNorm": ("smaller micro-batches", "the loss before the first step", "other samples of its micro-batch"),
    "BiasedTwice": ("tensor 2", "block0.extra.bias", "counts once per rank"),
    "FanInOfSlice": ("tensor 2", "block0.down begins with other values", "fan-in"),
    "NotPlaced": ("tensor 2", "block0.down has the shape [32, 16], and [32, 32] in one process", "placements"),
    "SplitLamb": ("ZeRO 1", "after the first update", "declare `matrices` in its class instead of `splits`"),
    "remembering": ("killed and resumed", "learning rate", "pure function"),
    "source_by_rank": ("data 2", "sample 0 of the training data differs on rank 1", "not on the rank"),
    "Forgetful": ("data 2", "the gradient of", "does not sum the gradients"),
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
@pytest.mark.parametrize("name", ["constant", "source", "Engine", "Lamb", "Lion"])
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
        (f"{HERE}:CALLS", "give its kind with --kind block|optimizer"),
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
    assert found == ([] if right else [f"at position 0 it gives {rate!r}, which is not a learning rate"])


@pytest.mark.parametrize("name, draws", [("Scaled", False), ("Noisy", True)])
def test_a_process_records_its_step_and_whether_blocks_draw_random_numbers(name, draws):
    _, engine, batches, _ = sharded.made([f"model.block={HERE}:{name}", "model.dropout=0", "engine.precision=fp32"])
    observed = ObservedEngine(engine, seen := Record(), None)
    result = observed.train_step(batches.step(0), 1e-3, 0)
    assert seen.draws == draws and seen.steps[0]["lr"] == 1e-3 and seen.steps[0]["loss"] == result.loss
    names = {piece.name for piece in seen.updated}
    assert "block0.scale" in names and {piece.name for piece in seen.gradients} == names


@pytest.mark.parametrize("name, code", [("Bytes", 0), ("Lower", 64)])
def test_the_verb_ends_with_64_where_something_differs_and_prints_words_or_json(name, code, capsys):
    assert cli.main(["selftest", f"{HERE}:{name}"]) == code
    said = capsys.readouterr().out
    assert cli.main(["selftest", f"{HERE}:{name}", "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    result = selftest(f"{HERE}:{name}")
    assert found["agrees"] == (code == 0) == result.agrees and conclusion(result) in said


def record(scale=1.0, loss=4.0, first=0, **more):
    """What a process records of a toy with one weight."""

    def piece(values):
        return [WeightPiece("block0.w", np.asarray(values, np.float32), (4,), (0,))]

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
    assert stages(record(initial=[WeightPiece("block0.w", np.ones(4, np.float32), (4,), (0,))])) == ["initial"]
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
    assert TrialTensors.of([record().initial, record().initial]).disagreement("block0.w") == 0


def told(*trial, exact=False):
    return [(d.stage, d.what, d.hint) for d in differences([record()], trial, exact, random=False)]


def test_weights_that_begin_otherwise_are_told_by_their_shape_their_rank_or_their_name():
    def begins(*values, name="block0.w"):
        return record(initial=[WeightPiece(name, np.array(values, np.float32), (len(values),), (0,))])

    assert told(begins(1, 2)) == [("initial", "block0.w has the shape [2], but [4] in one process", "shape")]
    [other] = told(begins(2, 2, 3, 4), record())
    assert other == (
        "initial",
        "block0.w begins with other values on another rank: off by 0.17",
        "ranks",
    )  # 1 of sqrt(33)
    assert [what for _, what, _ in told(begins(1, 2, 3, 4, name="x"))] == [
        "this layout has no weight block0.w",
        "one process has no weight x",
    ]


def test_a_loss_before_the_first_step_that_differs_as_a_whole_names_no_weight():
    loss = ("forward", "the loss before the first step is 4.1, but 4 in one process", "")
    assert told(record(evaluated={"": 4.1, "block0.w": 4.2})) == [loss]
    assert told(record(evaluated={"": 4.1, "block0.w": 4.9})) == [loss]
    assert told(record(evaluated={})) == []
    [(_, what, _)] = told(record(evaluated={"": 4.0, "block0.w": 4.2}))
    assert (
        what == "block0.w acts differently: a small change of it changes the loss by +0.2, but by +0.1 in one process"
    )


def test_a_gradient_that_is_counted_twice_or_is_not_there_is_told():
    assert [hint for *_, hint in told(record(2.0), record(2.0))] == ["2 times"]
    assert [hint for *_, hint in told(record(0.5))] == ["0.5 times"]
    assert causes.cause("block", toy.TENSOR, [Difference("gradient", "", hint="2 times")]) == causes.GRADIENT["counted"]
    other = [WeightPiece("block1.w", np.ones(4, np.float32), (4,), (0,))]
    assert [what for _, what, _ in told(record(gradients=other))] == ["block0.w has no gradient"]
    assert told(record(gradients=[])) == []  # an engine that shows none


def test_other_bits_at_the_end_count_where_all_must_agree():
    final = [WeightPiece("block0.w", np.nextafter(record().final[0].values, np.float32(9)), (4,), (0,))]
    assert told(record(final=final)) == []
    [(stage, what, _)] = told(record(final=final), exact=True)
    assert stage == "later" and what.startswith("block0.w has other bits at the end: off by ")


def test_figures_that_only_one_side_reports_are_told_by_name_and_step():
    more = record()
    more.steps[0]["entropy"] = 1.0
    assert told(more) == [("report", "entropy is reported, but not in one process (step 1)", "entropy")]
    [lacks] = differences([more], [record()], exact=False, random=False)
    assert lacks.what == "entropy is not reported (step 1)"
    slower = record()
    slower.steps[0]["lr"] = 2e-3
    assert told(slower)[0][1] == "the learning rate of step 1 is 0.002, but 0.001 in one process"


def test_samples_that_differ_are_told_by_rank_or_as_read_again():
    right = [record(samples=["a", "b", "c"])]
    trial = [record(samples=["a", "b", "c"]), record(samples=["a", "x", "y"]), record(samples=["a, then z"])]
    assert [difference.what for difference in run._samples(right, trial)] == [
        "sample 1 of the training data differs on rank 1",
        "sample 0 of the training data differs when it is read again",
    ]


def test_a_layout_whose_random_numbers_are_others_is_compared_in_evaluation_only():
    right = [record(draws=True)]
    assert run._compared("block", toy.TENSOR, right, [record(loss=9.0)]).details == (UNCOMPARED,)
    assert run._compared("block", toy.DATA, right, [record(loss=9.0)]).outcome == "differs"
    assert [note[:23] for note in run._notes(right)] == ["it draws random numbers"] and not [*run._notes([record()])]


def test_no_more_than_four_weights_are_named():
    def pieces(value):
        return [WeightPiece(f"block0.{n}", np.full(4, value, np.float32), (4,), (0,)) for n in range(6)]

    verdict = run._compared("block", toy.DATA, [record(initial=pieces(1.0))], [record(initial=pieces(2.0))])
    assert len(verdict.details) == 5 and verdict.details[4] == "and 2 more" and "block0.3" in verdict.details[3]


def test_the_toy_of_a_trial_has_the_users_settings_after_its_own_and_before_those_of_the_layout():
    given = ("model.hidden=64",)
    assert toy.settings_of("block", "mine:B", toy.TENSOR, given) == [
        *toy.TOY,
        *("optim.eps=1e-5", "model.block=mine:B", "model.hidden=64", "parallel.tensor=2"),
    ]
    assert toy.settings_of("optimizer", "mine:O", toy.DATA, ()) == [*toy.TOY, "optim.name=mine:O"]
    reference, others = toy.trials("engine", "mine:E")
    assert toy.settings_of("engine", "mine:E", reference, ()) == [*toy.TOY, "optim.eps=1e-5"]
    assert all("engine.name=mine:E" in trial.settings for trial in others)
    assert [(trial.name, trial.processes) for trial in others if trial.killed or trial.processes > 1] == [
        *(("tensor 2", 2), ("pipeline 2", 2), ("data 2", 2), ("ZeRO 1", 2), ("killed and resumed", 1))
    ]
    assert causes.cause("engine", others[2], [Difference("gradient", "")]) == causes.GRADIENT["stages"]
    assert causes.cause("engine", others[3], [Difference("gradient", "")]) == causes.GRADIENT["engine"]


def broken():
    raise ZeroDivisionError


def test_an_error_of_the_users_code_is_told_with_its_place():
    with pytest.raises(ZeroDivisionError) as caught:
        broken()
    line = broken.__code__.co_firstlineno + 1
    failure = failure_of(caught.value)
    assert failure.text == f"ZeroDivisionError: no message (test_selftest.py:{line}, in broken)" and not failure.refused
    assert failure_of(ConfigError("x")).refused and not failure_of(HpclmError("x")).refused
    failed = run._checked("one process", broken)
    assert (failed.outcome, failed.details) == ("failed", (failure.text,))


def test_the_kind_of_a_function_is_known_by_what_it_must_be_called_with():
    functions = {"schedule": lambda a, b, c, d=0: 0, "optimizer": lambda a, b: 0, "source": lambda a, b, c, d: 0}
    assert all(kinds.kind_of("mine:f", function) == kind for kind, function in functions.items())
    with pytest.raises(ConfigError, match="give its kind with --kind"):
        kinds.kind_of("mine:f", lambda a: 0)


class Fickle:
    """Samples of which the second is another each time."""

    dtype = np.int64

    def __init__(self):
        self.read_before = 0

    def samples(self, part, count):
        return self

    def __len__(self):
        return 3

    def read(self, index, row):
        row[:] = index
        if index == 1:
            self.read_before += 1
            row[0] = self.read_before


def test_a_sample_that_is_another_when_it_is_read_again_says_so():
    assert [", then " in digest for digest in direct.digests(Fickle(), 4)] == [False, True, False]


@pytest.mark.parametrize("rate", [-1e-3, float("nan"), "1e-3"])
def test_a_rate_that_is_none_is_named_with_its_position(rate):
    def schedule(position, length, optim):
        return rate if position == 7 else 0.0

    assert next(direct.schedule(schedule, None)) == f"at position 7 it gives {rate!r}, which is not a learning rate"


def test_processes_that_outlive_one_that_failed_are_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "GRACE", 0.0)

    def work(rank):
        if rank == 1:
            signal.pause()
        os.write(1, b"rank %d\n" % rank)
        return 3

    assert processes.run(2, work, tmp_path / "log") == [3, processes.HUNG]
    assert (tmp_path / "log").read_text() == "rank 0\n"


@pytest.mark.parametrize(
    "more, end",
    [
        ([], "agrees with one process"),
        ([("fsdp2", "refused", "no")], "agrees with one process everywhere else; fsdp2 is refused"),
        (
            [("tensor 2", "agrees", UNCOMPARED)],
            "agrees with one process; gradients were not compared in tensor 2: test it without its random numbers too",
        ),
        (
            [("fsdp2", "refused", "no"), ("ZeRO 1", "refused", "no")],
            "agrees with one process everywhere else; fsdp2, ZeRO 1 are refused",
        ),
        (
            [("tensor 2", "agrees", UNCOMPARED), ("fsdp2", "refused", "no")],
            "agrees with one process everywhere else; fsdp2 is refused; gradients were not compared in tensor 2: test it without its "
            "random numbers too",
        ),
        ([("data 2", "failed", "it hung")], "does not agree with one process: data 2"),
    ],
)
def test_the_last_line_says_what_agrees_and_what_was_refused(more, end):
    verdicts = [
        LayoutVerdict("one process", "agrees"),
        *(LayoutVerdict(name, outcome, (why,)) for name, outcome, why in more),
    ]
    assert conclusion(Result("mine:Block", "block", tuple(verdicts))) == f"mine:Block (model.block) {end}"


def test_a_failure_is_in_capitals_and_its_further_lines_are_indented():
    assert lines(LayoutVerdict("data 2", "failed", ("it hung", "a\nb"))) == [
        "  data 2                  FAILED: it hung",
        *(f"{' ' * 26}{line}" for line in "ab"),
    ]
    assert lines(LayoutVerdict("fsdp2", "refused", ("no",))) == ["  fsdp2                   refused: no"]


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
    wrong = LayoutVerdict("tensor 2", "differs", ("the gradient of w is off",), "copy it")
    result = Result(
        "mine:Block",
        "block",
        (LayoutVerdict("one process", "agrees"), wrong, wrong, LayoutVerdict("fsdp2", "refused", ("no",))),
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

"""Engines whose replicas share out the weights: fsdp2 and fairscale."""

import shutil
import signal
import sysconfig
from pathlib import Path

import pytest

from tests import ranks
from tests.engine import sharded
from tests.forks import Ranks, hpclm
from tests.parity import alone, trained
from tests.runs import figures

ENGINES = ["fsdp2", "fairscale"]
FAIRSCALE_TOO = pytest.mark.parametrize("engine", ["fsdp2", pytest.param("fairscale", marks=pytest.mark.whole)])
HEADER = Path(sysconfig.get_path("include"), "Python.h")


def words(engine, *more, precision="fp32"):
    return [f"engine.name={engine}", f"engine.precision={precision}", *more]


@pytest.mark.parametrize("engine", ENGINES)
def test_no_process_ever_holds_the_whole_model(engine):
    block = 12 * 512 * 512 * 4  # bytes
    shape = ["model.layers=12", "model.hidden=512", "model.bias=false", "batch.micro_size=1"]
    for held, peak in ranks.run(4, sharded.memory, words(engine, *shape)):
        assert 3 * block <= held <= 3.1 * block
        assert peak < 4 * block  # less than one more block than it keeps


WIDE = ["model.layers=1", "model.hidden=256", "model.vocab_size=60000", "model.tied=false", "batch.micro_size=1"]
TABLE = 60000 * 256 * 4  # bytes, of which the model has two


@pytest.mark.parametrize("engine", ENGINES)
def test_no_process_ever_holds_a_whole_token_table(engine):
    for held, peak in ranks.run(4, sharded.memory, words(engine, *WIDE)):
        assert TABLE / 2 < held < 0.53 * TABLE
        assert peak < held + TABLE / 4


@pytest.mark.parametrize("engine, fits", [("native", False), ("fsdp2", True), ("fairscale", True)])
def test_a_model_that_no_process_has_room_for_is_built_in_parts(engine, fits):
    assert ranks.run(4, sharded.within, words(engine, *WIDE), int(1.4 * TABLE)) == [fits] * 4


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed", pytest.param("fairscale", marks=pytest.mark.whole)])
def test_a_block_that_sets_its_own_weights_is_shared_out_with_them(engine):
    own = ["model.block=tests.engine.sharded:OwnBlock", "batch.micro_size=4"]
    exact = alone(*words("native", *own))
    assert exact["losses"] != alone(*words("native", *own[1:]))["losses"]
    found = trained(2, *words(engine, "engine.zero_stage=3", *own), steps=3)
    assert found["losses"] == pytest.approx(exact["losses"][:3], abs=1e-5)


def test_a_checkpoint_goes_from_any_engine_to_any_other_on_any_number_of_processes(tmp_path):
    native = words("native", "batch.global_size=12", "batch.micro_size=2")
    [(_, whole)] = ranks.run(1, sharded.goes_on, tmp_path / "whole", 15, native)
    links = [
        (1, native),
        (3, words("fsdp2", *native[2:])),  # shares of unequal size
        (4, words("fairscale", *native[2:], "parallel.tensor=2")),
        (3, words("fairscale", "engine.zero_stage=2", *native[2:])),
        (2, words("fsdp2", "engine.zero_stage=2", *native[2:])),
    ]
    pieces, evaluated = [], []
    for number, (size, link) in enumerate(links):
        found = ranks.run(size, sharded.goes_on, tmp_path / "run", 3 * number + 3, link)
        assert all(other == found[0] for other in found)
        begun, (here, *losses) = found[0]
        assert begun == pytest.approx(whole[0], abs=1e-5)
        assert number == 0 or abs(here - begun) > 1e-3
        pieces += losses
        evaluated.append(here)
    assert pieces == pytest.approx(whole[1:], abs=1e-5)
    [(_, [last])] = ranks.run(1, sharded.goes_on, tmp_path / "run", 15, native)
    [(_, [same])] = ranks.run(1, sharded.goes_on, tmp_path / "whole", 15, native)
    assert last == pytest.approx(same, abs=1e-5) and last < min(evaluated)


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") and HEADER.exists()), reason="no C++ compiler, or no Python.h")
def test_compiled_blocks_that_are_shared_out_and_recomputed_learn_the_same():
    more = ["batch.micro_size=4", "model.layers=1"]
    exact = alone(*words("native", *more))["losses"][:3]
    compiled = words("fsdp2", "engine.compile=true", "engine.recompute=full", *more)
    assert trained(2, *compiled, steps=3)["losses"] == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_nan_on_one_rank_leaves_all_weights_and_moments_alone(engine):
    for _, skipped, same, count, _ in ranks.run(2, sharded.left_alone, words(engine, "batch.micro_size=4")):
        assert (skipped, same, count) == (True, True, 2)


@pytest.mark.parametrize("gradients", [pytest.param("auto", marks=pytest.mark.whole), "fp32"])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_fp16_overflow_lowers_the_scale_and_otherwise_fp16_tracks_fp32(engine, gradients):
    more = ["batch.micro_size=4"]
    exact = alone(*words("native", *more))["losses"][:2]
    half = words(engine, f"engine.gradients={gradients}", *more, precision="fp16")
    for losses, skipped, same, count, scale in ranks.run(2, sharded.left_alone, half):
        assert losses == pytest.approx(exact, rel=0.01)
        assert (skipped, same, count, scale) == (True, True, 2, 2.0**39)


def test_fairscale_does_not_pile_up_hooks():
    [(first, fifth), _] = ranks.run(2, sharded.hooks, words("fairscale", "batch.micro_size=4"))
    assert first == fifth > 0


@FAIRSCALE_TOO
def test_a_run_that_is_killed_and_warned_while_it_evaluates_is_the_run_of_one_process(engine, tiny, tmp_path):
    more = ["evaluate.every=4", "evaluate.batches=3", "cluster.preflight=false", "model.ffn=44"]
    hpclm("train", *tiny("one", *more), check=0)
    mine = tiny("run", *more, f"engine.name={engine}", "data.source=tests.faults:warning_once")
    with Ranks(2, [*mine, "stop_at=6"], TEST_MARK=tmp_path / "warned", TEST_DIES=tmp_path / "died") as run:
        assert {code for code, _ in run.wait().values()} == {85}  # warned in the evaluation at step 4
    with Ranks(2, mine, TEST_MARK=tmp_path / "warned", TEST_DIES=tmp_path / "died") as run:
        assert -signal.SIGKILL in {code for code, _ in run.wait().values()}
    with Ranks(2, mine, TEST_MARK=tmp_path / "warned", TEST_DIES=tmp_path / "died") as run:
        ended = run.wait()
        assert {code for code, _ in ended.values()} == {0}, ended
    for name in ("loss", "validation_loss"):
        one, two = (dict(map(tuple, figures(tmp_path / out, "step", name))) for out in ("one", "run"))
        assert one.keys() == two.keys() and list(two.values()) == pytest.approx(list(one.values()), abs=1e-5)


@pytest.mark.parametrize(
    "more, answer",
    [
        (["engine.zero_stage=1"], "cannot do engine.zero_stage=1; it can do stages 2, 3"),
        (["engine.overlap=false"], "engine.overlap=False has no effect with engine"),
        (["engine.offload=optimizer"], "cannot do engine.offload=optimizer"),
        (["parallel.pipeline=2"], "does not support parallel.pipeline"),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_engine_cannot_do_is_refused(engine, more, answer):
    from hpclm import config
    from hpclm.errors import ConfigError

    with pytest.raises(ConfigError, match=answer):
        config.load(None, words(engine, *more))

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


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") and HEADER.exists()), reason="no C++ compiler, or no Python.h")
def test_compiled_blocks_that_are_shared_out_and_recomputed_learn_the_same():
    more = ["batch.micro_size=4", "model.layers=1"]
    exact = alone(*words("native", *more))["losses"][:3]
    compiled = words("fsdp2", "engine.compile=true", "engine.recompute=full", *more)
    assert trained(2, *compiled, steps=3)["losses"] == pytest.approx(exact, abs=1e-4)


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

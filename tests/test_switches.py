"""Orders by files, to a run of two processes, at any time."""

import random
import time

import pytest

from hpclm.checkpoint import shelf
from tests.runs import Ranks, figures

RUN = ["budget.steps=1000000", "optim.schedule=constant", "checkpoint.every=0", "checkpoint.keep_last=1000"]
RUN += ["cluster.preflight=false"]


def saved(out):
    return sorted(int(path.name[5:]) for path in (out / "checkpoints").glob("step-*"))


def wait(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("orders", [3, pytest.param(40, marks=[pytest.mark.whole, pytest.mark.slow])])
def test_every_order_is_followed_once_by_both_and_its_file_is_gone(orders, tiny, tmp_path):
    out, draw = tmp_path / "run", random.Random(orders)
    with Ranks(2, tiny("run", *RUN)) as ranks:
        ranks.wait_for(out, 1)
        for number in range(1, orders + 1):
            time.sleep(draw.uniform(0, 0.5))
            (out / "save-now").touch()
            wait(lambda: not (out / "save-now").exists())
            wait(lambda number=number: len(saved(out)) >= number)
        time.sleep(draw.uniform(0, 0.5))
        (out / "stop").touch()
        assert {code for code, _ in ranks.wait().values()} == {0}
    assert len(saved(out)) == orders + 1 and saved(out)[-1] == figures(out, "step", "loss")[-1][0]
    assert not (out / "stop").exists()
    for step in saved(out):
        shelf.verified(out / f"checkpoints/step-{step:08d}")


@pytest.mark.whole
@pytest.mark.slow
def test_both_orders_while_a_run_starts_are_followed_as_soon_as_it_can(tiny, tmp_path):
    out, draw = tmp_path / "run", random.Random(1)
    out.mkdir(mode=0o700)
    before = 0
    for _ in range(5):
        with Ranks(2, tiny("run", *RUN)) as ranks:
            time.sleep(draw.uniform(0, 5))
            for name in draw.sample(["save-now", "stop"], 2):
                (out / name).touch()
            assert {code for code, _ in ranks.wait().values()} == {0}
        assert not (out / "stop").exists()
        reached = max((step for step, _ in figures(out, "step", "loss")), default=0)
        assert before <= reached and (not reached or saved(out)[-1] == reached)
        before = reached

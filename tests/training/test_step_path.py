"""What the loop itself adds to steps on a GPU: nothing between CPUs, and one wait, for the step before."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from hpclm import config
from hpclm.checkpoint import CheckpointStore, Progress, Retention
from hpclm.diagnostics.corruption import Verifier
from hpclm.distributed.context import DistributedContext, single
from hpclm.engine import StepResult
from hpclm.parallel.async_all_reduce import AsyncAllReduce, Reduction
from hpclm.parallel.mesh import Compute, Mesh
from hpclm.planning import simulate
from hpclm.planning.fake_gpu import CUDA, fake_gpu
from hpclm.training.control import Control
from hpclm.training.loop import TrainingLoop
from hpclm.training.opening import OpenRun
from hpclm.training.run_data import RunData
from hpclm.training.step import Stepper

STEPS, RANKS = 8, 2
WORDS = ["model.layers=1", "model.hidden=64", "model.attention.heads=2", "model.vocab_size=256", "model.context=32"]
WORDS += ["batch.micro_size=2", "batch.global_size=8", f"job.gpus={RANKS}", "data.source=synthetic", "evaluate.every=0"]
WORDS += [f"stop_at={STEPS}", "checkpoint.enabled=false", "engine.compile=false"]


class CollectiveCounts:
    """How many collectives and waits there had been before each step, and how many collectives were the engine's."""

    def __init__(self, engine, counter):
        self._train_step, self._counter, self.began, self.engines = engine.train_step, counter, [], 0
        engine.train_step = self.train_step

    def begin(self):
        self.began.append((self._counter.calls.total() - self.engines, self._counter.waits))

    def train_step(self, *args):
        before = self._counter.calls.total()
        result = self._train_step(*args)
        self.engines += self._counter.calls.total() - before
        return result


class Vectors:
    """Which vectors have been read, and how many had been sent by then; they have this rank's numbers, since fake tensors have none."""

    def __init__(self):
        self.sent, self.read = [], []
        self._start, self._read = AsyncAllReduce.start, Reduction.read

    def starting(self):
        def start(vector, values, counts=None, slots=()):
            reduction = self._start(vector, values, counts, slots)
            known = {name: 0.0 if isinstance(value, torch.Tensor) else value for name, value in values.items()}
            self.sent.append((reduction, known))
            return reduction

        return start

    def reading(self):
        def read(reduction):
            self._read(reduction)
            number = next(number for number, (sent, _) in enumerate(self.sent, 1) if sent is reduction)
            self.read.append((number, len(self.sent)))
            return self.sent[number - 1][1]

        return read

    def asking(self):
        ask = DistributedContext.all_reduce_max

        def all_reduce_max(context, *values):
            ask(context, *values)
            return list(values)

        return all_reduce_max


def simulated(tmp_path, *words):
    """A whole run of rank 0, by the real loop: of its steps but the first and the last two the collectives that are not the engine's,
    and waits; and of its vectors when each was read."""
    settings = config.load("configs/gpt2-124m.yaml", [*WORDS, f"out={tmp_path}", *words])
    vectors, plan = Vectors(), settings.plan(RANKS)
    context = single()
    context.size = RANKS
    with pytest.MonkeyPatch.context() as patched, fake_gpu(0, RANKS) as counter:
        patched.setattr(AsyncAllReduce, "start", vectors.starting())
        patched.setattr(Reduction, "read", vectors.reading())
        patched.setattr(Reduction, "slots", [0.0, 0.0])
        patched.setattr(DistributedContext, "all_reduce_max", vectors.asking())
        compute = Compute(CUDA, torch.bfloat16, Mesh.build(0, RANKS, settings.parallel))
        engine = simulate.build_engine(settings, compute.mesh)
        counts = CollectiveCounts(engine, counter)

        def step(samples):
            counts.begin()
            return [simulate.micro_batch(settings)] * plan.accumulation(samples)

        data = RunData(
            plan,
            config.plan.Length(None, None),
            Progress(),
            config.phases.Timeline(settings),
            None,
            SimpleNamespace(step=step, hash=0, replica=0, plan=plan, samples=None),
            [],
        )
        store = CheckpointStore(tmp_path / "checkpoints", Retention(), {}, context)
        loop = TrainingLoop(OpenRun(settings, context, compute, data, engine, store))
        loop.verifier = loop.stepper.verifier = Verifier(engine, compute.mesh, context, math.inf)
        assert loop.train() == 0
        counts.begin()
    return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(counts.began[2:-1])], vectors.read


USUAL = [(1, 1)] * (STEPS - 3), [(1, 1), *((step, step + 1) for step in range(2, STEPS)), (STEPS, STEPS)]
"""One vector, nothing else between ranks, and one wait a step, which is for the step before; the first and the last step are
waited for at once."""


@pytest.mark.parametrize("words", [[], ["engine.name=fsdp2"], ["parallel.tensor=2", "batch.global_size=4"]])
def test_a_step_waits_for_the_one_before_it_and_asks_nothing_between_cpus(words, tmp_path):
    assert simulated(tmp_path, *words) == USUAL


def test_a_question_between_cpus_that_is_put_back_is_seen(tmp_path, monkeypatch):
    receive = Control.receive
    monkeypatch.setattr(Control, "receive", lambda self, answer: [receive(self, answer), self.ask()][0])
    steps, _ = simulated(tmp_path)
    assert steps == [(2, 2)] * (STEPS - 3)


def test_a_wait_for_the_same_step_that_is_put_back_is_seen(tmp_path, monkeypatch):
    step = Stepper.step
    monkeypatch.setattr(Stepper, "step", lambda self, progress: [step(self, progress), self.finish()][0])
    _, read = simulated(tmp_path)
    assert read == [(step, step) for step in range(1, STEPS + 1)]


def test_a_loss_that_is_looked_at_is_seen(tmp_path, monkeypatch):
    init = StepResult.__init__
    monkeypatch.setattr(StepResult, "__init__", lambda self, *args: [init(self, *args), self.loss][0])
    steps, _ = simulated(tmp_path)
    assert steps == [(1, 2)] * (STEPS - 3)

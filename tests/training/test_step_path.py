"""What the loop itself adds to steps on a GPU: nothing between CPUs, and one wait, for the step before."""

from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from hpclm import config
from hpclm.checkpoint import CheckpointStore, Progress, Retention
from hpclm.config import ClusterConfig
from hpclm.distributed.bootstrap import World
from hpclm.distributed.context import DistributedContext
from hpclm.distributed.rendezvous import RankInfo
from hpclm.distributed.shutdown import Shutdown
from hpclm.distributed.watchdog import Watchdog
from hpclm.engine import DeviceResult
from hpclm.node.notify import Notifier
from hpclm.node.preemption import Preemption
from hpclm.optim.guard import Guard
from hpclm.parallel.mesh import Mesh
from hpclm.parallel.step_vector import Reduction, StepVector
from hpclm.planning import pretend, trace
from hpclm.planning.building import built
from hpclm.planning.record import Recorder
from hpclm.sinks.process import Sinks
from hpclm.training import loop
from hpclm.training.agreement import Agreement, Trained
from hpclm.training.control import RunControl
from hpclm.training.deadline import Deadline
from hpclm.training.metrics import Mute
from hpclm.training.profile import Profile
from hpclm.training.results import Results
from hpclm.training.saver import Saver
from hpclm.training.session import Session

STEPS, RANKS = 8, 2
WORDS = ["model.layers=1", "model.hidden=64", "model.heads=2", "model.vocab_size=256", "model.context=32"]
WORDS += ["batch.micro_size=2", "batch.global_size=8", f"job.gpus={RANKS}", "data.source=synthetic", "evaluate.every=0"]
WORDS += [f"stop_at={STEPS}", "checkpoint.enabled=false", "engine.compile=false"]


class Turns(Recorder):
    """The operations, and how many there had been before each step and each wait."""

    def __post_init__(self):
        super().__post_init__()
        self.began, self.waited = [], []

    def wait(self, what):
        super().wait(what)
        self.waited.append(len(self.operations))


class Vectors:
    """Which vectors have been read, and how many had been sent by then; they have this rank's numbers, since the device that
    is not there has none."""

    def __init__(self):
        self.sent, self.read = [], []
        self._start, self._read = StepVector.start, Reduction.read

    def starting(self):
        def start(vector, values):
            reduction = self._start(vector, values)
            self.sent.append(
                (reduction, [0.0 if isinstance(value, torch.Tensor) else float(value) for value in values])
            )
            return reduction

        return start

    def reading(self):
        def read(reduction):
            self._read(reduction)
            number = next(number for number, (sent, _) in enumerate(self.sent, 1) if sent is reduction)
            self.read.append((number, len(self.sent)))
            return self.sent[number - 1][1]

        return read


def traced(tmp_path, *words):
    """A whole run of rank 0, by real loop, session and agreement: of its steps but the first and the last two the operations
    on the device, collectives between CPUs, and waits; and of its vectors when each was read."""
    run = config.load("configs/gpt2-124m.yaml", [*WORDS, f"out={tmp_path}", *words])
    world, turns, vectors = World("single", 0, RANKS), Turns(), Vectors()
    me = RankInfo.of(world)
    quiet = ClusterConfig(hang_minutes=0, slow=0)
    context = DistributedContext(world, (me,) * RANKS, Watchdog(quiet, (me,), me, Shutdown(me, (me,))))

    @contextmanager
    def session(*_):
        mesh = Mesh.build(0, RANKS, run.parallel)
        engine = built(run, mesh, pretend.CUDA, trace.DTYPES["bf16"])
        store, trained = CheckpointStore(tmp_path / "checkpoints", Retention(), {}, context), Trained(0.0)
        agreement = Agreement(
            context, StepVector(mesh.world, pretend.CUDA), Preemption(), store, trained, None, None, None
        )
        guard, saver, plan = Guard(run.optim), Saver(store, run, 0), run.plan(RANKS)
        deadline, length = Deadline(agreement, saver), config.plan.Length(None, None)
        results = Results(agreement, trained, guard, Mute(), run.scaler.minimum)
        control = RunControl(run, length, engine, agreement, saver, deadline, guard, None, lambda step: None)

        def step(samples):
            turns.began.append(len(turns.operations))
            return [trace._batch(run)] * plan.accumulation(samples)

        profile = Profile(run.profile, tmp_path, 0, pretend.CUDA)
        yield Session(
            run, context, plan, length, pretend.CUDA, engine, SimpleNamespace(step=step), [], guard, control,
            deadline, results, Mute(), Progress(), profile, None, Sinks([], tmp_path), Notifier([], run.name, run.out),
        )  # fmt: skip

    with pytest.MonkeyPatch.context() as patched, pretend.ranks(0, RANKS), pretend.gpu(turns), turns:
        patched.setattr(loop, "open_session", session)
        patched.setattr(StepVector, "start", vectors.starting())
        patched.setattr(Reduction, "read", vectors.reading())
        assert loop.run(run, context) == 0
    edges = [*turns.began, len(turns.operations)]
    steps = []
    for begin, end in pairwise(edges[2:-1]):
        collectives = [each for each in turns.operations[begin:end] if each.kind == "collective"]
        between_cpus = [each for each in collectives if each.on_host]
        agreed = [each for each in collectives if "step_vector" in each.place.file]
        steps.append((len(between_cpus), len(agreed), sum(begin < at <= end for at in turns.waited)))
    return steps, vectors.read


USUAL = [(0, 1, 1)] * (STEPS - 3), [(1, 1), *((step, step + 1) for step in range(2, STEPS)), (STEPS, STEPS)]
"""No collective between CPUs, one vector, and one wait a step, which is for the step before; the first and the last step are
waited for at once."""


@pytest.mark.parametrize("words", [[], ["engine.name=fsdp2"], ["parallel.tensor=2", "batch.global_size=4"]])
def test_a_step_waits_for_the_one_before_it_and_asks_nothing_between_cpus(words, tmp_path):
    assert traced(tmp_path, *words) == USUAL


def test_a_question_between_cpus_that_is_put_back_is_seen(tmp_path, monkeypatch):
    hear = RunControl.hear
    monkeypatch.setattr(RunControl, "hear", lambda self, orders: [hear(self, orders), self.agreement()])
    steps, _ = traced(tmp_path)
    assert steps == [(1, 1, 1)] * (STEPS - 3)


def test_a_wait_for_the_same_step_that_is_put_back_is_seen(tmp_path, monkeypatch):
    queue = Results.queue
    monkeypatch.setattr(Results, "queue", lambda self, step: [queue(self, step), self.read()][1])
    _, read = traced(tmp_path)
    assert read == [(step, step) for step in range(1, STEPS + 1)]


def test_a_loss_that_is_looked_at_is_seen(tmp_path, monkeypatch):
    values = DeviceResult.values
    monkeypatch.setattr(DeviceResult, "values", lambda self: [*values(self)[:2], float(self.skipped)])
    steps, _ = traced(tmp_path)
    assert steps == [(0, 1, 2)] * (STEPS - 3)

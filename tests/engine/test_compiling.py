"""A rank that cannot compile where the others can: no rank computes other gradients, none waits forever, and all go on in one way."""

import os
import tempfile
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hpclm import engine as engines
from hpclm.base.errors import ConfigError
from hpclm.config import ClusterConfig
from hpclm.diagnostics import self_check
from hpclm.distributed.bootstrap import World
from hpclm.distributed.context import DistributedContext, single
from hpclm.engine import compiling
from hpclm.engine.compiling import AgreedCompilations
from hpclm.model import loss, stack
from hpclm.model.compiled import Compilation, compile_layers
from hpclm.parallel.mesh import Compute
from tests import ranks
from tests.engine import sharded
from tests.model.test_compiled import broken

WORDS = ["batch.micro_size=1", "model.layers=2", "model.activation=swiglu", "model.norm=rmsnorm", "model.bias=false"]
WORDS += ["engine.precision=fp32"]
ONE_BLOCK = "torch.compile failed on one rank, so blocks run uncompiled and slower on all"


class Lines(list):
    """What is logged, as a handler."""

    level = 0

    def handle(self, record):
        self.append(record.getMessage())


def listening():
    lines = Lines()
    compiling.log.addHandler(lines)
    return lines


def only_rank_0_compiles():
    """From now on, rank 0 traces its blocks, which fills buckets in another order, and no other rank can."""
    backend = broken if dist.get_rank() else "aot_eager"
    stack.compile_layers = partial(compile_layers, backend=backend)
    loss.Compilation = partial(Compilation, backend="eager")


def learned(words, mixed):
    """Losses and weights of three steps; which blocks are compiled after the first step and after all agreed; what was logged."""
    if mixed:
        only_rank_0_compiles()
    run, engine, batches, context = sharded.made([*words, f"engine.compile={str(mixed).lower()}"])
    agreed, lines = AgreedCompilations(engine, context), listening()
    results = sharded.steps(run, engine, batches, 0, 1)
    before = any(each.compilation.works for each in engine.model_stacks)
    agreed.agree()
    after = any(each.compilation.works for each in engine.model_stacks)
    results += sharded.steps(run, engine, batches, 1, 3)
    weights = [weight.parameter.detach().clone() for weight in engine.weights]
    return (
        [(each.loss, each.grad_norm) for each in results],
        weights,
        (before, after, agreed.failed_late()),
        list(lines),
    )


@pytest.mark.filterwarnings("ignore")  # of torch.compile
@pytest.mark.parametrize(
    "words, first_step",
    [
        (["engine.bucket_mb=0.002"], [True, False]),
        (["parallel.tensor=2"], [False, False]),
        pytest.param(["parallel.context=2", "engine.recompute=selective"], [False, False], marks=pytest.mark.whole),
        pytest.param(["engine.zero_stage=1", "engine.bucket_mb=0.002"], [True, False], marks=pytest.mark.whole),
        pytest.param(["engine.name=fsdp2"], [True, False], marks=pytest.mark.whole),
        pytest.param(["engine.name=fsdp2", "engine.zero_stage=2"], [True, False], marks=pytest.mark.whole),
        *(
            pytest.param(
                ["engine.name=deepspeed", f"engine.zero_stage={stage}"], [False, False], marks=pytest.mark.whole
            )
            for stage in range(4)
        ),
    ],
    ids=lambda words: " ".join(words) if isinstance(words[0], str) else "",
)
def test_where_one_rank_cannot_compile_all_learn_what_they_learn_uncompiled(words, first_step):
    exact = ranks.run(2, learned, [*WORDS, *words], False)
    found = ranks.run(2, learned, [*WORDS, *words], True)
    for (wanted, weights, *_), (results, same, states, _) in zip(exact, found, strict=True):
        assert [value for pair in results for value in pair] == pytest.approx(
            [v for pair in wanted for v in pair], abs=1e-5
        )
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(weights, same, strict=True))
        assert states[1:] == (False, 0)
    assert [states[0] for *_, states, _ in found] == first_step
    [line] = found[0][-1]
    assert ONE_BLOCK in line and "rank 1" in line and "no kernels today" in line and not found[1][-1]


def late():
    """What ends a run in which rank 1 fails after all agreed, and how many late failures each rank tells the others of."""
    stack.compile_layers, loss.Compilation = (
        partial(compile_layers, backend="eager"),
        partial(Compilation, backend="eager"),
    )
    run, engine, batches, context = sharded.made([*WORDS, "engine.compile=true"])
    agreed = AgreedCompilations(engine, context)
    sharded.steps(run, engine, batches, 0, 1)
    agreed.agree()
    counts = [agreed.failed_late()]
    if dist.get_rank():
        [blocks] = [each for each in engine.compilations if each.name == "blocks run"]
        blocks.works, blocks.failure = False, "no space left on device"
    counts.append(agreed.failed_late())
    error = agreed.error()
    return counts, str(error), error.shared


def test_a_rank_that_can_no_longer_compile_ends_the_run_on_all_ranks_with_its_reason():
    (first, *said), (second, *same) = ranks.run(2, late)
    assert (first, second) == ([0, 0], [0, 1])
    for text, shared in (said, same):
        assert "on rank 1" in text and "no space left on device" in text and "engine.compile=false" in text and shared


def settled():
    """What works on this rank after all agreed, where rank 1 could not compile blocks, and no rank the loss."""
    rank, alone = dist.get_rank(), single()
    infos = tuple(replace(alone.ranks[0], rank=other) for other in range(2))
    blocks = SimpleNamespace(name="blocks", works=rank == 0, failure="no space left on device" * rank)
    last = SimpleNamespace(name="the loss", works=False, failure="no kernels")
    engine = SimpleNamespace(compilations=[blocks, last])
    agreed = AgreedCompilations(engine, DistributedContext(World("test", rank, 2), infos, alone.watchdog))
    agreed.agree()
    return blocks.works, last.works, agreed.failed_late()


def test_after_the_first_step_no_rank_runs_compiled_what_one_could_not_compile():
    assert ranks.run(2, settled) == [(False, False, 0)] * 2


def without(lacks, words):
    """What the settings become where some ranks have no compiler, and what is logged."""
    engines.missing_compiler = lambda: "a C++ compiler on the PATH" if dist.get_rank() in lacks else None
    run, _, _, context = sharded.made([*WORDS, *words])
    lines = listening()
    settings = compiling.shared_by_all(run.for_engine(2), torch.device("cuda"), context)
    return settings.engine.compile, list(lines)


@pytest.mark.parametrize(
    "lacks, words, decided",
    [([1], [], False), ([], [], None), ([0, 1], [], None), ([1], ["engine.compile=false"], False)],
)
def test_what_one_rank_lacks_no_rank_uses(lacks, words, decided):
    found = ranks.run(2, without, lacks, words)
    assert [each[0] for each in found] == [decided] * 2
    assert ["rank 1" in line for line in found[0][1]] == ([True] if lacks == [1] and not words else [])


def of_types(names):
    """What is wrong where ranks compute in these types."""
    _, _, _, context = sharded.made(WORDS)
    try:
        compiling.check_types(names[context.rank], context)
    except ConfigError as error:
        return str(error)
    return ""


def test_all_ranks_compute_in_one_type():
    assert ranks.run(2, of_types, ["bf16", "bf16"]) == ["", ""]
    for text in ranks.run(2, of_types, ["bf16", "fp32"]):
        assert "engine.precision=auto is bf16 on rank 0" in text and "fp32 on rank 1" in text


def proven(folder):
    """How a run whose rank 1 cannot compile computes after its check."""
    os.environ["XDG_CACHE_HOME"] = folder
    only_rank_0_compiles()
    run, _, _, context = sharded.made([*WORDS, "engine.bucket_mb=0.002"])
    run = replace(run, out=folder, cluster=ClusterConfig(self_check=True), engine=replace(run.engine, compile=True))
    mesh = sharded.Mesh.build(dist.get_rank(), 2, run.parallel)
    ended = self_check.check_computation(run, context, Compute(torch.device("cpu"), torch.float32, mesh))
    return ended.settings.engine.compile, (open(f"{folder}/self-check.json").read() if context.is_main else "")


@pytest.mark.filterwarnings("ignore")  # of torch.compile
def test_after_the_self_check_no_rank_compiles_where_one_cannot(tmp_path):
    (first, report), (second, _) = ranks.run(2, proven, str(tmp_path))
    assert (first, second) == (False, False)
    assert '"way": "uncompiled"' in report and "torch.compile failed on rank 1" in report


def really(folder, lacks):
    """As ``learned``, with Inductor, for which rank 1 lacks a C++ compiler, or a folder for what it compiles."""
    rank = dist.get_rank()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{rank}"
    from torch._inductor import config as inductor

    inductor.compile_threads = 1
    if rank and lacks == "compiler":
        inductor.cpp.cxx = (None, "/nowhere/g++")  # not CXX, which counts only until this module is first imported
    elif rank:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        tempfile.tempdir = f"{folder}/gone"
    run, engine, batches, context = sharded.made([*WORDS, "engine.bucket_mb=0.002", "engine.compile=true"])
    agreed = AgreedCompilations(engine, context)
    results = sharded.steps(run, engine, batches, 0, 1)
    works = engine.model.compilation.works
    agreed.agree()
    results += sharded.steps(run, engine, batches, 1, 3)
    return [each.loss for each in results], works, engine.model.compilation.works


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(engines.missing_compiler() is not None, reason="no C++ compiler, or no Python.h")
@pytest.mark.parametrize("lacks", ["compiler", "folder"])
def test_a_rank_that_lacks_what_compiling_needs_learns_what_it_learns_uncompiled(tmp_path, lacks):
    exact = ranks.run(2, learned, [*WORDS, "engine.bucket_mb=0.002"], False)
    wanted = [value for value, _ in exact[0][0]]
    (losses, works, after), (same, works_there, after_there) = ranks.run(2, really, str(tmp_path), lacks)
    assert losses == same == pytest.approx(wanted, abs=1e-4)
    assert (works, works_there, after, after_there) == (True, False, False, False)

"""Blocks that are compiled: one graph for all of them, in every layout; errors of the compiler."""

import getpass
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial

import pytest
import torch

from hpclm import config
from hpclm import engine as engines
from hpclm.base.errors import HpclmError
from hpclm.model import compiled, loss, stack
from hpclm.model.attention import layout
from hpclm.model.stack import Stack
from hpclm.node import environment
from hpclm.parallel.mesh import Compute
from tests import ranks
from tests.engine import sharded
from tests.parity import STYLES, TINY
from tests.runs import ROOT, hpclm

CPU = torch.device("cpu")


def graphs(words):
    """Losses of an engine with its layers as they are, and compiled as far as PyTorch traces them; the graphs made."""
    from torch._dynamo.testing import CompileCounterWithBackend

    run, engine, batches, _ = sharded.made(words)
    plain = [result.loss for result in sharded.steps(run, engine, batches, 0, 1)]
    counter, whole = CompileCounterWithBackend("aot_eager"), []

    def traced(function, asked):
        whole.append(asked)
        return compiled.compiled(function, asked, counter)

    before, stack.compiled = stack.compiled, traced
    run, engine, batches, _ = sharded.made(words)
    engine.model.compile_blocks()
    stack.compiled = before
    found = [result.loss for result in sharded.steps(run, engine, batches, 0, 1)]
    assert all(whole) and engine.model.compilation.layers
    return plain, found, counter.frame_count


WORDS = ["engine.precision=fp32", "batch.micro_size=2", "model.layers=2"]
DROPOUT = "model.dropout=0.1"
FP8 = ["engine.fp8=rowwise", "engine.precision=bf16", "model.layers=4", "model.hidden=64"]


@pytest.mark.parametrize(
    "size, words",
    [
        (2, ["parallel.tensor=2", *STYLES["gpt2"]]),
        pytest.param(2, ["engine.name=fsdp2", "engine.recompute=full", DROPOUT], marks=pytest.mark.whole),
        (2, ["parallel.context=2", *STYLES["llamadocs"]]),
        (2, ["parallel.tensor=2", *FP8]),
        pytest.param(4, ["parallel.context=2", "parallel.tensor=2"], marks=pytest.mark.whole),
        pytest.param(2, ["parallel.tensor=2", *STYLES["llamadocs"]], marks=pytest.mark.whole),
        pytest.param(2, ["parallel.tensor=2", *STYLES["bloom"], "engine.recompute=full"], marks=pytest.mark.whole),
        pytest.param(2, ["parallel.tensor=2", DROPOUT, "engine.recompute=selective"], marks=pytest.mark.whole),
        pytest.param(2, ["engine.name=fsdp2", *STYLES["llama"]], marks=pytest.mark.whole),
        pytest.param(2, [*STYLES["llama"], DROPOUT], marks=pytest.mark.whole),
    ],
    ids=[
        "tensor",
        "fsdp2-full-dropout",
        "context-llamadocs",
        "tensor-fp8",
        "context-tensor",
        "tensor-llamadocs",
        "tensor-bloom-full",
        "tensor-selective",
        "fsdp2",
        "dp",
    ],
)
def test_all_blocks_are_one_graph_without_breaks_that_computes_the_same(size, words):
    for plain, found, count in ranks.run(size, graphs, [*WORDS, *words]):
        assert found == pytest.approx(plain, abs=1e-6)
        assert count == 3 + (words[-4:] == FP8)  # input, block, final norm; blocks in FP8 and those in bf16


def split_loss():
    """The vocabulary-parallel loss and its gradient, as they are and as one traced graph."""
    import torch.distributed as dist

    from hpclm.config import ParallelConfig
    from hpclm.model.loss import split_nll_and_gradient
    from hpclm.parallel.mesh import Mesh

    axis = Mesh.build(dist.get_rank(), 2, ParallelConfig(tensor=2)).tp
    draw = torch.Generator().manual_seed(axis.rank)
    logits, labels, weights = torch.randn(6, 8, generator=draw), torch.tensor([0, 3, 8, 12, 13, 1]), torch.ones(6)
    traced = torch.compile(split_nll_and_gradient, backend="aot_eager", fullgraph=True, dynamic=False)
    return [function(logits.clone(), labels, weights, 14, axis)[:2] for function in (split_nll_and_gradient, traced)]


def test_the_loss_of_a_split_vocabulary_is_one_graph():
    for wanted, found in ranks.run(2, split_loss):
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def broken(graph, inputs):
    raise RuntimeError("no kernels today")


def broken_backward(graph, inputs):
    """A backend that can do the forward pass only."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.compilers import nop

    return aot_autograd(fw_compiler=nop, bw_compiler=broken)(graph, inputs)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # PyTorch's own look at its tensors
@pytest.mark.parametrize("backend", [broken, broken_backward])
def test_an_error_of_the_compiler_names_the_setting_that_avoids_it(backend, monkeypatch):
    monkeypatch.setattr(stack, "compiled", partial(compiled.compiled, backend=backend))
    run, engine, batches, _ = sharded.made(WORDS)
    engine.model.compile_blocks()
    with pytest.raises(HpclmError, match=r"no kernels today\nset engine.compile=false") as caught:
        sharded.steps(run, engine, batches, 0, 1)
    assert str(caught.value).startswith("torch.compile failed: ")
    assert "no kernels today" in compiled.problem(CPU, backend)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # what the compiler imports
def test_without_a_folder_for_compiled_code_nothing_can_be_compiled(tmp_path, monkeypatch):
    """As where /tmp became full, or was mounted read-only, after the process had chosen it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", environment.NOWHERE)  # as after a failure before
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert compiled.problem(CPU).startswith(f"no folder for compiled code can be made: {tmp_path}/gone: No such file")


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
@pytest.mark.filterwarnings("ignore")
def test_without_a_compiler_nothing_can_be_compiled(tmp_path, monkeypatch):
    from torch._inductor import config as inductor

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(inductor, "compile_threads", 1)
    assert compiled.problem(CPU) == ""
    torch.compiler.reset()
    monkeypatch.setattr(inductor.cpp, "cxx", (None, "/nowhere/g++"))
    assert "/nowhere/g++" in compiled.problem(CPU) or "C++" in compiled.problem(CPU)


DOCUMENTS = [
    *(
        "model.context=300",
        "model.positions=rope",
        "model.attention.pattern=[window,full]",
        "model.attention.window=70",
    ),
    "model.rope.scaling={rope_type: yarn, factor: 4, original_max_position_embeddings: 75}",
    *("data.reset_attention_mask=true", "data.reset_position_ids=true", "batch.global_size=4", "model.layers=4"),
]


def documents(engine, batches, steps, train=True):
    """Losses of steps with other documents in every micro-batch, and an evaluation after every tenth, or only these after each; the graphs
    before each step."""
    losses, graphs, numbers, draw = [], [], set(), torch.Generator().manual_seed(0)

    def divided(batch):
        ends = torch.rand(batch.tokens.shape, generator=draw) < 0.05 * torch.rand((), generator=draw)
        document, index = ends.cumsum(1) - ends.long(), torch.arange(ends.shape[1])
        starts = torch.where(document.diff(dim=1, prepend=document[:, :1] - 1) != 0, index, 0).cummax(1).values
        numbers.add(tuple(document[:, -1].tolist()))
        return replace(batch, documents=document, positions=index - starts)

    for step in range(steps):
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        if train:
            losses.append(engine.train_step([*map(divided, batches.step(4 * step))], 1e-3, step).loss)
        if step % 10 == 0 or not train:
            losses.append(engine.evaluate(map(divided, batches.take(4 * step, 2))))
    assert len(numbers) > steps // 2
    return losses, graphs


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore:The .grad attribute")
def test_nothing_is_compiled_again_whatever_the_documents_of_200_steps(monkeypatch):
    for module in (stack, loss):
        monkeypatch.setattr(module, "compiled", partial(compiled.compiled, backend="aot_eager"))
    _, engine, batches, _ = sharded.made([*WORDS, *DOCUMENTS, "engine.compile=true"])
    _, graphs = documents(engine, batches, 200)
    assert engine.model.compilation.layers and graphs[-1] == graphs[2] > graphs[0]


@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:The .grad attribute")
def test_in_blocks_that_are_not_compiled_flex_attention_is_compiled_alone_once(monkeypatch):
    """Forward only: on CPUs PyTorch's FlexAttention has no backward pass."""
    words = [*WORDS, *DOCUMENTS]
    _, engine, batches, _ = sharded.made(words)
    plain, _ = documents(engine, batches, 6, train=False)
    monkeypatch.setattr(layout, "flexible", lambda config, able, device, masked: able and masked)  # as on a GPU
    monkeypatch.setattr(compiled, "compiled", partial(compiled.compiled, backend="aot_eager"))
    monkeypatch.setattr(engines, "compiles_attention", lambda run, device: run.engine.compile is None)
    _, engine, batches, _ = sharded.made(words)
    found, graphs = documents(engine, batches, 6, train=False)
    assert found == pytest.approx(plain, abs=1e-5)
    assert graphs[-1] == graphs[1] > graphs[0]
    _, engine, batches, _ = sharded.made([*words, "engine.compile=false"])
    assert not engine.model.compilation.may_compile_attention


def test_a_function_of_too_many_shapes_is_an_error(monkeypatch):
    monkeypatch.setattr(compiled, "VARIANTS", 2)
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 2)
    doubled = compiled.compiled(lambda x: 2 * x, backend="eager")
    with pytest.raises(HpclmError, match=r"torch.compile failed: .*\n.*engine.compile=false"):
        for length in range(1, 5):
            assert doubled(torch.ones(length)).tolist() == [2] * length


@pytest.mark.parametrize(
    "words, device, wanted, why",
    [
        ([], "cpu", False, None),
        (["engine.compile=true"], "cpu", True, None),
        ([], "cuda", True, None),
        (["engine.name=fsdp2"], "cuda", True, None),
        (["engine.compile=false"], "cuda", False, None),
        (["engine.name=fairscale"], "cuda", False, "engine 'fairscale' is compiled only with"),
        (["engine.name=fairscale", "engine.compile=false"], "cuda", False, None),
        (["model.block=hpclm.model.gpt:Block"], "cuda", False, "model.block=hpclm.model.gpt:Block is compiled only"),
        (["model.kernels=apex"], "cuda", False, "model.kernels=apex cannot"),
    ],
)
def test_blocks_are_compiled_on_gpus_unless_something_speaks_against_it(words, device, wanted, why, monkeypatch):
    run = config.load(None, [word for word in [*TINY, *words] if word != "engine.device=cpu"])
    found, reason = engines.compiles(run.for_engine(), torch.device(device))
    assert found == wanted and (why in reason if why else reason is None)


def test_an_engine_learns_whether_it_is_to_compile(monkeypatch):
    asked = []
    monkeypatch.setattr(Stack, "compile_blocks", lambda stack, whole=True: asked.append(whole))
    monkeypatch.setattr(engines, "compiles", lambda *_: (True, None))
    run = config.load(None, TINY)
    engine = engines.build(run.for_engine(), Compute(torch.device("cpu"), torch.float32))
    assert asked == [True] and engine.config.engine.compile


COMPILE = """
import torch
from hpclm.model.compiled import compiled
print(compiled(lambda x: (x.sin() + 1).cos())(torch.ones(3)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_code_is_not_compiled_in_the_folder_that_another_user_made_where_pytorch_would_compile(tmp_path):
    tmp_path.chmod(0o1777)
    foreign = tmp_path / f"torchinductor_{getpass.getuser()}"
    foreign.mkdir()
    foreign.chmod(0o777)
    env = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    env |= {"TMPDIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / f"hpclm-inductor-{os.geteuid()}").rglob("*.so"))
    assert not list(foreign.iterdir())


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_an_attempt_uses_what_the_one_before_has_compiled_on_this_machine(tiny, tmp_path):
    words, told = tiny("run", "engine.compile=true", "budget.steps=4"), []
    tmp_path.chmod(0o700)
    for stop in ("stop_at=2", "stop_at=4"):
        env = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
        env |= {"TMPDIR": str(tmp_path), "TORCH_LOGS": "+inductor"}
        told.append(hpclm("train", *words, stop, env=env, check=0).stderr)
    assert "fx graph cache miss" in told[0] and "fx graph cache miss" not in told[1]
    assert (tmp_path / f"hpclm-inductor-{os.geteuid()}").stat().st_mode & 0o777 == 0o700
    assert not list(tmp_path.glob("torchinductor_*"))

"""How torch.compile divides a model into graphs: counted on a CPU, with a few small blocks of the same architecture."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import nn

from hpclm.config import RunConfig
from hpclm.data.batches import Batch
from hpclm.engine import native, sharded_optimizer
from hpclm.model import gpt
from hpclm.parallel.mesh import Mesh
from hpclm.planning import pretend
from hpclm.planning.building import built

LAYERS, WIDTH, TOKENS, VOCABULARY = 3, 16, 32, 128


@dataclass(frozen=True)
class Graphs:
    """What torch.compile makes of a model with several equal blocks."""

    blocks: int
    """Graphs that the blocks need together; 1 if they share one."""
    functions: int
    """Graphs outside the blocks: of the embedding, the final norm and the loss."""
    breaks: tuple[str, ...]
    """Why a graph had to end in the middle, once for each place."""


def of(run: RunConfig) -> Graphs:
    """Compile a small version of the model and take two steps in the layout of ``run``, with process groups without peers."""
    small = _small(run)
    replicas = 2 if run.job.nodes * run.job.gpus > run.parallel.model else 1
    world = run.parallel.model * replicas
    small = replace(small, batch=replace(small.batch, global_size=replicas * 2))
    counted = {"blocks": 0, "functions": 0}
    breaks: list[str] = []
    torch._dynamo.reset()
    with pretend.ranks(0, world), _counting(counted, breaks), _as_on_a_gpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns about PyTorch's code as it compiles
        engine = built(small, Mesh.build(0, world, small.parallel), torch.device("cpu"), torch.bfloat16)
        ids = torch.zeros(1, TOKENS, dtype=torch.int64)
        for step in range(2):
            engine.train_step([Batch(ids, ids, None, None, None)] * 2, 1e-4, step)
    torch._dynamo.reset()
    return Graphs(counted["blocks"], counted["functions"], tuple(breaks))


def _small(run: RunConfig) -> RunConfig:
    """The same architecture with few and narrow layers."""
    model, parallel = run.model, run.parallel
    groups = parallel.tensor * (2 if model.groups > 1 else 1)
    heads = groups * (2 if model.groups < model.heads else 1)
    keys = groups if model.kv_heads is not None else None
    shape: dict[str, Any] = dict(
        layers=LAYERS * parallel.pipeline, heads=heads, kv_heads=keys, hidden=heads * WIDTH, ffn=heads * WIDTH * 2
    )
    model = replace(model, **shape, context=TOKENS * parallel.tensor, vocab_size=VOCABULARY)
    engine = replace(run.engine, compile=True, precision="bf16", device="cpu", loss_chunk=None)
    return replace(run, model=model, engine=engine, batch=replace(run.batch, micro_size=1, rampup=None))


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Inside this context backward passes add gradients of weights in place, as they do on a GPU."""
    with ExitStack() as opened:
        for module in (native, sharded_optimizer):
            opened.enter_context(mock.patch.object(module, "adds_in_place", lambda *_: True))
        yield


@contextmanager
def _counting(counted: dict[str, int], breaks: list[str]) -> Iterator[None]:
    """Inside this context torch.compile counts graphs and compiles nothing."""
    from torch._dynamo.utils import counters

    def backend(kind: str) -> Callable[..., Any]:
        def count(graph: Any, inputs: Any) -> Any:
            counted[kind] += 1
            return graph.forward

        return count

    blocks, functions = backend("blocks"), backend("functions")
    compile_function, compile_module = torch.compile, nn.Module.compile

    def function_(function: Any = None, **options: Any) -> Any:
        if function is None:
            return lambda given: function_(given, **options)
        return compile_function(function, **{"backend": functions} | options)

    def module_(module: nn.Module, **options: Any) -> None:
        compile_module(module, **options | {"backend": blocks if isinstance(module, gpt.Block) else functions})

    counters.clear()
    with mock.patch("torch.compile", function_), mock.patch("torch.nn.Module.compile", module_):
        yield
    breaks += [
        " ".join(reason.split("\n")[0].split())
        for reason, times in counters["graph_break"].items()
        for _ in range(times)
    ]

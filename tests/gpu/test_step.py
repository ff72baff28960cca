"""What a step on a GPU costs: memory as the planner says, no waiting for the host, one compilation, two ranks on one GPU."""

import gc
import math
import os

import pytest
import torch

from hpclm import config
from hpclm import engine as engines
from hpclm.node.gpus import KINDS
from hpclm.parallel import main_gradients
from hpclm.parallel.fp8 import FP8
from hpclm.parallel.mesh import SINGLE, Compute
from hpclm.parallel.micro_batch import MicroBatch
from hpclm.planning import forecast
from tests import parity, ranks
from tests.forks import hpclm
from tests.runs import figures

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # what torch.compile warns of inside itself

SHAPES = {
    "cuda": "model={vocab_size: 50257, layers: 4, hidden: 768, context: 512, attention: {heads: 12}}",  # 67 M parameters
    "cpu": "model={vocab_size: 5000, layers: 2, hidden: 128, context: 64, attention: {heads: 4}}",
    "interpreted": "model={vocab_size: 256, layers: 1, hidden: 64, context: 32, attention: {heads: 4}}",  # kernels in Python
}
BATCH = "batch={global_size: 8, micro_size: 4}"
WORKSPACES = 2 * 32 * 2**20
"""Bytes of cuBLAS's workspaces on Hopper, one for each thread that computes; the planner counts them with the process."""
REST = ["data.source=synthetic", "budget.steps=100", "optim.lr=1e-4", "optim.min_lr=1e-5"]


def stepper(device, *words):
    """A function that does a step of a model on random tokens, and its settings; uncompiled unless ``words`` say otherwise."""
    place = [f"engine.device={device.type}", "engine.compile=false"]
    run = config.load(None, [SHAPES[os.environ.get("HPCLM_TEST_SHAPE", device.type)], BATCH, *REST, *place, *words])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    engine = engines.build(run.for_engine(), Compute(device, dtype))
    rows = torch.randint(
        0, run.model.vocab_size, (4, run.model.context + 1), generator=torch.Generator().manual_seed(0)
    ).to(device)
    batch = MicroBatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    count = iter(range(1000))
    return lambda: engine.train_step([batch, batch], 1e-4, next(count)), run


@pytest.mark.parametrize(
    "more",
    [
        *(
            [],
            ["engine.recompute=full"],
            ["engine.recompute=selective"],
            ["engine.compile=true"],
            ["model.dropout=0.1"],
        ),
        *(["engine.fp8=rowwise"], ["engine.fp8=tensorwise", "engine.compile=true"]),
    ],
    ids=str,
)
def test_the_planner_knows_the_memory_of_a_step_within_three_percent(more, gpu):
    gc.collect()  # the engines of earlier tests
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    step, run = stepper(gpu, *more)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated() - before - (WORKSPACES if not before else 0)
    plan = forecast.predict(run, KINDS["H200"])  # the kind tells how fast and whether it fits, not how much it takes
    tensors = plan.memory[0].tensors
    print(f"planner {tensors / 2**20:,.0f} MiB, allocated {found / 2**20:,.0f} MiB: {tensors / found:.3f}")
    assert tensors == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize("more", [[], ["engine.compile=true"], ["model.dropout=0.1"]], ids=str)
def test_the_host_waits_for_the_gpu_at_most_once_a_step(more, gpu):
    step, _ = stepper(gpu, *more)
    for _ in range(3):
        step()
    steps = 5
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as trace:
        for _ in range(steps):
            step()
    waits = {e.key: e.count for e in trace.key_averages() if "Synchronize" in e.key}
    waits.pop("cudaDeviceSynchronize", None)  # the profiler's own, at its end
    assert sum(waits.values()) <= steps, waits


def test_every_kernel_of_a_bf16_step_that_multiplies_matrices_is_bf16(gpu):
    step, _ = stepper(gpu)
    step()
    with torch.profiler.profile(record_shapes=True) as trace:
        step()
    rows = [e for e in trace.events() if e.name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear")]
    assert rows
    wide = [e.name for e in rows if e.kernels and any("sgemm" in kernel.name for kernel in e.kernels)]
    assert not wide


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_product_is_added_to_an_fp32_gradient_where_it_lies(dtype, device):
    draw = torch.Generator().manual_seed(1)
    a, b = (torch.randn(512, n, generator=draw).to(device, dtype) for n in (96, 160))
    total, rounding = (
        torch.ones(96, 160, device=device),
        2.0**-8 if device.type == "cpu" else 1e-5,
    )  # CPUs round products
    where = total.data_ptr()
    main_gradients.add_product(total, a, b)
    wanted = 1 + a.double().t() @ b.double()
    assert total.data_ptr() == where and (total - wanted).abs().max() <= rounding * wanted.abs().max()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rowwise", [False, True])
def test_products_in_fp8_are_those_of_the_emulation(rowwise, compiled, gpu):
    x, weight, d_y = (
        (torch.randn(shape, device=gpu) * 3).bfloat16() for shape in ((2, 40, 256), (512, 256), (2, 40, 512))
    )

    def products(fp8, x, weight, d_y):
        return fp8.output(x, weight), fp8.input_gradient(d_y, weight)()

    real = torch.compile(products, fullgraph=True) if compiled else products
    found = real(FP8(rowwise, SINGLE, False), x, weight, d_y)
    for mine, wanted in zip(found, products(FP8(rowwise, SINGLE, False, emulated=True), x, weight, d_y), strict=True):
        assert (mine.float() - wanted.float()).abs().max() <= 2.0**-7 * wanted.float().abs().max()


@pytest.mark.parametrize("more", [[], ["engine.recompute=full"]], ids=str)
def test_a_step_that_offloads_activations_is_one_that_does_not(more, gpu):
    kept, _ = stepper(gpu, "engine.compile=false", *more)
    moved, _ = stepper(gpu, "engine.offload_activations=true", *more)
    for _ in range(4):
        assert moved().loss == pytest.approx(kept().loss, rel=2e-3)


def test_a_compiled_step_learns_what_an_eager_one_does(device):
    eager, _ = stepper(device)
    compiled, _ = stepper(device, "engine.compile=true")
    steps = 4 if device.type == "cuda" else 1
    tolerance = 2e-2 if device.type == "cuda" else 1e-5
    for _ in range(steps):
        assert compiled().loss == pytest.approx(eager().loss, rel=tolerance)


def test_nothing_is_compiled_again_after_the_first_step(device):
    step, _ = stepper(device, "engine.compile=true")
    step()
    step()
    known = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(2):
        step()
    assert known and torch._dynamo.utils.counters["stats"]["unique_graphs"] == known


def test_a_step_reports_a_loss_that_is_that_of_chance_at_first(device):
    step, run = stepper(device)
    assert step().loss == pytest.approx(math.log(run.model.vocab_size), rel=0.05)


def test_two_ranks_on_one_gpu_learn_what_one_does(device):
    """Over gloo, since NCCL refuses two ranks on one GPU."""
    words = ["engine.precision=fp32"]
    both = ranks.run(2, parity.train, words, 6, 0, None, device.type)
    alone = ranks.run(1, parity.train, words, 6, 0, None, "cpu")
    assert both[0]["losses"] == pytest.approx(alone[0]["losses"], rel=1e-4)
    assert both[0]["losses"] == both[1]["losses"]


def test_metrics_name_the_device_and_how_much_of_it_is_used(words):
    ran = words("run", "budget.steps=20", "log.every=1")
    hpclm("train", *ran, check=0)
    folder = next(word.partition("=")[2] for word in ran if word.startswith("out="))
    rows = figures(folder, "step", "tokens_per_second")
    assert len(rows) == 20 and all(rate > 0 for _, rate in rows[2:])

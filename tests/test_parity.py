"""However a run is laid out over processes, and whatever computes it, it learns the same thing."""

import itertools
import math
import zlib
from dataclasses import dataclass

import pytest
import torch

from tests import sizes
from tests.parity import STEPS, STYLES, TODAY, alone, errors, trained


@dataclass(frozen=True)
class Layout:
    """An engine with its ZeRO stage, and how processes divide the work."""

    engine: str
    stage: int
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    more: tuple[str, ...] = ()

    @property
    def size(self):
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def name(self):
        sizes = {"dp": self.data, "cp": self.context, "tp": self.tensor, "pp": self.pipeline}
        shape = "".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "one"
        return "-".join([f"{self.engine}{self.stage}", shape, *(word.split("=")[1] for word in self.more)])

    @property
    def shape(self):
        """Settings that one process takes over: micro-batches of the same size, and no more layers than the stages need."""
        samples = {3: 12, 5: 10, 6: 12, 8: 16}.get(self.data, 8)
        micro = samples // self.data // max(2, self.pipeline)
        layers = max(4, self.pipeline) if self.pipeline > 1 else 2
        return [f"batch.global_size={samples}", f"batch.micro_size={micro}", f"model.layers={layers}"]

    @property
    def words(self):
        words = [f"engine.name={self.engine}", f"engine.zero_stage={self.stage}", f"parallel.tensor={self.tensor}"]
        words += [f"parallel.context={self.context}"] * (self.context > 1)
        return [*words, f"parallel.pipeline={self.pipeline}", *self.more]


LAYOUTS = [
    *(Layout("native", 0, *sizes) for sizes in [(2,), (4,), (1, 2), (1, 4), (2, 2)]),
    *(Layout("native", 1, *sizes) for sizes in [(2,), (4,), (2, 2)]),
    *(Layout("pipelining", 0, *sizes) for sizes in [(1, 1, 2), (1, 1, 3), (2, 1, 2), (1, 2, 2), (2, 2, 2)]),
    Layout("pipelining", 0, pipeline=2, more=("parallel.schedule=gpipe",)),
    Layout("pipelining", 0, pipeline=2, more=("parallel.schedule=interleaved", "parallel.chunks=2")),
    Layout("pipelining", 0, pipeline=2, more=("parallel.schedule=zero_bubble", "parallel.chunks=2")),
    Layout("pipelining", 0, pipeline=2, more=("parallel.schedule=zero_bubble",)),
    Layout("pipelining", 0, tensor=2, pipeline=2, more=("parallel.schedule=zero_bubble",)),
    *(
        Layout(engine, stage, *sizes)
        for engine in ("fsdp2", "fairscale")
        for stage in (2, 3)
        for sizes in [(2,), (4,), (2, 2)]
    ),
    *(Layout(engine, 3) for engine in ("fsdp2", "fairscale")),
    *(Layout("deepspeed", stage, *sizes) for stage in (0, 1, 2, 3) for sizes in [(2,), (2, 2)]),
    *(Layout("deepspeed", 1, *sizes) for sizes in [(1, 1, 2), (1, 1, 3), (1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 2)]),
    *(Layout("fsdp2", stage, 4, more=("parallel.shard=2",)) for stage in (3, 2)),
    Layout("fsdp2", 3, 4, 2, more=("parallel.shard=2",)),
    Layout("native", 1, 4, more=("parallel.shard=2",)),
]
ODD = (3, 5, 6)
"""Numbers of replicas that are no powers of two, so that what is split among them needs padding."""
FEW = (*ODD, 8)
"""Numbers of replicas that are not tried with everything: what is combined is a matter of one process."""
SHARDED = [("native", 0), ("native", 1), *((engine, stage) for engine in ("fsdp2", "fairscale") for stage in (2, 3))]
SHARDED += [("deepspeed", stage) for stage in (0, 1, 2, 3)]
LAYOUTS += [Layout(engine, stage, data) for engine, stage in SHARDED for data in ODD]
LAYOUTS += [Layout(engine, stage, 3, 2) for engine, stage in SHARDED]
LAYOUTS += [
    Layout(engine, stage, *sizes)
    for engine, stage in (("pipelining", 0), ("deepspeed", 1))
    for sizes in [(3, 1, 2), (5, 1, 2), (6, 1, 2), (3, 2, 2)]
]
LAYOUTS += [Layout(engine, stage, 8) for engine, stage in SHARDED]
LAYOUTS += [Layout(engine, stage, pipeline=5) for engine, stage in (("pipelining", 0), ("deepspeed", 1))]
LAYOUTS += [Layout("pipelining", 0, 2, pipeline=2, more=("parallel.schedule=zero_bubble",))]
LAYOUTS += [
    *(
        Layout("native", 0, *sizes)
        for sizes in [(1, 1, 1, 2), (1, 1, 1, 4), (1, 1, 1, 8), (2, 1, 1, 2), (1, 2, 1, 2), (2, 2, 1, 2)]
    ),
    *(Layout("native", 1, *sizes) for sizes in [(1, 1, 1, 2), (2, 2, 1, 2)]),
    *(Layout("fsdp2", 3, *sizes) for sizes in [(1, 1, 1, 2), (2, 1, 1, 2), (1, 2, 1, 2), (2, 1, 1, 4)]),
    Layout("fsdp2", 2, context=4),
    Layout("fsdp2", 3, 2, context=2, more=("parallel.shard=2",)),
    *(Layout("pipelining", 0, *sizes) for sizes in [(1, 1, 2, 2), (2, 1, 2, 2), (1, 2, 2, 2)]),
    Layout("pipelining", 0, pipeline=2, context=2, more=("parallel.schedule=zero_bubble",)),
]
LAYOUTS += [
    *(Layout("pipelining", 1, *sizes) for sizes in [(2, 1, 2), (3, 1, 2), (2, 2, 2), (2, 1, 2, 2)]),
    Layout("pipelining", 1, 2, pipeline=2, more=("parallel.schedule=interleaved", "parallel.chunks=2")),
    Layout("pipelining", 1, 2, pipeline=2, more=("parallel.schedule=zero_bubble",)),
]
OFTEN_ODD = {"native1-dp5", "fsdp23-dp3", "fairscale3-dp3", "deepspeed1-dp3pp2", "deepspeed1-dp3", "deepspeed3-dp5"}
RARE = {f"{engine}{stage}-dp4" for engine in ("fsdp2", "fairscale") for stage in (2, 3)}
RARE |= {"native1-dp4", "deepspeed0-dp2tp2", "deepspeed2-dp2tp2", "deepspeed1-pp4", "native0-tp4"}
RARE |= {"fsdp22-dp4-2", "fsdp23-dp4tp2-2", "pipelining0-pp5", "deepspeed1-pp5", "pipelining0-dp2pp2-zero_bubble"}
RARE |= {layout.name for layout in LAYOUTS if layout.data in FEW} - OFTEN_ODD
RARE |= {"native0-tp2", "native0-dp4", "native0-dp2tp2", "native1-dp2", "native1-dp2tp2", "fsdp23-dp2", "fsdp23-dp4-2"}
RARE |= {"pipelining0-dp2pp2", "pipelining0-tp2pp2", "pipelining0-tp2pp2-zero_bubble", "fsdp22-dp2tp2"}
RARE |= {"fairscale2-dp2tp2", "fairscale3-dp2", "deepspeed1-dp2", "deepspeed1-dp2tp2", "deepspeed3-dp2"}
RARE |= {"deepspeed1-dp2pp2", "deepspeed1-tp2pp2", "pipelining1-dp2tp2pp2", "pipelining1-dp2pp2-interleaved-2"}
"""Layouts of which the sample has nothing but rows that are named below: each is between others."""
RECOMPUTE = {"kept": [], "full": ["engine.recompute=full"], "selective": ["engine.recompute=selective"]}
RECOMPUTE["every2"] = ["engine.recompute=full", "engine.recompute_every=2"]
DROPOUT = {"dry": [], "dropout": ["model.dropout=0.1", "model.attention.dropout=0.1"]}
PRECISION = ["fp32", "bf16"]


UPDATES = 8
"""Of the rows that always run: enough for errors in moments and updates to show; a gradient that is wrong shows in the first step."""
MUON = ("native", "fsdp2", "pipelining")
OFTEN_MUON = {"native1-dp2tp2-muon-fp32-llama", "pipelining0-dp2pp2-muon-fp32-gpt2", "fsdp23-dp4-2-muon-bf16-llama"}


def combinations(layout):
    """Everything that is combined with a layout: (id, settings, whether it can be equal)."""
    for precision, style, recompute, dropout in itertools.product(PRECISION, STYLES, RECOMPUTE, DROPOUT):
        if dropout == "dropout" and layout.tensor > 1:
            continue  # each tensor-parallel process drops in its own part, with its own random stream
        if "llama" in style and layout.tensor > 2:
            continue  # two key/value heads
        if recompute != "kept" and "zero_bubble" in layout.name:
            continue  # refused
        if layout.engine == "fairscale" and layout.tensor > 1 and recompute in ("full", "every2"):
            continue  # refused
        if layout.context > 1 and (dropout != "dry" or (recompute != "kept" and style not in ("gpt2", "llamadocs"))):
            continue  # each process has its own random stream; and recomputation is the same in all
        if layout.data in FEW and (recompute != "kept" or dropout != "dry" or style not in ("gpt2", "llamadocs")):
            continue
        words = [
            *layout.shape,
            f"engine.precision={precision}",
            *STYLES[style],
            *RECOMPUTE[recompute],
            *DROPOUT[dropout],
        ]
        yield f"{layout.name}-{precision}-{style}-{recompute}-{dropout}", words
    for kind, style in itertools.product(PRECISION, ("gpt2", "llama") if layout.engine in MUON else ()):
        if style == "gpt2" or layout.tensor <= 2:
            muon = ["optim.name=muon", f"optim.newton_schulz_type={kind}"]
            yield f"{layout.name}-muon-{kind}-{style}", [*layout.shape, "engine.precision=fp32", *STYLES[style], *muon]


def cases():
    """Every combination; those that are not of the sample that always runs are marked whole."""
    for number, layout in enumerate(LAYOUTS):
        found = sorted(combinations(layout), key=lambda case: zlib.crc32(case[0].encode()))
        exact = [name for name, _ in found if "-fp32-" in name and "-muon-" not in name]
        rounded = [name for name, _ in found if "-bf16-" in name and "-muon-" not in name]
        rare = layout.name in RARE or (layout.context > 1 and layout.name not in CONTEXT)
        sample = OFTEN_MUON if rare else {exact[0], *rounded[: number % 24 == 0]} | OFTEN_MUON
        for name, words in found:
            marks = [] if name in sample else [pytest.mark.whole]
            yield pytest.param(layout, words, id=name, marks=marks)


CONTEXT = {"native0-cp2", "native0-dp2cp2tp2", "fsdp23-dp2cp2"}
"""Layouts with context parallelism of which the sample has something."""
TODAYS_SAMPLE = {
    "native0-tp2-olmo3",
    "pipelining0-pp2-gemma2",
    "fsdp23-dp2-sinks",
    "native1-dp2tp2-xielu",
    "native0-cp4-olmo3",
    "native0-tp2-latent",
    "native1-dp2tp2-latent",
    "native0-cp4-latent",
    "pipelining0-cp2tp2pp2-latent",
    "fsdp23-dp2-latent",
    "pipelining0-cp2tp2pp2-sinks",
    "native0-dp2tp2-frozen",
    "native1-dp4-2-frozen",
    "pipelining0-tp2pp2-zero_bubble-frozen",
    "pipelining1-dp2pp2-frozen",
    "fsdp23-dp4tp2-2-frozen",
    "fsdp22-dp2-frozen",
    "fairscale3-dp2tp2-frozen",
    "deepspeed1-dp2pp2-frozen",
    "deepspeed3-dp2tp2-frozen",
}


def todays():
    """Every layout, with each shape of today; most are marked whole."""
    for layout, style in itertools.product(LAYOUTS, TODAY):
        if layout.tensor > 2:
            continue  # two key/value heads
        if style == "frozen" and layout.engine == "deepspeed" and layout.pipeline > 2:
            continue  # refused: a stage trains one weight only, fewer than another has groups
        name = f"{layout.name}-{style}"
        marks = [] if name in TODAYS_SAMPLE else [pytest.mark.whole]
        words = [*layout.shape, "engine.precision=fp32", *TODAY[style]]
        yield pytest.param(layout, words, id=f"{layout.name}-fp32-{style}-kept-dry", marks=marks)


def pytest_generate_tests(metafunc):
    """The thousands of rows that are marked whole are made only where they run."""
    if "words" in metafunc.fixturenames:
        whole = sizes.of_options(metafunc.config) == "whole"
        metafunc.parametrize("layout, words", [row for row in (*cases(), *todays()) if whole or not row.marks])


def test_every_layout_learns_what_one_process_learns(layout, words, record_property, request):
    steps = STEPS if request.node.get_closest_marker("whole") else UPDATES
    wanted, found = alone(*words, steps=steps), trained(layout.size, *words, *layout.words, steps=steps)
    exact = "engine.precision=fp32" in words
    limit = 1e-3 if "optim.newton_schulz_type=bf16" in words else 1e-5
    near = dict(abs=limit) if exact else dict(abs=0.03)
    assert found["losses"] == pytest.approx(wanted["losses"], **near)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=limit if exact else 0.1)
    assert found["z_losses"] == pytest.approx(wanted["z_losses"], **near)
    assert (wanted["z_losses"][0] > 0) == ("optim.z_loss=0.01" in words)
    assert found["evaluation"] == pytest.approx(wanted["evaluation"], **near)
    assert found["averaged"] == pytest.approx(wanted["averaged"], **near)
    assert found["scalars"]["optimizer_steps"] == wanted["scalars"]["optimizer_steps"]
    assert found["tensors"].keys() == wanted["tensors"].keys()
    if exact:
        worst = max(errors(found["gradients"], wanted["gradients"]).values())
        norm = abs(found["norms"][0] / wanted["norms"][0] - 1)
        record_property("gradients", f"{layout.engine}{layout.stage} {layout.size} {worst:.1e} {norm:.1e}")
        assert max(worst, norm) < 1e-6
    frozen = {}
    if TODAY["frozen"][0] in words:
        first = alone(*words, steps=0)["tensors"]
        frozen = {
            name: tensor for name, tensor in first.items() if name.replace("model.", "ema.", 1) not in wanted["tensors"]
        }
        assert len(frozen) == 1 + 12 + 4 + 2
    for name, tensor in frozen.items():
        assert torch.equal(found["tensors"][name], tensor), name
    for name, tensor in wanted["tensors"].items():
        assert found["tensors"][name].shape == tensor.shape
        if exact:
            assert (found["tensors"][name] - tensor).abs().max().item() < limit, name


ON_ONE_STAGE = {
    "last": "optim.groups=[{match: output, lr: 0.5}]",
    "first": "optim.groups=[{match: tokens, weight_decay: 0.3}]",
    "each block": "optim.groups=[{match: block0, lr: 0.5}, {match: block1.mlp, lr: 0.25}, {match: block2.mlp.up, lr: 0.75}]",
}
"""Groups of weights of which stages have different numbers."""
GROUPED = [
    Layout("deepspeed", 1, pipeline=2),
    Layout("deepspeed", 1, 2, pipeline=2),
    Layout("deepspeed", 1, tensor=2, pipeline=2),
    Layout("pipelining", 0, pipeline=2),
    *(Layout(engine, stage, 2) for engine, stage in SHARDED),
]


@pytest.mark.parametrize(
    "layout, groups",
    [
        pytest.param(
            layout, groups, id=f"{layout.name}-{name}", marks=[pytest.mark.whole] * (number != 0 or name == "first")
        )
        for number, layout in enumerate(GROUPED)
        for name, groups in ON_ONE_STAGE.items()
    ],
)
def test_every_layout_learns_with_groups_of_weights_that_one_stage_has(layout, groups):
    words = [*layout.shape, "model.tied=false", "engine.precision=fp32", groups]
    if layout.size == layout.data:
        words.append("model.layers=4")
    exact, learned = alone(*words, steps=UPDATES), trained(layout.size, *words, *layout.words, steps=UPDATES)
    assert learned["losses"] == pytest.approx(exact["losses"], abs=1e-5)
    assert learned["norms"] == pytest.approx(exact["norms"], rel=1e-5)
    for name, tensor in exact["tensors"].items():
        assert (learned["tensors"][name] - tensor).abs().max().item() < 1e-5, name


FP16 = ["engine.precision=fp16", "scaler.initial=1048576", "scaler.hysteresis=1", "scaler.window=4"]
FP16 += ["batch.micro_size=2", "model.layers=2"]
HALVES = [
    Layout("native", 0, 2),
    Layout("native", 1, 2),
    Layout("pipelining", 0, pipeline=2),
    *(Layout(engine, 3, 2, more=("engine.gradients=fp32",)) for engine in ("fsdp2", "fairscale", "deepspeed")),
    Layout("fsdp2", 3, 4, more=("engine.gradients=fp32", "parallel.shard=2")),
    Layout("deepspeed", 0, 2),
    Layout("deepspeed", 1, 2, more=("engine.gradients=fp32",)),
    Layout("deepspeed", 2, 3, more=("engine.gradients=fp32", "batch.global_size=12")),
    Layout("deepspeed", 1, pipeline=2, more=("engine.gradients=fp32",)),
    Layout("deepspeed", 1, 2, pipeline=2, more=("engine.gradients=fp32",)),
]


OFTEN = ("native0-dp2", "fsdp23-dp2-fp32", "deepspeed1-dp2pp2-fp32")
OFTEN_UNSCALED = ("pipelining0-pp2", "deepspeed3-dp2-fp32")


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, id=each.name, marks=[pytest.mark.whole] * (each.name not in OFTEN)) for each in HALVES],
)
def test_in_fp16_every_engine_that_sums_gradients_in_fp32_skips_the_same_steps_while_the_scale_searches(layout):
    size = [word for word in layout.more if word.startswith("batch.global")]
    wanted = alone(*FP16, *size)
    found = trained(layout.size, *FP16, *layout.words)
    assert wanted["skipped"].count(True) > 2 and found["skipped"] == wanted["skipped"]
    assert found["scalars"]["loss_scale"] == wanted["scalars"]["loss_scale"]
    assert found["losses"] == pytest.approx(wanted["losses"], abs=5e-3)
    for norm, right in zip(found["norms"], wanted["norms"]):
        assert norm == pytest.approx(right, rel=1e-3) or not math.isfinite(right)


@pytest.mark.parametrize("layout", [each for each in HALVES if each.name in OFTEN_UNSCALED], ids=lambda each: each.name)
def test_in_fp16_losses_and_norms_are_those_of_the_unscaled_step(layout):
    words = ["engine.precision=fp16", "scaler.initial=256", *FP16[-2:]]
    wanted, found = alone(*words, steps=2), trained(layout.size, *words, *layout.words, steps=2)
    assert not any(wanted["skipped"]) and not any(found["skipped"])
    assert found["losses"] == pytest.approx(wanted["losses"], abs=5e-3)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-2)


def test_the_losses_fall():
    """Otherwise equal curves would prove little."""
    losses = alone(*LAYOUTS[0].shape, "engine.precision=fp32")["losses"]
    assert losses[-1] < losses[0] - 0.2

"""Runs, as a person starts them, whose model is divided over processes."""

import pytest

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.engine import check_supports
from tests.engine.sharded import Measured
from tests.forks import Ranks, hpclm
from tests.runs import figures, lines
from tests.test_train import corpus

MORE = ["model={vocab_size: 64, layers: 4, hidden: 32, context: 16, attention: {heads: 4}}", "cluster.preflight=false"]
MORE += ["checkpoint.file_mb=0", "batch.micro_size=1", "evaluate.every=4", "evaluate.batches=2", "optim.eps=1e-5"]
LAYOUTS = [(2, ["parallel.tensor=2"]), (2, ["engine.name=pipelining", "parallel.pipeline=2"]), (1, [])]
MORE_LAYOUTS = [
    (2, ["engine.name=deepspeed", "engine.zero_stage=3"]),
    (2, ["engine.name=fsdp2"]),
    (4, ["engine.name=pipelining", "parallel.pipeline=2", "parallel.tensor=2"]),
    (2, ["engine.name=fairscale"]),
    (4, ["engine.name=fsdp2", "parallel.shard=2"]),
    (4, ["engine.name=deepspeed", "parallel.pipeline=2"]),
    (4, ["engine.name=pipelining", "parallel.pipeline=2", "engine.zero_stage=1"]),
    (2, ["engine.name=deepspeed", "engine.zero_stage=2", "parallel.tensor=2"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts", [LAYOUTS, pytest.param([*LAYOUTS, *MORE_LAYOUTS], marks=pytest.mark.whole)], ids=len
)
def test_a_run_goes_on_in_any_other_layout(layouts, tiny, tmp_path):
    more = [*MORE, f"budget.steps={3 * len(layouts)}"]
    hpclm("train", *tiny("whole", *more), check=0)
    for number, (size, words) in enumerate(layouts, start=1):
        with Ranks(size, tiny("pieces", *more, *words, f"stop_at={3 * number}")) as ranks:
            found = ranks.wait()
            assert {code for code, _ in found.values()} == {0}, found
    hashes = [figures(tmp_path / out, "step", "data_hash") for out in ("whole", "pieces")]
    assert hashes[0] == hashes[1] and len(dict(hashes[0])) == 3 * len(layouts)
    for keys in (("step", "loss", "grad_norm"), ("step", "validation_loss")):
        whole, pieces = (figures(tmp_path / out, *keys) for out in ("whole", "pieces"))
        seen = {row[0]: row for row in pieces}
        for alone in whole:
            assert seen[alone[0]] == pytest.approx(alone, abs=1e-5)
    hpclm("evaluate", tmp_path / "pieces", "--samples", 8, check=0)


@pytest.mark.whole
@pytest.mark.slow
def test_a_run_that_shrinks_and_grows_reads_the_same_samples_at_every_step(tiny, tmp_path):
    more = [*MORE, "model.vocab_size=257", "batch.global_size=12", "evaluate.every=0", "data.workers=0"]
    more += ["data.source=tests.faults:recording", f"data.prefix={corpus(tmp_path)}"]

    def reads(folder, size, tensor, stop):
        """What each step of a launch has read, whatever process it was."""
        (tmp_path / folder).mkdir()
        words = tiny(folder.rstrip("1234"), *more, f"parallel.tensor={tensor}", f"stop_at={stop}")
        with Ranks(size, words, TEST_READS=tmp_path / folder) as ranks:
            assert {code for code, _ in ranks.wait().values()} == {0}
        notes = [lines(tmp_path / folder / f"{rank}.txt") for rank in range(size)]
        assert all(notes[rank] == notes[rank - rank % tensor] for rank in range(size))  # peers read alike
        each = 12 * tensor // size
        return [
            sorted(sample for own in notes[::tensor] for sample in own[first : first + each])
            for first in range(0, len(notes[0]), each)
        ]

    whole = reads("whole1", 1, 1, 12)
    pieces = [*reads("pieces1", 4, 1, 3), *reads("pieces2", 2, 2, 6), *reads("pieces3", 4, 2, 9)]
    pieces += reads("pieces4", 3, 1, 12)
    assert len(whole) == 12 and pieces == whole
    assert len({sample for step in whole for sample in step}) > 100
    losses = [figures(tmp_path / out, "step", "loss", "grad_norm") for out in ("whole", "pieces")]
    for alone, together in zip(*losses, strict=True):
        assert together == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize(
    "words, answer",
    {
        "parallel.tensor=3": "model.attention.heads=4 must be a multiple of parallel.tensor=3",
        "parallel.pipeline=2": "engine 'native' does not support parallel.pipeline=2",
        "engine.name=pipelining": "it supports 2 or more; engines that do: native, ",
        "engine.name=pipelining parallel.pipeline=8": "8 stages, but model.layers=4",
        "engine.name=fsdp2 engine.zero_stage=1": "it supports stages 2, 3",
        "engine.name=fairscale engine.recompute=full parallel.tensor=2": "does not support engine.recompute=full with parallel.tensor",
        "engine.zero_stage=2": "engine 'native' does not support engine.zero_stage=2; it supports stages 0, 1",
        "engine.defer_reduction=true": "engine 'native' does not support engine.defer_reduction=true; engines that do: fsdp2",
        "engine.name=pipelining parallel.pipeline=2 parallel.schedule=interleaved": "needs parallel.chunks",
        "engine.name=pipelining parallel.pipeline=2 batch.global_size=1": "it needs at least 2",
        "engine.name=pipelining parallel.pipeline=2 parallel.schedule=interleaved parallel.chunks=2 batch.global_size=6 "
        "batch.rampup=[4,1,12]": "cannot run 5 micro-batches a step",
        "model.attention.kv_heads=2 parallel.tensor=4": "model.attention.kv_heads=2 must be a multiple of parallel.tensor=4",
        "parallel.tensor=2": "1 process cannot be divided by parallel.tensor=2 x parallel.pipeline=1 = 2; start 2 or a "
        "multiple of it, such as hpclm submit --gpus 2",
    }.items(),
)
def test_a_layout_that_cannot_work_is_refused_before_the_queue(tiny, words, answer):
    done = hpclm("submit", "--cluster=local", "--gpus=1", *tiny("run", *MORE, *words.split()), check=64)
    assert answer in done.stderr, done.stderr


MINE = """
import torch
from torch import nn
from hpclm.config.supports import Supports
from hpclm.engine.native import NativeEngine
from hpclm.model.gpt import Block
from hpclm.parallel.collectives import copy_to_tp

class Gated(Block):
    def __init__(self, config, recompute_core, generator, tp):
        super().__init__(config, recompute_core, generator, tp)
        self.tp, self.gate = tp, nn.Parameter(torch.full((config.hidden,), 0.5))

    def forward(self, x, layout):
        return x + copy_to_tp(self.gate, self.tp) * (super().forward(x, layout) - x)

class Own(NativeEngine):
    supports = Supports("", options=("compile",))
"""


def test_a_block_and_an_engine_of_ones_own_are_divided_like_ours(tiny, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    own = [*MORE, "model.block=mine:Gated", "engine.name=mine:Own"]
    hpclm("train", *tiny("whole", *own), check=0, cwd=tmp_path)
    with Ranks(2, tiny("tensor", *own, "parallel.tensor=2"), PYTHONPATH=tmp_path) as ranks:
        assert {code for code, _ in ranks.wait().values()} == {0}
    whole, tensor = (figures(tmp_path / out, "loss", "grad_norm") for out in ("whole", "tensor"))
    for alone, divided in zip(whole, tensor, strict=True):
        assert divided == pytest.approx(alone, abs=1e-5)
    done = hpclm("train", *tiny("refused", *own, "engine.bucket_mb=3"), check=64, cwd=tmp_path)
    assert "engine 'mine:Own' does not support engine.bucket_mb=3.0" in done.stderr
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(
    "words",
    [["parallel.pipeline=2"], ["engine.zero_stage=1"], ["parallel.context=2"], ["engine.offload=optimizer"]],
    ids=lambda words: words[0],
)
def test_an_engine_of_ones_own_that_declares_nothing_is_not_asked_for_more_than_replicas_and_tensor_ranks(words):
    run = config.from_cli(["debug", "engine.name=tests.engine.sharded:Measured", *words], None).for_engine(2)
    with pytest.raises(ConfigError) as refused:
        check_supports(run, Measured)
    assert words[0] in str(refused.value) and "declares further features in `supports`" in str(refused.value)

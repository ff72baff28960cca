"""batch.micro_size=auto, and what is said when the memory is not enough."""

import os
import re
from dataclasses import replace

import pytest
import torch.distributed as dist

from hpclm import config
from hpclm.base.errors import ConfigError, DeviceMemoryError
from hpclm.config import compose
from hpclm.distributed.bootstrap import World
from hpclm.distributed.context import DistributedContext, single
from hpclm.inference import run_settings
from hpclm.node.gpus import KINDS
from hpclm.planning import fit, forecast, suggest
from tests import ranks
from tests.events import began, note
from tests.forks import hpclm
from tests.runs import ROOT, losses

H200, H100 = KINDS["H200"], KINDS["H100"]
LARGE = ["model={vocab_size: 50304, layers: 24, hidden: 2048, context: 2048, attention: {heads: 16}}", "engine.precision=bf16",
         "batch={global_size: 128, micro_size: 16}", "job.gpus=8"]  # fmt: skip


def preset(name, *options):
    return config.load(f"configs/{name}.yaml", ["data.source=synthetic", *options])


@pytest.mark.parametrize(
    "name, options, kind, size",
    [
        ("gpt-1b3", [], H200, 16),
        ("gpt-1b3", [], H100, 8),
        ("llama-7b", ["job.gpus=8"], H200, 4),
        ("llama-7b", ["job.gpus=8"], H100, 2),
        ("gpt-1b3", ["batch.micro_size=2"], H200, 2),
        ("gpt-1b3", ["batch.global_size=12"], H200, 4),
    ],
    ids=str,
)
def test_auto_is_the_fastest_size_that_fits_and_divides(name, options, kind, size):
    chosen = suggest.with_micro_size(preset(name, *options), kind)
    assert chosen.batch.micro_size == size and forecast.predict(chosen, kind).room == "fits"


def test_a_layout_that_cannot_fit_is_refused_with_both_numbers():
    with pytest.raises(
        ConfigError, match=r"micro_size=1 this layout needs \d+ GiB of each of 1 x 1 GPUs, which have 79"
    ):
        suggest.with_micro_size(preset("llama-7b"), H100)


def test_auto_can_be_written_to_a_file_and_read_back(tmp_path):
    run = preset("gpt-1b3")
    compose.dump(run, tmp_path / "config.yaml")
    assert config.load(tmp_path / "config.yaml") == run and run.batch.micro_size == 0
    assert "batch.micro_size = 'auto'" in repr(run)


def test_a_run_keeps_the_number_it_started_with(tmp_path):
    run, context = preset("gpt-1b3", f"out={tmp_path}"), single()
    first = fit.with_micro_size_for(H200, run, context)
    assert first.batch.micro_size == 16
    compose.dump(first, tmp_path / "config.yaml")
    note(tmp_path, "began", from_step=0, micro_size=16, context=run.model.context)
    assert fit.with_micro_size_for(H100, run, context).batch.micro_size == 16
    longer = replace(run, model=replace(run.model, context=16384))  # as in a later phase
    assert fit.with_micro_size_for(H100, longer, context).batch.micro_size == 1
    other = replace(run, batch=replace(run.batch, global_size=24))  # 16 does not divide it
    assert fit.with_micro_size_for(H100, other, context).batch.micro_size == 8


def agreed(options, kinds):
    """What a rank of those kinds of GPU chooses, on a machine of their number."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = single()
    infos = tuple(replace(alone.ranks[0], rank=number, size=size) for number in range(size))
    context = DistributedContext(World("test", rank, size, rank, size), infos, alone.watchdog)
    return fit.with_micro_size_for(kinds[rank], preset("gpt-1b3", *options), context).batch.micro_size


@pytest.mark.parametrize(
    "kinds, options, size",
    [
        ((H200, H200), [], 16),
        ((H200, H100), [], 8),  # the smallest decides, on whichever rank it is
        ((H100, H200), [], 8),
        *(
            pytest.param((None, None), [f"model.context={context}"], size, marks=pytest.mark.whole)
            for context, size in ((16, 256), (2048, 2), (8192, 1))
        ),
        ((None, None), ["model.context=16", "batch.global_size=12"], 2),
    ],
    ids=str,
)
def test_all_ranks_choose_the_same_number(kinds, options, size, tmp_path):
    assert ranks.run(2, agreed, [f"out={tmp_path}", *options], kinds) == [size, size]


def test_a_number_that_fits_no_gpu_is_refused_on_every_rank(tmp_path):
    with pytest.raises(ConfigError, match="micro_size=1 this layout needs"):
        ranks.run(2, agreed, [f"out={tmp_path}", "model.hidden=32768"], (H200, H100))


TOY = ["data.source=synthetic", "batch.global_size=12", "model.layers=1", "model.hidden=16", "model.context=16"]
TOY += ["model.vocab_size=64", "model.attention.heads=2", "engine.device=cpu"]


def test_auto_trains_on_several_ranks_and_keeps_its_number_when_it_is_submitted_again(tmp_path):
    """config.yaml keeps auto, so that a resume on other processes may choose anew."""
    out = tmp_path / "run"

    def sizes():
        return config.load(out / "config.yaml").batch.micro_size, [attempt["micro_size"] for attempt in began(out)]

    submit = ["submit", "--cluster", "local", *TOY, "batch.micro_size=auto", f"out={out}"]
    hpclm(*submit, "--gpus", 2, "budget.steps=1", check=0)
    assert sizes() == (0, [2])
    again = hpclm(*submit, "--gpus", 1, "budget.steps=2", check=0)
    assert "batch.micro_size=auto: 2, as before" in again.stderr  # alone it would be 4
    assert sizes() == (0, [2, 2])
    assert "step 2" in hpclm("evaluate", out, check=0).stdout
    assert run_settings.inference_settings(out, []).batch.micro_size == 2
    hpclm(
        "resume", "--runs", tmp_path, "run", "--gpus", 4, "budget.steps=3", check=0
    )  # 12 samples are no multiple of 4 x 2
    assert sizes() == (0, [2, 2, 1])


GPU = ("OfTheGPU", "CUDA out of memory. Tried to allocate 2.00 GiB.")
MACHINE = ("OfTheMachine", "DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize(
    "engine, first, processes",
    [(*MACHINE, 1), (*GPU, 2), *(pytest.param(*row, marks=pytest.mark.whole) for row in [(*GPU, 1), (*MACHINE, 2)])],
)
def test_the_error_says_what_held_the_memory_and_what_would_need_less(engine, first, processes, tiny, tmp_path):
    words = tiny("run", f"engine.name=tests.planning.hungry:{engine}", "batch.micro_size=2")
    start = ["train"] if processes == 1 else ["submit", "--cluster", "local", "--gpus", processes]
    stderr = hpclm(*start, *words, check=93, env=os.environ | {"PYTHONPATH": str(ROOT)}).stderr
    assert first in stderr and "see PyTorch's notes" not in stderr and "Warning" not in stderr
    assert 1 in losses(tmp_path / "run")
    assert re.search(r"the planner expected [\d.]+ [GM]iB: weights .*, activations ", stderr)
    assert first in (tmp_path / "run" / "log.txt").read_text()


def test_the_settings_that_are_named_change_one_thing_and_need_less():
    run, kind = config.load(None, LARGE), KINDS["A100"]
    changes = fit.smaller(run, kind)
    assert list(changes) == ["batch.micro_size=8", "engine.recompute=full", "engine.name=fsdp2 engine.zero_stage=3"]
    for settings, expected in changes.items():
        other = config.load(None, [*LARGE, *settings.split()])
        assert fit.needed(other, kind) == expected < fit.needed(run, kind)


def test_weights_that_are_sharded_within_nodes_can_be_sharded_over_all():
    run = config.load("configs/llama-7b.yaml", ["job.nodes=8", "job.gpus=8", "batch.micro_size=2"])
    assert "parallel.shard=null" in fit.smaller(run, KINDS["H100"])


def test_other_errors_pass_through(tiny):
    run = config.load(None, tiny())
    with pytest.raises(RuntimeError, match="of another kind"), fit.memory_errors_explained(run, None):
        raise RuntimeError("of another kind")


@pytest.mark.parametrize(
    "context, batch, size",
    [(1024, 64, 4), (1000, 64, 4), (2048, 64, 2), (4096, 64, 1), (8192, 64, 1), (16, 12, 4), (16, 7, 1)],
)
def test_on_a_cpu_auto_is_the_largest_power_of_two_that_divides_the_batch_with_at_most_4096_tokens(
    context, batch, size, tmp_path
):
    words = [f"out={tmp_path}", "batch.micro_size=auto", f"batch.global_size={batch}", f"model.context={context}"]
    assert fit.with_micro_size_for(None, config.load(None, words), single()).batch.micro_size == size


def test_memory_that_a_cpu_could_not_get_is_an_error_with_what_was_expected_and_what_needs_less():
    run = config.load(None, ["engine.device=cpu", "batch.micro_size=4", "engine.precision=fp32"])
    error = RuntimeError(f"[enforce fail] {fit.CPU_MESSAGE}: you tried to allocate 9 bytes\nmore")
    error.add_note("block1: experts got many rows")
    with pytest.raises(DeviceMemoryError) as caught, fit.memory_errors_explained(run, single()):
        raise error
    first, note, expected, less, last = str(caught.value).splitlines()
    assert (
        note == "block1: experts got many rows"
        and first.endswith("you tried to allocate 9 bytes")
        and caught.value.exit_code == 93
    )
    sizes = re.findall(r"(\w+) ([\d.]+) (GiB|MiB)", expected.partition(": ")[2])
    assert [name for name, *_ in sizes] == ["weights", "gradients", "optimizer", "activations", "buffers", "logits"]
    assert "batch.micro_size=2 (" in less and "engine.recompute=full (" in less and "--suggest" in last
    assert [fit._in_units(size << 20) for size in (10, 11, 1536)] == ["10.0 MiB", "0.01 GiB", "1.50 GiB"]

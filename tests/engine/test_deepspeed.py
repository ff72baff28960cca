"""What DeepSpeed's engines do beyond learning what one process learns (tests/test_parity.py)."""

from ctypes.util import find_library
from pathlib import Path

import pytest
import torch

from hpclm.base.errors import ConfigError
from tests import parity, ranks
from tests.engine import sharded
from tests.parity import TINY, alone, trained

DISKS = find_library("aio") and Path("/usr/include/libaio.h").exists()
ZERO = ["engine.name=deepspeed", "engine.precision=fp32", "batch.micro_size=2"]
PIPELINE = [*ZERO, "parallel.pipeline=2", "model.layers=3"]
EXTRA = "engine.extra"
NATIVE = ["engine.precision=fp32", "batch.micro_size=2"]


def cases(given, *often):
    """A table, name -> settings, of which some cases run always and the others with -m whole."""
    marked = [pytest.param(v, id=k, marks=[pytest.mark.whole] * (k not in often)) for k, v in given.items()]
    return pytest.mark.parametrize("words", marked)


def close(found, wanted):
    """Whether a run of some steps was the beginning of another."""
    steps = len(found["losses"])
    assert found["losses"] == pytest.approx(wanted["losses"][:steps], abs=1e-5)
    assert found["norms"] == pytest.approx(wanted["norms"][:steps], rel=1e-5)


STAGES = {f"stage{stage}": [*ZERO, f"engine.zero_stage={stage}"] for stage in (0, 1, 2, 3)}
BF16 = {
    "bf16": [*ZERO, "engine.precision=bf16"],
    "bf16-fp32": [*ZERO, "engine.precision=bf16", "engine.gradients=fp32"],
}


@cases({name: words for name, words in STAGES.items() if name != "stage0"}, "stage1", "stage3")
def test_what_is_saved_is_what_deepspeed_says_it_holds(words):
    for found in ranks.run(3, compared, [*words, "batch.global_size=12"]):
        assert found and all(found.values()), found


def compared(words):
    """Whether the values that this process saves are those that DeepSpeed's documented functions give, of each tensor."""
    from deepspeed import utils

    run, engine, batches, _ = sharded.made(words)
    sharded.steps(run, engine, batches, 0, 2)
    found = {}
    for weight in map(engine.state.local_part, engine.weights):
        for moment in (None, "exp_avg", "exp_avg_sq"):
            if moment:
                whole = utils.safe_get_full_optimizer_state(weight.parameter, moment)
            else:
                whole = utils.safe_get_full_fp32_param(weight.parameter)
            held = engine.state.values(weight, moment)[: weight.count]
            found[f"{moment} {weight.name}"] = torch.equal(held, whole.view(-1)[weight.begin :][: weight.count])
    return found


def test_no_process_holds_the_whole_model_at_stage_3():
    small = "engine.extra.zero_optimization.stage3_param_persistence_threshold=0"
    words = [*ZERO, "engine.zero_stage=3", small, "model.hidden=128", "model.layers=4"]
    for held, largest, whole in ranks.run(2, held_numbers, words):
        assert held < 0.51 * whole
        assert largest < 0.51 * whole  # while the layers were built, too


def test_no_process_holds_more_than_one_layer_whole_while_the_layers_are_built():
    words = [*ZERO, "engine.zero_stage=3", "model.layers=1", "model.hidden=256", "model.vocab_size=60000"]
    table = 60000 * 256 * 4  # bytes
    for held, peak in ranks.run(4, grown, [*words, "model.tied=false"]):
        assert 0.45 * table < held < 0.55 * table  # a fourth of two of them
        assert peak < 1.6 * table


@pytest.mark.parametrize(
    "words, says",
    [
        (["engine.zero_stage=1", f"{EXTRA}.zero_optimization.sub_group_size=-1"], "sub_group_size=-1: .*greater than"),
        (["engine.zero_stage=3", f"{EXTRA}.zero_optimization.sub_group_size=-1"], "sub_group_size=-1: .*greater than"),
        ([f"{EXTRA}.data_types.keep_in_fp32_modules=[1]"], "DeepSpeed says: data_types.keep_in_fp32_modules must be"),
    ],
)
def test_a_value_that_deepspeed_refuses_is_told_by_its_key(words, says):
    with pytest.raises(ConfigError, match=says) as error:
        trained(1, *ZERO, *words, steps=1)
    assert error.value.exit_code == 64 and str(error.value).startswith(EXTRA)


def grown(words):
    """By how many bytes this process's memory has grown when the layers are built, and by how many at most until then."""
    from hpclm.engine.deepspeed import library

    initialize, found = library.initialize, []
    before = sharded.fresh(words)

    def looked(**arguments):
        found.extend(sharded.status(name) - before for name in ("VmRSS", "VmHWM"))
        return initialize(**arguments)

    library.initialize = looked
    sharded.made(words)
    return found


def held_numbers(words):
    """Numbers of the weights that this process holds once the engine is built, the most it held meanwhile, and all."""
    import gc

    from hpclm import config
    from hpclm import engine as engines
    from hpclm.model import count
    from hpclm.model.stack import Stack
    from hpclm.parallel.mesh import Compute, Mesh

    run = config.load(None, [*TINY, *words])
    mesh = Mesh.build(torch.distributed.get_rank(), 2, run.parallel)

    def numbers():
        found = {}
        for parameter in (p for p in gc.get_objects() if isinstance(p, torch.nn.Parameter)):
            for tensor in (parameter.data, getattr(parameter, "ds_tensor", None)):
                if tensor is not None:
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return sum(found.values())

    seen, made = [0], Stack.__init__

    def watched(self, *args):
        *rest, place, execution = args
        made(self, *rest, lambda name, layer: (place(name, layer), seen.append(numbers()))[0], execution)

    Stack.__init__ = watched
    engine = engines.build(run.for_engine(mesh.world.size), Compute(torch.device("cpu"), torch.float32, mesh))
    held = {p.ds_tensor.untyped_storage().data_ptr(): p.ds_tensor for p in engine.model.parameters()}
    held = sum(t.untyped_storage().nbytes() // 4 for t in held.values()) + sum(
        p.numel() for p in engine.model.parameters()
    )
    return held, max(seen), count.parameters(run.model)


RAMP = ["batch.rampup=[4, 4, 40]", "data.eod_mask_loss=true", "data.reset_attention_mask=true"]
OWNER = f"{EXTRA}.zero_optimization.use_multi_rank_bucket_allreduce=false"
OFFLOAD = "engine.offload=optimizer"
# processes, settings, settings of one process too
LEARNS = {
    "owner1": (2, ["engine.zero_stage=1", OWNER], []),
    "owner2": (2, ["engine.zero_stage=2", OWNER], []),
    "ramp-pipeline": (2, ["parallel.pipeline=2"], RAMP),
    "ramp-stage2": (2, ["engine.zero_stage=2"], RAMP),
    "optimizer1": (2, ["engine.zero_stage=1", OFFLOAD], []),
    "optimizer2": (
        2,
        ["engine.zero_stage=2", OFFLOAD, "engine.bucket_mb=0.01", "engine.extra.zero_optimization.overlap_comm=false"],
        [],
    ),
    "parameters3": (2, ["engine.zero_stage=3", "engine.offload=parameters"], []),
    "cpu_adam": (2, ["engine.zero_stage=2", OFFLOAD, "optim.name=cpu_adam"], []),  # compiles DeepSpeed's Adam, once
    "hpz": (4, ["engine.zero_stage=3", f"{EXTRA}.zero_optimization.zero_hpz_partition_size=2"], []),
}


@cases(LEARNS, "owner1", "ramp-pipeline", "optimizer1", "parameters3", "hpz")
def test_in_every_way_it_learns_what_one_process_learns(words):
    size, own, shared = words
    close(trained(size, *ZERO, *own, *shared, steps=20 if shared else 6), alone(*NATIVE, *shared))


def test_a_compiled_block_whose_weights_are_sharded_is_one_graph():
    for losses, graphs, breaks in ranks.run(2, compiled, [*ZERO, "engine.zero_stage=3", "engine.compile=true"]):
        assert losses == pytest.approx(alone(*NATIVE)["losses"][:4], abs=1e-5) and graphs and not breaks


def compiled(words):
    """Losses, graphs and graph breaks of some steps, without kernels, which take long to compile."""
    compile = torch.compile
    torch.compile = lambda function, **given: compile(function, **{**given, "backend": "aot_eager"})
    losses, counters = parity.train(words, 4)["losses"], torch._dynamo.utils.counters
    return losses, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.whole  # compiles DeepSpeed's access to disks, once
@pytest.mark.slow
@pytest.mark.skipif(not DISKS, reason="DeepSpeed's access to disks needs libaio and its headers")
@pytest.mark.parametrize("what", ["optimizer", "parameters"])
def test_what_lies_on_a_disk_learns_the_same_and_is_saved(what, tmp_path):
    shape = ["model.hidden=512", "model.layers=1", "model.init_std=0.02"]  # smaller parts never go to the disk
    wanted, saved = (trained(1, *NATIVE, *shape, steps=steps) for steps in (4, 2))
    words = [*ZERO, *shape, "engine.zero_stage=3", f"engine.offload={what}", f"engine.offload_folder={tmp_path}"]
    close(trained(2, *words, steps=4), wanted)
    found = trained(2, *words, steps=4, first=2, saved=saved)
    assert found["losses"] == pytest.approx(wanted["losses"][2:], abs=1e-5)
    assert any(path.stat().st_size for path in tmp_path.rglob("*.swp"))


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.whole), 3])
def test_bf16_gradients_may_be_summed_in_fp32(stage):
    wanted = alone(*NATIVE)
    words = [*ZERO, "engine.precision=bf16", f"engine.zero_stage={stage}"]
    exact, rough = (trained(2, *words, f"engine.gradients={type_}", steps=4) for type_ in ("fp32", "auto"))
    assert exact["norms"] != rough["norms"]
    assert exact["losses"] == pytest.approx(wanted["losses"][:4], abs=0.03)


@pytest.mark.skipif(bool(DISKS), reason="there is libaio")
def test_a_disk_that_cannot_be_reached_is_told_with_what_is_missing(tmp_path):
    words = [*ZERO, "engine.zero_stage=3", "engine.offload=optimizer", f"engine.offload_folder={tmp_path}"]
    with pytest.raises(ConfigError, match="apt-get install libaio-dev"):
        trained(1, *words, steps=1)

import pytest
import torch

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.engine.stages import owners, parameters, stages
from hpclm.model import count, gpt
from tests import ranks, weights
from tests.engine import sharded
from tests.parity import TINY
from tests.states import Kept

CPU = torch.device("cpu")


def divided(*words):
    run = config.load(None, [*TINY, "engine.name=deepspeed", *words])
    specs = gpt.layers(run.model, run.engine, torch.float32, run.seed)
    return run, specs, stages(run.for_engine(run.parallel.replica), specs)


def blocks(parts):
    return [sum(spec.name.startswith("block") for spec in part) for part in parts]


@pytest.mark.parametrize(
    "partition, vocab, wanted",
    [("blocks", 60, [2, 2, 1]), ("blocks", 6000, [2, 2, 1]), ("parameters", 6000, [1, 3, 1])],
)
def test_stages_share_blocks_or_parameters(partition, vocab, wanted):
    words = ["model.layers=5", "parallel.pipeline=3", f"parallel.partition={partition}", f"model.vocab_size={vocab}"]
    _, specs, parts = divided(*words)
    assert sorted(blocks(parts)) == sorted(wanted) and [spec for part in parts for spec in part] == specs
    if partition == "parameters":
        assert blocks(parts) == wanted


def test_counting_parameters_draws_none_and_counts_all():
    run, specs, _ = divided("model.layers=2", "parallel.pipeline=2", "model.tied=false")
    assert sum(parameters(specs)) == count.parameters(run.model)


def test_a_tied_table_is_on_two_stages_and_each_answers_for_its_layers():
    _, _, parts = divided("model.layers=4", "parallel.pipeline=4")
    found = owners(parts)
    assert found["tokens"] == [0, 3] and found["block1"] == [1] and found["norm"] == [3]


def refused(words):
    """What each rank says of a checkpoint that lacks a weight and has one too many."""
    _, engine, _, _ = sharded.made(words)
    config, own = engine.config.model, {}
    own = {f"model.{name}": torch.zeros(p.shape) for name, p in weights.build(config).weights()}
    own["model.stray.weight"] = own.pop("model.block0.norm1.weight")
    with pytest.raises(ConfigError) as caught:
        engine.load(Kept(own), engine.scalars())
    return caught.value.problems


@pytest.mark.parametrize("engine", ["deepspeed", "pipelining"])
def test_a_stage_answers_for_its_layers_and_for_weights_of_none(engine):
    words = [f"engine.name={engine}", "parallel.pipeline=2", "model.layers=2", "engine.precision=fp32"]
    first, second = ranks.run(2, refused, words)
    assert [line.split(" ")[5].rstrip(",") for line in first] == ["block0.norm1.weight", "stray.weight"]
    assert [line.split(" ")[5].rstrip(",") for line in second] == ["stray.weight"]

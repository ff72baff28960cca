from dataclasses import replace

import pytest
import torch

from hpclm import config
from hpclm.config import EngineConfig, ModelConfig, ParallelConfig
from hpclm.engine.stages import stages as divided
from hpclm.model import count, gpt
from hpclm.node.gpus import KINDS
from hpclm.parallel.mesh import Axis
from hpclm.planning import engines, memory, suggest, time
from hpclm.planning.layout import Layout, micro_batches_held, parameters, stages
from hpclm.planning.layout import experts as of_experts

MODEL = ModelConfig(layers=12)


def test_stages_and_tensor_ranks_hold_the_model_once_and_a_tied_table_twice():
    table = MODEL.padded_vocab * MODEL.hidden
    for tied, extra in ((True, table), (False, 0)):
        model = replace(MODEL, tied=tied)
        layout = Layout(pipeline=4, tensor=2)
        every = stages(model, layout)
        whole = sum(weight.size for _, weight in count.network(model) if weight.placement.dim is None)
        held = 2 * sum(parameters(model, layout, stage) for stage in every)
        assert held == count.parameters(model) + extra + whole


@pytest.mark.parametrize(
    "layout, bubble",
    (
        (Layout(pipeline=1, accumulation=8), 0.0),
        (Layout(pipeline=4, accumulation=8), 3 / 11),
        (Layout(pipeline=4, accumulation=8, schedule="interleaved", chunks=2), 3 / 19),
        (Layout(pipeline=4, accumulation=8, schedule="gpipe"), 3 / 11),
        (Layout(pipeline=4, accumulation=8, schedule="zero_bubble"), 1 / 9),
    ),
)
def test_the_bubble_is_the_papers(layout, bubble):
    assert time.bubble(layout) == pytest.approx(bubble)


def test_a_schedule_holds_the_micro_batches_that_the_papers_say():
    layout = Layout(pipeline=4, accumulation=16)
    first, *_, last = stages(MODEL, layout)
    assert (micro_batches_held(layout, first), micro_batches_held(layout, last)) == (4, 1)
    assert micro_batches_held(replace(layout, accumulation=2), first) == 2
    assert micro_batches_held(replace(layout, schedule="gpipe"), last) == 16
    interleaved = replace(layout, schedule="interleaved", chunks=3)
    assert micro_batches_held(interleaved, first) == pytest.approx(4 * (1 + 3 / (4 * 3)))


def test_activations_of_a_block_are_korthikantis_without_the_scores():
    model = ModelConfig.of({"hidden": 1024, "attention.heads": 16, "dropout": 0.1})
    costs, sums = (
        engines.costs(EngineConfig(), 2, ParallelConfig()),
        4 * 16 * 1024,
    )  # flash attention's, 4 bytes a head and token
    assert memory.block_activations(model, Layout(), costs, model.blocks[0]) - sums == 34 * 1024 * 1024
    assert memory.block_activations(model, Layout(tensor=4), costs, model.blocks[0]) == (34 * 1024 * 1024 + sums) / 4


def test_blocks_that_are_recomputed_together_keep_one_input():
    model, costs = replace(MODEL, layers=5), engines.costs(EngineConfig(), 2, ParallelConfig())
    alone, pairs = (Layout(recompute="full", recompute_every=every) for every in (1, 2))
    held = [memory.activations(model, layout, costs, stages(model, layout)[0]) for layout in (alone, pairs)]
    assert held[0] - held[1] == (5 - 3) * model.context * model.hidden * 2


@pytest.mark.parametrize("stage, psi", ((0, 2), (1, 3), (2, 3), (3, 3)))
def test_replicas_send_two_or_three_elements_a_parameter(stage, psi):
    name = "deepspeed" if stage else "native"
    model = replace(MODEL, vocab_size=128, context=16)  # the embedding is gathered only once in stage 3
    chosen = engines.costs(EngineConfig(name=name, zero_stage=stage), 2, ParallelConfig())
    sent = time.volumes(model, Layout(data=8), chosen)[0].data
    assert sent == pytest.approx(psi * count.parameters(model) * 7 / 8 * (2 if stage else 4), rel=1e-3)


@pytest.mark.parametrize("name", ["fsdp2", "fairscale"])
@pytest.mark.parametrize("stage, psi", [(2, 2), (3, 3)])
def test_sharded_weights_are_gathered_once_or_for_each_pass(name, stage, psi):
    model = replace(MODEL, vocab_size=128, context=16)  # the embedding is gathered only once in stage 3
    engine = EngineConfig(name=name, zero_stage=stage, gradients="compute")
    sent = time.volumes(model, Layout(data=8), engines.costs(engine, 2, ParallelConfig()))[0].data
    assert sent == pytest.approx(psi * count.parameters(model) * 7 / 8 * 2, rel=1e-3)


@pytest.mark.parametrize("stage, expected", ((0, 16), (1, 2 + 2 + 12 / 64), (2, 2 + 16 / 64), (3, 18 / 64)))
def test_zero_keeps_what_its_paper_says(stage, expected):
    chosen = engines.costs(EngineConfig(name="deepspeed", zero_stage=stage), 2, ParallelConfig())
    found = memory.of_stages(MODEL, Layout(data=64), chosen)[0]
    assert found.weights + found.gradients + found.optimizer == pytest.approx(expected * count.parameters(MODEL))


def test_deepspeed_keeps_weights_gathered_that_it_needs_again_soon():
    chosen = engines.costs(EngineConfig(name="deepspeed", zero_stage=3), 2, ParallelConfig())
    large, small = (memory.of_stages(replace(MODEL, layers=n), Layout(data=64), chosen)[0].buffers for n in (100, 2))
    assert large == pytest.approx(2 * 5e8 + 2 * 5e8, rel=0.01)  # a bucket of gradients, and weights
    assert small == pytest.approx(2 * 5e8 + 2 * count.parameters(replace(MODEL, layers=2)), rel=0.01)


@pytest.mark.parametrize("element, expected", ((2, 4 + 2 + 12 / 64), (4, 4 + 4 + 8 / 64)))
def test_native_can_divide_its_optimizer_over_the_replicas(element, expected):
    chosen = engines.costs(EngineConfig(zero_stage=1), element, ParallelConfig())
    found = memory.of_stages(MODEL, Layout(data=64), chosen)[0]
    copies = chosen.gathered.on(64) * count.parameters(MODEL)
    assert found.weights + found.gradients + found.optimizer + copies == pytest.approx(
        expected * count.parameters(MODEL)
    )
    sent = time.volumes(MODEL, Layout(data=8), chosen)[0].data
    assert sent == pytest.approx((4 + element) * count.parameters(MODEL) * 7 / 8)


def test_a_group_inside_a_node_uses_its_links_and_one_across_nodes_all_its_adapters():
    kind, model = KINDS["A100"], replace(MODEL, hidden=1536)
    plain = replace(engines.costs(EngineConfig(), 2, ParallelConfig()), overlap=False)
    sent = time.volumes(model, Layout(data=8), plain)[0].data
    inside = time.step(model, Layout(data=8, node=8), plain, kind).data
    assert inside == pytest.approx(sent / (kind.link * time.ACHIEVED))
    outside = time.step(model, Layout(data=8, node=2), plain, kind).data
    assert outside == pytest.approx(sent / (2 * kind.network * time.ACHIEVED))


@pytest.mark.parametrize("by", ["parameters", "blocks"])
@pytest.mark.parametrize("pipeline, layers", [(2, 12), (4, 12), (3, 8), (4, 7), (8, 24), (5, 5)])
def test_the_planner_divides_a_model_as_it_runs(by, pipeline, layers):
    words = ["engine.name=pipelining", f"parallel.pipeline={pipeline}", f"parallel.partition={by}"]
    run = config.load(None, [*words, f"model.layers={layers}", "batch.global_size=64"])
    specs = gpt.layers(run.model, run.engine, torch.float32, 1)
    running = [sum(spec.layer is not None for spec in stage) for stage in divided(run.for_engine(pipeline), specs)]
    planned = [len(stage.blocks) for stage in stages(run.model, Layout(pipeline=pipeline, partition=by))]
    assert planned == running and sum(planned) == layers


EXPERTS = ["model.experts.count=8", "model.experts.pattern=[dense,experts,experts]", "model.experts.ffn=1536"]


@pytest.mark.parametrize("by, expert", [("parameters", 1), ("parameters", 4), ("blocks", 2)])
def test_the_planner_divides_a_model_with_experts_as_it_runs(by, expert):
    words = ["engine.name=pipelining", "parallel.pipeline=4", f"parallel.partition={by}", f"parallel.expert={expert}"]
    run = config.load(None, [*words, *EXPERTS, "model.layers=11", "batch.global_size=64"])
    axes = gpt.ExpertAxes(Axis(expert))
    specs = gpt.layers(run.model, run.engine, torch.float32, 1, axes=axes)
    settings = run.for_engine(4 * expert)
    running = [[spec.layer for spec in stage if spec.layer] for stage in divided(settings, specs)]
    planned = stages(run.model, Layout(pipeline=4, partition=by, expert=expert))
    assert [list(stage.blocks) for stage in planned] == running


def test_ranks_hold_experts_once_for_each_group_that_shares_them_out():
    model = config.load(None, [*EXPERTS, "model.layers=12"]).model
    for split in (True, False):
        layout = Layout(data=8, pipeline=2, tensor=2, expert=4, split_experts=split)
        experts = sum(of_experts(model, layout, stage) for stage in stages(model, layout))
        every = [weight for _, weight in count.network(model) if weight.stack]
        divided = sum(weight.size for weight in every if split and weight.placement.dim is not None)
        assert experts == (divided / 2 + sum(weight.size for weight in every) - divided) / 4
        assert (layout.of_experts.ranks, layout.of_experts.sharing, layout.of_experts.copies) == (2, 2, 1)
    assert replace(layout, shard=4).of_experts.copies == 2


@pytest.mark.parametrize("expert", [2, 8, 16])
def test_rows_go_to_experts_of_another_node_at_the_pace_of_the_network(expert):
    kind, model = KINDS["H100"], config.load(None, [*EXPERTS, "model.experts.count=16"]).model
    layout = Layout(data=16, expert=expert)
    costs = engines.costs(EngineConfig(), 2, ParallelConfig())
    sent = time.volumes(model, layout, costs)[0].expert
    assert sent == 4 * 8 * 2 * model.context * model.hidden * 2 * (expert - 1) / expert
    step = time.step(model, layout, costs, kind)
    pace = kind.link if expert <= 8 else kind.network * 15 / 8
    assert step.expert == pytest.approx(sent / (pace * time.ACHIEVED))
    assert step.waits == 8 * time.WAIT


def test_what_is_suggested_for_experts_can_run():
    path, words = "configs/qwen3-30b-a3b.yaml", ["job.gpus=8", "parallel.expert=1", "engine.recompute=none"]
    suggested = suggest.ranked(config.load(path, words), KINDS["H100"])
    assert {one.run.parallel.expert for one in suggested} - {1}
    for one in suggested:
        config.load(path, [*words, *one.options]).plan(8)
    # with sizes that neither the experts nor the ranks share, only whole ones are left
    run = config.load(
        None, [*EXPERTS, "model.experts.count=9", "batch.global_size=64", "job.gpus=4", "engine.precision=bf16"]
    )
    assert {one.run.parallel.expert for one in suggest.ranked(run, KINDS["H100"])} == {1}


@pytest.mark.parametrize(
    "words",
    [["batch.rampup=[16,16,1000]"], ["batch.global_size=20"], ["batch.global_size=12", "model.layers=24"]],
    ids=str,
)
def test_what_is_suggested_can_run(words):
    run = config.load(None, ["batch.global_size=64", *words, "job.gpus=2", "engine.precision=bf16"])
    found = suggest.ranked(run, KINDS["A100"])
    assert len(found) > 5
    for one in found:
        config.load(None, ["batch.global_size=64", *words, "engine.precision=bf16", *one.options]).plan(2)

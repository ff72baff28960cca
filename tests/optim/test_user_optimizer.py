"""An optimizer of the user's own trains, is saved and resumed in every layout that it can train in, and the others are refused by name."""

import json
from math import prod

import pytest
import torch

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.config import OptimConfig
from hpclm.config.supports import SUPPORTS
from hpclm.engine.matrix_exchange import MatrixExchange
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.engine.state import UnsavableStateError
from hpclm.engine.user_optimizers import check_optimizer
from hpclm.optim.adamw import AdamW
from hpclm.optim.maker import UserOptimizerMaker
from hpclm.optim.user_optimizer import UserOptimizer, make
from hpclm.parallel.mesh import SINGLE_MESH
from hpclm.parallel.placement import Placement
from tests import ranks
from tests.engine.sharded import made, steps
from tests.optim import users
from tests.optim.users import WholeLamb
from tests.parity import TINY
from tests.states import state

WORDS = ["engine.precision=fp32", "batch.global_size=12", "batch.micro_size=1", "model.layers=3", "optim.eps=1e-8"]
WORDS += ["optim.groups=[{match: mlp, lr: 0.5}]"]
PIPELINE = ["engine.name=pipelining", "parallel.pipeline=2"]
LAYOUTS = [
    (2, ["parallel.tensor=2"]),
    (2, ["engine.zero_stage=1"]),
    (3, ["engine.name=fsdp2"]),
    (2, PIPELINE),
]
MORE = [
    (2, ["engine.name=fairscale"]),
    (4, [*PIPELINE, "parallel.tensor=2"]),
    (4, ["parallel.tensor=2", "engine.zero_stage=1"]),
    (4, ["engine.name=fsdp2", "parallel.shard=2", "engine.zero_stage=2"]),
]
DEEPSPEED = [(2, ["engine.name=deepspeed", f"engine.zero_stage={stage}"]) for stage in (1, 0, 2, 3)]
DEEPSPEED += [(2, [*words, "engine.offload=optimizer"]) for _, words in (DEEPSPEED[0], *DEEPSPEED[2:])]
DEEPSPEED += [(2, ["engine.name=deepspeed", "parallel.pipeline=2"])]


def named(name, **arguments):
    words = [f"optim.arguments.{key}={value}" for key, value in arguments.items()]
    return [f"optim.name={name if ':' in name else f'{users.__name__}:{name}'}", *words]


def goes_through(folder, words, layouts, within=1e-5):
    """Train alone, and in one layout after the other from checkpoint to checkpoint: the losses are the same."""
    layouts = [*layouts, (1, [])]
    alone = ranks.run(1, users.goes_on, folder / "alone", 2 * len(layouts), [*WORDS, *words])[0]
    moved = []
    for number, (size, layout) in enumerate(layouts, start=1):
        losses = ranks.run(size, users.goes_on, folder / "moved", 2 * number, [*WORDS, *words, *layout])
        assert all(other == losses[0] for other in losses)
        moved += losses[0]
    assert moved == pytest.approx(alone, abs=within) and moved[-1] < moved[0] - 0.02


def test_lion_trains_alike_in_every_layout_and_resumes_to_the_bit(tmp_path):
    goes_through(tmp_path, named("Lion", betas="[0.9, 0.98]"), LAYOUTS)


EPS = ("AdamW", "Adam", "RMSprop", "RAdam", "Adamax", "Adagrad", "Adadelta", "NAdam")
ELEMENTWISE = {
    # or they would make steps of the rounding errors in gradients that are 0, as those of key biases
    **{f"torch.optim:{name}": {"eps": 1e-5} for name in EPS},
    "torch.optim:SGD": {"momentum": 0.9, "dampening": 0.5},
    "torch.optim:Adagrad": {"eps": 1e-5, "initial_accumulator_value": 0.01},
    "torch.optim:Rprop": {},
    "torch.optim:ASGD": {},
    "Counting": {},
}


@pytest.mark.whole
@pytest.mark.parametrize("name, arguments", ELEMENTWISE.items(), ids=ELEMENTWISE)
def test_an_elementwise_optimizer_trains_alike_in_every_layout(name, arguments, tmp_path):
    goes_through(tmp_path, [*named(name, **arguments), *RATES.get(name, [])], [*LAYOUTS, *MORE])


RATES = {
    "torch.optim:Rprop": ["optim.lr=1e-3", "optim.min_lr=1e-3"],
    "torch.optim:Adadelta": ["optim.lr=1", "optim.min_lr=1"],
    "torch.optim:SGD": ["optim.lr=0.3", "optim.min_lr=0.1"],
    "torch.optim:ASGD": ["optim.lr=0.3", "optim.min_lr=0.1"],
}


@pytest.mark.whole
@pytest.mark.parametrize(
    "name", ["Lion", "torch.optim:Rprop", "torch.optim:NAdam", "torch.optim:SGD", "torch.optim:Adam"]
)
def test_an_elementwise_optimizer_trains_with_deepspeed(name, tmp_path):
    arguments = ELEMENTWISE.get(name, {})
    goes_through(tmp_path, [*named(name, **arguments), *RATES.get(name, [])], DEEPSPEED, 1e-4)


@pytest.mark.whole
def test_an_optimizer_that_needs_whole_weights_trains_wherever_they_are_gathered(tmp_path):
    goes_through(tmp_path, [*named("WholeLamb"), "optim.lr=1e-2"], [*LAYOUTS, MORE[1], MORE[2], MORE[3]])


def problems_of(name, words, processes=2, **arguments):
    """Why a layout is refused; None if it is not."""
    run = config.load(None, [*TINY, *WORDS, *named(name, **arguments), *words])
    try:
        check_optimizer(run.for_engine(processes), SUPPORTS[run.engine.name])
    except ConfigError as error:
        return str(error)


DIVIDED = ["parallel.tensor=2"], ["engine.zero_stage=1"], ["engine.name=fsdp2"], ["engine.name=fairscale"], PIPELINE
DIVIDED = [*DIVIDED, *(["engine.name=deepspeed", f"engine.zero_stage={stage}"] for stage in (1, 2, 3))]
WHOLE = [], ["engine.name=deepspeed", "engine.zero_stage=0"]


@pytest.mark.parametrize("name", ["Lamb", "torch.optim:Adafactor", "muon", "Noisy"])
def test_an_optimizer_that_declares_nothing_is_refused_where_layouts_divide_weights(name):
    for words in DIVIDED:
        refused = problems_of(name, [*words, "batch.micro_size=1"])
        assert words[-1] in refused and "set its attribute splits = True" in refused
    for words in WHOLE:
        assert problems_of(name, words) is None


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_optimizer_of_single_values_is_refused_nowhere(name):
    for words in (*DIVIDED, *WHOLE):
        assert problems_of(name, [*words, "batch.micro_size=1"], **ELEMENTWISE[name]) is None


def test_an_optimizer_of_whole_matrices_is_refused_where_engines_do_not_gather_them():
    for words in (*DIVIDED, *WHOLE):
        refused = problems_of("WholeLamb", [*words, "batch.micro_size=1"])
        assert bool(refused) == any(word in ("engine.name=fairscale", "engine.name=deepspeed") for word in words)
        assert not refused or "declares `matrices`; engines that do: native, fsdp2, pipelining" in refused


class Silent(torch.optim.Optimizer):
    def __init__(self, params, lr=1.0):
        super().__init__(params, dict(lr=lr))


class WithSelf(Silent):
    def matrices(self, placement):
        return True


def returns_nothing(weights, optim):
    return None


REFUSED = {
    "torch.optim:LBFGS": "needs a closure",
    "torch.optim:Nothing": "torch.optim",
    "torch.nn:Linear": "cannot be called with (weights, optim)",
    f"{__name__}:REFUSED": "is neither a class nor a function",
    "tests.optim.users:ScheduleFree": "has eval() and train()",
    f"{__name__}:WithSelf": "must declare `matrices` as True or as a function of a weight's Placement",
    "json:loads": "part of Python's standard library",
}


@pytest.mark.parametrize("name, says", REFUSED.items(), ids=REFUSED)
def test_what_is_no_optimizer_is_refused_by_name(name, says):
    refused = problems_of(name, [])
    assert says in refused and name in refused


class AveragingLater(torch.optim.SGD):
    """It has eval() and train() only when it is made."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.eval = self.train = self.zero_grad


UNMAKEABLE = {
    "torch.optim:Muon": "Muon only supports 2D parameters",
    f"{__name__}:returns_nothing": "it must return a torch.optim.Optimizer",
    f"{__name__}:AveragingLater": "has eval() and train()",
}


@pytest.mark.parametrize("name, says", UNMAKEABLE.items(), ids=UNMAKEABLE)
def test_what_cannot_be_made_ends_the_start_by_name(name, says):
    with pytest.raises(ConfigError) as refused:
        made([*WORDS, *named(name)])
    assert says in str(refused.value) and name in str(refused.value)


def test_arguments_and_settings_that_an_optimizer_does_not_take_are_refused_by_name(capsys):
    assert (
        "optim.arguments.beta: tests.optim.users:Lion has no such parameter; it takes betas. Did you mean 'betas'?"
        in (problems_of("Lion", [], beta="[0.9, 0.99]"))
    )
    assert "optim.arguments.lr cannot be set; tests.optim.users:Lion gets optim.lr" in problems_of("Lion", [], lr=1)
    assert "no parameter weight_decay" in problems_of("Counting", ["optim.weight_decay=0.3"])
    for setting in ("betas=[0.8, 0.9]", "eps=1e-6", "momentum=0.5", "newton_schulz_steps=3"):
        with pytest.raises(
            ConfigError,
            match=f"optim.{setting.split('=')[0]}=.* is not read by your own optim.name=.*it takes arguments in 'optim.arg",
        ):
            config.load(None, [*TINY, *WORDS, *named("Lion"), f"optim.{setting}"])
    with pytest.raises(ConfigError, match="is for your own optimizer"):
        config.load(None, [*TINY, "optim.arguments={betas: [0.8, 0.9]}"])
    with pytest.raises(ConfigError, match=r"unknown optim.name 'adam'; choose one of .* Did you mean 'adamw'"):
        config.load(None, [*TINY, "optim.name=adam"])


def test_values_of_arguments_keep_their_types():
    words = ["optim.arguments={betas: [0.9, 0.98], eps: 1e-8, on: true, name: '1.5', no: null, deep: {a: 1}}"]
    optim = config.load(None, [*TINY, *WORDS, *named("Lion"), *words, "optim.arguments.more=2"]).optim
    assert optim.arguments == {
        **{"betas": [0.9, 0.98], "eps": 1e-8, "on": True, "name": "1.5", "no": None, "deep": {"a": 1}},
        "more": 2,
    }


def toys():
    """A matrix, a vector and an embedding of ones, whose gradients are 1."""
    placements = {"matrix": Placement((3, 2)), "vector": Placement((3,)), "table": Placement((4, 2), use="embedding")}
    found = [ShardedParameter(n, torch.nn.Parameter(torch.ones(p.shape)), p) for n, p in placements.items()]
    for weight in found:
        weight.parameter.grad = torch.ones(weight.shape)
    return found


def test_weight_decay_is_that_of_each_weight():
    weights = toys()
    optimizer = UserOptimizerMaker(OptimConfig(weight_decay=0.3), AdamW)(weights)
    found = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [found[weight.parameter] for weight in weights] == [0.3, 0.0, 0.3]


class Whole(torch.optim.SGD):
    """Its matrices are gathered."""

    def matrices(placement):
        return placement.dimensions == 2


def test_an_optimizer_of_whole_matrices_follows_the_learning_rate():
    weights = toys()
    optimizer = make(weights, OptimConfig(name=f"{__name__}:Whole", lr=9.0, weight_decay=0.0))
    optimizer.share(MatrixExchange([weights[0], weights[2]], SINGLE_MESH))
    for rate, left in ((0.25, 0.75), (0.5, 0.25)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        assert [weight.parameter.unique().tolist() for weight in weights] == [[left]] * 3
    assert optimizer.steps_taken() == 2
    optimizer.share(MatrixExchange(weights[:1], SINGLE_MESH))  # another process works on the other matrix
    for weight in weights:
        optimizer.restore(weight.parameter, {"momentum_buffer": torch.full(weight.shape, 4.0)}, 3)
    assert [[*optimizer.state.get(weight.parameter, {})] for weight in weights] == [["momentum_buffer"]] * 2 + [[]]
    assert optimizer.steps_taken() == 3


def test_state_is_restored_as_it_was_saved_or_as_the_optimizer_begins():
    weights = toys()
    words = {"initial_accumulator_value": 0.5}
    optimizer = make(weights, OptimConfig(name="torch.optim:Adagrad", lr=0.1, weight_decay=0.0, arguments=words))
    first = weights[0].parameter
    optimizer.restore(first, {"sum": torch.full_like(first, 2.0)}, 3)
    assert optimizer.state[first]["sum"].unique().tolist() == [2.0] and optimizer.steps_taken() == 3
    for tensors, updates in ((None, 3), ({"sum": torch.full_like(first, 2.0)}, 0)):
        optimizer.restore(first, tensors, updates)
        assert optimizer.state[first]["sum"].unique().tolist() == [0.5] and optimizer.state[first]["step"] == 0


class Halves(torch.optim.Optimizer):
    """Two optimizers, each of some groups."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, dict(lr=lr))
        self.parts = [torch.optim.SGD(self.param_groups[:1], lr), torch.optim.SGD(self.param_groups[1:], lr)]

    def step(self):
        for part in self.parts:
            part.step()


@pytest.mark.parametrize("inner", [lambda groups: torch.optim.SGD(groups, 1.0), lambda groups: Halves(groups, 1.0)])
def test_only_the_groups_that_a_library_leaves_in_it_are_updated(inner):
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = UserOptimizer(inner([{"params": [p]} for p in parameters]))
    for p in parameters:
        p.grad = torch.ones(2)
    whole = optimizer.param_groups
    for number in range(2):
        optimizer.param_groups = whole[number : number + 1]
        optimizer.step()
        assert [p.tolist()[0] for p in parameters] == [0.0, 1.0 - number]
    assert all(p.grad is not None for p in parameters)


@pytest.mark.parametrize("name", ["Lion", "Counting", "torch.optim:Adagrad", "torch.optim:SGD"])
def test_a_step_that_is_not_finite_changes_nothing(name):
    run, engine, batches, _ = made([*WORDS, *named(name, **ELEMENTWISE.get(name, {}))])
    first = steps(run, engine, batches, 0, 2)
    before = {key: value.clone() for key, value in state(engine).items()}
    scalars = engine.scalars()
    [bad] = batches.step(0)[:1]
    with torch.no_grad():
        weight = engine.weights[0].parameter
        kept = weight.clone()
        weight[0] = torch.inf
    assert engine.train_step([bad], 1e-3, 2).skipped and not first[-1].skipped
    with torch.no_grad():
        weight.copy_(kept)
    assert engine.scalars() == scalars
    assert all(torch.equal(value, before[key]) for key, value in state(engine).items())


class Hidden(torch.optim.Optimizer):
    """The momentum is that of an optimizer inside it."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, dict(lr=lr))
        self.parts = [torch.optim.SGD(self.param_groups, lr, momentum=0.9)]

    def step(self):
        self.parts[0].step()


class OwnGenerator(torch.optim.SGD):
    """It draws from a generator of its own."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, lr)
        self.draws = torch.Generator().manual_seed(1)

    def step(self):
        torch.rand((), generator=self.draws)
        super().step()


@pytest.mark.parametrize(
    "name, kept",
    [
        (f"{users.__name__}:Attributes", "Attributes.momentum"),
        (f"{__name__}:Hidden", "Hidden.parts"),
        (f"{__name__}:OwnGenerator", "OwnGenerator.draws"),
    ],
)
def test_what_an_optimizer_keeps_in_other_attributes_ends_the_second_step(name, kept):
    run, engine, batches, _ = made([*WORDS, *named(name)])
    steps(run, engine, batches, 0, 1)
    with pytest.raises(UnsavableStateError, match=f"training changes {kept}, which checkpoints do not save"):
        steps(run, engine, batches, 1, 2)


class Odd(torch.optim.SGD):
    """It keeps what no checkpoint stores."""

    keep = None

    def step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            self.keep(p, self.state[p])
        super().step()


class Narrow(Odd):
    def keep(self, p, state):
        state["average"] = p.bfloat16()


class Named(Odd):
    def keep(self, p, state):
        state["a.b"] = torch.zeros_like(p)


class Numbered(Odd):
    def keep(self, p, state):
        state[0] = 1.0


class NotANumber(Odd):
    def keep(self, p, state):
        state["best"] = torch.tensor(torch.nan)


class Strided(Odd):
    def keep(self, p, state):
        state["average"] = torch.zeros_like(p).t().contiguous().t()


class Rows(Odd):
    splits = True

    def keep(self, p, state):
        state["rows"] = torch.zeros(3)


class CountsMatrices(WholeLamb):
    def step(self):
        self.param_groups[0]["updates"] = self.param_groups[0].get("updates", 0) + 1
        super().step()


@pytest.mark.parametrize(
    "kind, words, says",
    [
        (Narrow, [], "'average' of tokens.weight, a tensor of bfloat16 [64, 32]"),
        (Named, [], "'a.b' of tokens.weight, a tensor of float32 [64, 32]"),
        (Numbered, [], "0 of tokens.weight, the value 1.0"),
        (NotANumber, [], "'best' of tokens.weight, a tensor of float32 []"),
        (Strided, [], "'average' of tokens.weight, a tensor of float32 [64, 32], which is not contiguous"),
        (CountsMatrices, [], "'updates' of a parameter group, the value "),
    ],
)
def test_state_that_no_checkpoint_stores_ends_the_first_step(kind, words, says):
    run, engine, batches, _ = made([*WORDS, f"optim.name={__name__}:{kind.__name__}", *words])
    with pytest.raises(UnsavableStateError) as refused:
        steps(run, engine, batches, 0, 1)
    assert says in str(refused.value)


def test_state_of_a_part_of_a_weight_has_the_shape_of_that_part(tmp_path):
    words = [*WORDS, f"optim.name={__name__}:Rows", "engine.zero_stage=1"]
    with pytest.raises(UnsavableStateError, match=r"keeps 'rows' of .*, a tensor of float32 \[3\]"):
        ranks.run(2, users.goes_on, tmp_path, 2, words)


def test_step_counts_that_differ_by_weight_are_resumed(tmp_path):
    words = [*named("Skipping"), "model.block=tests.engine.test_unsaved_state:Unused", "optim.lr=0.5"]
    goes_through(tmp_path, words, [(1, [])])
    manifest = json.loads(max(tmp_path.glob("moved/step-*/MANIFEST.json")).read_text())
    counts = {name: entry["state"]["step"] for name, entry in manifest["scalars"]["optimizer_numbers"].items()}
    assert {count for name, count in counts.items() if name.endswith(".extra")} == {0} and counts["norm.weight"] > 1


@pytest.mark.parametrize("name", ["Factored", "LateCounter"])
def test_numbers_and_tensors_of_any_shape_are_resumed(name, tmp_path):
    words = [*WORDS, *named(name)]
    [alone] = ranks.run(1, users.goes_on, tmp_path / "alone", 4, words)
    parts = [ranks.run(1, users.goes_on, tmp_path / "moved", steps, words)[0] for steps in (2, 4)]
    assert parts[0] + parts[1] == alone


def test_tensors_of_any_shape_of_gathered_matrices_are_saved_once_and_go_to_any_layout(tmp_path):
    layouts = [(4, ["engine.zero_stage=1", "parallel.tensor=2"]), (3, ["engine.name=fsdp2"]), (2, PIPELINE)]
    goes_through(tmp_path, [*named("Factored"), "optim.lr=1e-2"], layouts)
    manifests = [json.loads(path.read_text()) for path in tmp_path.glob("moved/step-*/MANIFEST.json")]
    assert len(manifests) == len(layouts) + 1
    for tensors in (manifest["tensors"] for manifest in manifests):
        shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items()}
        wanted = {}
        for name, (rows, *columns) in shapes.items():
            weight = name.removeprefix("model.")
            if name != weight and columns:
                wanted |= {f"optim.rows.{weight}": (rows, 1), f"optim.columns.{weight}": (*columns,)}
            elif name != weight:
                wanted[f"optim.square.{weight}"] = (rows,)
        assert wanted == {name: shape for name, shape in shapes.items() if name.startswith("optim.")}
        saved = {name: sum(prod(part["size"]) for part in entry["parts"]) for name, entry in tensors.items()}
        assert saved == {name: prod(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("name, lr", [("Lamb", 1e-2), ("torch.optim:Adafactor", 1e-2), ("Noisy", 0.3)])
def test_an_optimizer_that_declares_nothing_trains_alike_on_replicas_and_resumes_to_the_bit(name, lr, tmp_path):
    goes_through(tmp_path, [*named(name), f"optim.lr={lr}"], [(2, [])])

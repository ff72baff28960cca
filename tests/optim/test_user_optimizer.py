"""An optimizer of the user's own trains, is saved and resumed in every layout that it can train in, and the others are refused by name."""

import pytest
import torch

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.config import OptimConfig
from hpclm.config.supports import SUPPORTS
from hpclm.engine.state import UnsavableStateError
from hpclm.engine.user_optimizers import check_optimizer
from hpclm.optim.adamw import AdamW, groups
from hpclm.optim.maker import UserOptimizerMaker
from hpclm.optim.trial import SHAPES, USUAL, LocalExchange, ToyWeight
from hpclm.optim.user_optimizer import UserOptimizer, load, make, restored
from tests import ranks
from tests.engine.sharded import made, steps
from tests.optim import users
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
    "name", ["Lion", "torch.optim:Rprop", "torch.optim:Adagrad", "torch.optim:SGD", "torch.optim:Adam"]
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


SPLIT = ["parallel.tensor=2"], ["engine.zero_stage=1"], ["engine.name=fsdp2"], ["engine.name=fairscale"]
SPLIT = [*SPLIT, *(["engine.name=deepspeed", f"engine.zero_stage={stage}"] for stage in (1, 2, 3))]
WHOLE = [], [*PIPELINE, "batch.micro_size=1"], ["engine.name=deepspeed", "engine.zero_stage=0"]


@pytest.mark.parametrize("name", ["Lamb", "torch.optim:Adafactor", "muon"])
def test_an_optimizer_that_needs_whole_weights_is_refused_where_layouts_split_them(name):
    for words in SPLIT:
        refused = problems_of(name, words)
        assert (words[-1] in refused and "needs whole ones" in refused) or "keeps more than" in refused
    for words in WHOLE[:2]:
        assert problems_of(name, words) is None


@pytest.mark.parametrize("name, arguments", ELEMENTWISE.items(), ids=ELEMENTWISE)
def test_an_elementwise_optimizer_is_refused_nowhere_but_where_its_state_does_not_fit(name, arguments):
    more = name in ("torch.optim:ASGD", "torch.optim:NAdam", "Counting")
    for words in (*SPLIT, *WHOLE):
        refused = problems_of(name, words, **arguments)
        assert bool(refused) == (more and "engine.name=deepspeed" in words)
        assert not refused or "keeps more than tensors of the weights' shapes" in refused


def make_of_all(weights, optim):
    return Normed(groups(weights, optim), optim.lr)


class Normed(torch.optim.Optimizer):
    """The update of a weight depends on the others."""

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        parameters = [p for group in self.param_groups for p in group["params"]]
        length = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.sub_(p.grad / length, alpha=1e-3)


@pytest.mark.parametrize("name", ["make_of_all", "Normed"])
def test_an_optimizer_that_needs_all_weights_trains_on_replicas_only(name):
    name = f"{__name__}:{name}"
    assert "gives each process different weights" in problems_of(name, PIPELINE)
    assert "needs whole ones" in problems_of(name, ["engine.zero_stage=1"])
    assert problems_of(name, []) is None


class Silent(torch.optim.Optimizer):
    def __init__(self, params, lr=1.0):
        super().__init__(params, dict(lr=lr))


class WithSelf(Silent):
    def matrices(self, name, shape):
        return True


class OddState(Silent):
    state_tensors = {"exp_avg": "matrix"}  # noqa: RUF012


def returns_nothing(weights, optim):
    return None


REFUSED = {
    "torch.optim:LBFGS": "needs a closure",
    "torch.optim:SparseAdam": "does not support dense gradients",
    "torch.optim:Muon": "only supports 2D parameters",
    "torch.optim:Nothing": "torch.optim",
    "torch.nn:Linear": "cannot be called with (weights, optim)",
    f"{__name__}:REFUSED": "is neither a class nor a function",
    f"{__name__}:Silent": "fails on small weights",
    f"{__name__}:returns_nothing": "it must return a torch.optim.Optimizer",
    "tests.optim.users:ScheduleFree": "has eval() and train()",
    f"{__name__}:WithSelf": "matrices must be a function of (name, shape), without self",
    f"{__name__}:OddState": "must look like {'exp_avg': 'weight'}",
    "json:loads": "part of Python's standard library",
}


@pytest.mark.parametrize("name, says", REFUSED.items(), ids=REFUSED)
def test_what_is_no_optimizer_is_refused_by_name(name, says):
    refused = problems_of(name, [])
    assert says in refused and name in refused


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
    found = [ToyWeight(name, torch.nn.Parameter(torch.ones(SHAPES[name])), SHAPES[name], None) for name in USUAL]
    for weight in found:
        weight.parameter.grad = torch.ones(weight.shape)
    return found


def test_weight_decay_is_that_of_each_weight():
    weights = toys()
    optimizer = UserOptimizerMaker("mine", AdamW, None)(weights, OptimConfig(weight_decay=0.3))
    found = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [found[weight.parameter] for weight in weights] == [0.3, 0.0, 0.3]


class Whole(torch.optim.SGD):
    """Its matrices are gathered."""

    def matrices(name, shape):
        return len(shape) == 2


def test_an_optimizer_of_whole_matrices_follows_the_learning_rate():
    weights = toys()
    optimizer = make(weights, OptimConfig(name=f"{__name__}:Whole", lr=9.0, weight_decay=0.0))
    optimizer.share(LocalExchange([weight for weight in weights if len(weight.shape) == 2]))
    for rate, left in ((0.25, 0.75), (0.5, 0.25)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        assert [weight.parameter.unique().tolist() for weight in weights] == [[left]] * 3
    assert [optimizer.state[weight.parameter]["step"] for weight in weights] == [2, 2, 2]
    optimizer.share(LocalExchange(weights[:1]))  # another process works on the other matrix
    for weight in weights:
        optimizer.restore(weight.parameter, {"momentum_buffer": torch.full(weight.shape, 4.0)}, 3)
    assert [optimizer.state.get(weight.parameter, {}).get("step") for weight in weights] == [3, 3, None]
    optimizer.step()
    assert [optimizer.state.get(weight.parameter, {}).get("step") for weight in weights] == [4, 4, None]


@pytest.mark.parametrize("example", [0, 0.0, torch.tensor(1.0), torch.tensor(1), torch.tensor([1.0])])
def test_a_step_count_is_restored_in_the_type_that_the_optimizer_keeps(example):
    count = restored(example, 3, torch.ones(2))
    assert count == 3 and type(count) is type(example)
    if isinstance(example, torch.Tensor):
        assert (count.dtype, count.shape) == (example.dtype, example.shape) and example != 3


def test_state_is_restored_as_it_was_saved_or_as_the_optimizer_begins():
    weights = toys()
    words = {"initial_accumulator_value": 0.5}
    optimizer = make(weights, OptimConfig(name="torch.optim:Adagrad", lr=0.1, weight_decay=0.0, arguments=words))
    first, other = weights[0].parameter, weights[1].parameter
    optimizer.restore(first, {"sum": torch.full_like(first, 2.0)}, 3)
    assert optimizer.state[first]["sum"].unique().tolist() == [2.0] and optimizer.state[first]["step"].item() == 3.0
    for tensors, updates in ((None, 3), ({"sum": torch.full_like(first, 2.0)}, 0)):
        optimizer.restore(first, tensors, updates)
        assert optimizer.state[first]["sum"].unique().tolist() == [0.5] and optimizer.state[first]["step"] == 0
    joined = torch.nn.Parameter(torch.ones(7))  # as a library puts several weights together
    optimizer.restore(joined, None, 0)
    assert optimizer.state[joined]["sum"].tolist() == [0.5] * 7 and not {first, other} & optimizer.state.keys()


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
    optimizer = UserOptimizer(inner([{"params": [p]} for p in parameters]), {}, {}, {})
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


@pytest.mark.parametrize("name, lost", [("Attributes", "momentum"), ("Lion", None), ("LateCounter", None)])
def test_a_trial_tells_what_a_resumed_run_would_lose(name, lost):
    assert load(OptimConfig(name=f"{users.__name__}:{name}")).trial.lost == lost


def test_what_an_optimizer_keeps_in_other_attributes_ends_the_first_step(tmp_path):
    with pytest.raises(
        UnsavableStateError, match="keeps momentum outside of its state: the updates of a resumed run would differ"
    ):
        ranks.run(1, users.goes_on, tmp_path, 2, [*WORDS, *named("Attributes")])


def test_an_optimizer_whose_step_counts_differ_by_weight_ends_the_step_in_which_they_do(tmp_path):
    words = [*WORDS, *named("Skipping"), "model.block=tests.engine.test_unsaved_state:Unused"]
    with pytest.raises(ConfigError, match="0 to 1 as 'step' of different weights"):
        users.goes_on(tmp_path, 1, words)


def test_a_number_that_the_first_update_makes_is_resumed(tmp_path):
    words = [*WORDS, *named("LateCounter")]
    [alone] = ranks.run(1, users.goes_on, tmp_path / "alone", 4, words)
    parts = [ranks.run(1, users.goes_on, tmp_path / "moved", steps, words)[0] for steps in (2, 4)]
    assert parts[0] + parts[1] == alone


def test_an_optimizer_that_draws_random_numbers_trains_in_one_process():
    for layout in (["job.gpus=2"], ["job.gpus=2", "parallel.tensor=2"], ["job.gpus=2", "engine.zero_stage=1"]):
        run = config.load("configs/debug.yaml", [*named("Noisy"), *layout]).for_engine(2)
        with pytest.raises(ConfigError, match="cannot train in 2 processes: it draws random numbers"):
            check_optimizer(run, SUPPORTS["native"])
    run = config.load("configs/debug.yaml", named("Noisy")).for_engine(1)
    check_optimizer(run, SUPPORTS["native"])

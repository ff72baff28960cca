"""Measures a user's optimizer on a few small weights before a run begins: the state that it keeps of a weight, and its updates. Layouts
that split weights over processes require that the update of a part equals that part of the whole update."""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hpclm.base.errors import ConfigError
from hpclm.config import OptimConfig
from hpclm.config.optimizers import Shape, State, StateTensor, dimensions, stacked
from hpclm.optim.maker import UserOptimizerMaker

SHAPES: Mapping[str, tuple[int, ...]] = {
    "block0.mlp.up.weight": (160, 144),
    "block0.norm1.weight": (144,),
    "tokens.weight": (150, 136),
    "block0.mlp.experts.up": (3, 160, 144),
    "block0.mlp.experts.up_bias": (3, 160),
}
"""Both sides of a matrix exceed 128, because some optimizers factor only larger matrices; all lengths differ."""
MATRIX, VECTOR, TABLE, STACK, BIASES = SHAPES
USUAL = (MATRIX, VECTOR, TABLE)
"""Weights of every model; the others belong to experts."""
UPDATES = 4
OF_EXPERTS = f" and a three-dimensional stack of experts ({STACK})"
RANDOM = "it draws random numbers, which differ between processes"
LR = 0.01
RELATIVE = 1e-3
ROUNDING = 1e-6
"""Allowed differences of updates: relative to the largest change of a value, and to the largest value."""
Cut = Callable[[Tensor], Tensor]
"""A tensor of a weight's shape -> a part of it."""


class NeedsGPUError(ConfigError):
    """The optimizer fails on a CPU, with an error that names CUDA."""


@dataclass(frozen=True)
class OptimizerTrial:
    """Measurements of a user's optimizer on small weights."""

    kept: Mapping[str, Mapping[str, Any]]
    """The state of each example after updates."""
    begun: Mapping[str, Any]
    """The state of a vector before its first update."""
    group_state: tuple[str, ...]
    """Numbers in parameter groups that updates changed."""
    parts_differ: str | None
    """How the update of a part of a weight differs from that part of the whole update; None if it does not."""
    weights_depend: str | None
    """How the update of a weight changes if another process has the other weights; None if it does not."""
    lost: str | None = None
    """The attributes that a resumed run would lack; None if its updates do not differ. A checkpoint has only the state and the numbers of
    the parameter groups."""

    def scalars(self, name: str, shape: Shape) -> Mapping[str, Any]:
        """Examples of the numbers kept of a weight."""
        kept = self.kept[example(name, shape)]
        return {key: value for key, value in kept.items() if not isinstance(value, Tensor) or value.ndim == 0}

    def state(self, name: str, shape: Shape) -> State:
        """The state of a weight that can be saved, without step counts."""
        like = example(name, shape)
        tensors = {}
        for key, value in self.kept[like].items():
            if not isinstance(value, Tensor) or value.dtype != torch.float32 or (key == "step" and value.ndim == 0):
                continue
            if tuple(value.shape) == SHAPES[like]:
                tensors[key] = StateTensor(tuple(shape))
                continue
            lengths = _lengths(value.shape, SHAPES[like], shape)
            if lengths is not None:
                tensors[key] = StateTensor(lengths, "everywhere")
        return tensors


@dataclass(frozen=True)
class ToyWeight:
    """A weight, or a process's part of it."""

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    cut: Cut


@dataclass(frozen=True)
class LocalExchange:
    """Implements WholeMatrices (hpclm.optim.optimizers) for a process that has all matrices whole."""

    matrices: Sequence["ToyWeight"]

    @property
    def worked_on(self) -> Sequence[str]:
        """Names of all matrices."""
        return [weight.name for weight in self.matrices]

    @property
    def rounds(self) -> Sequence[Sequence[int]]:
        """One matrix at a time."""
        return [[number] for number in range(len(self.matrices))]

    def __call__(
        self, numbers: Sequence[int], local_values: Sequence[Tensor], work: Callable[[int, Tensor], Tensor]
    ) -> Sequence[Tensor]:
        """See WholeMatrices; nothing is exchanged."""
        pairs = zip(numbers, local_values, strict=True)
        return [work(number, values.reshape(self.matrices[number].shape)).flatten() for number, values in pairs]


@dataclass(frozen=True)
class Trained:
    """A process after some updates."""

    moved: Mapping[str, Tensor]
    """The change of each weight's values."""
    kept: Mapping[str, Mapping[str, Any]]
    begun: Mapping[str, Mapping[str, Any]]
    """Like ``kept``, before the first update."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """Numbers in parameter groups that updates changed."""
    lost: str = ""
    """Attributes of the optimizer that another instance does not take over."""


def example(name: str, shape: Shape) -> str:
    """The example that resembles a weight."""
    if stacked(name):
        return STACK if dimensions(name, shape) == 2 else BIASES
    if len(shape) < 2:
        return VECTOR
    return MATRIX if name.startswith("block") else TABLE


def measure(maker: UserOptimizerMaker, optim: OptimConfig, names: Sequence[str] = USUAL) -> OptimizerTrial:
    """Try an optimizer on the weights with these names; ConfigError if it fails."""
    optim = replace(optim, lr=LR, min_lr=0.0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        try:
            whole = _trained(maker, optim, dict.fromkeys(names, _all), device)
        except ConfigError:
            raise
        except Exception as error:  # the user's code may raise anything
            needs_gpu = device.type == "cpu" and "cuda" in str(error).lower()
            experts = OF_EXPERTS if STACK in names else ""
            raise (NeedsGPUError if needs_gpu else ConfigError)(
                f"optim.name={maker.name} fails on small weights{experts}, {_where(error)}: {type(error).__name__}: {error}"
            ) from error
        if maker.whole and not maker.shares:
            _check_skips(maker, optim, device, names)
        if not _same(whole, _trained(maker, optim, dict.fromkeys(names, _all), device)):
            return OptimizerTrial(whole.kept, whole.begun[VECTOR], tuple(whole.numbers), RANDOM, RANDOM)
        differ = next(_differences(maker, optim, whole, device), None)
        depend = next(_dependences(maker, optim, whole, device), None)
        resumed = _trained(maker, optim, dict.fromkeys(names, _all), device, resumes=True)
        lost = None
        if not _same(whole, resumed):
            lost = resumed.lost or "values"
    return OptimizerTrial(whole.kept, whole.begun[VECTOR], tuple(whole.numbers), differ, depend, lost)


def _same(trained: "Trained", other: "Trained") -> bool:
    """Whether both made the same updates, to the last bit."""
    return all(torch.equal(trained.moved[name], other.moved[name]) for name in trained.moved)


def _differences(maker: UserOptimizerMaker, optim: OptimConfig, whole: Trained, device: torch.device) -> Iterator[str]:
    """Differences between updates of parts and parts of the whole update."""
    for what, processes in _divisions(list(whole.moved)).items():
        for cuts in processes:
            cuts = {
                name: _all if maker.whole and maker.whole(name, SHAPES[name]) else cut for name, cut in cuts.items()
            }
            yield from _compared(maker, optim, whole, cuts, device, f"{what} of a weight")


def _dependences(maker: UserOptimizerMaker, optim: OptimConfig, whole: Trained, device: torch.device) -> Iterator[str]:
    """How the updates of weights change if a process has only some of the weights."""
    for names in ([MATRIX], [name for name in whole.moved if name != MATRIX]):
        yield from _compared(maker, optim, whole, dict.fromkeys(names, _all), device, "a weight without the others")


def _compared(
    maker: UserOptimizerMaker,
    optim: OptimConfig,
    whole: Trained,
    cuts: Mapping[str, Cut],
    device: torch.device,
    what: str,
) -> Iterator[str]:
    try:
        part = _trained(maker, optim, cuts, device)
    except Exception as error:  # the user's code may raise anything
        yield f"the update of {what} fails, {_where(error)}: {type(error).__name__}: {error}"
        return
    for name, cut in cuts.items():
        wanted = cut(whole.moved[name])
        if not wanted.numel():
            continue
        limit = RELATIVE * float(wanted.abs().max()) + ROUNDING * float(_values(name, device).abs().max())
        difference = float((part.moved[name] - wanted).abs().max())
        if not difference <= limit:
            yield f"the update of {what} differs by up to {difference / float(wanted.abs().max() or 1.0):.0%} from the update in a single process"
        for key, value in whole.kept[name].items():
            if _is_number(value) and not _close(value, part.kept[name].get(key)):
                yield f"it keeps a different {key!r} of {what}"
    for key, value in whole.numbers.items():
        if not _close(value, part.numbers.get(key)):
            yield f"it has a different {key!r} in a parameter group of {what}"


def _divisions(names: Sequence[str]) -> dict[str, list[dict[str, Cut]]]:
    """Divisions of weights over two processes: by rows (stacks by experts), by columns (vectors stay whole), and by values."""
    stacks = [name for name in names if stacked(name)]
    vectors = [name for name in names if len(SHAPES[name]) == 1]
    rows: list[dict[str, Cut]] = [
        dict.fromkeys(names, lambda values: values[:70]) | dict.fromkeys(stacks, lambda values: values[:2]),
        dict.fromkeys(names, lambda values: values[70:]) | dict.fromkeys(stacks, lambda values: values[2:]),
    ]
    columns: list[dict[str, Cut]] = [
        dict.fromkeys(names, lambda values: values[:, :60]) | dict.fromkeys(vectors, _all),
        dict.fromkeys(names, lambda values: values[:, 60:]) | dict.fromkeys(vectors, _all),
    ]
    runs: list[dict[str, Cut]] = [
        dict.fromkeys(names, lambda values: values.flatten()[:9001]),
        # a process may have no values of a small weight
        dict.fromkeys(names, lambda values: values.flatten()[9001:]),
    ]
    return {"some rows": rows, "some columns": columns, "a run of values": runs}


def _check_skips(maker: UserOptimizerMaker, optim: OptimConfig, device: torch.device, names: Sequence[str]) -> None:
    try:
        _trained(maker, optim, dict.fromkeys(names, _all), device, without_gradient=(TABLE,))
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(
            f"optim.name={maker.name} declares `matrices`, so hpclm updates them one by one: it must skip parameters whose grad is None, but "
            f"fails, {_where(error)}: {type(error).__name__}: {error}"
        ) from error


def _trained(
    maker: UserOptimizerMaker,
    optim: OptimConfig,
    cuts: Mapping[str, Cut],
    device: torch.device,
    without_gradient: Sequence[str] = (),
    resumes: bool = False,
) -> Trained:
    """A process after some updates of parts of weights, cut by ``cuts``. ``resumes``: half-way, another optimizer takes over."""
    weights = [
        ToyWeight(name, nn.Parameter(_part(cut, _values(name, device))), SHAPES[name], cut)
        for name, cut in cuts.items()
    ]
    before = [weight.parameter.detach().clone() for weight in weights]
    optimizer = _optimizer(maker, weights, optim)
    lost = ""
    begun = {w.name: {k: copied(v) for k, v in optimizer.state.get(w.parameter, {}).items()} for w in weights}
    started = [_numbers(group) for group in optimizer.param_groups]
    for number in range(UPDATES):
        if resumes and number == UPDATES // 2:
            previous = optimizer
            optimizer = _optimizer(maker, weights, optim)
            lost = ", ".join(_attributes_changed(optimizer, previous))
            _take_over(optimizer, previous)
        for group in optimizer.param_groups:
            group["lr"] = optim.lr * group.get("factor", 1.0)
        for weight in weights:
            gradient = _part(weight.cut, _drawn(weight.name, 1 + number, device))
            weight.parameter.grad = gradient
            if weight.name in without_gradient:
                weight.parameter.grad = None
        optimizer.step()
    ended = [_numbers(group) for group in optimizer.param_groups]
    changed = {
        key: new[key] for old, new in zip(started, ended, strict=True) for key in new if new[key] != old.get(key)
    }
    return Trained(
        {w.name: w.parameter.detach() - start for w, start in zip(weights, before, strict=True)},
        {w.name: dict(optimizer.state.get(w.parameter, {})) for w in weights},
        begun,
        changed,
        lost,
    )


def _optimizer(maker: UserOptimizerMaker, weights: Sequence[ToyWeight], optim: OptimConfig) -> torch.optim.Optimizer:
    optimizer = maker(weights, optim)
    if callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None)):
        raise ConfigError(
            f"optim.name={maker.name} has eval() and train(), as schedule-free optimizers have: it evaluates other weights than those it "
            "trains, and hpclm would evaluate, keep as best and export the trained ones"
        )
    if maker.shares and maker.whole:
        matrices = [weight for weight in weights if maker.whole(weight.name, weight.shape)]
        optimizer.share(LocalExchange(matrices))  # type: ignore[attr-defined]
    return optimizer


def _take_over(optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Give ``optimizer`` the state of ``other`` that a checkpoint has: tensors by parameter, and numbers of parameter groups."""
    for group, old in zip(optimizer.param_groups, other.param_groups, strict=True):
        group.update({key: copied(value) for key, value in old.items() if key != "params" and _is_number(value)})
        for parameter in group["params"]:
            if parameter in other.state:
                optimizer.state[parameter] = {key: copied(value) for key, value in other.state[parameter].items()}


def _attributes_changed(new: torch.optim.Optimizer, used: torch.optim.Optimizer) -> list[str]:
    """Attributes, beyond those of every optimizer, that updates have changed."""
    common = vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    return [key for key, value in vars(used).items() if key not in common and repr(value) != repr(vars(new).get(key))]


def copied(value: Any) -> Any:
    """A copy of a value in an optimizer's state."""
    return value.clone() if isinstance(value, Tensor) else value


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a parameter group, except the learning rate, which is set in every step."""
    return {
        key: value.item() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key not in ("params", "lr") and _is_number(value)
    }


def _part(cut: Cut, values: Tensor) -> Tensor:
    return cut(values).contiguous().clone()


def _all(values: Tensor) -> Tensor:
    return values


def _values(name: str, device: torch.device) -> Tensor:
    return _drawn(name, 0, device)


def _drawn(name: str, number: int, device: torch.device) -> Tensor:
    """Values of different sizes in rows and columns, so that the norm of a part differs from that of the whole."""
    shape = SHAPES[name]
    draw = torch.Generator().manual_seed(10 * list(SHAPES).index(name) + number)
    values = torch.randn(shape, generator=draw)
    for axis, length in enumerate(shape):
        sizes = torch.linspace(-2.0, 0.0, length)[torch.randperm(length, generator=draw)].exp()
        values *= sizes.view([-1 if other == axis else 1 for other in range(len(shape))])
    values[: len(values) // 3] *= 0.1
    return values.to(device)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _close(value: Any, other: Any) -> bool:
    with suppress(TypeError, ValueError):
        return abs(float(value) - float(other)) <= RELATIVE * abs(float(value))
    return False


def _lengths(kept: Shape, whole: Shape, shape: Shape) -> tuple[int, ...] | None:
    """The shape of a state tensor for a weight of shape ``shape``, given its shape ``kept`` for a weight of shape ``whole``. None if ambiguous."""
    if len(whole) != len(shape):
        return None
    lengths = {1: 1, **dict(zip(whole, shape, strict=True))}
    if not set(kept) <= set(lengths):
        return None
    return tuple(lengths[length] for length in kept)


def _where(error: BaseException) -> str:
    """The file and line of the error."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"in {frame.filename}, line {frame.lineno}"

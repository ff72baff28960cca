"""What a user's optimizer does, measured on a few small weights before a run begins: what it keeps of a weight, and whether the update of
a part of a weight is that part of the whole weight's update, as layouts need that split weights over processes.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hpclm.config import ModelConfig, OptimConfig
from hpclm.config.optimizers import Shape, State, StateTensor, dimensions, stacked
from hpclm.errors import ConfigError
from hpclm.optim.maker import UserOptimizerMaker

SHAPES: Mapping[str, tuple[int, ...]] = {
    "block0.mlp.up.weight": (160, 144),
    "block0.norm1.weight": (144,),
    "tokens.weight": (150, 136),
    "block0.mlp.experts.up": (3, 160, 144),
    "block0.mlp.experts.up_bias": (3, 160),
}
"""More than 128 each way, from where on some optimizers keep factors of a matrix; all lengths of a matrix differ."""
MATRIX, VECTOR, TABLE, STACK, BIASES = SHAPES
USUAL = (MATRIX, VECTOR, TABLE)
"""What every model has; the others are of experts."""
UPDATES = 4
OF_EXPERTS = f", one of which stacks experts in three dimensions ({STACK})"
RANDOM = "it draws random numbers, and processes draw different ones"
LR = 0.01
RELATIVE, ROUNDING = 1e-3, 1e-6
"""How much updates may differ: of the largest change of a value, and of the largest value."""
Cut = Callable[[Tensor], Tensor]
"""A tensor of a weight's shape -> a part of it."""


class NeedsGPUError(ConfigError):
    """It fails on a CPU, and names CUDA."""


@dataclass(frozen=True)
class Trial:
    """What was measured."""

    kept: Mapping[str, Mapping[str, Any]]
    """By example, what is kept of it after updates."""
    begun: Mapping[str, Any]
    """What is kept of a vector before its first update."""
    group_state: tuple[str, ...]
    """Numbers in parameter groups that updates changed."""
    parts_differ: str | None
    """How the update of a part of a weight differs from that part of the whole's update; None if it does not."""
    weights_depend: str | None
    """How the update of a weight changes if another process has the other weights; None if it does not."""
    lost: str | None = None
    """What a resumed run would not know: with the state and the numbers of the parameter groups alone, updates differ."""

    def scalars(self, name: str, shape: Shape) -> Mapping[str, Any]:
        """Examples of the numbers that are kept of a weight."""
        kept = self.kept[example(name, shape)]
        return {key: value for key, value in kept.items() if not isinstance(value, Tensor) or value.ndim == 0}

    def state(self, name: str, shape: Shape) -> State:
        """What is kept of a weight and can be saved, step counts left out."""
        like = example(name, shape)
        tensors = {}
        for key, value in self.kept[like].items():
            if not isinstance(value, Tensor) or value.dtype != torch.float32 or (key == "step" and value.ndim == 0):
                continue
            if tuple(value.shape) == SHAPES[like]:
                tensors[key] = StateTensor(tuple(shape))
            elif (lengths := _lengths(value.shape, SHAPES[like], shape)) is not None:
                tensors[key] = StateTensor(lengths, "everywhere")
        return tensors


@dataclass(frozen=True)
class ToyWeight:
    """A weight, or the part of it that a process has."""

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    cut: Cut


@dataclass(frozen=True)
class LocalExchange:
    """An Exchange (hpclm.optim.optimizers) of a process that has all matrices whole."""

    matrices: Sequence["ToyWeight"]

    @property
    def worked_on(self) -> Sequence[str]:
        """All."""
        return [weight.name for weight in self.matrices]

    @property
    def rounds(self) -> Sequence[Sequence[int]]:
        """One matrix at a time."""
        return [[number] for number in range(len(self.matrices))]

    def __call__(
        self, numbers: Sequence[int], local_values: Sequence[Tensor], work: Callable[[int, Tensor], Tensor]
    ) -> Sequence[Tensor]:
        """As Exchange's."""
        pairs = zip(numbers, local_values, strict=True)
        return [work(number, values.reshape(self.matrices[number].shape)).flatten() for number, values in pairs]


@dataclass(frozen=True)
class Trained:
    """A process after some updates."""

    moved: Mapping[str, Tensor]
    """By weight, the change of its values."""
    kept: Mapping[str, Mapping[str, Any]]
    begun: Mapping[str, Mapping[str, Any]]
    """As ``kept``, before the first update."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """That updates changed in parameter groups."""
    lost: str = ""
    """Attributes of the optimizer that another one does not take over."""


def example(name: str, shape: Shape) -> str:
    """The example that is like a weight."""
    if stacked(name):
        return STACK if dimensions(name, shape) == 2 else BIASES
    if len(shape) < 2:
        return VECTOR
    return MATRIX if name.startswith("block") else TABLE


def of(maker: UserOptimizerMaker, optim: OptimConfig, names: Sequence[str] = USUAL) -> Trial:
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
            raise (NeedsGPUError if needs_gpu else ConfigError)(
                f"optim.name={maker.name} fails on small weights{OF_EXPERTS * (STACK in names)}, {_where(error)}: {type(error).__name__}: {error}"
            ) from error
        if maker.whole and not maker.shares:
            _check_skips(maker, optim, device, names)
        if not _same(whole, _trained(maker, optim, dict.fromkeys(names, _all), device)):
            return Trial(whole.kept, whole.begun[VECTOR], tuple(whole.numbers), RANDOM, RANDOM)
        differ = next(_differences(maker, optim, whole, device), None)
        depend = next(_dependences(maker, optim, whole, device), None)
        resumed = _trained(maker, optim, dict.fromkeys(names, _all), device, resumes=True)
        lost = None if _same(whole, resumed) else resumed.lost or "more than that"
    return Trial(whole.kept, whole.begun[VECTOR], tuple(whole.numbers), differ, depend, lost)


def _same(trained: "Trained", other: "Trained") -> bool:
    """Whether both made the same updates, to the last bit."""
    return all(torch.equal(trained.moved[name], other.moved[name]) for name in trained.moved)


def _differences(maker: UserOptimizerMaker, optim: OptimConfig, whole: Trained, device: torch.device) -> Iterator[str]:
    """How updates of parts differ from parts of the whole update."""
    for what, processes in _divisions(list(whole.moved)).items():
        for cuts in processes:
            cuts = {
                name: _all if maker.whole and maker.whole(name, SHAPES[name]) else cut for name, cut in cuts.items()
            }
            yield from _compared(maker, optim, whole, cuts, device, f"{what} of a weight")


def _dependences(maker: UserOptimizerMaker, optim: OptimConfig, whole: Trained, device: torch.device) -> Iterator[str]:
    """How updates change if processes have other weights."""
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
            yield f"the update of {what} differs by up to {difference / float(wanted.abs().max() or 1.0):.0%} from that of the whole"
        for key, value in whole.kept[name].items():
            if _is_number(value) and not _close(value, part.kept[name].get(key)):
                yield f"of {what} it keeps another {key!r}"
    for key, value in whole.numbers.items():
        if not _close(value, part.numbers.get(key)):
            yield f"of {what} it has another {key!r} in a parameter group"


def _divisions(names: Sequence[str]) -> dict[str, list[dict[str, Cut]]]:
    """How layouts split weights over two processes: by rows (stacks by experts), by columns (vectors then are whole), and by values."""
    rows: list[dict[str, Cut]] = [
        {name: (lambda values: values[:2]) if stacked(name) else (lambda values: values[:70]) for name in names},
        {name: (lambda values: values[2:]) if stacked(name) else (lambda values: values[70:]) for name in names},
    ]
    columns: list[dict[str, Cut]] = [
        {name: (lambda values: values[:, :60]) if len(SHAPES[name]) > 1 else _all for name in names},
        {name: (lambda values: values[:, 60:]) if len(SHAPES[name]) > 1 else _all for name in names},
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
            f"optim.name={maker.name} declares `matrices`, which are updated one by one: it must skip parameters whose grad is None, but "
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
    """A process that has such a part of each weight, after some updates. ``resumes``: half-way another optimizer takes over, which gets
    what a checkpoint has."""
    weights = [
        ToyWeight(name, nn.Parameter(_part(cut, _values(name, device))), SHAPES[name], cut)
        for name, cut in cuts.items()
    ]
    before = [weight.parameter.detach().clone() for weight in weights]
    optimizer, lost = _optimizer(maker, weights, optim), ""
    begun = {w.name: {k: _copied(v) for k, v in optimizer.state.get(w.parameter, {}).items()} for w in weights}
    started = [_numbers(group) for group in optimizer.param_groups]
    for number in range(UPDATES):
        if resumes and number == UPDATES // 2:
            before_it, optimizer = optimizer, _optimizer(maker, weights, optim)
            lost = ", ".join(_attributes_changed(optimizer, before_it))
            _take_over(optimizer, before_it)
        for group in optimizer.param_groups:
            group["lr"] = optim.lr * group.get("factor", 1.0)
        for weight in weights:
            gradient = _part(weight.cut, _gradient(weight.name, number, device))
            weight.parameter.grad = None if weight.name in without_gradient else gradient
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
        optimizer.share(LocalExchange(matrices), ModelConfig())  # type: ignore[attr-defined]
    return optimizer


def _take_over(optimizer: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Give ``optimizer`` what a checkpoint has of ``other``: state by parameter, and numbers of parameter groups."""
    for group, old in zip(optimizer.param_groups, other.param_groups, strict=True):
        group.update({key: _copied(value) for key, value in old.items() if key != "params" and _is_number(value)})
        for parameter in group["params"]:
            if parameter in other.state:
                optimizer.state[parameter] = {key: _copied(value) for key, value in other.state[parameter].items()}


def _attributes_changed(new: torch.optim.Optimizer, used: torch.optim.Optimizer) -> list[str]:
    """Attributes, beside those that every optimizer has, in which one that has made updates differs from a new one."""
    common = vars(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    return [key for key, value in vars(used).items() if key not in common and repr(value) != repr(vars(new).get(key))]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a parameter group, but for the learning rate, which is set in every step."""
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


def _gradient(name: str, number: int, device: torch.device) -> Tensor:
    return _drawn(name, 1 + number, device)


def _drawn(name: str, number: int, device: torch.device) -> Tensor:
    """Values whose sizes differ from row to row and from column to column, so that a norm of a part is not that of the whole."""
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
    """What ``kept``, the shape of something kept of a weight of the shape ``whole``, is for one of another ``shape``; None if that is
    not clear."""
    if len(whole) != len(shape):
        return None
    lengths = {1: 1, **dict(zip(whole, shape, strict=True))}
    return tuple(lengths[length] for length in kept) if set(kept) <= set(lengths) else None


def _where(error: BaseException) -> str:
    """The file and line of the error."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"in {frame.filename}, line {frame.lineno}"

"""Whether Muon updates matrices as it should (Jordan et al. 2024), whatever rounding errors its iteration magnifies.

Known numbers go through the exchange of matrices, and must arrive. Then each part of an update is compared with what this process made
it from: the update that is orthogonalised with the momentum, the result with a plain iteration in fp64, and the change of the
weight with that result.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hpclm.config import OptimConfig
from hpclm.config.optimizers import block_matrix
from hpclm.engine.base import BaseEngine
from hpclm.engine.sharded_parameter import ShardedParameter, blocks
from hpclm.optim.muon import TYPES, Muon, Parts, parts_of
from hpclm.optim.optimizers import rate_and_decay
from hpclm.parallel.mesh import Axis
from hpclm.training.updates import FLOOR, ROUNDINGS, State

FACTOR = 3.0  # times what the type costs
WHOLE = 251  # whole numbers below it, and 1 more, are exact in every type
QUINTIC = 3.4445, -4.7750, 2.0315
Sampled = Callable[[ShardedParameter, Tensor], Tensor]


class WatchedExchange:
    """In place of the optimizer's exchange of matrices: hands them on, and notes what goes wrong with them."""

    def __init__(self, engine: BaseEngine, muon: Muon, sampled: Sampled):
        """``sampled``: a process's values of a weight -> those of them that are compared."""
        self.optim, self.tp, self.sampled = engine.config.optim, engine.mesh.tp, sampled
        self.inner, self.rounds = muon.exchange, muon.exchange.rounds
        self.matrices = [weight for weight in engine.weights if block_matrix(weight.name, weight.shape)]
        model, split = engine.config.model, self.optim.split
        self.parts = [parts_of(weight.name, model) if split else None for weight in self.matrices]
        self.state: dict[str, Tensor] = {}
        """The sampled update of the last step before and after it was orthogonalised, as "update of NAME" and "direction of NAME"."""
        self.wrong = self._lost()
        """The first thing that was wrong."""
        muon.exchange = self

    def __call__(
        self, numbers: Sequence[int], held: Sequence[Tensor], work: Callable[[int, Tensor], Tensor]
    ) -> Sequence[Tensor]:
        """As of hpclm.optim.optimizers.Exchange."""

        def watched(number: int, update: Tensor) -> Tensor:
            self.wrong = self.wrong or self._misdirected(number, update, work)
            return work(number, update)

        for number, update in zip(numbers, held, strict=True):  # before the exchange, which may reuse their memory
            weight = self.matrices[number]
            self.state[f"update of {weight.name}"] = self.sampled(weight, update)
        back = self.inner(numbers, held, watched)
        for number, made in zip(numbers, back, strict=True):
            weight = self.matrices[number]
            self.state[f"direction of {weight.name}"] = self.sampled(weight, made)
        return back

    def _lost(self) -> str:
        """The first matrix whose values do not arrive on the process that works on it, or do not come back."""
        kind, wrong = TYPES[self.optim.newton_schulz_type], list[str]()

        def work(number: int, matrix: Tensor) -> Tensor:
            places = (torch.arange(size, device=matrix.device) for size in matrix.shape)
            if not torch.equal(matrix, _numbers(number, *places).to(kind)):
                wrong.append(f"values of {self.matrices[number].name} do not arrive where Muon orthogonalises it")
            return matrix + 1

        for numbers in self.rounds:
            sent = [_part(number, self.matrices[number], self.tp).to(kind) for number in numbers]
            due = [values + 1 for values in sent]
            for number, values, back in zip(numbers, due, self.inner(numbers, sent, work), strict=True):
                if not torch.equal(back, values):
                    wrong.append(f"values of {self.matrices[number].name} do not come back as Muon orthogonalised them")
        return next(iter(wrong), "")

    def _misdirected(self, number: int, update: Tensor, work: Callable[[int, Tensor], Tensor]) -> str:
        """What is wrong with an orthogonalised matrix, in its type, and in fp32, where a wrong iteration shows; empty if nothing is."""
        right = direction(update, self.parts[number], self.optim, torch.float64)
        for kind in dict.fromkeys((update.dtype, torch.float32)):
            cost = (direction(update, self.parts[number], self.optim, kind) - right).norm()
            off = float((work(number, update.to(kind)).double() * self._scale(number) - right).norm())
            allowed = FACTOR * float(cost) + FLOOR * float(right.norm())
            if not off <= allowed:
                name = self.matrices[number].name
                return f"the orthogonalised update of {name} is off by {off / allowed:.2g} times what {kind} may cost"
        return ""

    def _scale(self, number: int) -> float:
        """What a weight's direction is multiplied by: that of the first of the matrices that it fuses."""
        rows, columns = self.matrices[number].shape
        count, sizes = self.parts[number] or (1, (rows,))
        return scale(self.optim, (count * sizes[0], columns))

    def misupdated(self, lr: float, states: Sequence[State]) -> str:
        """The first matrix that one of the updates between ``states``, the first of a run, has not changed as Muon does; empty if none."""
        if self.wrong:
            return self.wrong
        for step in range(1, len(states)):
            for number, weight in enumerate(self.matrices):
                for what, off, allowed in self._errors(lr, number, weight, states[step - 1], states[step]):
                    if not off <= allowed:
                        return f"update {step}: {what} of {weight.name} is not Muon's, by {off / allowed:.2g} times a rounding"
        return ""

    def _errors(
        self, lr: float, number: int, weight: ShardedParameter, old: State, new: State
    ) -> Iterator[tuple[str, float, float]]:
        """Of the update before it is orthogonalised, and of the weight: the norm of the difference, and what rounding may make of it."""
        name, optim, eps = weight.name, self.optim, torch.finfo(torch.float32).eps
        buffer, beta = f"momentum_buffer of {name}", optim.momentum
        w, m, update, made = (
            state[what].double()
            for state, what in ((old, name), (new, buffer), (new, f"update of {name}"), (new, f"direction of {name}"))
        )
        m_old = old[buffer].double() if buffer in old else torch.zeros_like(m)
        right = (m - beta * m_old) + beta * m if optim.nesterov else m
        size = torch.finfo(TYPES[optim.newton_schulz_type]).eps + FLOOR + eps / (1 - beta)
        yield "the momentum", float((update - right).norm()), float(size * (right.norm() + m.norm()))
        _, decay = rate_and_decay(name, weight.shape, optim)
        change = -lr * (decay * w + self._scale(number) * made)
        off = new[name].double() - w - change
        yield "the change", float(off.norm()), float(FLOOR * change.norm() + ROUNDINGS * eps * w.norm())


def direction(update: Tensor, parts: Parts | None, optim: OptimConfig, kind: torch.dtype) -> Tensor:
    """[A, B] update -> the change of the weight for a learning rate of -1, computed in ``kind``, in fp64."""
    count, sizes = parts or (1, (len(update),))
    out, (a, b, c) = [], QUINTIC
    for part in update.to(kind).unflatten(0, (count, -1)).split(sizes, 1):
        x = part.flatten(0, 1)
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(optim.newton_schulz_steps):
            if len(x) > x.shape[1]:
                square = x.T @ x
                x = a * x + x @ (b * square + c * square @ square)
            else:
                square = x @ x.T
                x = a * x + (b * square + c * square @ square) @ x
        out.append((x * scale(optim, x.shape)).unflatten(0, (count, -1)))
    return torch.cat(out, 1).flatten(0, 1).double()


def scale(optim: OptimConfig, shape: Sequence[int]) -> float:
    """optim.adjust for a matrix of this shape."""
    rows, columns = shape
    return {"original": max(1.0, rows / columns) ** 0.5, "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5}[
        optim.adjust
    ]


def _numbers(number: int, rows: Tensor, columns: Tensor) -> Tensor:
    """[rows, columns] whole numbers for a matrix, which tell where they are."""
    return (7 * number + 31 * rows[:, None] + 3 * columns) % WHOLE


def _part(number: int, weight: ShardedParameter, tp: Axis) -> Tensor:
    """This process's values of a matrix of such numbers, flattened."""
    values = torch.empty(weight.count, device=weight.parameter.device)
    for start, block in blocks(weight, weight.begin, values, tp):
        places = (torch.arange(low, low + n, device=values.device) for low, n in zip(start, block.shape, strict=True))
        block.copy_(_numbers(number, *places))
    return values

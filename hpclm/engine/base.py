"""The training step of every engine. Subclasses override how the model is wrapped and which parts their library performs."""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from hpclm.base.errors import ConfigError
from hpclm.base.registry import OWN
from hpclm.config import EngineSettings
from hpclm.config.model import BLOCKS
from hpclm.config.optimizers import OPTIMIZERS
from hpclm.engine import SavedState, Shard, StepResult, keep_going
from hpclm.engine.gradient_buckets import GradientBuckets
from hpclm.engine.matrix_exchange import MatrixExchange
from hpclm.engine.outliers import GUARDS
from hpclm.engine.qk_clip import QKClip
from hpclm.engine.router_state import RouterState
from hpclm.engine.save_plan import SavePlan
from hpclm.engine.scalars import check_scalars
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.engine.state import TrainingState, UnsavableStateError
from hpclm.engine.state_numbers import check_numbers
from hpclm.engine.step import NO_RANK, GlobalNorm, StepInputs, Timers, mean_loss, seed_step, step_inputs
from hpclm.engine.user_optimizers import OptimizerAttributes
from hpclm.engine.weight_average import WeightAverage
from hpclm.model import gpt
from hpclm.model.init import TensorParallelModule
from hpclm.model.own_block import BlockState
from hpclm.model.reports import check_name
from hpclm.model.stack import Stack, Stages, check_shapes
from hpclm.optim.adamw import update
from hpclm.optim.optimizers import MatrixOptimizer, kind_of, optimizer_of
from hpclm.optim.stability import LossScale
from hpclm.optim.user_optimizer import UserOptimizer
from hpclm.parallel.collectives import all_reduce, all_reduce_in_place, all_reduce_max, union
from hpclm.parallel.mesh import SINGLE, Compute, Mesh
from hpclm.parallel.micro_batch import MicroBatch, ModelOutput, add
from hpclm.parallel.placement import Placement

log = logging.getLogger(__name__)


class BaseEngine:
    """One model and one optimizer per replica: fp32 weights and optimizer state, activations in the compute type."""

    sharded = False
    """True if weights are sharded over the replicas."""
    backward_timer = "backward"
    """The phase of log.timers that includes the reduction of gradients."""
    kept_gradients: Collection[nn.Parameter] = ()
    """Weights with gradients that keep their memory between steps."""
    gradients: GradientBuckets | None = None
    """Reduces the gradients over the replicas, unless finish_backward() does it in another way."""

    def __init__(
        self,
        config: EngineSettings,
        compute: Compute,
        model: Stack | Stages,
        weights: Sequence[ShardedParameter],
        forward: Callable[[MicroBatch], ModelOutput] | None = None,
    ):
        """``weights``: all of this process, frozen ones included. ``forward``: replaces Stack.forward if the engine does not call the model itself."""
        mesh = compute.mesh
        device = compute.device
        self.forward: Callable[[MicroBatch], ModelOutput] = forward or model
        self.config = config
        self.mesh = mesh
        self.device = device
        self.model = model
        self.weights = tuple(weights)
        self.trained = tuple(weight for weight in weights if weight.trained)
        self.model_stacks = [module for module in model.modules() if isinstance(module, Stack)]
        self.reported: dict[str, Tensor] = {}
        """Values reported by layers and loss in this step, summed over this process's tokens."""
        self._names_reported: tuple[str, ...] | None = None
        """All reported names, on any stage; None before the first step."""
        own_block = config.model.block not in BLOCKS
        # hpclm's own code draws random numbers only for dropout, and seeds them there
        self._own_code = own_block or any(map(OWN.fullmatch, (config.optim.name, config.engine.name)))
        split = {weight.name for weight in self.trained if weight.placement.data_ranks > 1}
        # stages of hpclm's blocks hold the same kinds of weights, except experts
        if own_block or config.model.experts.count:
            split = union(split, mesh.pp)
        sharded = self.sharded or any(weight.local_range for weight in self.weights)
        self.norm = GlobalNorm(self.trained, compute, sharded, bool(split))
        """Norm of the gradients, or of the updates, of the weights that this process updates."""
        self.guard = GUARDS[config.optim.guard](self.norm, device)
        self.optimizer, self.state, self.exchange = optimizer_for(self.weights, config, mesh)
        self.router_state: RouterState | None = None
        if config.model.experts.count:
            self.router_state = RouterState(self.model_stacks, config.model, compute)
        limit = config.optim.qk_clip
        self.qk_clip = limit and QKClip(self.model_stacks, self.trained, compute, limit)
        self.block_state = BlockState(model) if own_block else None
        self.attributes = OptimizerAttributes(self.optimizer) if isinstance(self.optimizer, UserOptimizer) else None
        # a run that saves nothing may keep any state
        self._steps_to_check = 2 if config.saves else 0
        self.timers = Timers(device, config.timers)
        self.scale = LossScale.first(config.scaler) if model.dtype == torch.float16 else None

        deferred = any(isinstance(m, TensorParallelModule) and m.defer_tp_grad_sum for m in model.modules())
        self.deferred = [w for w in self.trained if deferred and w.placement.dim is None]
        """Weights with gradients to be summed over the tensor-parallel ranks after the backward pass."""

    # hooks for subclasses

    def close(self) -> None:
        """Release references that would keep the engine alive; it is unusable afterwards."""

    def no_sync(self) -> AbstractContextManager:
        """Inside this context, backward passes accumulate gradients locally, as DistributedDataParallel.no_sync does."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """The backward pass of one micro-batch."""
        loss.backward()

    def finish_backward(self) -> None:
        """After the last backward pass, finish reducing gradients over the replicas."""
        if self.gradients:
            self.gradients.finish()
        for weight in self.trained:
            # several replicas update unused weights too, because their buckets are zeroed; a single one must do the same
            if weight.parameter.grad is None:
                weight.parameter.grad = torch.zeros_like(weight.parameter)

    def gradient_norm(self) -> Tensor:
        """Global norm of the reduced gradients."""
        return self.norm.of_gradients()

    def update(self, loss: Tensor, scale: float) -> dict[str, Tensor | float]:
        """Clip by the global norm and update the weights, unless loss or norm is not finite. Returns grad_norm and skipped."""
        norm = self.gradient_norm()
        # a tensor, not a bool: the host would have to wait for the device in every step
        bad = (~torch.isfinite(norm + loss)).float()
        with self.guard.around(loss, norm / scale, bad) as skip:
            update(self.optimizer, norm, self.config.optim.clip, scale, skip)
        # before refresh(): otherwise the model would compute with copies of the unclipped weights
        clipped = self.qk_clip.clip(skip) if self.qk_clip else {}
        self.refresh()
        self.zero_grad()
        return {"grad_norm": norm / scale, "skipped": bad, **self.guard.metrics, **clipped}

    def overflowed(self, result: StepResult) -> bool:
        """Whether a step counts as an overflow for the loss scale."""
        return not math.isfinite(result.grad_norm)

    def zero_grad(self) -> None:
        """Reset the gradients after a step; gradients that this engine accumulates in place are zeroed in place."""
        if self.gradients:
            self.gradients.zero()
            return
        for weight in self.trained:
            if weight.parameter not in self.kept_gradients:
                # freed, not zeroed: the first micro-batch then writes the gradient instead of adding to it
                weight.parameter.grad = None
        kept = [weight.grad for weight in self.kept_gradients if weight.grad is not None]
        if kept:
            # in place, because modules hold these gradients as main_grad
            torch._foreach_zero_(kept)

    def refresh(self) -> None:
        """After an update, refresh the copies of the weights that the model computes with, if any."""

    def settle(self) -> None:
        """Before weights are overwritten outside an update, wait for pending gathers, or free gathered weights."""

    def reshard(self) -> None:
        """After an evaluation, free weights that forward passes have gathered."""

    def loss_factor(self, scale: float) -> float:
        """The factor on a step's losses. ``scale``: fp16's loss scale, or 1."""
        return scale

    def forward_backward(self, inputs: StepInputs) -> Tensor:
        """Run this replica's micro-batches. Returns the sum of their weighted losses without the factor, a scalar in fp32."""
        total = torch.zeros((), device=self.device)
        factor = inputs.factor
        last = len(inputs.batches) - 1
        for number, batch in enumerate(inputs.batches):
            if number:
                # only gradients have changed so far, so the step can be abandoned and repeated from the same state
                inputs.check_interrupt(number)
            with self.no_sync() if number < last else nullcontext():
                with self.timers("forward"):
                    value, scalars = self.forward(batch)
                with self.timers("backward"):
                    self.backward(value)
            total += value.detach() if factor == 1.0 else value.detach() / factor
            add(self.reported, scalars)
        return total

    # the step and the state, the same for all engines

    def train_step(
        self, batches: Sequence[MicroBatch], lr: float, step: int, check_interrupt: Callable[[int], None] = keep_going
    ) -> StepResult:
        """Forward and backward over the micro-batches, clip, update; skips the update if loss or gradients are not finite."""
        config = self.config
        mesh = self.mesh
        scale = self.scale.value if self.scale else 1.0
        if self._own_code:
            # seeded by step number, so that a resumed run and a repeated step draw the same numbers
            seed_step(config.seed, step, mesh.world.rank)
        # a user's block may have put one of its modules in evaluation mode
        if self._own_code or not self.model.training:
            self.model.train()
        for group in self.optimizer.param_groups:
            # set in every step: the rate is a function of the step, so checkpoints need not store it
            group["lr"] = lr * group.get("factor", 1.0)
        self.guard.lr = lr
        self.reported = {}
        if self.qk_clip:
            self.qk_clip.begin()
        inputs = step_inputs(config, mesh, batches, step, self.loss_factor(scale), check_interrupt)
        if self.gradients:
            self.gradients.begin(len(batches))
        self.guard.counted = inputs.counted
        average = self.average  # made before the first update: it begins with the initial weights
        try:
            loss = self.forward_backward(inputs)
        except torch.OutOfMemoryError as error:
            if self.router_state:
                for line in self.router_state.most_received():
                    error.add_note(line)
            raise
        with self.timers(self.backward_timer):
            self.finish_backward()
            # after the gradients, which some ranks may have begun to send: all ranks must send in one order. From
            # here on the loss has the same bits on every rank, so all ranks agree on whether to skip the step
            loss = all_reduce(loss, mesh.dp)
            all_reduce_in_place([w.parameter.grad for w in self.deferred if w.parameter.grad is not None], mesh.tp)
        with self.timers("optimizer"):
            if self.attributes:
                seed_step(config.seed, step, NO_RANK)  # all processes that hold a weight draw the same numbers for it
            metrics = self.update(loss, scale)
            skipped = metrics["skipped"] + self.guard.held_back
            if average:
                average.update(skipped)
        if self.router_state:
            self.router_state.update(self.reported, skipped)
        self._report_optimizer(inputs.factor)
        counts = {"counted_tokens": inputs.counted, "empty_micro_batches": inputs.empty}
        metrics = {"loss": loss, **metrics, **self.reports(inputs.factor), **counts}
        expert_tokens = self.router_state.counts if self.router_state else None
        result = StepResult(metrics, scale, self.timers.take(), expert_tokens)
        if self._steps_to_check:  # fail early, before hours are spent on a state that cannot be saved
            self._check_state(first=self._steps_to_check == 2)
            self._steps_to_check -= 1
        if self.scale:  # the next step's scale depends on this one's norm: fp16 waits for the device here
            self.scale = self.scale.after(self.overflowed(result), config.scaler)
        return result

    def _check_state(self, first: bool = False) -> None:
        """UnsavableStateError if the optimizer or blocks keep state that a checkpoint would leave out."""
        self.state.check(self.weights)
        for kept, way_out in (
            (
                self.block_state,
                "Keep it as a weight, compute it from the input, or draw from PyTorch's default generator",
            ),
            (
                self.attributes,
                "Keep it in state[parameter] or in the parameter groups, or draw from PyTorch's default generator",
            ),
        ):
            if kept and first:
                kept.begin()
            elif kept and (changed := kept.changed()):
                raise UnsavableStateError(
                    f"training changes {', '.join(changed[:4])}, which checkpoints do not save and ranks do not share: a resumed run would differ. "
                    f"{way_out}. If no result depends on it, name it in the attribute `transient` of its class. Or set checkpoint.enabled=false"
                )

    def _report_optimizer(self, factor: float) -> None:
        """Report the metrics of a user's optimizer, averaged over all processes."""
        if isinstance(self.optimizer, UserOptimizer):
            for name, value in self.optimizer.metrics().items():
                check_name(name)
                part = torch.as_tensor(value, dtype=torch.float32, device=self.device)
                self.reported[name] = part * (factor / self.mesh.world.size)

    def reports(self, factor: float) -> dict[str, Tensor]:
        """Mean over the step's tokens of each value that layers and loss reported, the same on every rank; a collective.

        ConfigError if this step reports other names than the first: the ranks would wait for each other.
        """
        if self._names_reported is None:
            names = {*self.reported}
            if self.config.optim.z_loss:
                names.add("z_loss")
            dense = self.config.model.block in BLOCKS and not self.config.model.experts.count
            shared = dense and self.config.optim.name in OPTIMIZERS  # every stage reports the same names
            # sorted: all ranks reduce one vector, and the order of a set differs between processes
            self._names_reported = tuple(sorted(names if shared else union(names, self.mesh.pp)))
        who = []
        if self.config.model.block not in BLOCKS:
            who.append(f"model.block={self.config.model.block}")
        if self.config.optim.name not in OPTIMIZERS:
            who.append(f"optim.name={self.config.optim.name}")
        if unknown := self.reported.keys() - {*self._names_reported}:
            raise ConfigError(
                f"{' or '.join(who)} reports {', '.join(sorted(unknown))} in some steps only; a name must be reported in every step, or in none"
            )
        if not self._names_reported:
            return {}
        nothing = torch.zeros((), device=self.device)
        sums = torch.stack([self.reported.get(name, nothing) for name in self._names_reported])
        means = all_reduce(sums / factor, self.mesh.world)
        return dict(zip(self._names_reported, means.unbind(), strict=True))

    def evaluate(self, batches: Iterable[MicroBatch], alone: bool = False) -> float | None:
        """Mean loss over the counted tokens, None if no token counts. ``alone``: only over this replica's batches."""
        self.model.eval()
        loss = mean_loss(self.forward, batches, self.device, SINGLE if alone else self.mesh.dp)
        self.reshard()
        return loss

    @cached_property
    def average(self) -> WeightAverage | None:
        """The average of the weights; None without optim.ema."""
        decay = self.config.optim.ema
        return None if decay is None else WeightAverage(self.state, self.save_plan, decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Evaluate the average of the weights (optim.ema) inside this context; a collective. If the block fails, the weights remain
        exchanged."""
        self._exchange_average()
        yield
        self._exchange_average()

    def _exchange_average(self) -> None:
        assert self.average is not None
        self.settle()
        self.average.exchange()
        self.refresh()

    @cached_property
    def save_plan(self) -> SavePlan:
        """The values that this process saves and reads."""
        local_parts = [self.state.local_part(weight) for weight in self.weights]
        # the fp32 weight, its optimizer state and its average
        bytes_each = 4 + self.state.kind.bytes_per_parameter(Placement((1, 1)))
        if self.config.optim.ema is not None:
            bytes_each += 4
        return SavePlan.among(local_parts, self.mesh, self.config.file_mb, bytes_each)

    def tensors(self) -> Iterator[Shard]:
        """Shards of the weights, of their average and, after the first update, of the optimizer's state."""
        self._check_state()
        yield from self.state.tensors(self.save_plan, self.mesh, self.config.file_mb)
        if self.average:
            yield from self.average.tensors()
        if self.router_state:
            yield from self.router_state.tensors()

    def scalars(self) -> dict[str, Any]:
        """The optimizer's step count, numbers of a user's optimizer, the loss scale, and the window of optim.guard; a collective."""
        # a stage without trained weights counts no steps
        steps = torch.tensor(self.state.steps(), dtype=torch.float64, device=self.device)
        numbers: dict[str, Any] = {
            "optimizer_steps": int(all_reduce_max(steps, self.mesh.pp)),
            "loss_scale": asdict(self.scale) if self.scale else {},
        }
        if self.state.users:
            numbers["optimizer_numbers"] = self.state.numbers(self.trained, self.mesh.world)
        return numbers | self.guard.scalars() | (self.router_state.scalars() if self.router_state else {})

    @torch.no_grad()
    def load(self, saved: SavedState, scalars: dict[str, Any]) -> None:
        """Load a saved state."""
        given = {name.removeprefix("model."): shape for name, shape in saved.shapes().items() if name[:6] == "model."}
        # all checks come before the first write: a refused checkpoint leaves the model unchanged
        own = self.scalars() | {"guard": self.guard.form(scalars.get("guard"))}
        if not scalars.get("loss_scale"):
            own["loss_scale"] = {}
        numbers = scalars.get("optimizer_numbers", {}) if self.state.users else {}
        check_numbers(numbers)
        if self.state.users:
            own["optimizer_numbers"] = numbers
        check_scalars(scalars, own)
        check_shapes(self.model.placements, self._expected(given))
        if scalars["optimizer_steps"]:
            self._check_optimizer(saved.shapes())
            self.state.check_numbers(self.trained, numbers)
        self.settle()
        self.state.load(self.save_plan, self.mesh, saved, scalars["optimizer_steps"])
        if self.average:
            self.average.load(saved, scalars["optimizer_steps"])
        elif any(name.startswith("ema.") for name in saved.shapes()):
            log.warning("optim.ema=null: the average of the weights in the checkpoint is dropped")
        if self.state.users:
            self.state.load_numbers(self.trained, numbers if scalars["optimizer_steps"] else {})
        if self.router_state:
            self.router_state.load_saved(saved, scalars)
        self.refresh()
        self.guard.load(scalars)
        if self.scale:
            self.scale = LossScale.of(scalars.get("loss_scale"), self.config.scaler)

    def _check_optimizer(self, given: Mapping[str, Sequence[int]]) -> None:
        """ConfigError if a saved state belongs to another optimizer. ``given``: the shapes of all tensors."""
        name = self.config.optim.name
        if self.state.users:  # what it needs is known only after an update
            return
        needed = {
            f"optim.{name}.{weight.name}": tuple(tensor.shape)
            for weight in self.weights
            for name, tensor in self.state.declared(weight).items()
        }
        missing = [tensor for tensor in needed if tensor not in given]
        if missing:
            raise ConfigError(
                f"the checkpoint has no {missing[0]}, which optim.name={name} needs: it was saved with another optimizer; set "
                "optim.name to that one, or start a new run from its weights with checkpoint.init_from"
            )
        for tensor, shape in needed.items():
            if tuple(given[tensor]) != shape:
                raise ConfigError(
                    f"{tensor} has the shape {list(given[tensor])} in the checkpoint, but optim.name={name} needs {list(shape)}: it was "
                    "saved with other settings of the optimizer; restore them, or start a new run with checkpoint.init_from"
                )

    def _expected(self, given: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The weights of ``given`` that this process must know: all but those in layers of other stages."""
        config = self.config
        mine = {name.split(".")[0] for name in self.model.placements}
        layers = {spec.name for spec in gpt.layers(config.model, config.engine, self.model.dtype, config.seed)}
        elsewhere = layers - mine if self.mesh.pp.size > 1 else set()
        return {name: shape for name, shape in given.items() if name.split(".")[0] not in elsewhere}


def optimizer_for(
    weights: Sequence[ShardedParameter], config: EngineSettings, mesh: Mesh
) -> tuple[torch.optim.Optimizer, TrainingState, MatrixExchange | None]:
    """The optimizer of the trained ones among these weights, its state, and the exchange of whole matrices if the optimizer needs it."""
    weights = [weight for weight in weights if weight.trained]
    optimizer = optimizer_of(weights, config.optim)
    kind = kind_of(config.optim)
    exchange = None
    if kind.matrices:
        exchange = MatrixExchange([weight for weight in weights if kind.matrices(weight.placement)], mesh)
        cast(MatrixOptimizer, optimizer).share(exchange)
    return optimizer, TrainingState(optimizer, config.optim, exchange.worked_on if exchange else ()), exchange

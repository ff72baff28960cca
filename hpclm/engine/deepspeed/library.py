"""Initialises DeepSpeed on hpclm's process groups, and presents hpclm's mesh through DeepSpeed's interface."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.runtime.config import DeepSpeedConfigError
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from pydantic import ValidationError

from hpclm.base.errors import ConfigError
from hpclm.config import OptimConfig
from hpclm.engine.sharded_parameter import ShardedParameter
from hpclm.node import process_state
from hpclm.optim.adamw import groups
from hpclm.optim.optimizers import OptimizedWeight
from hpclm.parallel.mesh import Axis, Mesh

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Names of the types in engine.precision."""
NO_DISKS = (
    "engine.offload_folder: DeepSpeed cannot compile its access to disks here; it needs libaio with its headers and a "
    "C++ compiler (Debian: apt-get install libaio-dev g++ python3-dev)"
)

SECTIONS = {
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedBF16Config": "bf16",
    "CommsLoggerConfig": "comms_logger",
    "DeepSpeedThroughputTimerConfig": "timers.throughput",
}
"""The section of DeepSpeed's JSON that each of its pydantic models reads."""


class Accelerator(CPU_Accelerator):
    """DeepSpeed's CPU accelerator with capabilities that PyTorch has gained since."""

    def is_fp16_supported(self) -> bool:
        """PyTorch supports fp16 on every CPU, slowly on most."""
        return True

    def create_op_builder(self, op_name: str) -> Any:
        """None for a collective that gloo provides, so that DeepSpeed does not compile its own."""
        if op_name == "ShareMemCommBuilder":
            return None
        return super().create_op_builder(op_name)


class MeshView:
    """A mesh with the methods of DeepSpeed's mpu: get_data_parallel_group() and so on."""

    def __init__(self, mesh: Mesh):
        # DeepSpeed reduces norms and overflows over the "model parallel" ranks, which together hold one copy of the
        # model
        axes = {"data_parallel": mesh.dp, "model_parallel": mesh.model, "tensor_model_parallel": mesh.tp}
        for kind, axis in axes.items():
            for name, value in (("group", group(axis)), ("rank", axis.rank), ("world_size", axis.size)):
                setattr(self, f"get_{kind}_{name}", partial(_given, value))


def _given(value: Any) -> Any:
    return value


def group(axis: Axis) -> Any:
    """The process group of ``axis``. A single process gets a new group, since DeepSpeed takes None for all ranks."""
    if axis.group is not None:
        return axis.group
    return dist.new_group(list(axis.ranks), use_local_synchronization=True)


def begin(device: torch.device) -> None:
    """Let DeepSpeed use the existing process group; a single process gets a new one."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # DeepSpeed warns about settings chosen on purpose
    for name in (
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
    ):  # DeepSpeed uses these names, which torch 2.13 deprecates
        warnings.filterwarnings("ignore", f".*{name}.* is deprecated", FutureWarning)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        process_state.undo_later(dist.destroy_process_group)
    if device.type == "cpu":
        set_accelerator(Accelerator())
    deepspeed.init_distributed(dist_init_required=False, verbose=False)


def initialize(**arguments: Any) -> Any:
    """Call deepspeed.initialize with its output suppressed; returns the engine.

    DeepSpeed casts all weights, but keeps the fp32 values of trained ones only. Frozen weights stay in fp32; layers cast what they use.
    """
    # at stage 3, whose weights have a ds_id, DeepSpeed casts nothing
    weights = [p for p in arguments["model"].parameters() if not (p.requires_grad or hasattr(p, "ds_id"))]
    frozen = [(weight, weight.data) for weight in weights]
    with contextlib.redirect_stdout(io.StringIO()), refusals():
        engine, *_ = deepspeed.initialize(**arguments, dist_init_required=False)
    for weight, values in frozen:
        weight.data = values
    return engine


def destroy(engine: Any) -> None:
    """Remove the hooks and attributes that keep DeepSpeed's weights in memory; its output is suppressed."""
    weights = list(engine.module.parameters())
    modules = list(engine.module.modules())
    with contextlib.redirect_stdout(io.StringIO()):
        engine.destroy()
    offload = getattr(engine.optimizer, "parameter_offload", None)
    if offload:
        # stage 3 never removes a model from its stack of running modules, nor the coordinator and modules from the
        # keys of a cache; they stay as empty objects
        FWD_MODULE_STACK[:] = [module for module in FWD_MODULE_STACK if module is not engine.module]
        for key in (offload.get_param_coordinator(), *modules):
            vars(key).clear()
    for weight in weights:  # the garbage collector does not see all references to them
        vars(weight).clear()


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Report settings that DeepSpeed rejects under engine.extra, the only setting they can come from."""
    try:
        yield
    except ValidationError as error:
        section = SECTIONS.get(error.title, error.title)
        problems = [(".".join([section, *map(str, e["loc"])]), e["input"], e["msg"]) for e in error.errors()]
        raise ConfigError(
            [f"engine.extra.{key}={given!r}: DeepSpeed says: {says}" for key, given, says in problems]
        ) from error
    except DeepSpeedConfigError as error:
        raise ConfigError(f"engine.extra: DeepSpeed says: {error}") from error
    except RuntimeError as error:
        if "JIT load the async_io" not in str(error):
            raise
        raise ConfigError(NO_DISKS) from error


def check_disks() -> None:
    """ConfigError if DeepSpeed cannot access disks here; it would find out only after compiling for a minute."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if not (installed_ops.get("async_io") or AsyncIOBuilder().is_compatible()):
            raise ConfigError(NO_DISKS)


def cpu_adam(weights: Sequence[OptimizedWeight], optim: OptimConfig) -> torch.optim.Optimizer:
    """DeepSpeed's CPU Adam, which keeps its state in CPU memory."""
    settings: dict[str, Any] = dict(lr=optim.lr, betas=optim.betas, eps=optim.eps, adamw_mode=True)
    try:
        return DeepSpeedCPUAdam(groups(weights, optim), **settings)
    except Exception as error:  # the extension build may raise anything
        reason = (str(error) or repr(error)).splitlines()[0]
        raise ConfigError(
            f"optim.name=cpu_adam: DeepSpeed could not compile it: {reason}; "
            "it needs a C++ compiler, Python's headers (Debian: apt-get install g++ python3-dev) and a home directory that can be "
            "written (HOME, or TORCH_EXTENSIONS_DIR), or use optim.name=adamw"
        ) from error


def mark_split(weights: Iterable[ShardedParameter]) -> None:
    """Mark tensor-parallel weights for DeepSpeed's gradient norm, which counts other weights only once."""
    for weight in weights:
        weight.parameter.tensor_model_parallel = weight.placement.dim is not None  # type: ignore[attr-defined]

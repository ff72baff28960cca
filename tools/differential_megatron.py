"""Megatron-core's side of differential.py, run by a Python that has megatron-core and PyTorch: its GPTModel from its local layers, its
schedules, gradient reduction and optimizer, on CPUs over gloo.

Megatron-core asks for GPUs. In this process alone, what names one gets the CPU, synchronisation does nothing, random numbers are not
forked (there is no dropout). Three things are done through its own interfaces:

- ``Norm`` stands in for its wrapper of PyTorch's norms where that refuses: sequence parallelism, and LayerNorm without a bias.
- A hook gives the padding entries of the vocabulary no probability; Megatron-core gives them some.
- With the distributed optimizer, reduced gradients are gathered to be compared; the optimizer reads only its own part.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from differential_worker import RefusedError, serve
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.overrides import TorchFunctionMode

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "swiglu": F.silu,
    "geglu": F.gelu,
}
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


class OnCPU(TorchFunctionMode):
    """Makes tensors on the CPU where a GPU is named."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` with the CPU in place of a GPU."""
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return func(*("cpu" if isinstance(x, str) and x.startswith("cuda") else x for x in args), **kwargs)


def pretend() -> None:
    """Replace what Megatron-core calls of torch.cuda."""
    kind = torch.Tensor.type

    def named(tensor: Tensor, *words: Any, **more: Any) -> Any:
        name = kind(tensor, *words, **more)
        return f"torch.cuda.{name.rpartition('.')[2]}" if isinstance(name, str) else name

    replaced: Any = torch
    replaced.Tensor.type, replaced.Tensor.cuda = named, lambda tensor, *_, **__: tensor
    replaced.cuda.synchronize, replaced.cuda.current_device = lambda *_: None, lambda: "cpu"
    for name in ("LongTensor", "FloatTensor", "ByteTensor", "IntTensor"):
        setattr(torch.cuda, name, getattr(torch, name))
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()


class Norm:
    """PyTorch's norm for Megatron-core's layers, whose gradients are summed over the slices of the sequence."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        """Make it as Megatron-core's layers do."""
        if config.normalization == "RMSNorm":
            norm: torch.nn.Module = torch.nn.RMSNorm(hidden_size, eps)
        else:
            norm = torch.nn.LayerNorm(hidden_size, eps, bias=config.add_bias_linear)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def network(case: dict[str, Any]) -> tuple[TransformerConfig, GPTModel]:
    """This rank's part of the model."""
    model, fused = case["model"], case["fused"]
    config = TransformerConfig(
        num_layers=model["layers"], hidden_size=model["hidden"], num_attention_heads=model["attention.heads"],
        num_query_groups=model["attention.groups"], ffn_hidden_size=model["ffn"], gated_linear_unit=model["gated"],
        activation_func=F.gelu if fused and not model["gated"] else ACTIVATIONS[model["activation"]],
        add_bias_linear=model["bias"], qk_layernorm=model["attention.qk_norm"], layernorm_epsilon=model["norm_eps"],
        normalization="RMSNorm" if model["norm"] == "rmsnorm" else "LayerNorm", bias_activation_fusion=fused,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True, bias_dropout_fusion=fused,
        apply_rope_fusion=False, gradient_accumulation_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
        tensor_model_parallel_size=case["tensor"], pipeline_model_parallel_size=case["pipeline"],
        sequence_parallel=case["sequence_parallel"], pipeline_dtype=torch.float32,
        calculate_per_token_loss=case["loss_norm"] == "token", finalize_model_grads_func=finalize_model_grads,
    )  # fmt: skip
    layer = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=model["attention.qk_norm"])
    block: Any = layer
    if config.sequence_parallel or (model["norm"] == "layernorm" and not model["bias"]):
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        attention = layer.submodules.self_attention.submodules
        if model["attention.qk_norm"]:
            attention.q_layernorm = attention.k_layernorm = Norm
        block = TransformerBlockSubmodules([layer] * get_num_layers_to_build(config), layer_norm=Norm)
    last = parallel_state.is_pipeline_last_stage()
    kind = {"learned": "learned_absolute"}.get(model["positions"], model["positions"])
    gpt = GPTModel(
        config, block, vocab_size=model["padded_vocab"], max_sequence_length=model["context"], post_process=last,
        pre_process=parallel_state.is_pipeline_first_stage(), share_embeddings_and_output_weights=model["tied"],
        position_embedding_type=kind, rotary_base=model["rope.base"],
    )  # fmt: skip
    if last and model["padded_vocab"] > model["vocab_size"]:
        gpt.output_layer.register_forward_hook(partial(without_padding, model["vocab_size"]))
    return config, gpt


def without_padding(vocabulary: int, layer: Any, given: Any, output: Any) -> Any:
    """[T, B, V / tp] logits, those of padding entries without probability."""
    logits, *rest = output
    first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
    return logits.masked_fill(first + torch.arange(logits.shape[-1]) >= vocabulary, -torch.inf), *rest


def named(module: GPTModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's parameters, with the numbers of layers in the whole model."""
    layers = module.decoder.layers
    for name, parameter in module.named_parameters():
        yield (
            re.sub(r"layers\.(\d+)\.", lambda match: f"layers.{layers[int(match[1])].layer_number - 1}.", name),
            parameter,
        )


def mine(whole: Tensor, parameter: Tensor, blocks: int) -> Tensor:
    """This tensor-parallel rank's slice of a weight, of each of whose ``blocks`` it has a part."""
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return whole
    dim = parameter.partition_dim  # type: ignore[attr-defined]
    return torch.cat([block.chunk(size, dim)[rank] for block in whole.chunk(blocks, dim)], dim)


def forward_step(case: dict[str, Any], batches: Iterator[Any], model: Any) -> Any:
    """The losses of the tokens, and the function that sums them, as Megatron-LM's pretrain_gpt.py has it."""
    tokens, labels, mask, positions, documents = next(batches)
    length = tokens.shape[1]
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    if documents is not None:
        hidden = hidden | (documents[:, None, :, None] != documents[:, None, None, :])
    positions = torch.arange(length).expand(len(tokens), -1) if positions is None else positions
    counts = (torch.ones(labels.shape) if mask is None else mask.float()).view(-1)

    def summed(losses: Tensor) -> Any:
        total, tokens = (losses.float().view(-1) * counts).sum(), counts.sum().int()
        return total, tokens, (total.item(), tokens.item())

    return model(tokens.contiguous(), positions.contiguous(), hidden, labels=labels.contiguous()), summed


def megatron(case: dict[str, Any], inputs: dict[str, Any], rank: int) -> dict[str, Any]:
    """Megatron-core's steps."""
    pretend()
    with OnCPU():
        parallel_state.initialize_model_parallel(case["tensor"], case["pipeline"])
        try:
            config, module = network(case)
        except (AssertionError, ValueError, NotImplementedError) as error:
            raise RefusedError(str(error).strip().splitlines()[0][:200]) from None
        return trained(case, inputs, config, module)


def trained(case: dict[str, Any], inputs: dict[str, Any], config: Any, module: GPTModel) -> dict[str, Any]:
    """Load the weights, and do the steps."""
    optim, gated = case["optim"], case["model"]["gated"]
    held = dict(named(module))
    with torch.no_grad():
        for name, parameter in held.items():
            whole = inputs["theirs"][EMBEDDING if name == OUTPUT and case["model"]["tied"] else name]
            parameter.copy_(mine(whole, parameter, 2 if gated and "linear_fc1" in name else 1))
    distributed = case["distributed_optimizer"]
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=distributed), module)
    settings = OptimizerConfig(
        optimizer="adam", lr=optim["lr"], weight_decay=optim["weight_decay"], adam_beta1=optim["betas"][0],
        adam_beta2=optim["betas"][1], adam_eps=optim["eps"], clip_grad=optim["clip"], params_dtype=torch.float32,
        use_distributed_optimizer=distributed,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, [ddp])
    for group in optimizer.param_groups:  # as Megatron-LM's scheduler does
        group["lr"], group["weight_decay"] = optim["lr"], optim["weight_decay"] * group["wd_mult"]
    replica, losses, norms, gradients = parallel_state.get_data_parallel_rank(), [], [], []
    for step in inputs["batch"]:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        micro_batches = [
            [None if x is None else x[micro, replica] for x in step] for micro in range(case["micro_batches"])
        ]
        parts = get_forward_backward_func()(
            forward_step_func=partial(forward_step, case), data_iterator=iter(micro_batches), model=[ddp],
            num_microbatches=len(micro_batches), seq_length=case["model"]["context"],
            micro_batch_size=step[0].shape[2], forward_only=False,
        )  # fmt: skip
        losses.append(parts)
        if distributed:
            gather_gradients(ddp)
        sums: dict[str, Any] = dict(held)
        gradients.append({name: parameter.main_grad.clone() for name, parameter in sums.items()})
        _, norm, _ = optimizer.step()
        norms.append(None if norm is None else float(norm))
    state = {f"model.{name}": parameter.detach() for name, parameter in held.items()}
    if not distributed:
        adam = optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer.chained_optimizers[0].optimizer
        for moment in ("exp_avg", "exp_avg_sq"):
            state |= {f"optim.{moment}.{name}": adam.state[p][moment] for name, p in held.items() if p in adam.state}
    place = [
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        replica,
    ]
    return {"place": place, "losses": losses, "norms": norms, "gradients": gradients, "state": state}


def gather_gradients(ddp: DistributedDataParallel) -> None:
    """Fill in the parts of the reduced gradients that other replicas hold."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    for buffer in ddp.buffers if size > 1 else ():
        for bucket in buffer.buckets:
            parts = [torch.empty_like(part) for part in bucket.grad_data.chunk(size)]
            dist.all_gather(parts, bucket.grad_data.chunk(size)[rank].clone(), group=group)
            bucket.grad_data.copy_(torch.cat(parts))


if __name__ == "__main__":
    serve({"megatron": megatron})

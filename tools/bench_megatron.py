"""Megatron-core's step for bench_train.py: its GPTModel, distributed data parallelism and optimizer, on one GPU.

With Transformer Engine's layers where that is installed, otherwise Megatron-core's own, whose attention keeps a [T, T] matrix.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from hpclm.config import ModelConfig


def megatron(model: ModelConfig, rows: torch.Tensor, dtype: torch.dtype) -> Callable[[], float]:
    """Build it for tokens [A, B, T + 1] of A micro-batches; a function that does one optimizer step and returns its loss.

    RuntimeError on a CPU, for which Megatron-core is not made.
    """
    import torch.distributed as dist

    if rows.device.type == "cpu":
        raise RuntimeError("Megatron-core needs a GPU")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not dist.is_initialized():
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=rows.device)
        parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(0)
    return stepping(model, rows, dtype)


def stepping(model: ModelConfig, rows: torch.Tensor, dtype: torch.dtype) -> Callable[[], float]:
    """The step, once Megatron-core's process groups are there."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    half = dtype == torch.bfloat16
    config = shape(model, dtype, fused=rows.is_cuda)
    network = network_of(config, model).to(rows.device)
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False),
        Float16Module(config, network) if half else network,
    )
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-4, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, clip_grad=1.0,
        bf16=half, params_dtype=dtype, use_distributed_optimizer=False,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, [ddp])
    for group in optimizer.param_groups:  # as Megatron-LM's scheduler does
        group["lr"], group["weight_decay"] = 1e-4, 0.1 * group["wd_mult"]
    batches = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in rows]
    context = rows.shape[2] - 1
    mask = torch.ones(context, context, dtype=torch.bool, device=rows.device).triu(1)[None, None]
    positions = torch.arange(context, device=rows.device).expand(rows.shape[1], -1).contiguous()

    def step() -> float:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        for number, (ids, labels) in enumerate(batches):
            with nullcontext() if number == len(batches) - 1 else ddp.no_sync():
                loss = ddp(ids, positions, mask, labels=labels).float().mean()
                (loss / len(batches)).backward()
        ddp.finish_grad_sync()
        optimizer.step()
        return loss.item()

    return step


def shape(model: ModelConfig, dtype: torch.dtype, fused: bool) -> Any:
    """The model's settings as Megatron-core's TransformerConfig; ``fused``: with the kernels that need a GPU."""
    import torch
    import torch.nn.functional as F
    from megatron.core.transformer.transformer_config import TransformerConfig

    gated = model.activation == "swiglu"
    return TransformerConfig(
        num_layers=model.layers, hidden_size=model.hidden, num_attention_heads=model.attention.heads,
        num_query_groups=model.attention.groups, ffn_hidden_size=model.ffn_width, gated_linear_unit=gated,
        activation_func=F.silu if gated else F.gelu, add_bias_linear=model.bias,
        normalization="RMSNorm" if model.norm == "rmsnorm" else "LayerNorm", layernorm_epsilon=model.norm_eps,
        hidden_dropout=0.0, attention_dropout=0.0, init_method_std=model.init_std,
        bf16=dtype == torch.bfloat16, params_dtype=dtype, pipeline_dtype=dtype, use_cpu_initialization=not fused,
        bias_activation_fusion=fused, bias_dropout_fusion=fused, apply_rope_fusion=False,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False,
    )  # fmt: skip


def network_of(config: Any, model: ModelConfig) -> torch.nn.Module:
    """The GPTModel."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    if gpt_layer_specs.HAVE_TE and not config.use_cpu_initialization:
        layer = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        layer = gpt_layer_specs.get_gpt_layer_local_spec(normalization=config.normalization)
    return GPTModel(
        config, layer, vocab_size=model.padded_vocab, max_sequence_length=model.context,
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type="rope" if model.positions == "rope" else "learned_absolute",
        rotary_base=int(model.rope.base),
    )  # fmt: skip

"""A GPT that Megatron-core trains on a CPU and saves in its torch_dist format: python -m tests.interop.mcore_run OUT [--distributed] [--masked] [--experts KIND].

Eight steps; the checkpoint is that after the fourth, and OUT/losses.json has loss and gradient norm of each. OUT/rank has its weights as a
rank file. Megatron-core only knows GPUs, so what asks for one gets the CPU.
"""

import argparse
import contextlib
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

LR, DECAY = 1e-2, 0.1
SHAPE = dict(num_layers=2, hidden_size=32, num_attention_heads=4)
ARGS = dict(
    **SHAPE, ffn_hidden_size=128, kv_channels=8, max_position_embeddings=16, padded_vocab_size=128, normalization="LayerNorm",
    position_embedding_type="learned_absolute", hidden_dropout=0.0, attention_dropout=0.0, bias_gelu_fusion=False,
    consumed_train_samples=16, train_iters=8, global_batch_size=4, micro_batch_size=2, seed=77, bf16=False, fp16=False,
    adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, weight_decay=DECAY, clip_grad=1.0, lr=LR, min_lr=LR, lr_decay_style="constant",
)  # fmt: skip

EXPERTS = dict(
    num_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=16,
    moe_shared_expert_intermediate_size=24,
    moe_layer_freq=[0, 1],
)
KINDS = {
    "losses": dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.05),
    "sequence": dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.1, moe_router_pre_softmax=True),
    "bias": dict(
        moe_router_load_balancing_type="none", moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.05, moe_router_topk_scaling_factor=2.5, moe_router_num_groups=2, moe_router_group_topk=1,
    ),
}  # fmt: skip
"""How tokens choose experts."""
GATED = dict(swiglu=True, add_bias_linear=False, normalization="RMSNorm", micro_batch_size=4)
"""The losses that balance experts depend on the micro-batch: with experts, a step has one."""


def batch(step):
    """[4, 17] tokens, the second half of which repeats the first."""
    ids = torch.randint(0, 128, (4, 17), generator=torch.Generator().manual_seed(step))
    ids[:, 8:] = ids[:, :9]
    return ids


def mask(step):
    """[4, 16] tokens that count in a loss with masked ends: each sequence has another number of them."""
    return torch.rand(4, 16, generator=torch.Generator().manual_seed(1000 + step)) < torch.tensor(
        [[1.0], [0.2], [0.7], [0.4]]
    )


class OnCPU(TorchFunctionMode):
    """Makes tensors on the CPU where the GPU is named."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return func(*("cpu" if isinstance(x, str) and x.startswith("cuda") else x for x in args), **kwargs)


def pretend():
    """Replace what Megatron-core calls of torch.cuda."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    kind = torch.Tensor.type

    def named(tensor, *words, **more):
        found = kind(tensor, *words, **more)
        return f"torch.cuda.{found.rpartition('.')[2]}" if isinstance(found, str) else found

    torch.Tensor.type, torch.Tensor.cuda = named, lambda tensor, *_, **__: tensor
    moe_utils.te_general_gemm = None  # 0.16.1 defines it only with Transformer Engine
    torch.cuda.synchronize, torch.cuda.current_device = lambda *_: None, lambda: "cpu"
    for name in ("LongTensor", "FloatTensor", "ByteTensor", "IntTensor"):
        setattr(torch.cuda, name, getattr(torch, name))
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()


def model_and_optimizer(distributed, experts):
    """Both wrapped as Megatron-LM wraps them. ``experts``: arguments of the mixture; empty: a dense network."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        **SHAPE, use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0, bias_activation_fusion=False,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False, bias_dropout_fusion=False, persist_layer_norm=False, **of_mixture(experts),
    )  # fmt: skip
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False) if experts else get_gpt_layer_local_spec()
    torch.manual_seed(7)
    model = GPTModel(
        config, spec, vocab_size=128, max_sequence_length=16,
        share_embeddings_and_output_weights=True, position_embedding_type="learned_absolute",
    )  # fmt: skip
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=distributed), model)
    settings = OptimizerConfig(
        optimizer="adam", lr=LR, weight_decay=DECAY, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=1.0,
        params_dtype=torch.float32, use_distributed_optimizer=distributed,
    )  # fmt: skip
    return model, ddp, get_megatron_optimizer(settings, [ddp])


def of_mixture(experts):
    """Fields of TransformerConfig for the arguments of a mixture."""
    if not experts:
        return {}
    fields = {name: value for name, value in experts.items() if name.startswith("moe_")}
    gated = dict(
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False, normalization="RMSNorm"
    )
    return fields | gated | dict(num_moe_experts=experts["num_experts"], moe_token_dispatcher_type="allgather")


def step(ddp, optimizer, number, masked):
    """Loss and gradient norm of one step, of one micro-batch or, with masked ends, of two: their losses are averaged."""
    from megatron.core.distributed import finalize_model_grads

    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    future = torch.ones(16, 16, dtype=torch.bool).triu(1)[None, None]
    loss = torch.zeros(())
    for ids, counts in zip(batch(number).chunk(1 + masked), mask(number).chunk(1 + masked)):
        positions = torch.arange(16).expand(len(ids), -1).contiguous()
        losses = ddp(ids[:, :-1].contiguous(), positions, future, labels=ids[:, 1:].contiguous())
        part = (losses * counts).sum() / counts.sum() / 2 if masked else losses.mean()
        part.backward()
        loss += part.detach()
    finalize_model_grads([ddp])
    for group in optimizer.param_groups:  # as Megatron-LM's scheduler does
        group["lr"], group["weight_decay"] = LR, DECAY * group["wd_mult"]
    _, norm, _ = optimizer.step()
    return loss.item(), float(norm)


def main():
    """Train, save, train on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--distributed", action="store_true", help="with the distributed optimizer")
    parser.add_argument("--masked", action="store_true", help="losses without masked ends (--eod-mask-loss)")
    parser.add_argument("--experts", choices=KINDS, help="with experts in the second layer")
    args = parser.parse_args()
    experts = EXPERTS | GATED | KINDS[args.experts] if args.experts else {}
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    pretend()
    with OnCPU():
        parallel_state.initialize_model_parallel(1, 1)
        model, ddp, optimizer = model_and_optimizer(args.distributed, experts)
        losses = [step(ddp, optimizer, number, args.masked) for number in range(1, 5)]
        folder = args.out / "iter_0000004"
        folder.mkdir(parents=True)
        sharded = model.sharded_state_dict()
        kind = {"distrib_optim_sharding_type": "fully_reshardable"}
        state = {
            "args": argparse.Namespace(**ARGS | experts, eod_mask_loss=args.masked, calculate_per_token_loss=False),
            "checkpoint_version": 3.0,
            "iteration": 4,
            "model": sharded,
            "optimizer": optimizer.sharded_state_dict(sharded, metadata=kind),
            "rng_state": ShardedObject(
                "rng_state", [{"cpu_rng_state": torch.get_rng_state()}], (1,), (0,), replica_id=0
            ),
        }
        dist_checkpointing.save(state, str(folder), ("torch_dist", 1))
        (args.out / "latest_checkpointed_iteration.txt").write_text("4")
        (args.out / "rank/mp_rank_00").mkdir(parents=True)
        ranks = {key: state[key] for key in ("args", "checkpoint_version", "iteration")}
        torch.save(
            ranks | {"model": model.state_dict_for_save_checkpoint()}, args.out / "rank/mp_rank_00/model_optim_rng.pt"
        )
        losses += [step(ddp, optimizer, number, args.masked) for number in range(5, 9)]
    (args.out / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()

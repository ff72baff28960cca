"""Suggest the right setting for an unknown one, by its name in hpclm or in another project."""

import re
from collections.abc import Sequence
from difflib import get_close_matches

ACCUMULATION = "it follows from batch.global_size = batch.micro_size x accumulation steps x data-parallel replicas"
FROM_LAUNCHER = "it follows from Slurm, MPI or torchrun; hpclm submit takes --nodes and --gpus"
OTHER_NAMES = {
    # Megatron-LM, Hugging Face transformers, nanoGPT, fairseq, DeepSpeed -> a setting, key=value, or why there is none
    **dict.fromkeys(("num_layers", "n_layer", "num_hidden_layers"), "model.layers"),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), "model.hidden"),
    **dict.fromkeys(("num_attention_heads", "n_head"), "model.heads"),
    **dict.fromkeys(("num_key_value_heads", "num_query_groups"), "model.kv_heads"),
    **dict.fromkeys(("ffn_hidden_size", "intermediate_size"), "model.ffn"),
    **dict.fromkeys(("seq_length", "max_position_embeddings", "block_size", "tokens_per_sample"), "model.context"),
    "position_embedding_type": "model.positions",
    "rope_theta": "model.rope_base",
    "hidden_dropout": "model.dropout",
    "tie_word_embeddings": "model.tied",
    "use_flash_attn": "model.attention=flash",
    **dict.fromkeys(("data_path", "train_data"), "data.prefix"),
    "tokenizer_type": "data.tokenizer",
    "vocab_file": "data.tokenizer_files",
    "num_workers": "data.workers",
    **dict.fromkeys(("micro_batch_size", "batch_size", "per_device_train_batch_size"), "batch.micro_size"),
    **dict.fromkeys(("global_batch_size", "train_batch_size"), "batch.global_size"),
    "rampup_batch_size": "batch.rampup",
    **dict.fromkeys(("max_steps", "train_iters", "max_update"), "budget.steps"),
    "train_samples": "budget.samples",
    **dict.fromkeys(("num_train_epochs", "max_epoch"), "budget.epochs"),
    "learning_rate": "optim.lr",
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_betas"), "optim.betas"),
    **dict.fromkeys(("clip_grad", "max_grad_norm", "gradient_clipping"), "optim.clip"),
    **dict.fromkeys(("lr_scheduler", "lr_decay_style", "scheduler_type"), "optim.schedule"),
    **dict.fromkeys(("warmup_steps", "lr_warmup_iters", "warmup_updates"), "optim.warmup"),
    "warmup_ratio": "optim.warmup_fraction",
    "lr_decay_iters": "optim.schedule_length",
    "fp16_init_scale": "scaler.initial",
    **dict.fromkeys(("tensor_model_parallel_size", "tensor_parallel"), "parallel.tensor"),
    **dict.fromkeys(("pipeline_model_parallel_size", "pipeline_parallel"), "parallel.pipeline"),
    "zero_optimization_stage": "engine.zero_stage",
    **dict.fromkeys(("fp16_enabled", "bf16_enabled", "dtype"), "engine.precision"),
    "bf16": "engine.precision=bf16",
    "fp16": "engine.precision=fp16",
    **dict.fromkeys(("gradient_checkpointing", "checkpoint_activations"), "engine.recompute"),
    "checkpoint_num_layers": "engine.recompute_every",
    "checkpoint_in_cpu": "engine.offload_activations",
    **dict.fromkeys(("eval_interval", "eval_steps"), "evaluate.every"),
    "eval_iters": "evaluate.batches",
    **dict.fromkeys(("save", "save_dir", "output_dir", "checkpoint_dir"), "out"),
    **dict.fromkeys(("save_interval", "save_steps"), "checkpoint.every"),
    "save_total_limit": "checkpoint.keep_last",
    **dict.fromkeys(("load", "resume_from_checkpoint"), "checkpoint.resume"),
    "finetune": "checkpoint.init_from",
    **dict.fromkeys(("log_interval", "logging_steps"), "log.every"),
    "report_to": "log.sinks",
    "profile_step_start": "profile.steps",
    **dict.fromkeys(("num_nodes", "nnodes"), "job.nodes"),
    **dict.fromkeys(("nproc_per_node", "gpus_per_node", "num_gpus"), "job.gpus"),
    **dict.fromkeys(("gradient_accumulation_steps", "update_freq"), ACCUMULATION),
    **dict.fromkeys(("local_rank", "world_size", "master_addr", "master_port"), FROM_LAUNCHER),
    "partition_activations": "with parallel.tensor, activations between layers are always divided (sequence parallelism)",
    "synchronize_each_layer": "hpclm submit --debug waits for the GPU after every operation",
    "context_parallel_size": "hpclm has no context parallelism; parallel.tensor divides the sequence between layers",
    "num_experts": "hpclm has no mixture of experts",
}
NEAR = 0.8  # minimum similarity of a misspelt name


def hint(key: str, known: Sequence[str]) -> str:
    """The end of a message about ``key``, which is not in ``known`` (dotted keys)."""
    suggestion = meant(key, known)
    if suggestion is None:
        return ". See hpclm config --reference for all settings."
    return f": {suggestion}" if is_reason(suggestion) else f". Did you mean {suggestion!r}?"


def is_reason(suggestion: str) -> bool:
    """Whether what ``meant`` returned is not a setting, but says why there is none."""
    return " " in suggestion


def is_variable(key: str) -> bool:
    """Whether ``key`` is written as environment variables are."""
    return re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", key) is not None


def meant(key: str, known: Sequence[str]) -> str | None:
    """The one of ``known`` that ``key`` stands for, perhaps as key=value, or why there is none; None if it is unclear."""
    parts = key.lstrip("-").replace("-", "_").lower().split(".")
    for start in range(len(parts)):  # with and without its sections: fp16.enabled is not our checkpoint.enabled
        name = "_".join(parts[start:])
        if exact := OTHER_NAMES.get(name) or _named(name, parts, known):
            return exact
    names = {setting.rpartition(".")[2] for setting in known}
    near = get_close_matches(parts[-1], sorted(names | OTHER_NAMES.keys()), n=1, cutoff=NEAR)
    return (OTHER_NAMES.get(near[0]) or _named(near[0], parts, known)) if near else None


def _named(name: str, parts: Sequence[str], known: Sequence[str]) -> str | None:
    """The setting whose last part is ``name``, in the section most like that of ``parts``."""
    same = [setting for setting in known if setting.rpartition(".")[2] == name]
    return next(iter(get_close_matches(".".join(parts), same, n=1, cutoff=0.0)), None)

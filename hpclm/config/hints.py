"""What was meant: by an unknown setting, by stray words of a command line, and by options of sbatch."""

import re
import typing
from collections.abc import Sequence
from difflib import get_close_matches

from hpclm.config.fields import required, type_of
from hpclm.config.job import INSTEAD, VALUED
from hpclm.config.migrating import SEE, replacements

_NAMES = {  # of Megatron-LM, Hugging Face transformers, nanoGPT, fairseq and DeepSpeed
    "model.layers": "num_layers n_layer num_hidden_layers",
    "model.hidden": "hidden_size n_embd d_model",
    "model.heads": "num_attention_heads n_head",
    "model.kv_heads": "num_key_value_heads num_query_groups",
    "model.ffn": "ffn_hidden_size intermediate_size",
    "model.context": "seq_length max_position_embeddings n_positions block_size tokens_per_sample",
    "model.positions": "position_embedding_type",
    "model.rope_base": "rope_theta",
    "model.tied": "tie_word_embeddings",
    "data.prefix": "data_path train_data",
    "data.tokenizer_files": "vocab_file",
    "batch.micro_size": "micro_batch_size batch_size per_device_train_batch_size",
    "batch.global_size": "global_batch_size train_batch_size",
    "batch.rampup": "rampup_batch_size",
    "budget.steps": "max_steps max_iters train_iters max_update",
    "budget.samples": "train_samples",
    "budget.epochs": "num_train_epochs max_epoch",
    "optim.lr": "learning_rate",
    "optim.betas": "adam_betas",
    "optim.clip": "clip_grad grad_clip max_grad_norm gradient_clipping",
    "optim.schedule": "lr_scheduler lr_decay_style scheduler_type",
    "optim.warmup": "warmup_steps lr_warmup_iters warmup_updates",
    "optim.warmup_fraction": "warmup_ratio",
    "optim.schedule_length": "lr_decay_iters total_num_update",
    "set optim.schedule_length and optim.unit=samples": "lr_decay_samples",
    "set optim.warmup and optim.unit=samples": "lr_warmup_samples",
    "optim.period": "lr_period_updates",
    "parallel.tensor": "tensor_model_parallel_size",
    "parallel.context": "context_parallel_size",
    "parallel.pipeline": "pipeline_model_parallel_size",
    "engine.zero_stage": "zero_optimization_stage",
    "engine.precision": "fp16_enabled bf16_enabled dtype",
    "optim.name": "optimizer_type",
    "engine.precision=bf16": "bf16",
    "engine.precision=fp16": "fp16",
    "engine.recompute=full": "gradient_checkpointing checkpoint_activations",
    "engine.offload_activations=true": "checkpoint_in_cpu cpu_checkpointing",
    "evaluate.every": "eval_interval eval_steps",
    "evaluate.batches": "eval_iters",
    "out": "save save_dir output_dir checkpoint_dir",
    "checkpoint.every": "save_interval save_interval_updates save_steps",
    "checkpoint.keep_last": "save_total_limit keep_interval_updates",
    "checkpoint.enabled=false": "no_save",
    "checkpoint.init_from": "finetune restore_file reset_optimizer",
    "a run resumes from its newest good checkpoint by itself": "load resume_from_checkpoint",
    "log.every": "log_interval logging_steps",
    "log.timers=true": "log_timers_to_tensorboard",
    "log.sinks": "report_to",
    "exit_minutes": "exit_duration_in_mins",
    "kill_switch": "kill_switch_path",
    "job.nodes": "num_nodes nnodes",
    "job.gpus": "nproc_per_node gpus_per_node num_gpus",
    "it follows from batch.global_size = batch.micro_size x accumulation steps x data-parallel replicas": (
        "gradient_accumulation_steps update_freq"
    ),
    "it follows from Slurm, MPI or torchrun; hpclm submit takes --nodes and --gpus": "local_rank world_size master_addr",
    "with parallel.tensor, activations between layers are always divided (sequence parallelism)": "partition_activations",
    "hpclm submit --debug waits for the GPU after every operation": "synchronize_each_layer",
    "parallel.expert": "ep ep_size expert_model_parallel_size expert_parallel_degree expert_parallel_size",
    "model.experts": "num_experts num_local_experts n_routed_experts moe_num_experts num_moe_experts",
    "model.experts_per_token": "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts",
    "model.expert_ffn": "moe_intermediate_size",
    "set model.shared_ffn to the inner size of the shared experts together": "n_shared_experts moe_num_shared_experts",
    "set model.mlp_pattern, a list of experts and dense": (
        "first_k_dense_replace decoder_sparse_step mlp_only_layers mlp_layer_types moe_layer_start_index"
    ),
    "model.router_score": "scoring_func",
    "model.router_normalize": "norm_topk_prob",
    "model.router_scale": "routed_scaling_factor",
    "model.router_groups": "n_group",
    "model.router_top_groups": "topk_group",
    "model.router_choice_bias": "use_expert_bias",
    "model.balance_bias": "load_balance_coeff",
    "model.balance_micro_batch": "router_aux_loss_coef",
    "model.router_z_loss": "router_z_loss_coef",
}
OTHER_NAMES = {name: meaning for meaning, names in _NAMES.items() for name in names.split()}
"""Name in another project -> a setting, key=value, or why there is none."""
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
"""PyTorch's names of types."""
NEAR = 0.8  # minimum similarity of a misspelt name
SLIP = 0.92  # of one that is a setting of another section, or a name in another project

KEY = re.compile(r"[A-Za-z_][\w.-]*")
UNIT = re.compile(r"([KMGT])(i?B)?", re.IGNORECASE)
FLAGS = re.compile("contiguous|exclusive|kill-on-invalid-dep|overcommit|oversubscribe|reboot|spread-job")
"""Options of sbatch without a value."""
SHORT = dict(D="chdir", e="error", G="gpus", m="distribution", n="ntasks", o="output")


def hint(key: str, keys: Sequence[str]) -> str:
    """The end of a message about ``key``, which is not in ``keys`` (dotted keys)."""
    if option := _option_of_job(key):
        return f": {option}"
    suggestion = meant(key, keys)
    if suggestion is None and key.startswith("job."):
        return ". Options of sbatch are job.options.NAME. See hpclm config --reference for all settings."
    if suggestion is None:
        return ". See hpclm config --reference for all settings."
    if is_reason(suggestion):
        return f": {suggestion}" if suggestion in OTHER_NAMES.values() else f": {suggestion}; {SEE}"
    return f". Did you mean {suggestion!r}?"


def _option_of_job(key: str) -> str:
    """What to set for job.NAME, if NAME is an option of sbatch; else empty."""
    section, _, name = key.partition(".")
    option = name.replace("_", "-")
    if section == "job" and option in INSTEAD:
        return INSTEAD[option]
    if section != "job" or not (VALUED.fullmatch(option) or FLAGS.fullmatch(option)):
        return ""
    value = "''" if FLAGS.fullmatch(option) else "..."
    return f"set job.options.{option}={value} (sbatch --{option})"


def is_reason(suggestion: str) -> bool:
    """Whether what ``meant`` returned is not a setting, but says why there is none."""
    return " " in suggestion


def meant(key: str, keys: Sequence[str]) -> str | None:
    """The one of ``keys`` that ``key`` stands for, perhaps as key=value, or why there is none; None if it is unclear."""
    parts = key.lstrip("-").replace("-", "_").lower().split(".")
    # a letter too few or too many, before a setting of another section that has this name: model.expert, not parallel.expert
    inside = {setting.partition(".")[2]: setting for setting in keys if setting.startswith(f"{parts[0]}.")}
    if slip := get_close_matches(".".join(parts[1:]), [*inside], n=1, cutoff=SLIP):
        return inside[slip[0]]
    for start in range(len(parts)):  # with and without its sections: fp16.enabled is not our checkpoint.enabled
        name = "_".join(parts[start:])
        if exact := of_another_project(name) or _setting_named(name, parts, keys):
            return exact
    names = {setting.rpartition(".")[2] for setting in keys} | OTHER_NAMES.keys() | replacements().keys()
    near = get_close_matches(parts[-1], sorted(names), n=1, cutoff=NEAR)
    return (of_another_project(near[0]) or _setting_named(near[0], parts, keys)) if near else None


def of_another_project(name: str) -> str | None:
    """What takes the place of another project's option ``name``, with _ for -: a setting, key=value, or why there is none."""
    replacement = replacements().get(name)
    return OTHER_NAMES.get(name) or (replacement.here if replacement else None)


def with_value(setting: str, name: str, value: str) -> str:
    """``setting``, key=value, which takes the place of another project's option ``name``, for the ``value`` that the option was given."""
    example = replacements()[name].example if name in replacements() else ""
    if not example or value in ("...", example):
        return setting
    key = setting.partition("=")[0]
    return f"{key}={value if value in map(str, typing.get_args(required(type_of(key)))) else '...'}"


def _setting_named(name: str, parts: Sequence[str], keys: Sequence[str]) -> str | None:
    """The setting whose last part is ``name``, in the section most like that of ``parts``."""
    same = [setting for setting in keys if setting.rpartition(".")[2] == name]
    return next(iter(get_close_matches(".".join(parts), same, n=1, cutoff=0.0)), None)


def mistakes(stray: Sequence[str], typed: Sequence[str]) -> list[str]:
    """What is wrong with the ``stray`` words of the command line ``typed``, which name no settings file; empty if it is unclear."""
    explained: set[str] = set()
    problems = []
    for index, word in enumerate(typed):
        before, after = typed[index - 1] if index else "", typed[index + 1] if index + 1 < len(typed) else "…"
        setting, _, value = word.partition("=")
        if word in explained:
            continue
        if setting == "" and KEY.fullmatch(before) and "=" in word:
            problems.append(f"write {before}={value or after}, without spaces")
            explained |= {before} if value else {before, after}
        elif word.endswith("=") and KEY.fullmatch(setting) and after in stray:
            problems.append(f"write {word}{after}, without a space")
            explained.add(after)
        elif UNIT.fullmatch(word) and re.search(r"(^|=)\d+$", before):
            option = f"{typed[index - 2]} " if before.isdigit() and index > 1 else ""
            problems.append(f"write {option}{before}{word[0].upper()}, in one word")
        elif word in stray and type_of(word) is not None and not after.startswith("="):
            problems.append(f"{word} has no value: {word}=…")
    return problems


def sbatch_option(option: str, value: str) -> str | None:
    """What to give for an ``option`` of sbatch, with its dashes and without its ``value``; None if it is not one."""
    name = option.lstrip("-") if option.startswith("--") else SHORT.get(option[1:], "")
    if name in ("gres", "gpus-per-node") and (count := value.rpartition(":")[2]).isdecimal():
        return f"use --gpus {count} (GPUs of each node)"
    if name in INSTEAD:
        return INSTEAD[name]
    if VALUED.fullmatch(name):
        name = f"{name}={value or '...'}"
    elif not FLAGS.fullmatch(name):
        return None
    return f"it is an option of sbatch: hpclm submit --sbatch {name}"

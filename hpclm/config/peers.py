"""Names of settings in other projects: Megatron-LM and Megatron-DeepSpeed, Hugging Face transformers, nanoGPT, fairseq, DeepSpeed.

For suggestions only: these names are not accepted.
"""

_NAMES = {
    "seed": "random_seed manual_seed data_seed",
    "name": "run_name exp_name experiment_name wandb_run_name wandb_exp_name",
    "out": "checkpoint.dir output_dir out_dir save save_dir checkpoint_dir checkpoint_path run_dir load",
    "kill_switch": "kill_switch_path kill_switch_file",
    "exit_minutes": "exit_duration_in_mins exit_duration",
    # model
    "model.vocab_size": "padded_vocab_size n_vocab num_embeddings",
    "model.vocab_multiple": "make_vocab_size_divisible_by pad_to_multiple_of padding_factor",
    "model.layers": "num_layers n_layer n_layers nlayers num_hidden_layers decoder_layers depth num_blocks",
    "model.hidden": "hidden_size n_embd d_model dim embed_dim decoder_embed_dim embedding_size nhidden model_dim n_hidden",
    "model.heads": "num_attention_heads n_head n_heads nheads num_heads decoder_attention_heads attention_heads",
    "model.kv_heads": "num_key_value_heads num_query_groups n_kv_heads n_kv_head num_kv_heads group_query_attention",
    "model.ffn": "ffn_hidden_size intermediate_size n_inner decoder_ffn_embed_dim ffn_dim mlp_dim hidden_dim d_ff feed_forward",
    "model.context": "seq_length seq_len max_seq_len max_seq_length sequence_length max_position_embeddings n_positions n_ctx "
    "block_size tokens_per_sample max_target_positions context_length encoder_seq_length context_size model_max_length",
    "model.positions": "position_embedding_type pos_emb positional_embedding decoder_learned_pos   ",
    "model.rope_base": "rotary_base rope_theta rotary_emb_base rotary_embedding_base",
    "model.norm": "normalization norm_type layernorm_type ",
    "model.norm_eps": "layernorm_epsilon norm_epsilon layer_norm_eps layer_norm_epsilon rms_norm_eps",
    "model.activation": "hidden_act activation_function activation_fn act_fn bias_gelu_fusion openai_gelu glu_activation",
    "model.bias": "add_bias_linear disable_bias_linear attention_bias mlp_bias use_bias",
    "model.tied": "tie_word_embeddings tie_embeddings share_decoder_input_output_embed untie_embeddings_and_output_weights "
    "share_embeddings weight_tying",
    "model.embed_norm": "embed_layernorm embed_layer_norm layernorm_embedding word_embeddings_layernorm",
    "model.embed_scale": "scale_embedding no_scale_embedding",
    "model.qk_norm": "qk_layernorm qk_norm_type",
    "model.dropout": "hidden_dropout resid_pdrop embd_pdrop dropout_rate hidden_dropout_prob dropout_p residual_dropout",
    "model.attention_dropout": "attn_pdrop attn_dropout attention_probs_dropout_prob",
    "model.init_std": "init_method_std initializer_range",
    "model.kernels": "fused_kernels apex use_fused_kernels",
    "model.positions=rope": "use_rotary_position_embeddings rotary rope",
    "model.positions=alibi": "alibi",
    "model.norm=rmsnorm": "rmsnorm",
    "model.activation=swiglu": "swiglu",
    # data
    "data.prefix": "data.path data_path dataset_path dataset train_data train_file data_prefix data_file data_impl data_dir",
    "data.blend": "data_paths datasets dataset_mixture data_weights",
    "data.train": "train_data_path train_data_paths train_weighted_split_paths trainpref",
    "data.valid": "valid_data_path validation_file valid_weighted_split_paths validpref eval_dataset val_data valid_subset",
    "data.test": "test_data_path test_file testpref test_weighted_split_paths",
    "data.split": "train_val_test_split data_split splits",
    "data.break_mode": "sample_break_mode",
    "data.index_cache": "data_cache_path cache_dir index_mapping_dir",
    "data.workers": "num_workers dataloader_num_workers n_workers dataloader_workers",
    "data.tokenizer": "tokenizer_type tokenizer_name tokenizer_name_or_path bpe",
    "data.tokenizer_files": "vocab_file merge_file merges_file tokenizer_model tokenizer_file tokenizer_path sentencepiece_model",
    "data.eod": "eos_token eod_token eod_id eos_token_id end_of_document",
    "data.extra_ids": "vocab_extra_ids",
    "data.keep_partial": "drop_last dataloader_drop_last drop_last_partial_validation_sequence",
    # batch and budget
    "batch.micro_size": "micro_batch_size micro_bsz mbs batch_size per_device_train_batch_size train_micro_batch_size_per_gpu "
    "per_gpu_batch_size micro_batch max_sentences device_batch_size",
    "batch.global_size": "global_batch_size gbs train_batch_size total_batch_size",
    "batch.rampup": "rampup_batch_size batch_size_rampup batch_size_warmup",
    "batch.loss_norm": "calculate_per_token_loss sentence_avg",
    "budget.steps": "max_steps train_iters max_iters max_update train_steps num_steps total_steps num_iterations training_steps "
    "iterations num_train_steps iters",
    "budget.samples": "train_samples max_samples num_samples",
    "budget.tokens": "train_tokens total_tokens num_tokens training_tokens",
    "budget.epochs": "num_train_epochs max_epoch max_epochs num_epochs epoch train_epochs",
    "budget.hours": "stop_time_hours max_hours train_hours max_time",
    # optim and scaler
    "optim.name": "optimizer optim optimizer_type optimizer_name",
    "optim.lr": "lr_rate learning_rate max_lr peak_lr lr_max base_lr init_lr warmup_max_lr",
    "optim.min_lr": "lr_min min_learning_rate end_learning_rate final_lr lr_end eta_min lr_min_rate cos_min_ratio",
    "optim.betas": "adam_betas adam_beta1 adam_beta2 beta1 beta2",
    "optim.eps": "adam_eps adam_epsilon epsilon",
    "optim.weight_decay": "wd decay adam_weight_decay l2 weight_decay_rate",
    "optim.clip": "clip_grad grad_clip max_grad_norm clip_norm gradient_clipping gradient_clip_val max_norm clip_gradient "
    "grad_norm_clip",
    "optim.schedule": "scheduler.type lr_decay_style lr_scheduler lr_scheduler_type scheduler decay_lr lr_schedule schedule_type lr_policy",
    "optim.warmup": "warmup_iters warmup_steps lr_warmup_iters lr_warmup_samples lr_warmup_steps warmup_updates "
    "warmup_num_steps num_warmup_steps warmup_samples",
    "optim.warmup_fraction": "warmup_ratio lr_warmup_fraction warmup_frac lr_warmup_ratio warmup_percent",
    "optim.warmup_start": "lr_warmup_init warmup_init_lr warmup_min_lr warmup_start_lr",
    "optim.schedule_length": "lr_decay_iters lr_decay_samples lr_decay_steps total_num_update total_num_steps",
    "optim.period": "lr_period_updates cycle_length",
    "optim.period_growth": "t_mult",
    "optim.period_shrink": "lr_shrink",
    "optim.wsd_decay": "lr_wsd_decay_iters lr_wsd_decay_samples cooldown_iters decay_steps",
    "optim.wsd_style": "lr_wsd_decay_style",
    "scaler.initial": "loss_scale initial_loss_scale initial_scale_power fp16_init_scale init_scale",
    "scaler.window": "loss_scale_window fp16_scale_window scale_window",
    "scaler.minimum": "min_loss_scale minimum_loss_scale min_scale threshold_loss_scale",
    "scaler.consecutive": "consecutive_hysteresis",
    # parallel and engine
    "parallel.tensor": "tensor_model_parallel_size model_parallel_size tensor_parallel_size tp tp_size tensor_parallel mp_size "
    "autotp_size sequence_parallel tensor_model_parallel",
    "parallel.pipeline": "pipeline_model_parallel_size pipeline_parallel_size pp pp_size pipeline_parallel stages num_stages "
    "pipeline_model_parallel pipe_parallel_size",
    "parallel.shard": "data_parallel_shard_degree dp_shard shard_degree hsdp_shard_size mics_shard_size fsdp_size",
    "parallel.chunks": "num_layers_per_virtual_pipeline_stage virtual_pipeline_model_parallel_size num_virtual_stages",
    "parallel.partition": "partition_method pp_partition_method pipeline_partition",
    "parallel.schedule": "pipeline_schedule pipe_schedule",
    "engine.name": "ddp_backend backend strategy distributed_strategy ddp_impl ",
    "engine.zero_stage": "zero stage zero_optimization.stage sharding_strategy reshard_after_forward",
    "engine.offload": "cpu_offload offload_optimizer offload_param optimizer_cpu_offload zero_optimization.cpu_offload",
    "engine.offload_folder": "nvme_path offload_dir",
    "engine.bucket_mb": "reduce_bucket_size allgather_bucket_size ddp_bucket_size bucket_cap_mb bucket_size",
    "engine.overlap": "overlap_comm overlap_grad_reduce overlap_gradients",
    "engine.gradients": "communication_data_type accumulate_allreduce_grads_in_fp32 grad_reduce_in_fp32 fp32_reduce_scatter "
    "grad_accum_dtype grad_dtype reduce_dtype",
    "engine.device": "accelerator ",
    "engine.precision": "fp16.enabled bf16.enabled dtype torch_dtype params_dtype mixed_precision amp param_dtype compute_dtype data_type",
    "engine.matmul": " float32_matmul_precision",
    "engine.compile": "torch_compile use_compile jit",
    "engine.recompute": "activation_checkpointing gradient_checkpointing checkpoint_activations recompute_granularity "
    "recompute_activations use_checkpoint grad_checkpointing activation_recompute recompute_method",
    "engine.recompute_every": "checkpoint_num_layers recompute_num_layers activation_checkpoint_interval",
    "engine.offload_activations": "checkpoint_in_cpu cpu_checkpointing activation_offload cpu_offloading",
    "engine.anomaly": "detect_anomaly check_for_nan_in_loss_and_grad",
    "engine.loss_chunk": "chunked_loss ce_chunk_size",
    "engine.name=fsdp2": "fsdp use_fsdp",
    "engine.name=deepspeed": "deepspeed",
    "engine.precision=bf16": "bf16",
    "engine.precision=fp16": "fp16",
    "engine.device=cpu": "use_cpu no_cuda cpu",
    "engine.device=cuda": "use_cuda",
    "engine.matmul=fast": "tf32 allow_tf32",
    # evaluate, checkpoint, log
    "evaluate.every": "eval_interval eval_steps validate_interval validate_interval_updates val_check_interval valid_interval "
    "eval_every evaluation_strategy eval_freq",
    "evaluate.batches": "eval.iters eval_iters eval_batches limit_val_batches val_steps max_eval_steps",
    "checkpoint.every": "save_interval save_steps save_interval_updates save_every checkpoint_interval ckpt_interval save_freq "
    "checkpoint_every always_save_checkpoint save_strategy",
    "checkpoint.enabled=false": "no_save",
    "checkpoint.epochs": "save_interval_epochs save_every_n_epochs save_epochs",
    "checkpoint.keep_epochs": "keep_last_epochs",
    "checkpoint.minutes": "save_interval_minutes save_minutes checkpoint_minutes",
    "checkpoint.background": "async_save async_checkpoint async_ckpt",
    "checkpoint.keep_last": "checkpoint.keep save_total_limit keep_interval_updates keep_last_n_checkpoints max_to_keep",
    "checkpoint.keep_every": "save_retain_interval keep_interval_updates_pattern non_persistent_save_interval",
    "checkpoint.keep_best": "keep_best_checkpoints load_best_model_at_end save_top_k",
    "checkpoint.resume": "resume_from_checkpoint restore_file reset_optimizer auto_resume",
    "checkpoint.init_from": "finetune pretrained_checkpoint finetune_from_model model_name_or_path load_weights init_checkpoint",
    "log.every": "log_interval logging_steps steps_per_print log_every print_interval log_freq",
    "log.timers=true": "profile_backward log_timers_to_tensorboard wall_clock_breakdown timing_log_level",
    "profile.steps": "profile profile_step_start profile_step_end profile_steps pytorch_profiler use_pytorch_profiler",
    "profile.ranks": "profile_ranks",
    "log.tensorboard": "tensorboard_dir tensorboard_logdir logging_dir",
    "log.sinks": "report_to wandb_log log_with use_wandb loggers",
    "log.project": "wandb_project wandb_project_name mlflow_experiment_name trackio_project",
    # job and cluster
    "job.nodes": "num_nodes nnodes n_nodes",
    "job.gpus": "nproc_per_node num_gpus gpus_per_node n_gpus ngpus ntasks_per_node num_processes gpus devices",
    "job.time": "time_limit walltime wall_time",
    "job.partition": "queue slurm_partition",
    "job.account": "slurm_account project",
    "job.container": "image docker_image container_image",
    "model.attention=flash": "use_flash_attn use_flash_attention",
    "cluster.timeout_minutes": "distributed_timeout_minutes ddp_timeout dist_timeout nccl_timeout",
}

PEERS = {name: key for key, names in _NAMES.items() for name in names.split()}
"""Name in another project (with _ for -) -> dotted key, or key=value."""

ACCUMULATION = (
    *("gradient_accumulation_steps", "num_accumulation_steps", "accumulate_grad_batches", "gradient_accumulation"),
    *("grad_accum", "accumulation", "update_freq"),
)
"""Names of the number of micro-batches that a replica computes in a step."""

WITHOUT = {
    "partition_activations": "with parallel.tensor, activations between layers are always divided (sequence parallelism)",
    "contiguous_memory_optimization": "activations are not copied into a buffer; PyTorch's allocator keeps them together",
    "contigious_checkpointing": "activations are not copied into a buffer; PyTorch's allocator keeps them together",
    "synchronize_each_layer": "hpclm submit --debug waits for the GPU after every operation",
    "synchronize_checkpoint_boundary": "hpclm submit --debug waits for the GPU after every operation",
    "local_rank": "a process learns its rank from Slurm, MPI or torchrun",
    "node_rank": "a process learns its rank from Slurm, MPI or torchrun",
    "rank": "a process learns its rank from Slurm, MPI or torchrun",
    "world_size": "the number of processes follows from the launcher; hpclm submit takes --nodes and --gpus",
    "master_addr": "it is derived from Slurm, MPI or torchrun",
    "master_port": "it is derived from Slurm, MPI or torchrun",
    "distributed_backend": "it follows from the device: NCCL for GPUs, gloo for CPUs",
    "ema": "hpclm does not average weights",
    "context_parallel_size": "hpclm has no context parallelism; parallel.tensor divides the sequence between layers",
    "expert_model_parallel_size": "hpclm has no mixture of experts",
    "num_experts": "hpclm has no mixture of experts",
    "label_smoothing": "hpclm only has plain cross entropy",
} | dict.fromkeys(
    ACCUMULATION, "it follows from batch.global_size = batch.micro_size x accumulation steps x data-parallel replicas"
)
"""Name in another project without a setting here -> what to use instead, or why there is none."""

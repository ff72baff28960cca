"""Megatron's options: those that hpclm reads, those that must have a certain value, and those without effect on what is imported.

An option in none of these groups must not be set. The names are those of Megatron-LM 1.0 to Megatron-core 0.19, and of
BigScience's and Microsoft's Megatron-DeepSpeed; ``tests/interop/megatron_options.txt`` has them all.
"""

from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from hpclm.errors import ConfigError
from hpclm.interop.pickles import StandIn

NETWORK = """
    num_layers hidden_size num_attention_heads kv_channels group_query_attention num_query_groups
    num_key_value_heads ffn_hidden_size max_position_embeddings seq_length padded_vocab_size position_embedding_type
    add_position_embedding use_rotary_position_embeddings rotary_base rope_theta normalization norm_epsilon
    layernorm_epsilon embed_layernorm qk_layernorm swiglu glu_activation bias_gelu_fusion openai_gelu
    add_bias_linear untie_embeddings_and_output_weights hidden_dropout attention_dropout"""
"""Options that become the model's settings."""
FIXED: Mapping[str, tuple[Any, ...]] = {
    "num_experts": (None, 0, 1, "[1]"),
    "rotary_percent": (1.0,),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "rope_type": (None, "rope"),
    "glu_activation": (None, "geglu", "swiglu"),
    "mlp_type": ("standard",),
    "softmax_type": ("vanilla",),
}
"""Options of the network, and the values that hpclm supports."""
UNSET = """
    num_moe_experts num_experts_switch num_tokentypes apply_residual_connection_post_layernorm apply_layernorm_1p
    layernorm_zero_centered_gamma rotary_interleaved use_rope_scaling no_rope_freq mrope_section softmax_scale
    qk_l2_norm export_qk_l2_norm window_size window_attn_skip_freq attention_output_gate
    experimental_attention_variant linear_attention_freq multi_latent_attention add_qkv_bias squared_relu
    quick_geglu gated_linear_unit activation_func glu_linear_offset activation_func_clamp_value use_mup
    mtp_num_layers heterogeneous_block_specs heterogeneous_layers_config_path
    heterogeneous_layers_config_encoded_json is_hybrid_model hybrid_override_pattern hybrid_layer_pattern
    hybrid_attention_ratio hybrid_mlp_ratio spec enable_gpt_oss decoder_num_layers decoder_seq_length
    retro_add_retriever export_num_eagle_layers export_num_medusa_heads modelopt_enabled export_quant_cfg
    export_real_quant_cfg use_te_activation_func use_transformer_engine_op_fuser export_num_mtp"""
"""Options of the network that hpclm does not have."""
TRAINING = """
    lr min_lr lr_decay_style lr_decay_iters lr_decay_samples lr_warmup_iters lr_warmup_samples lr_warmup_fraction
    lr_warmup_init lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style adam_beta1 adam_beta2 adam_eps
    weight_decay clip_grad global_batch_size micro_batch_size rampup_batch_size train_iters train_samples
    consumed_train_samples iteration seed bf16 fp16 loss_scale_window min_loss_scale hysteresis eod_mask_loss
    reset_position_ids reset_attention_mask split calculate_per_token_loss"""
"""Options that become the settings and the progress of a run that continues here."""
FP32 = (None, "fp32", "torch.float32")
TRAINED_WITH: Mapping[str, tuple[Any, ...]] = {
    "optimizer": ("adam",),
    "decoupled_weight_decay": (True,),
    "weight_decay_incr_style": ("constant",),
    "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    "dataloader_type": (None, "single"),
    "mid_level_dataset_surplus": (0.005,),
    "head_lr_mult": (1.0,),
    "grad_norm_skip_threshold": (float("inf"),),
    **dict.fromkeys(("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), FP32),
}
"""Options of training, and the values that hpclm supports."""
UNTRAINED = """
    decoupled_lr decoupled_min_lr use_checkpoint_opt_param_scheduler use_checkpoint_lr_scheduler
    apply_wd_to_qk_layernorm no_weight_decay_cond_type qk_clip use_bnb_optimizer loss_scale skipped_train_samples
    iterations_to_skip skip_train_iteration_range phase_transition_iterations decrease_batch_size_if_needed
    step_batch_size_schedule train_data_exact_num_epochs train_tokens lr_decay_tokens lr_warmup_tokens fim_data sft
    dataloader_inter_document_masking hybrid_context_parallel repeated_dataloader loss_on_targets_only
    reweight_loss_based_on_position_frequency curriculum_learning curriculum_learning_legacy
    data_efficiency_curriculum_learning random_ltd compression_training kd logits_load_dir export_kd_teacher_load
    perform_rl_step freeze_all_layers freeze_base_for_mtp qad_train_target fp8 fp4 fp8_e4m3 fp8_hybrid
    kitchen_config_file kitchen_recipe_number use_kitchen use_kitchen_attention te_precision_config_file
    quant_recipe mos renormalize_blend_weights"""
"""Options of training that hpclm does not have."""
WITHOUT_EFFECT: Mapping[str, str] = {
    "parallelism and communication": """
        tp_comm_* ddp_* fsdp_* megatron_fsdp_* overlap_* zero_* ds_* inprocess_* nccl_* DDP_impl
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split align_grad_reduce
        align_param_gather async_save async_strategy async_tensor_model_parallel_allreduce batch_p2p_comm
        batch_p2p_sync context_parallel_size cp_comm_type create_all_gather_group create_moe_param_group
        data_parallel_random_init data_parallel_sharding_strategy data_parallel_size data_sharding
        deallocate_pipeline_outputs decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers deepscale
        deepscale_config deepspeed deepspeed_activation_checkpointing deepspeed_config deepspeed_config_dict
        deepspeed_configuration deepspeed_dataloader deepspeed_mpi defer_embedding_wgrad_compute
        delay_grad_reduce delay_offload_until_cuda_graph delay_param_gather delay_wgrad_compute
        disable_symmetric_registration distrib_optim_fully_reshardable_mem_efficient distributed_backend
        distributed_timeout_minutes distributed_timeout_seconds_after_init embedding_path
        enable_expert_tensor_parallelism enable_full_sharding_in_hsdp enable_gloo_process_groups
        enable_zbh1_exact_semantics enable_zbh1_pipeline encoder_pipeline_model_parallel_size
        encoder_tensor_model_parallel_size ep_overlap_early_attn_memory_release
        experimental_attention_variant_loss_scale_func expert_gtp_weight_remat_size expert_interval
        expert_model_parallel_size expert_tensor_parallel_num_weight_shards expert_tensor_parallel_size
        fake_process_group finalize_model_grads_func first_pipeline_num_layers force_ds_sequence_parallel
        fp32_allreduce fully_parallel_load fully_parallel_save grad_scale_func grad_sync_func
        gtp_weight_remat_size hierarchical_context_parallel_sizes high_priority_a2a_comm_stream
        high_priority_stream_groups keep_fp8_transpose_cache_when_using_custom_fsdp last_pipeline_num_layers
        lazy_mpu_init local_rank max_seqlen_per_dp_cp_rank memory_centric_tiled_linear
        microbatch_group_size_per_vp_stage model_parallel_size no_pipeline_parallel no_sync_func
        num_distributed_optimizer_instances num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
        num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank outer_dp_sharding_strategy
        param_sync_func pipeline_dtype pipeline_model_parallel_comm_backend pipeline_model_parallel_layout
        pipeline_model_parallel_size pipeline_model_parallel_split_rank pp_partition_method rank remote_device
        scatter_gather_tensors_in_pipeline sequence_parallel sharp_enabled_group standalone_embedding_stage
        strict_fsdp_dtensor_load suggested_communication_unit_size symmetric_ar_type
        sync_tp_duplicated_parameters tensor_model_parallel_size tensor_parallel_num_weight_shards tile_factor
        timers torch_fsdp2_reshard_after_forward transformer_pipeline_model_parallel_size
        use_contiguous_buffers_in_ddp use_contiguous_buffers_in_local_ddp use_custom_fsdp
        use_distributed_optimizer use_gloo_process_groups use_layer_wise_distributed_optimizer
        use_layer_wise_param_layout use_megatron_fsdp use_pin_memory use_ring_exchange_p2p use_sharp
        use_torch_fsdp2 use_torch_optimizer_for_cpu_offload use_tp_pp_dp_mapping variable_seq_lengths
        virtual_pipeline_model_parallel_size wgrad_deferral_limit world_size""",
    "memory": """
        recompute_* cpu_offloading_* activation_offload_fraction activations_checkpoint_method
        activations_checkpoint_num_layers checkpoint_activations checkpoint_in_cpu checkpoint_num_layers
        contigious_checkpointing cpu_offloading cpu_optimizer cpu_torch_adam delta_offload_bytes_across_pp_ranks
        distribute_checkpointed_activations distribute_saved_activations empty_unused_memory_level
        fine_grained_activation_offloading fine_grained_offloading_max_inflight_offloads mem_efficient_ln
        memory_efficient_layer_norm memory_snapshot_path min_offloaded_tensor_size
        num_microbatches_with_partial_activation_checkpoints offload_modules optimizer_cpu_offload
        optimizer_offload_fraction partition_activations pin_cpu_grads pin_cpu_params record_memory_history
        store_param_remainders""",
    "kernels and rounding": """
        cuda_graph_* fp8_* fp4_* abort_on_unmet_fused_kernel_constraints accumulate_allreduce_grads_in_fp32
        activation_func_fp8_input_store allow_transformer_engine apply_query_key_layer_scaling apply_rope_fusion
        attention_backend attention_softmax_in_fp32 autocast_dtype batch_invariant_mode bias_activation_fusion
        bias_dropout_fusion bias_swiglu_fusion clone_scatter_output_in_embedding
        create_attention_mask_in_dataloader cross_entropy_fusion_impl cross_entropy_loss_fusion
        decode_only_cuda_graphs deprecated_use_mcore_models deterministic_mode
        disable_bf16_reduced_precision_matmul disable_jit_fuser disable_mamba_mem_eff_path
        disable_msc_deprecated disable_parameter_transpose_cache embedding_weights_in_fp32 enable_autocast
        enable_cuda_graph enable_experimental external_cuda_graph first_last_layers_bf16 flash_attention_version
        flash_decode fp16_lm_cross_entropy fp32_residual_connection fused_residual_rmsnorm fused_single_qkv_rope
        grad_reduce_in_bf16 gradient_accumulation_fusion gradient_reduce_div_fusion keep_fp8_transpose_cache
        kitchen_attention_backend masked_softmax_fusion mlp_chunks_for_prefill mlp_chunks_for_training
        no_persist_layer_norm num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 onnx_safe
        optimizer_cuda_graph params_dtype persist_layer_norm reuse_grad_buf_for_mxfp8_param_ag
        scaled_masked_softmax_fusion scaled_upper_triang_masked_softmax_fusion scattered_embeddings
        split_transformers stream_ckpt_dequant te_rng_tracker tp_only_amax_red transformer_impl
        use_dist_ckpt_deprecated use_flash_attn use_flash_attn_builder use_flash_attn_triton use_flash_attn_v1
        use_flash_attn_v2 use_flashinfer_fused_rope use_fused_weighted_squared_relu
        use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert use_inference_optimized_layers
        use_legacy_models use_mamba_mem_eff_path use_mcore_models use_persistent_ckpt_worker
        use_precision_aware_optimizer use_te_rng_tracker use_tutel""",
    "initial weights": """
        embedding_init_method embedding_init_method_std init_method init_method_std init_method_xavier_uniform
        init_model_with_meta_device output_layer_init_method perform_initialization use_cpu_initialization""",
    "saving, loading and exiting": """
        ckpt_* dist_ckpt_* async_ckpt_* non_persistent_* save_* load_* exit_* no_load_* no_save_* ft_*
        adlr_autoresume adlr_autoresume_interval app_tag_run_name app_tag_run_version auto_detect_ckpt_format
        calc_ft_timeouts enable_ft_package enable_msc enable_one_logger finetune finetune_data_split
        finetune_hf_dataset hetereogenous_dist_checkpoint kill_switch_file kill_switch_path load metadata_path
        most_recent_k object_storage_cache_path override_ckpt_iteration override_lr_scheduler
        override_opt_param_scheduler pretrained_checkpoint replication replication_factor replication_jump
        reset_iteration s3_cache_path save universal_checkpoint use_checkpoint_args use_dist_ckpt
        use_mp_args_from_checkpoint_args use_tokenizer_model_from_checkpoint_args verify_integrity""",
    "logs, profiles and checks": """
        log_* tensorboard_* wandb_* one_logger_* profile_* pytorch_profiler_* flight_recorder_* straggler_*
        timing_* check_for_* barrier_with_L1_time check_weight_hash_across_dp_replicas_interval codecarbon_dir
        config_logger_dir disable_straggler_on_startup dump_param_to_param_group_map error_injection_rate
        error_injection_type filter_warnings gigaflos_no_embeds gpu_sniff_test_interval logging_level manual_gc
        manual_gc_eval manual_gc_interval memory_keys modules_to_filter num_floating_point_operations_so_far
        nvtx_ranges parameters_in_billions_no_embedding profile record_shapes rerun_mode
        run_workload_inspector_server runtime_time_unit set_level_for_all_loggers synchronize_each_layer
        test_mode throughput_window_size use_nsys_profiler use_pytorch_profiler""",
    "evaluation": """
        eval_* valid_* consumed_valid_samples do_test do_train do_valid full_validation multiple_validation_sets
        skip_train start_eval_at_iter test_data_path test_weighted_split_paths test_weighted_split_paths_path
        to_test validation_set_names""",
    "data and tokenizer, which you name": """
        tokenizer_* tiktoken_* fim_* allow_ambiguous_pad_tokens aml_data_download_path block_data_path
        chat_template data_args_path data_cache_path data_impl data_path dataloader_defer_npy_index_mmap
        dataloader_fast_cache_load encoder_num_layers encoder_seq_length evidence_data_path legacy_tokenizer
        make_vocab_size_divisible_by merge_file mmap_bin_files mmap_warmup mock_data null_tokenizer_eod_id
        null_tokenizer_pad_id num_dataset_builder_threads num_workers pad_vocab_size pad_vocab_size_to
        per_dataset_sequences_path per_split_data_args_path return_data_index sft_tokenizer_prompt_format
        special_tokens titles_data_path train_data_path train_desc_path train_doc_idx_path train_idx_path
        train_sample_idx_path train_shuffle_idx_path train_sync_interval train_weighted_split_paths
        train_weighted_split_paths_path trust_remote_code use_dataset_only vocab_extra_ids vocab_file vocab_size""",
    "progress and names from before": """
        _is_global_batch_size_explicitly_specified actual_seq_length batch_size consumed_train_bins
        consumed_train_tokens curr_iteration dynamic_loss_scale end_weight_decay initial_loss_scale
        lr_decay_steps lr_warmup_steps min_scale model_type start_weight_decay teacher_forward teacher_model
        teacher_model_config warmup wd_incr_steps wsd_decay_steps yaml_cfg""",
    "what needs an option that is refused": """
        moe_* mtp_* mla_* dsa_* mamba_* mup_* muon_* adaptive_muon_* soap_* lion_* sgd_* yarn_* retro_* rl_*
        grpo_* langrl_* kd_* logits_* beta_fast beta_slow cache_mla_latents curriculum_scheduler
        curriculum_seqlen hidden_size_teacher kv_lora_rank linear_conv_kernel_dim linear_key_head_dim
        linear_num_key_heads linear_num_value_heads linear_value_head_dim mscale mscale_all_dim
        num_attention_heads_teacher num_experts_teacher num_layers_teacher original_max_position_embeddings
        q_lora_rank qk_clip_alpha qk_clip_threshold qk_head_dim qk_pos_emb_head_dim random_ltd_layer_num
        random_ltd_reserved_length relative_attention_max_distance relative_attention_num_buckets
        rope_scaling_factor rotary_scaling_factor topk v_head_dim""",
    "other networks, inference and export": """
        bert_* biencoder_* dino_* vision_* swin_* ict_* inference_* classes_fraction data_per_class_fraction
        disable_chunked_prefill enable_chunked_prefill export_default_te_spec export_draft_vocab_size
        export_eagle_algorithm export_force_local_attention export_freeze_mtp export_kd_cfg export_kd_finalize
        export_kd_teacher_ckpt_format export_kd_teacher_model_config export_kv_cache_quant
        export_legacy_megatron export_model_type export_moe_apply_probs_on_input export_offline_model
        export_te_mcore_model faiss_use_gpu img_dim img_h img_w indexer_batch_size indexer_log_interval
        inference iter_per_epoch mask_factor mask_prob mask_type max_tokens_to_oom mean_noise_span_length
        noise_density num_channels num_classes num_speculative_tokens offset_sampling_seed_by_dp_rank
        output_bert_embeddings patch_dim query_in_block_prob refit_method report_topk_accuracies
        result_rejected_tracker_filename retriever_report_topk_accuracies retriever_score_scaling
        retriever_seq_length return_log_probs sample_rate short_seq_prob skip_prompt_log_probs
        use_legacy_static_engine use_one_sent_docs""",
}
"""Options that change neither the imported network nor what its training computes; those ending in * are whole groups."""
READ = {*NETWORK.split(), *TRAINING.split()}
CHECKED = {*FIXED, *UNSET.split(), *TRAINED_WITH, *UNTRAINED.split()}
UNREAD = {name for names in WITHOUT_EFFECT.values() for name in names.split()}
GROUPS = tuple(name.rstrip("*") for name in UNREAD if name.endswith("*"))


def plain(value: Any) -> Any:
    """An option's value: an enum member's for a stand-in, None for an empty container, text for anything but a number."""
    if isinstance(value, StandIn):
        value = "an object" if value.value is None else value.value
    if value is None or isinstance(value, bool | int | float):
        return value
    return None if isinstance(value, list | tuple | dict) and not value else str(value)[:200]


def known(name: str) -> bool:
    """Whether the option ``name`` is in one of the groups."""
    return name in READ or name in CHECKED or name in UNREAD or name.startswith(GROUPS)


def without(args: Namespace, ignored: Collection[str]) -> Namespace:
    """The arguments without options that the user wants ignored; ConfigError for one that is not there, or that hpclm reads."""
    wrong = [f"--ignore {name}: the checkpoint has no such option" for name in ignored if name not in vars(args)]
    wrong += [f"--ignore {name}: hpclm needs this option" for name in ignored if name in READ]
    if wrong:
        raise ConfigError(wrong)
    return Namespace(**{name: value for name, value in vars(args).items() if name not in ignored})


def of_network(args: Namespace) -> Iterator[str]:
    """Why hpclm does not support the network; an option that it does not know may be one of the network."""
    yield from _wrong(args, FIXED, UNSET.split())
    for name, value in vars(args).items():
        if not known(name) and plain(value):
            yield (
                f"{name}={plain(value)}: hpclm does not know this option; if it changes neither the network nor its training, give "
                f"--ignore {name}"
            )


def of_training(args: Namespace) -> Iterator[str]:
    """Why a run cannot continue here."""
    return _wrong(args, TRAINED_WITH, UNTRAINED.split())


def _wrong(args: Namespace, fixed: Mapping[str, tuple[Any, ...]], unset: Collection[str]) -> Iterator[str]:
    for name, values in fixed.items():
        value = plain(getattr(args, name, None))
        if value is not None and value not in values:
            yield f"{name}={value}, and hpclm has {' or '.join(str(each) for each in values if each is not None)}"
    for name in unset:
        if value := plain(getattr(args, name, None)):
            yield f"{name}={value} is not supported"

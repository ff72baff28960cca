"""Defaults of keys that are missing in config.json, for each class in transformers (5.24)."""

from typing import Any

Keys = dict[str, Any]
BIASES: Keys = dict(attention_bias=False, mlp_bias=False)
COMMON: Keys = dict(initializer_range=0.02, attention_dropout=0.0, tie_word_embeddings=False)
NO_WINDOWS: Keys = dict(sliding_window=4096, use_sliding_window=False, max_window_layers=28, layer_types=None)
SIGMOID: Keys = dict(moe_intermediate_size=1408, n_group=1, topk_group=1, routed_scaling_factor=1.0)
MULTIPLIERS: Keys = dict.fromkeys(
    ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0
)
LATENT: Keys = dict(attention_bias=False, n_shared_experts=2, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64)
LATENT |= dict(qk_nope_head_dim=128, v_head_dim=128)
SLIDING: Keys = dict(sliding_window=4096, layer_types=None)
CAPPED: Keys = dict(final_logit_softcapping=30.0, attn_logit_softcapping=50.0)


def _llama(sizes: tuple[int, int, int, int, int], context: int, **more: Any) -> Keys:
    """The keys of a class like Llama's. ``sizes``: vocabulary, hidden and inner size, layers, heads."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    usual = dict(num_key_value_heads=None, hidden_act="silu", rms_norm_eps=1e-6)
    return COMMON | dict(zip(names, sizes, strict=True)) | usual | dict(max_position_embeddings=context) | more


def _gemma(vocabulary: int, context: int, **more: Any) -> Keys:
    usual: Keys = dict(head_dim=256, hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256)
    usual |= dict(attention_bias=False, num_key_value_heads=4, **SLIDING, tie_word_embeddings=True)
    keys = _llama((vocabulary, 2304, 9216, 26, 8), context, **{**usual, **more})
    del keys["hidden_act"]
    return keys


DEFAULTS: dict[str, Keys] = {
    "gpt2": dict(
        vocab_size=50257,
        n_positions=1024,
        n_embd=768,
        n_layer=12,
        n_head=12,
        n_inner=None,
        activation_function="gelu_new",
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
        layer_norm_epsilon=1e-5,
        initializer_range=0.02,
        tie_word_embeddings=True,
    ),
    "bloom": COMMON
    | dict(
        vocab_size=250880,
        hidden_size=64,
        n_layer=2,
        n_head=8,
        seq_length=2048,  # in the published models; transformers does not read it
        layer_norm_epsilon=1e-5,
        hidden_dropout=0.0,
        tie_word_embeddings=True,
    ),
    "gpt_neox": COMMON
    | dict(
        vocab_size=50432,
        hidden_size=6144,
        num_hidden_layers=44,
        num_attention_heads=64,
        intermediate_size=24576,
        hidden_act="gelu",
        hidden_dropout=0.0,
        max_position_embeddings=2048,
        layer_norm_eps=1e-5,
        use_parallel_residual=True,
    ),
    "phi3": _llama(
        (32064, 3072, 8192, 32, 32),
        4096,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        original_max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        sliding_window=None,
    ),
    "llama": _llama((32000, 4096, 11008, 32, 32), 2048, **BIASES, head_dim=None),
    "mistral": _llama((32000, 4096, 14336, 32, 32), 131072, num_key_value_heads=8, head_dim=None, sliding_window=4096),
    "qwen2": _llama((151936, 4096, 22016, 32, 32), 32768, num_key_value_heads=32, **NO_WINDOWS),
    "qwen3": _llama(
        (151936, 4096, 22016, 32, 32), 32768, attention_bias=False, num_key_value_heads=32, head_dim=128, **NO_WINDOWS
    ),
    "smollm3": _llama(
        (128256, 2048, 11008, 36, 16),
        32768,
        num_key_value_heads=4,
        use_sliding_window=False,
        sliding_window=None,
        no_rope_layers=None,
        no_rope_layer_interval=4,
        layer_types=None,
        **BIASES,
        tie_word_embeddings=True,
        head_dim=None,
    ),
    "granite": _llama((32000, 4096, 11008, 32, 32), 2048, **BIASES, **MULTIPLIERS, head_dim=None),
    "arcee": _llama((32000, 2560, 18432, 32, 32), 4096, hidden_act="relu2", rms_norm_eps=1e-5, **BIASES, head_dim=None),
    "seed_oss": _llama(
        (155136, 4096, 27648, 64, 80),
        524288,
        num_key_value_heads=8,
        attention_out_bias=False,
        attention_dropout=0.1,
        residual_dropout=0.1,
        attention_bias=True,
        mlp_bias=False,
        head_dim=128,
    ),
    "apertus": _llama(
        (131072, 4096, 14336, 32, 32), 65536, attention_bias=False, hidden_act="xielu", rms_norm_eps=1e-5, head_dim=None
    ),
    "olmo2": _llama((50304, 4096, 11008, 32, 32), 2048, attention_bias=False, rms_norm_eps=1e-5),
    "olmo3": _llama((50304, 4096, 11008, 32, 32), 2048, attention_bias=False, rms_norm_eps=1e-5, **SLIDING),
    "gemma2": _gemma(256000, 8192, **CAPPED),
    "gemma3_text": _gemma(262208, 131072, **dict.fromkeys(CAPPED)),
    "glm4": _llama(
        (151552, 4096, 13696, 40, 32),
        131072,
        num_key_value_heads=2,
        head_dim=128,
        rms_norm_eps=1.5625e-07,
        attention_bias=True,
        partial_rotary_factor=0.5,
    ),
    "nanochat": _llama(
        (50304, 768, 8192, 12, 6), 2048, attention_bias=False, hidden_act="relu2", final_logit_softcapping=15.0
    ),
    "exaone4": _llama(
        (102400, 4096, 16384, 32, 32), 2048, num_key_value_heads=32, rms_norm_eps=1e-5, head_dim=None, **SLIDING
    ),
    "hyperclovax": _llama(
        (32000, 4096, 11008, 32, 32), 2048, **BIASES, head_dim=None, **{**MULTIPLIERS, "attention_multiplier": None}
    ),
    "jais2": _llama(
        (150272, 3328, 26624, 32, 26),
        8192,
        hidden_act="relu2",
        layer_norm_eps=1e-5,
        head_dim=None,
        attention_bias=True,
        mlp_bias=True,
    ),
    "vaultgemma": _gemma(256000, 8192, **CAPPED),
    "granite_swa": _llama(
        (100352, 2560, 8192, 24, 20),
        8192,
        **BIASES,
        num_key_value_heads=4,
        rms_norm_eps=1e-5,
        head_dim=None,
        tie_word_embeddings=True,
        sliding_window=128,
        layer_types=None,
        **MULTIPLIERS,
    ),
    "cwm": _llama(
        (128256, 6144, 21504, 64, 48),
        131072,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        head_dim=128,
        mlp_bias=False,
        sliding_window=8192,
        layer_types=None,
    ),
    "ministral": _llama((32000, 4096, 14336, 32, 32), 131072, num_key_value_heads=8, **SLIDING),
    "mixtral": _llama(
        (32000, 4096, 14336, 32, 32),
        131072,
        num_key_value_heads=8,
        head_dim=None,
        rms_norm_eps=1e-5,
        sliding_window=None,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "qwen3_moe": _llama(
        (151936, 2048, 6144, 24, 32),
        32768,
        attention_bias=False,
        num_key_value_heads=4,
        head_dim=None,
        sliding_window=4096,
        use_sliding_window=False,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=False,
        decoder_sparse_step=1,
        mlp_only_layers=None,
    ),
    "olmoe": _llama(
        (50304, 2048, 2048, 16, 16),
        4096,
        attention_bias=False,
        rms_norm_eps=1e-5,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=False,
    ),
    "gpt_oss": _llama(
        (201088, 2880, 2880, 36, 64),
        131072,
        num_key_value_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        sliding_window=128,
        layer_types=None,
        attention_bias=True,
        num_local_experts=128,
        num_experts_per_tok=4,
    ),
    "ernie4_5_moe": {
        key: value
        for key, value in _llama((103424, 2560, 12288, 28, 20), 131072, num_key_value_heads=4, head_dim=None).items()
        if key != "attention_dropout"
    }
    | dict(
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        moe_intermediate_size=1536,
        moe_k=6,
        moe_num_experts=64,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        moe_layer_end_index=-1,
        moe_layer_interval=1,
    ),
    "dots1": _llama(
        (152064, 4608, 10944, 62, 32),
        2048,
        head_dim=None,
        num_key_value_heads=32,
        attention_bias=False,
        sliding_window=4096,
        max_window_layers=62,
        layer_types=None,
        n_shared_experts=None,
        n_routed_experts=None,
        num_experts_per_tok=None,
        norm_topk_prob=False,
        first_k_dense_replace=0,
        **SIGMOID,
    ),
    "glm4_moe": _llama(
        (151552, 4096, 10944, 46, 96),
        131072,
        head_dim=None,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        attention_bias=False,
        n_shared_experts=1,
        n_routed_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        first_k_dense_replace=1,
        use_qk_norm=False,
        **SIGMOID,
    ),
    "deepseek_v3": _llama(
        (129280, 7168, 18432, 61, 128),
        4096,
        **{**LATENT, "num_key_value_heads": 128, "n_shared_experts": 1},
        n_routed_experts=256,
        moe_intermediate_size=2048,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
        n_group=8,
        topk_group=4,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        rope_interleave=True,
    ),
    "deepseek_v2": _llama(
        (102400, 4096, 11008, 32, 32),
        2048,
        **LATENT,
        head_dim=None,
        n_routed_experts=64,
        moe_intermediate_size=1407,
        num_experts_per_tok=None,
        first_k_dense_replace=0,
        n_group=None,
        topk_group=None,
        topk_method="greedy",
        routed_scaling_factor=1.0,
    ),
    "glm4_moe_lite": _llama(
        (154880, 2048, 10240, 47, 20),
        202752,
        **{
            **LATENT,
            "num_key_value_heads": 20,
            "n_shared_experts": 1,
            "rms_norm_eps": 1e-5,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
        },
        n_routed_experts=64,
        moe_intermediate_size=1536,
        num_experts_per_tok=4,
        mlp_layer_types=None,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.8,
        rope_interleave=True,
    ),
    "internlm3": COMMON  # not in transformers: config.json must give its sizes
    | BIASES
    | dict(hidden_act="silu", head_dim=128, num_key_value_heads=2, max_position_embeddings=32768, rms_norm_eps=1e-5),
}
"""By model_type. None: the value follows from other keys."""
NULLABLE = {
    "llama": "attention_dropout",
    "mistral": "num_key_value_heads sliding_window",
    "qwen2": "num_key_value_heads sliding_window",
    "qwen3": "num_key_value_heads sliding_window",
    "smollm3": "num_key_value_heads",
    "seed_oss": "num_key_value_heads head_dim",
    "olmo3": "sliding_window",
    "gemma2": "attention_dropout sliding_window final_logit_softcapping attn_logit_softcapping",
    "gemma3_text": "attention_dropout sliding_window",
    "nanochat": "final_logit_softcapping",
    "exaone4": "sliding_window",
    "jais2": "attention_dropout",
    "vaultgemma": "attention_dropout sliding_window final_logit_softcapping attn_logit_softcapping",
    "granite_swa": "num_key_value_heads sliding_window",
    "ministral": "sliding_window",
    "qwen3_moe": "sliding_window",
    "gpt_oss": "sliding_window",
    "ernie4_5_moe": "num_key_value_heads moe_k moe_num_experts moe_num_shared_experts moe_layer_start_index moe_layer_end_index moe_layer_interval",
    "dots1": "num_key_value_heads n_group topk_group first_k_dense_replace norm_topk_prob attention_dropout sliding_window max_window_layers",
    "deepseek_v3": "num_key_value_heads q_lora_rank v_head_dim n_group topk_group num_experts_per_tok first_k_dense_replace norm_topk_prob rope_interleave attention_dropout",
    "deepseek_v2": "q_lora_rank topk_method attention_dropout",
    "glm4_moe_lite": "q_lora_rank",
    "internlm3": "num_key_value_heads head_dim",
}
"""Keys that may be null although their default is another value."""

"""Classes of transformers that need computations hpclm lacks, so that an error can name them."""

from collections.abc import Mapping
from typing import Any

LATENT = "another form of latent attention than DeepSeek V2 and V3"
RECURRENT = "state-space, linear-attention or convolution layers"
EXPERTS = "another form of experts"
LACKING = {
    LATENT: "longcat_flash mistral4 minicpm3 youtu sarvam_mla",
    "attention to tokens that an indexer chooses": "deepseek_v32 deepseek_v4 glm_moe_dsa",
    "images": "kimi_k25",
    RECURRENT: """kimi_linear jamba bamba granitemoehybrid qwen3_next qwen3_5 qwen3_5_moe lfm2 lfm2_moe falcon_h1 falcon_mamba mamba mamba2 zamba
        zamba2 nemotron_h olmo_hybrid minimax bailing_hybrid recurrent_gemma rwkv xlstm""",
    "gates on the results of attention": "afmoe step3p5 step3p7",
    "a gate on the shared experts": "qwen2_moe",
    "a choice of experts by sparse mixer": "phimoe",
    "factors on the inputs of experts, and attention in chunks": "llama4 llama4_text",
    "attention made of experts": "jetmoe",
    "clipped queries, keys and values": "dbrx",
    "norms of queries and keys after their rotation": "hunyuan_v1_moe hunyuan_v1_dense",
    "values of another width than keys": "mimo_v2_flash",
    "attention and MLP side by side": "cohere cohere2 cohere2_moe phi falcon",
}
"""Features that hpclm lacks, and the model_types that need them."""
KEYS = {
    LATENT: ("kv_lora_rank",),
    RECURRENT: ("mamba_", "ssm_", "state_size", "conv_L_cache", "linear_num_", "linear_key_", "linear_conv_"),
    EXPERTS: ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
}
"""Prefixes of config.json keys that reveal such a feature in other classes."""


def lacking(tree: Mapping[str, Any]) -> str | None:
    """The missing feature that the network of an unsupported config.json needs; None if unknown."""
    kind = tree.get("model_type")
    by_name = next((what for what, kinds in LACKING.items() if kind in kinds.split()), None)
    by_key = (what for what, starts in KEYS.items() if any(key.startswith(starts) and tree[key] for key in tree))
    return by_name or next(by_key, None)

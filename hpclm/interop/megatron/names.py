"""Megatron's names of the weights, of several generations, and ours."""

import re

LAYER = re.compile(r"^(input_layernorm|self_attention|attention)\.")
"""Names in a layer of its own begin like this."""
NO_WEIGHTS = re.compile(r"(\._extra_state|rotary_pos_emb\.inv_freq|rotary_emb\.inv_freq)$")
OUTER = re.compile(r"^(module\.)*(model\.)?(language_model\.)?")
OURS = [
    (r"embedding\.word_embeddings\.weight", "tokens.weight"),
    (r"embedding\.word_embeddings\.norm\.(weight|bias)", r"entry.norm.\1"),
    (r"embedding\.position_embeddings\.weight", "entry.table"),
    (r"(?:output_layer|lm_head)\.weight", "output.weight"),
    (r"(?:encoder|transformer|decoder)\.(?:final_layernorm|final_norm)\.(weight|bias)", r"norm.\1"),
]
IN_LAYER = [
    (r"(?:input_layernorm|input_norm)\.(weight|bias)", r"norm1.\1"),
    (r"self_attention\.linear_qkv\.layer_norm_(weight|bias)", r"norm1.\1"),
    (r"(?:post_attention_layernorm|post_attention_norm|pre_mlp_layernorm)\.(weight|bias)", r"norm2.\1"),
    (r"mlp\.linear_fc1\.layer_norm_(weight|bias)", r"norm2.\1"),
    (r"(?:self_attention|attention)\.(?:query_key_value|linear_qkv)\.(weight|bias)", r"attention.qkv.\1"),
    (r"(?:self_attention|attention)\.(?:dense|linear_proj)\.(weight|bias)", r"attention.out.\1"),
    (r"(?:self_attention|attention)\.([qk])_layernorm\.(weight|bias)", r"attention.\1_norm.\2"),
    (r"mlp\.(?:dense_h_to_4h|linear_fc1)\.(weight|bias)", r"mlp.up.\1"),
    (r"mlp\.(?:dense_4h_to_h|linear_fc2)\.(weight|bias)", r"mlp.down.\1"),
]


def full(name: str, first: int) -> str | None:
    """The name in the whole network of a tensor of a stage whose layers begin with number ``first``.

    None for what is no weight, and for a copy of the token table in a last stage.
    """
    name = OUTER.sub("", name)
    if NO_WEIGHTS.search(name) or name.startswith("word_embeddings_for_head."):
        return None
    return re.sub(r"\blayers\.(\d+)\.", lambda found: f"layers.{first + int(found[1])}.", name)


def ours(name: str) -> str:
    """Our name of a weight; its own where it has none here."""
    layer = re.fullmatch(r"(?:encoder|transformer|decoder)\.layers\.(\d+)\.(.*)", name)
    inner, table = (layer[2], IN_LAYER) if layer else (name, OURS)
    for pattern, replacement in table:
        found = re.fullmatch(pattern, inner)
        if found:
            return (f"block{layer[1]}." if layer else "") + found.expand(replacement)
    return name

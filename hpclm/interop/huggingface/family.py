"""A model class in transformers: the networks that it covers, its config.json, and the names of its weights."""

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.config.checks import value_at
from hpclm.config.experts import COEFFICIENTS
from hpclm.config.fields import required, type_of, type_text
from hpclm.config.section import leaves
from hpclm.interop.huggingface.defaults import DEFAULTS as MISSING
from hpclm.interop.huggingface.defaults import NULLABLE
from hpclm.interop.huggingface.shape import as_json
from hpclm.interop.rules import ConversionRule

Json = Mapping[str, Any]
log = logging.getLogger(__name__)
WITHOUT_EFFECT = """
    model_type architectures transformers_version _name_or_path name_or_path torch_dtype dtype vocab_size initializer_range
    quantization_config use_cache return_dict output_hidden_states output_attentions output_scores return_dict_in_generate torchscript
    use_bfloat16 tf_legacy_loss attn_implementation _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled
    gradient_checkpointing chunk_size_feed_forward bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id
    mask_token_id decoder_start_token_id tokenizer_class prefix id2label label2id num_labels problem_type finetuning_task
    task_specific_params classifier_dropout max_sequence_length n_ctx unsloth_version unsloth_fixed transformers.js_config
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens"""
"""Keys of config.json that no class's logits depend on, or that other code reads (quantization_config, vocab_size)."""
UNSET = """
    add_cross_attention cross_attention_hidden_size is_decoder is_encoder_decoder tie_encoder_decoder pruned_heads head_dim rope_scaling
    layer_types sliding_window use_sliding_window attention_bias mlp_bias summary_use_proj summary_proj_to_labels
    use_bidirectional_attention attn_logit_softcapping"""
"""Keys without effect while they are false or empty."""
CAUSAL = {"is_causal": (True,)}
GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu", "relu2": "relu2"}
GELUS |= dict(gelu_fast="gelu_tanh", gelu_accurate="gelu_tanh", gelu_python_tanh="gelu_tanh", gelu_python="gelu")
"""Maps transformers' names of activations to ours."""
LAYERNORM = dict(norm=("layernorm",), activation=("gelu", "gelu_tanh", "relu", "relu2"), bias=(True,))
"""Settings required by older classes."""
ELSEWHERE = """
    vocab_size vocab_multiple dropout attention.dropout init_std kernels attention.kernel tied attention.kv_heads ffn attention.head_dim
    hidden attention.heads layers context"""
"""Settings that do not affect the choice of a class, or that are checked separately."""
DIVIDED = "Llama Arcee Gemma2 Gemma3 VaultGemma Cwm HyperCLOVAX Jais2 InternLM3 DeepseekV2"
"""Classes (…ForCausalLM) that refuse a hidden size that is not a multiple of the number of heads, even if head_dim is set."""
DERIVED = ("ffn", "attention.kv_heads", "attention.dropout")
"""Settings that take a default if config.json has null."""
DIVISORS = "layers hidden attention.heads attention.kv_heads attention.head_dim attention.latent.kv_rank ffn context vocab_size"
DEFAULTS = dict(leaves(ModelConfig()))


@dataclass(frozen=True)
class Family:
    """One class of transformers."""

    architecture: str
    model_type: str
    keys: Mapping[str, str]
    """Our setting -> its key in config.json."""
    rules: Callable[[ModelConfig], Iterable[ConversionRule]]
    """The conversion rule of each weight."""
    prefix: str
    """Prefix of all tensor names except the output projection; missing in files of the bare model."""
    needs: Mapping[str, tuple[Any, ...]]
    """Our settings, and the values that the class supports."""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of config.json, and the values that hpclm supports; the first is the default for a missing key."""
    constant: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    """Additional keys to write to config.json."""
    activations: Mapping[str, str] = field(default_factory=lambda: GELUS)
    """Maps names of activations in config.json to ours."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Maps keys of old config.json files to their current names."""
    read: str = ""
    """Keys of config.json that ``shape``, ``wrong`` and ``remark`` read."""
    unread: str = ""
    """Keys of config.json that this class's logits do not depend on."""
    more: Callable[[ModelConfig], Iterable[str]] = lambda config: ()
    """Further reasons why the class does not cover a network."""
    grouped: bool = False
    """Whether there may be fewer key/value heads than heads."""
    buffers: tuple[str, ...] = ()
    """Suffixes of tensor names in old files that are not weights."""
    left_out: Callable[[Json, str], bool] = lambda tree, name: False
    """Whether a tensor belongs to layers for multi-token prediction, which imports omit, as transformers does."""
    wrong: Callable[[Json], Iterable[str]] = lambda tree: ()
    """Further features of a config.json that hpclm does not support."""
    remark: Callable[[Json], str | None] = lambda tree: None
    """A warning about a config.json."""
    form: Callable[["Family", Json], "Family"] = lambda family, tree: family
    """The class as a config.json describes it, if its rules or its keys depend on other keys."""
    shape: Callable[[Json], dict[str, Any]] = lambda tree: {}
    """Settings that depend on several keys of a config.json; ConfigError for features that hpclm lacks."""
    covers: tuple[str, ...] = ()
    """Settings translated by ``shape`` and ``constant``. A setting that is in none of ``covers``, ``keys`` and ``needs`` must have its
    default, or the class does not cover the network."""
    width: bool = False
    """Whether the heads may be wider or narrower than hidden / heads."""

    @property
    def theirs(self) -> dict[str, str]:
        """Maps our settings to keys in config.json, including the keys that all classes share."""
        return {"vocab_size": "vocab_size", "init_std": "initializer_range", **self.keys}

    def described(self, config: ModelConfig) -> dict[str, Any]:
        """The config.json of a network."""
        names = {ours: theirs for theirs, ours in reversed([*self.activations.items()])}
        derived = {
            "ffn": config.ffn_width,
            "attention.kv_heads": config.attention.groups,
            "attention.head_dim": config.head_dim,
            "attention.latent.value_dim": config.value_width,
            "experts.ffn": config.expert_width,
            "activation": names.get(config.activation, config.activation),
        }
        values = {theirs: derived.get(ours, value_at(config, ours)) for ours, theirs in self.keys.items()}
        return {"model_type": self.model_type, **values, **self.constant(config), **described_context(config)}

    def settings(self, tree: Json) -> dict[str, Any]:
        """Settings of the network described by a config.json."""
        tree = self.completed(tree)
        missing = [key for key in self.theirs.values() if key not in tree]
        if missing:
            raise ConfigError(f"it does not say {', '.join(missing)}")
        values = {ours: tree[key] for ours, key in self.theirs.items()}
        expected = {ours: _expected(ours, value) for ours, value in values.items()}
        wrong = [
            f"{self.theirs[ours]}={as_json(values[ours])} must be {kind}" for ours, kind in expected.items() if kind
        ]
        if wrong:
            raise ConfigError(wrong)
        if "activation" in values:
            key = self.keys["activation"]
            theirs = values["activation"]
            if not isinstance(theirs, str) or theirs not in self.activations:
                raise ConfigError(f"{key}={as_json(theirs)}, but hpclm supports {', '.join(self.activations)}")
            values["activation"] = self.activations[theirs]
        derived = {
            "ffn": 4 * values["hidden"],
            "attention.kv_heads": values["attention.heads"],
            "attention.dropout": 0.0,
        }
        values |= {name: value for name, value in derived.items() if name in values and values[name] is None}
        remark = self.remark(tree)
        if remark:
            log.warning(remark)
        return values | self.shape(tree)

    def completed(self, tree: Json) -> dict[str, Any]:
        """A config.json with current names, and with the class's defaults for missing keys."""
        named = {self.aliases.get(key, key): value for key, value in tree.items() if self.aliases.get(key) not in tree}
        return {**MISSING.get(self.model_type, {}), **named}

    def obstacles(self, config: ModelConfig) -> list[str]:
        """Reasons why this class does not cover a network."""
        reasons = [
            f"model.{name}={as_json(value_at(config, name))}, but it needs {' or '.join(map(as_json, values))}"
            for name, values in self.needs.items()
            if value_at(config, name) not in values
        ]
        supported_fields = {*self.keys, *self.needs, *self.covers, *ELSEWHERE.split(), *COEFFICIENTS}
        reasons += [
            f"model.{name}={as_json(value)}, which it does not support"
            for name, value in leaves(config)
            if name not in supported_fields and value != DEFAULTS[name]
        ]
        if not self.width and config.attention_width != config.hidden:
            reasons.append(
                f"model.attention.head_dim={config.attention.head_dim}, but it needs model.hidden / model.attention.heads"
            )
        if self.architecture.removesuffix("ForCausalLM") in DIVIDED.split() and config.hidden % config.attention.heads:
            reasons.append(
                f"model.attention.heads={config.attention.heads}, but it needs a divisor of model.hidden={config.hidden}"
            )
        if not self.grouped and config.attention.groups != config.attention.heads:
            reasons.append(
                f"model.attention.kv_heads={config.attention.kv_heads}, but it needs as many as model.attention.heads={config.attention.heads}"
            )
        return [*reasons, *self.more(config)]

    def problems(self, tree: Json) -> list[str]:
        """Features of a config.json that hpclm does not support."""
        reasons = [
            f"{key}={as_json(tree.get(key, values[0]))}, but hpclm supports {' or '.join(map(as_json, values))}"
            for key, values in {**CAUSAL, **self.fixed}.items()
            if tree.get(key, values[0]) not in values
        ]
        supported_keys = {*self.keys.values()} | {*CAUSAL, *self.fixed, *self.aliases}
        supported_keys |= {*WITHOUT_EFFECT.split(), *self.read.split(), *self.unread.split()}
        unset = {*UNSET.split()}
        reasons += [
            f"{key}={as_json(value)}: hpclm does not know this key; if the logits do not depend on it, give --ignore {key}"
            for key, value in tree.items()
            if value is not None and key not in supported_keys and (value or key not in unset)
        ]
        reasons += [
            f"{old}={as_json(tree[old])} and {key}={as_json(tree[key])}: two names of one setting"
            for old, key in self.aliases.items()
            if old in tree and tree[old] != tree.get(key, tree[old])
        ]
        nullable = NULLABLE.get(self.model_type, "").split()
        reasons += [
            f"{key}=null, and {self.architecture} needs a value"
            for key, default in MISSING.get(self.model_type, {}).items()
            if default is not None and key not in nullable and key in tree and tree[key] is None
        ]
        whole = self.completed(tree)
        heads = whole.get("num_attention_heads")
        hidden = whole.get("hidden_size")
        if (
            self.architecture.removesuffix("ForCausalLM") in DIVIDED.split()
            and isinstance(heads, int)
            and isinstance(hidden, int)
            and heads
            and hidden % heads
        ):
            reasons.append(
                f"hidden_size={hidden}, and {self.architecture} needs a multiple of num_attention_heads={heads}"
            )
        return reasons or [*self.wrong(whole)]


def described_context(config: ModelConfig) -> dict[str, Any]:
    """transformers scales dynamic rotary positions beyond max_position_embeddings, not beyond the original length."""
    if config.rope.scaling.get("rope_type") != "dynamic":
        return {}
    return {"max_position_embeddings": json.loads(config.rope.scaling["original_max_position_embeddings"])}


def _expected(name: str, value: Any) -> str:
    """The kind of value that the setting model.``name`` takes; empty if ``value`` is valid."""
    kind = type_of(f"model.{name}")
    inner = required(kind)
    least = name in DIVISORS.split()
    if inner not in (int, float, bool) or (value is None and (inner is not kind or name in DERIVED)):
        return ""
    if isinstance(value, bool) == (inner is bool) and isinstance(value, (inner, int)) and (value >= 1 or not least):
        return ""
    return f"{type_text(kind)} of at least 1" if least else type_text(kind)

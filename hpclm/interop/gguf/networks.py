"""The networks that llama.cpp runs: their names in a GGUF file, the names of their weights, and their limits.

Sources: llama.cpp, src/models/*.cpp and src/llama-arch.cpp; the specification of GGUF. Checked against the llama.cpp in llama-cpp-python
0.3.36.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig, rope
from hpclm.config.checks import value_at
from hpclm.interop.huggingface import families
from hpclm.interop.rules import ConversionRule, in_one, neighbours, of_modules, reordered
from hpclm.model.position import frequencies

MODULES = {
    "tokens": "token_embd",
    "entry": "position_embd",
    "entry.norm": "token_embd_norm",
    "norm1": "attn_norm",
    "attention.qkv": ("attn_q", "attn_k", "attn_v"),
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention.out": "attn_output",
    "post_norm1": "post_attention_norm",
    "norm2": "ffn_norm",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "post_norm2": "post_ffw_norm",
    "norm": "output_norm",
}
"""Maps our modules to llama.cpp's; the output projection has the same name."""
GATED = {"mlp.up": ("ffn_gate", "ffn_up")}
EPSILON = {"rmsnorm": "attention.layer_norm_rms_epsilon", "layernorm": "attention.layer_norm_epsilon"}
NO_YARN = {"mscale", "mscale_all_dim", "truncate", "attention_factor"}
"""Parameters of YaRN that llama.cpp does not support."""
SMOLLM3_KINDS = ("full", "full", "full", "nope")
Keys = dict[str, Any]


@dataclass(frozen=True)
class Network:
    """A network of llama.cpp, limited to features that the classes of transformers share."""

    name: str
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Our settings that the class of transformers leaves open, with the values that llama.cpp supports."""
    fused: bool = False
    """Whether q, k and v are one tensor."""
    joined: bool = False
    """Whether gate and up projection of the MLP are one tensor."""
    neighbours: bool = False
    """Whether rotary positions rotate pairs of neighbouring features instead of the two halves of a head."""
    untied: bool = False
    """Whether the file must contain the output projection even if it is tied to the embedding."""
    scalings: tuple[str, ...] = ("linear", "yarn")
    """Supported kinds of scaled rotary positions."""
    windows: bool = False
    """Whether some layers may have a window."""
    biased: bool = False
    """Whether attention's output projection and the MLP may have biases."""
    keys: Callable[[ModelConfig], Keys] = lambda config: {}
    """Metadata of this network alone."""
    more: Callable[[ModelConfig], Iterable[str]] = lambda config: ()
    """Further reasons why llama.cpp cannot compute a network."""

    def rules(self, config: ModelConfig) -> Iterator[ConversionRule]:
        """The conversion rule of each weight."""
        modules: dict[str, Any] = dict(MODULES)
        if config.gated and not self.joined:
            modules |= GATED
        for rule in of_modules(config, modules, "blk.{}."):
            if ".attention.qkv." in rule.ours and self.fused:
                yield in_one(rule.ours, rule.theirs[0].replace("attn_q.", "attn_qkv."), config)
            elif ".attention.qkv." in rule.ours and self.neighbours:
                yield reordered(rule, neighbours(config))
            elif rule.ours == "tokens.weight" and config.tied and self.untied:
                yield _twice(rule)
            else:
                yield rule

    def metadata(self, config: ModelConfig) -> Keys:
        """The file's keys that describe the network, without the prefix of its name."""
        metadata: Keys = {
            "vocab_size": config.vocab_size,
            "context_length": config.context,
            "embedding_length": config.hidden,
            "block_count": config.layers,
            "feed_forward_length": config.ffn_width,
            "attention.head_count": config.attention.heads,
            "attention.head_count_kv": config.attention.groups,
            "attention.key_length": config.head_width,
            "attention.value_length": config.head_width,
            EPSILON[config.norm]: config.norm_eps,
        }
        if config.positions == "rope":
            metadata |= {"rope.dimension_count": config.rotated, "rope.freq_base": config.rope.base, **_scaling(config)}
        return metadata | self.keys(config)

    def extra(self, config: ModelConfig) -> dict[str, Tensor]:
        """Tensors that are not weights: Llama 3.1's divisors of the rotary frequencies."""
        if rope_type(config) != "llama3":
            return {}
        width = config.rotated
        base = config.rope.base
        context = config.context
        cpu = torch.device("cpu")
        plain, _ = frequencies(width, base, {}, context, context, cpu)
        scaled, _ = frequencies(width, base, config.rope.scaling, context, context, cpu)
        return {"rope_freqs.weight": plain / scaled}

    def obstacles(self, config: ModelConfig) -> Iterator[str]:
        """Reasons why llama.cpp cannot compute a network that transformers' class covers."""
        for name, values in self.needs.items():
            if value_at(config, name) not in values:
                yield f"model.{name}={value_at(config, name)}, but it needs {' or '.join(map(str, values))}"
        windows = {layer.window for layer in config.blocks}
        if config.attention.window and not (self.windows and None in windows):
            layers = "some layers" if self.windows else "its layers"
            yield f"model.attention.window={config.attention.window}, but {layers} have full attention"
        if any(config.biases[1:]) and not self.biased:
            yield "biases in attention's output projection or the MLP, which it does not support"
        kind = rope_type(config)
        if kind and kind not in self.scalings:
            yield f"model.rope.scaling.rope_type={kind}, but it needs {' or '.join(self.scalings) or 'none'}"
        if kind == "yarn" and config.rope.scaling.keys() & NO_YARN:
            yield "model.rope.scaling with mscale, mscale_all_dim, truncate or attention_factor, which it does not support"
        yield from self.more(config)


def rope_type(config: ModelConfig) -> str | None:
    """The kind of scaled rotary positions."""
    return config.rope.scaling.get("rope_type")


def _scaling(config: ModelConfig) -> Keys:
    given = rope.parsed(config.rope.scaling)
    if rope_type(config) not in ("linear", "yarn"):
        return {}
    scaling = {"type": rope_type(config), "factor": float(given["factor"])}
    names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    scaling |= {theirs: float(given[ours]) for ours, theirs in names.items() if ours in given}
    if "original_max_position_embeddings" in given:
        scaling["original_context_length"] = given["original_max_position_embeddings"]
    return {f"rope.scaling.{key}": value for key, value in scaling.items()}


def _twice(rule: ConversionRule) -> ConversionRule:
    """The rule for an embedding that also serves as output projection."""
    return replace(rule, theirs=(*rule.theirs, "output.weight"), split=lambda x: [*rule.split(x), *rule.split(x)])


def _windows(config: ModelConfig) -> Keys:
    """The keys for layers with a window; none for a network without such layers."""
    if not config.attention.window:
        return {}
    pattern = [layer.window is not None for layer in config.blocks]
    return {"attention.sliding_window": config.attention.window, "attention.sliding_window_pattern": pattern}


def _scaled_windows(config: ModelConfig, scaled: bool) -> Iterator[str]:
    if config.attention.window and config.rope.scaling and config.rope.window_scaled != scaled:
        yield f"model.rope.window_scaled={config.rope.window_scaled}, but it needs {scaled}"


def _smollm3(config: ModelConfig) -> Iterator[str]:
    if any(config.attention.kind(i) != SMOLLM3_KINDS[i % 4] for i in range(config.layers)):
        yield f"model.attention.pattern={config.attention.pattern}, but it needs every fourth layer without positions"


def _gemma(config: ModelConfig, largest: int) -> Iterator[str]:
    if config.attention.score_scale not in (None, config.head_width**-0.5) or config.layers == largest:
        yield f"model.attention.score_scale={config.attention.score_scale} in {config.layers} layers, but it needs 1 / sqrt(size of a head)"


def _gemma2(config: ModelConfig) -> Iterator[str]:
    yield from _gemma(config, 46)
    yield from _scaled_windows(config, True)
    if not (config.attention.score_cap and config.logit_cap and config.attention.window):
        yield "no model.attention.score_cap, model.logit_cap or model.attention.window, but it needs all three"


def _gemma3(config: ModelConfig) -> Iterator[str]:
    yield from _gemma(config, 62)
    yield from _scaled_windows(config, False)


def _gemma3_keys(config: ModelConfig) -> Keys:
    keys = _windows(config)
    keys["rope.freq_base_swa"] = config.rope.window_base or config.rope.base
    if config.logit_cap:
        keys["final_logit_softcapping"] = config.logit_cap
    return keys


def _olmo2(config: ModelConfig) -> Iterator[str]:
    yield from _scaled_windows(config, False)
    if config.rope.window_base not in (None, config.rope.base):
        yield f"model.rope.window_base={config.rope.window_base}, but it needs one base for all layers"


SWIGLU = {"activation": ("swiglu",)}
TANH = {"activation": ("gelu_tanh",)}
GPT2 = Network("gpt2", TANH, fused=True, biased=True)
LLAMA = Network("llama", SWIGLU, neighbours=True, biased=True, scalings=("linear", "yarn", "llama3"))
OLMO2 = Network("olmo2", SWIGLU, untied=True, windows=True, more=_olmo2, keys=_windows)
GRANITE = Network(
    "granite",
    SWIGLU,
    neighbours=True,
    biased=True,
    keys=lambda c: {
        "attention.scale": c.attention.score_scale or c.head_width**-0.5,
        "embedding_scale": c.embed_multiplier,
        "residual_scale": c.residual_multiplier,
        "logit_scale": 1 / c.logit_multiplier,
    },
)
GEMMA2 = Network(
    "gemma2",
    {"activation": ("geglu_tanh",), "tied": (True,)},
    windows=True,
    more=_gemma2,
    keys=lambda c: (
        _windows(c)
        | {"attn_logit_softcapping": c.attention.score_cap, "final_logit_softcapping": c.logit_cap}
        | {"rope.freq_base_swa": c.rope.window_base or c.rope.base}
    ),
)
GEMMA3 = replace(GEMMA2, name="gemma3", needs={"activation": ("geglu_tanh",)}, more=_gemma3, keys=_gemma3_keys)
NETWORKS = {
    "GPT2LMHeadModel": GPT2,
    "BloomForCausalLM": replace(GPT2, name="bloom"),
    "GPTNeoXForCausalLM": Network(
        "gptneox", TANH, fused=True, biased=True, untied=True, keys=lambda c: {"use_parallel_residual": False}
    ),
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "SeedOssForCausalLM"), LLAMA),
    "Qwen3ForCausalLM": Network("qwen3", SWIGLU),
    "Olmo2ForCausalLM": OLMO2,
    "Olmo3ForCausalLM": OLMO2,
    "SmolLM3ForCausalLM": Network("smollm3", SWIGLU, neighbours=True, more=_smollm3),
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "GraniteForCausalLM": GRANITE,
    "ArceeForCausalLM": Network("arcee", neighbours=True),
    "Glm4ForCausalLM": Network("glm4", SWIGLU, neighbours=True, joined=True),
}
"""Maps classes of transformers to llama.cpp's equivalent network."""


def of_network(config: ModelConfig) -> Network:
    """llama.cpp's network for ``config``; ConfigError with the reason if it may compute other logits."""
    kind = families.of_network(config).architecture
    if kind not in NETWORKS:
        names = ", ".join(dict.fromkeys(network.name for network in NETWORKS.values()))
        raise ConfigError(
            f"{kind} cannot be written as GGUF; hpclm writes llama.cpp's {names}. For transformers, name a folder as TARGET"
        )
    network = NETWORKS[kind]
    wrong = list(network.obstacles(config))
    if wrong:
        raise ConfigError([f"llama.cpp's {network.name} would compute other logits than this network:", *wrong])
    return network

"""A config.json as the class of its model_type in transformers completes it: with its defaults, types and current names."""

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig

from hpclm.base.errors import ConfigError
from hpclm.config.model import MAX_LAYERS
from hpclm.interop.huggingface.shape import Json, as_json

OWN = "hpclm"
NO_EFFECT = """
    max_window_layers use_sliding_window sliding_window_pattern no_rope_layer_interval original_max_position_embeddings
    partial_rotary_factor num_nextn_predict_layers router_aux_loss_coef output_router_logits pretraining_tp use_cache quantization_config
    tokenizer_class classifier_dropout task_specific_params unsloth_version unsloth_fixed transformers.js_config"""
"""Keys that no class's logits depend on, that other code reads, or from which transformers has derived others."""
UNSET = dict(
    is_causal=True, attention_bias=False, mlp_bias=False, is_decoder=False, add_cross_attention=False, pruned_heads={}
)
UNSET |= dict.fromkeys(("tie_encoder_decoder", "torchscript", "use_bfloat16", "tf_legacy_loss"), False)
"""Keys that many files have though their class does not, with the only value that hpclm supports."""
FIELD = re.compile(r"field '(\w+)'")


class Keys(Mapping[str, Any]):
    """A completed config.json. It records the keys that were read."""

    def __init__(self, kind: type[PretrainedConfig], tree: Json):
        self.kind = kind
        self.whole = _completed(kind, tree)
        self.used: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        key = self.kind.attribute_map.get(key, key)
        self.used.add(key)
        return self.whole[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)

    def unread(self) -> Iterator[str]:
        """Errors for keys that were not read, unless they have no effect, or follow from those that were read."""
        bookkeeping = {*PretrainedConfig().to_dict(), *NO_EFFECT.split()}
        derived = _completed(self.kind, {key: value for key, value in self.whole.items() if key in self.used})
        for key, value in self.whole.items():
            if key in self.used or key in bookkeeping or key.endswith("_token_id"):
                continue
            if value == derived.get(key, UNSET.get(key)):
                continue
            if key in derived:
                yield f"{key}={as_json(value)}, but hpclm supports {as_json(derived[key])}"
            elif key == "auto_map":
                yield (
                    f"auto_map={as_json(value)}: hpclm runs no code that comes with a model; if transformers' own {self.kind.__name__} "
                    "describes the same network, remove auto_map from a copy of config.json"
                )
            else:
                yield (
                    f"{key}={as_json(value)}: hpclm does not know this key; if the logits do not depend on it, remove it from a copy "
                    "of config.json"
                )


def completed(tree: Json, model_type: str) -> Keys:
    """``tree`` as the class of ``model_type`` completes it; ConfigError if transformers refuses it."""
    return Keys(config_class(model_type), tree)


def config_class(model_type: str) -> type[PretrainedConfig]:
    """The class of a config.json of this ``model_type``; ConfigError if this version of transformers lacks it."""
    if model_type == OWN:
        from hpclm.interop.huggingface.modeling_hpclm import HpclmConfig  # takes seconds

        return HpclmConfig
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(f"transformers {transformers.__version__} lacks model_type={model_type}; a newer one has it")
    kind: type[PretrainedConfig] = CONFIG_MAPPING[model_type]
    return kind


def _completed(kind: type[PretrainedConfig], tree: Json) -> dict[str, Any]:
    for old, key in kind.attribute_map.items():
        if old in tree and tree[old] != tree.get(key, tree[old]):
            raise ConfigError(f"{old}={as_json(tree[old])} and {key}={as_json(tree[key])}: two names of one setting")
    for key in ("num_hidden_layers", "n_layer"):  # some classes make a list with an entry for each layer
        layers = tree.get(key)
        if isinstance(layers, int) and not 1 <= layers <= MAX_LAYERS:
            raise ConfigError(f"{key}={layers} must be from 1 to {MAX_LAYERS}")
    try:
        with quiet():
            return kind.from_dict(copy.deepcopy(dict(tree))).to_dict()
    except Exception as error:  # the classes raise any exception
        raise ConfigError(_refusal(kind, tree, error)) from None


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' log and progress bars below the level of errors."""
    level = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


def _refusal(kind: type[PretrainedConfig], tree: Json, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()] or [""]
    reason = f"{kind.__name__} of transformers refuses it: {lines[-1][:300]}"
    field = FIELD.search(lines[0])
    if field is None or field[1] not in tree:
        return reason
    return f"{field[1]}={as_json(tree[field[1]])}: {reason}"

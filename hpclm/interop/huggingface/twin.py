"""Proof of an import: a small model of transformers with the same config.json has the same logits in hpclm.

This twin has the config.json that is imported, but smaller: fewer heads of the same width, small inner widths, and the first layers, up to
one of every kind. Windows and the original and maximal lengths are short, so that a text can be longer than them.
"""

import copy
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from hpclm.base.errors import ConfigError
from hpclm.config import EngineConfig, ModelConfig
from hpclm.interop.huggingface.completion import OWN, Keys, quiet
from hpclm.interop.huggingface.family import Family
from hpclm.interop.huggingface.shards import Reader
from hpclm.interop.run import TensorSource
from hpclm.model import gpt
from hpclm.model.stack import Stack

Tree = dict[str, Any]
Named = Callable[[TensorSource, Family, ModelConfig], TensorSource]
LIMIT = 1e-4
"""The largest difference of two logits, relative to the largest logit."""
DRAWS = 2
"""The logits must agree for one of these draws of the weights: rounding may decide between two experts with nearly equal scores."""
VOCABULARY = 128
EMBEDDED = 0.02
"""Factor of the embedding's values: their squares are near the epsilon of the norms, so that it counts."""
LENGTHS = ("sliding_window", "original_max_position_embeddings", "max_position_embeddings", "n_positions", "seq_length")
SHORTEST = 8
"""Tokens: the least of the twin's lengths."""
RATIO = 4
"""The largest ratio of one of the twin's lengths to the next shorter one."""
GAIN = 2.0
"""Standard deviation of a matrix's outputs for normalised inputs: enough for clamps to act and for sharp attention."""


def prove(family: Family, keys: Keys, config: ModelConfig, named: Named) -> None:
    """ConfigError if the twin of the network ``config``, whose config.json is ``keys``, has other logits in hpclm than in transformers.

    ``named``: gives the tensors of a folder the names of a whole model.
    """
    small = family.completed(shrunk(family, keys.whole, config))
    family = family.form(family, small)
    network = ModelConfig.of({"vocab_multiple": 1, **family.settings(small)})
    worst = math.inf
    for seed in range(DRAWS):
        worst = min(worst, _difference(family, small, network, seed, named))
        if worst <= LIMIT:
            return
    raise ConfigError(
        f"a small {family.architecture} with these settings has other logits in transformers {transformers.__version__} than in hpclm: they "
        f"differ by {worst:.2g} of the largest. This is a fault of hpclm; please report it with config.json"
    )


def shrunk(family: Family, whole: Mapping[str, Any], config: ModelConfig) -> Tree:
    """A smaller network of the same class, as config.json."""
    tree = {key: value for key, value in whole.items() if key not in ("quantization_config", "dtype", "architectures")}
    tree |= {key: 0 for key in tree if key.endswith("_token_id")}
    kinds = [(config.attention.kind(i), config.experts.in_layer(i)) for i in range(config.layers)]
    layers = max(min(2, config.layers), *(kinds.index(kind) + 1 for kind in kinds))
    values = {"vocab_size": VOCABULARY, "layers": layers, **_widths(family, config)}
    keys = {"attention.kv_heads": "num_key_value_heads", **family.theirs}
    tree |= {keys[ours]: value for ours, value in values.items() if tree.get(keys.get(ours, ""))}
    for key, value in tree.items():
        if isinstance(value, list) and len(value) == config.layers:
            tree[key] = value[:layers]
    lengths = sorted({config.context, *_lengths(tree)})
    shorter = {lengths[0]: SHORTEST}
    for below, length in pairwise(lengths):
        shorter[length] = max(shorter[below] + 1, round(shorter[below] * min(length / below, RATIO)))
    return _replaced(tree, shorter)


def _widths(family: Family, config: ModelConfig) -> dict[str, int]:
    """Sizes of the twin, with as many queries for each key, in heads of the same width."""
    groups = config.attention.groups
    queries = config.attention.heads // groups
    most = 2
    if queries == 1:
        most = 4 if groups.bit_count() == 1 else 6  # ALiBi has another formula if it is no power of two
    groups = min(groups, most)
    heads = groups * queries
    hidden = heads * config.head_width
    if "attention.head_dim" in family.keys:
        hidden = heads * 4 * math.ceil(16 / heads)  # PyTorch multiplies experts' matrices with rows of 16 bytes
    return {
        "attention.heads": heads,
        "attention.kv_heads": groups,
        "hidden": hidden,
        "ffn": 96,
        "experts.ffn": 32,
        "attention.latent.kv_rank": 24,
        "attention.latent.q_rank": 20,
    }


def _lengths(tree: Mapping[str, Any]) -> Iterator[int]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _lengths(value)
        elif key in LENGTHS and value:
            yield value


def _replaced(tree: Mapping[str, Any], lengths: Mapping[int, int]) -> Tree:
    replaced = dict(tree)
    for key, value in tree.items():
        if isinstance(value, Mapping):
            replaced[key] = _replaced(value, lengths)
        elif key in LENGTHS and value:
            replaced[key] = lengths[value]
    return replaced


@torch.no_grad()
def _difference(family: Family, keys: Keys, config: ModelConfig, seed: int, named: Named) -> float:
    """The largest difference of a logit, relative to the largest logit, in a text below all lengths and in one above them."""
    draw = torch.Generator().manual_seed(seed)
    longest = config.context
    window = keys.whole.get("sliding_window") and not config.attention.window  # hpclm omits one as long as the context
    if config.positions in ("rope", "alibi") and not window:
        longest += SHORTEST
    with quiet(), torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        with _refused(family):
            there = _drawn(keys, draw)
            there.save_pretrained(folder)
        here = _converted(family, config, named(Reader(Path(folder)), family, config))
    worst = 0.0
    for length in (SHORTEST - 1, longest):
        tokens = torch.randint(VOCABULARY, (2, length), generator=draw)
        with _refused(family):
            theirs = there(tokens, use_cache=False).logits
        difference = (here.head(tokens).logits() - theirs).abs().max() / theirs.abs().max()
        worst = max(worst, difference.nan_to_num(math.inf).item())
    return worst


@contextmanager
def _refused(family: Family) -> Iterator[None]:
    """ConfigError instead of any exception of transformers."""
    try:
        yield
    except Exception as error:  # the classes raise any exception
        raise ConfigError(
            f"transformers cannot run a small {family.architecture} with these settings: {error}"
        ) from None


def _drawn(keys: Keys, draw: torch.Generator) -> Any:
    """transformers' model with random values in every tensor."""
    config: Any = keys.kind.from_dict(copy.deepcopy(keys.whole))
    if keys.kind.model_type == OWN:
        from hpclm.interop.huggingface.modeling_hpclm import HpclmForCausalLM

        model: Any = HpclmForCausalLM(config).float()
    else:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    chosen = [(name, x) for name, x in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for name, tensor in (*model.named_parameters(), *chosen):
        tensor.data = _values(name, tensor, draw)
    if not config.tie_word_embeddings:  # otherwise logits would be too small for a cap
        model.get_input_embeddings().weight.data *= EMBEDDED
    return model.eval()


def _values(name: str, tensor: Tensor, draw: torch.Generator) -> Tensor:
    noise = torch.randn(tensor.shape, generator=draw)
    if tensor.ndim > 1:
        return noise * GAIN * tensor.shape[-1] ** -0.5
    gain = name.endswith("weight")  # of a norm
    return noise * 0.2 + gain


def _converted(family: Family, config: ModelConfig, source: TensorSource) -> Stack:
    """hpclm's model with the weights of ``source``."""
    layers = gpt.layers(config, EngineConfig(), torch.float32, 0)
    stack = Stack(config, layers, torch.float32)
    stack.load_weights(
        {rule.ours: rule.join([source.read(name) for name in rule.theirs]).float() for rule in family.rules(config)}
    )
    return stack.eval()

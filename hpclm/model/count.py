"""Parameters of a model, FLOPs per token, and the number of logits in memory at a time. Needs no PyTorch."""

from collections.abc import Iterator

from hpclm.config import ModelConfig, fp8
from hpclm.config.layer import Layer
from hpclm.config.model import BLOCKS
from hpclm.model import weights
from hpclm.model.weights import Weight

CHUNK = 4096
"""Smallest number of tokens in a chunk of logits on a GPU: enough for fast matrix products."""
ROOM = 4 << 30
"""Bytes for logits and their intermediates on a large GPU. Fewer chunks accumulate into the embedding's gradient less often."""
LARGE_GPU_BYTES = 60 << 30
"""Bytes of memory of a large GPU. A threshold, not a fraction, so that GPUs of the same model choose equally."""
PER_LOGIT = 8
"""Bytes per logit: a 16-bit logit, its log-probability in fp32, and its gradient."""


def network(config: ModelConfig) -> Iterator[tuple[str, Weight]]:
    """All weights of the network by name, including the padding of the embedding."""
    yield from weights.before_blocks(config)
    for number, layer in enumerate(config.blocks):
        yield from ((f"block{number}.{name}", weight) for name, weight in weights.of_block(config, layer).items())
    yield from weights.after_blocks(config)


def parameters(config: ModelConfig) -> int:
    """Parameters of the model, including the padding of the embedding."""
    return sum(weight.size for _, weight in network(config))


def active_parameters(config: ModelConfig) -> int:
    """Parameters that compute any one token: of the experts, only model.experts.per_token in each layer."""
    return sum(weight.active for _, weight in network(config))


def trained_parameters(config: ModelConfig) -> int:
    """Parameters that model.freeze leaves to train."""
    return sum(weight.size for name, weight in network(config) if not config.freezes(name))


def described_size(config: ModelConfig) -> str:
    """The number of parameters for messages; with experts also the number of active parameters."""
    text = f"{parameters(config):,} parameters"
    if config.block not in BLOCKS:
        return f"{text}, counted with hpclm's block; model.block={config.block} may have others"
    if active_parameters(config) < parameters(config):
        text += f" ({active_parameters(config):,} active for each token)"
    if config.freeze:
        text += f", {trained_parameters(config):,} of them trained"
    return text


def block(config: ModelConfig, layer: Layer) -> int:
    """Parameters of one block."""
    return sum(weight.size for weight in weights.of_block(config, layer).values())


def active_block(config: ModelConfig, layer: Layer) -> int:
    """Parameters of one block that compute any one token."""
    return sum(weight.active for weight in weights.of_block(config, layer).values())


def products(config: ModelConfig, layer: Layer) -> int:
    """Parameters of a block's matrices that multiply any one token."""
    return sum(weight.active for weight in weights.of_block(config, layer).values() if weight.is_matrix)


def linears(config: ModelConfig, layer: Layer) -> list[tuple[int, int]]:
    """Inputs and outputs of each linear layer of one block; excludes experts and their router."""
    return [
        (columns, rows)
        for weight in weights.of_block(config, layer).values()
        if weight.is_matrix and not weight.stack and weight.placement.dim is not None
        for rows, columns in [weight.shape]
    ]


def fp8_gain(config: ModelConfig) -> float:
    """Upper bound on the speed-up of a step by engine.fp8. In a block with FP8, two of the three products of a linear layer take half as
    long as in bf16: those for outputs and for gradients of inputs."""
    multiplied = sum(a * b for number in fp8.blocks(config) for a, b in linears(config, config.blocks[number]))
    return 1 / (1 - 4 * multiplied / flops_per_token(config) / 2)


def attended(config: ModelConfig, causal: bool = True) -> float:
    """Mean number of tokens that a token attends to. Without ``causal``, every token is assumed to attend to as
    many tokens as the last one."""
    context = config.context
    spans = [min(layer.window or context, context) for layer in config.blocks]
    return sum(span - causal * span**2 / (2 * context) for span in spans) / len(spans)


def flops_per_token(config: ModelConfig, causal: bool = True) -> float:
    """Floating-point operations of one token's forward and backward pass, without recomputation.

    Matrix products cost 6 per weight and token (Kaplan et al. 2020); attention 12 x layers x hidden x context (Chowdhery et al. 2022,
    appendix B), halved by the causal mask, and less with windows. The embedding counts once, as the output projection. Only the experts
    that a token goes to are included. The gradient of a frozen weight, a third of its products, is not computed.
    """
    multiplied = sum(products(config, layer) for layer in config.blocks) + config.hidden * config.padded_vocab
    of_attention = config.layers * 12 * attended(config, causal) * config.core_width
    return 6 * multiplied - 2 * _frozen_products(config) + of_attention


def _frozen_products(config: ModelConfig) -> int:
    """Parameters of the frozen matrices that multiply any one token."""
    if not config.freeze:
        return 0
    output = "tokens.weight" if config.tied else "output.weight"
    named = [(name, weight) for name, weight in network(config) if name.startswith("block") or name == output]
    return sum(weight.active for name, weight in named if weight.is_matrix and config.freezes(name))


def recompute_flops(config: ModelConfig, recompute: str) -> float:
    """FLOPs per token that ``engine.recompute`` adds: the forward pass of the blocks, or of the attention core."""
    if recompute == "full":
        return (flops_per_token(config) - 6 * config.hidden * config.padded_vocab) / 3
    return config.layers * 2 * config.context * config.core_width if recompute == "selective" else 0.0


def loss_chunk(tokens: int, vocab: int, memory: float) -> int:
    """The default number of tokens in a chunk of logits. ``tokens``: tokens of the micro-batch. ``vocab``: size of the vocabulary.
    ``memory``: bytes of the GPU. Chunks are equal if possible, so that compiled code sees one shape."""
    # a threshold: with a fraction of the memory, two GPUs of the same model could add up different chunks
    room = ROOM if memory >= LARGE_GPU_BYTES else 0
    largest = max(CHUNK, room // (PER_LOGIT * vocab))
    fewest = max(1, -(-tokens // largest))
    count = next((parts for parts in range(fewest, 2 * fewest) if tokens % parts == 0), fewest)
    return -(-tokens // count)

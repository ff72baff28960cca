"""How many tokens' logits a GPU computes at a time for the loss, if engine.loss_chunk does not say. Needs no PyTorch."""

TOKENS = 4096
"""On any GPU: enough for fast matrix products."""
ROOM = 4 << 30
"""Bytes for logits and what the loss makes of them on a large GPU: fewer chunks add to the gradient of the embedding less often."""
LARGE = 60 << 30
"""Bytes of memory of a large GPU. It is a threshold, not a fraction, so that GPUs of one kind choose alike."""
PER_LOGIT = 8
"""Bytes: in 16 bits a logit, its log-probability in fp32, and its gradient."""


def chosen(tokens: int, vocab: int, memory: float) -> int:
    """Tokens of a micro-batch of ``tokens`` to compute at a time on a GPU with ``memory`` bytes, which has ``vocab`` entries of
    the vocabulary: equal chunks if possible, so that compiled code sees one shape."""
    room = ROOM if memory >= LARGE else 0
    most = max(TOKENS, room // (PER_LOGIT * vocab))
    least = max(1, -(-tokens // most))
    count = next((parts for parts in range(least, 2 * least) if tokens % parts == 0), least)
    return -(-tokens // count)

"""Where randomness inside a step comes from: from numbers that say where it happens, never from what happened before.

So dropout is the same however layers and micro-batches are laid out over processes, and when a layer is computed again. Only
tensor-parallel processes differ: each drops in its own part.
"""

MASK = (1 << 64) - 1


def mix(*words: int) -> int:
    """A seed of 63 bits that follows from ``words`` and their order (finaliser of SplitMix64, Steele et al. 2014)."""
    state = 0x9E3779B97F4A7C15
    for word in words:
        state = (state ^ (word & MASK)) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
        state ^= state >> 31
    return state >> 1

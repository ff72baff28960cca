"""Plain loops over numbers, compiled where they are long."""

from collections.abc import Callable
from typing import Any

WORTHWHILE = 1_000_000  # turns of the innermost loop; fewer are done before the compiler has started


def compiled(loop: Callable[..., Any], turns: int) -> Callable[..., Any]:
    """``loop`` itself, or where ``turns`` are many its numba translation, which gives the same numbers bit for bit."""
    if turns < WORTHWHILE:
        return loop
    from numba import njit

    translated: Callable[..., Any] = njit(loop)
    return translated

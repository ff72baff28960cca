"""Metric names as trackers accept them. A refused name always gets the same substitute."""

import hashlib
import re
from collections.abc import Callable
from posixpath import normpath

MAX_NAME_CHARACTERS = 250  # characters of a name
DIGEST = 6  # characters of the hash that distinguishes substitutes


class TrackerNames:
    """The names in one tracker. ``substitutes`` maps refused names to their substitutes."""

    def __init__(self, accepted: Callable[[str], bool]):
        """``accepted``: returns whether the tracker accepts a name."""
        self.substitutes: dict[str, str] = {}
        self._accepted = accepted

    def __call__(self, name: str) -> str:
        """``name``, or its substitute."""
        if self._accepted(name) and not SUBSTITUTE.search(name):
            return name
        return self.substitutes.setdefault(name, substitute(name))


SUBSTITUTE = re.compile(rf"-[0-9a-f]{{{DIGEST}}}\Z")
"""Suffix of substitutes. A name with this suffix gets a substitute too, so that no name equals another's substitute."""


def substitute(name: str) -> str:
    """A name of letters, digits, and ``_ - . space /``, with a hash that distinguishes it from other substitutes."""
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:DIGEST]
    parts = [part for part in re.sub(r"[^\w\-. /]", "_", name).split("/") if part.strip(". ")]
    begin = "/".join(parts).lstrip("_ ")[: MAX_NAME_CHARACTERS - DIGEST - 1] or "name"
    return f"{begin}-{digest}"


def is_path(name: str) -> bool:
    """Whether MLflow accepts a name: a normalised path of letters, digits and a few other characters."""
    normal = (
        0 < len(name) <= MAX_NAME_CHARACTERS
        and normpath(name) == name
        and name != "."
        and not name.startswith(("..", "/"))
    )
    return normal and re.fullmatch(r"[/\w.\- :]*", name) is not None


def is_key(name: str) -> bool:
    """Whether W&B accepts a name for a metric: printable, no leading _, as in W&B's `_step`, and not `step`, the axis of all charts."""
    return (
        bool(name.strip())
        and len(name) <= MAX_NAME_CHARACTERS
        and name.isprintable()
        and name[0] != "_"
        and name != "step"
    )

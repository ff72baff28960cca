"""What reading the files of a run's data has shown: found out by one process of a node, known to the others."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class SharedFacts:
    """Facts by name, which one process collects while it opens the data, and others start with.

    The names of files carry their lengths and dates, so that a process that sees other files finds nothing and reads them.
    """

    def __init__(self, known: Mapping[str, Any] | None = None):
        """``known``: of another process (JSON)."""
        self.known: dict[str, Any] = dict(known or {})

    def find(self, name: str, read: Callable[[], T]) -> T:
        """The fact ``name``; if it is not known, what ``read`` returns (JSON)."""
        if name not in self.known:
            self.known[name] = read()
        fact: T = self.known[name]
        return fact

    def once(self, name: str, check: Callable[[], object]) -> None:
        """``check``, unless it is known to have passed."""
        if name not in self.known:
            check()
            self.known[name] = True

"""A rank's line to the others beside their collectives, and how a process that must end takes everything down."""

import os
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from hpclm.cluster import children
from hpclm.cluster.rollcall import Present


class Line(ABC):
    """This process's line to the others; ``die`` when it fails, ``leave`` when it is done."""

    def __init__(self, me: Present, everyone: Sequence[Present]):
        self.me, self.everyone = me, everyone
        self.tell: Callable[[str, bool], None] = lambda text, speaker: None
        """Called with the cause of an ending, and whether this process tells it on behalf of all."""
        self.lost = 1
        """Exit code of a run that has lost a process which said nothing."""
        self.heard: dict[int, dict[str, Any]] = {}
        """The last word of each other rank that this one has a line to; a new object each time."""
        self.stand: Callable[..., dict[str, Any]] = dict
        """Called when a hung run wants to know where this process is."""
        self.accused: Callable[[dict[str, Any]], None] = lambda order: None
        """Called on rank 0, to end the run, when another rank has given up on it."""
        self._over = threading.Event()
        self._leaving = threading.Event()
        self._ending = threading.Lock()
        os.register_at_fork(after_in_child=self._forget)

    @abstractmethod
    def _forget(self) -> None:
        """In a forked child: close its copies of the connections, or the others would not see this process's end."""

    @abstractmethod
    def leave(self) -> None:
        """Say that this process ends as it should; call it once all have come to their end."""

    @abstractmethod
    def die(self, text: str, code: int, caused: bool) -> None:
        """Say that this process fails, of ``text``, and wait for what follows; ``caused``: it only lost a peer."""

    @property
    @abstractmethod
    def sockets(self) -> list[socket.socket]:
        """The connections, which the guardian of this process looks at too."""

    @abstractmethod
    def beat(self, **word: Any) -> None:
        """Say how far this rank is, without waiting."""

    def ends(self) -> bool:
        """Whether the caller may end this process: one thread alone does."""
        return self._ending.acquire(blocking=False)

    def end(self, text: str, code: int, speaker: bool) -> NoReturn:
        """Tell the cause, and take everything of this process down."""
        end(self.tell, text, code, speaker)


def end(tell: Callable[[str, bool], None], text: str, code: int, speaker: bool) -> NoReturn:
    """Tell the cause, and take everything of this process down. Runs beside a main thread that may never return."""
    late = threading.Timer(3.0, os._exit, args=(code,))  # whatever a lock or a dead disk does
    late.daemon = True
    late.start()
    children.kill()
    if text:
        tell(text, speaker)
    sys.stderr.flush()
    os._exit(code)

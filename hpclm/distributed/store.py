"""The store of a run: PyTorch's TCPStore with values in JSON.

Every process that can connect to it may write any key. So a run needs a network that it may trust, as PyTorch itself does.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store

TRIES = 10  # to replace a value that others keep writing


class JsonStore:
    """A store of JSON values."""

    def __init__(self, store: "Store"):
        self.raw = store

    def clone(self) -> "JsonStore":
        """This store over another connection, for another thread."""
        return JsonStore(self.raw.clone())  # type: ignore[attr-defined]

    def set(self, key: str, value: Any) -> None:
        """Write ``value`` (JSON)."""
        self.raw.set(key, json.dumps(value))

    def get(self, key: str) -> Any:
        """The value of ``key``; None without one."""
        return json.loads(self.raw.get(key)) if self.raw.check([key]) else None

    def get_all(self, keys: Sequence[str]) -> list[Any] | None:
        """The values of ``keys``; None until all are there."""
        if not keys or not self.raw.check([*keys]):
            return None
        return [json.loads(data) for data in self.raw.multi_get([*keys])]

    def wait(self, key: str, seconds: float, pause: float = 0.05) -> Any:
        """The value of ``key`` once it is there; None if it is not within ``seconds``."""
        until = time.monotonic() + seconds
        while (value := self.get(key)) is None and time.monotonic() < until:
            time.sleep(pause)
        return value

    def put(self, key: str, value: Any, over: Callable[[Any], bool] = lambda present: False) -> Any:
        """Write ``value`` unless there is one, other than one that it may replace (``over``); returns what is there."""
        mine = json.dumps(value).encode()
        before = b""
        for _ in range(TRIES):
            # atomic: of two ranks that put at once, both learn which value is there
            current = self.raw.compare_set(key, before, mine)  # type: ignore[arg-type]  # bytes are as good
            if current == mine:
                break
            present = json.loads(current)
            if not over(present):
                return present
            before = current
        return value

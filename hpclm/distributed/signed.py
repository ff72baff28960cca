"""The store of a run, of which a rank believes only what another rank of the same launch has written.

PyTorch's TCPStore lets every process that can connect to it write any key. So each value is JSON behind an HMAC over the
run id (job, step and restart), the key and the JSON, made with a secret that the launcher puts into the environment of
its ranks. A value from elsewhere, of another key or of an earlier attempt is ignored. Without a secret (plain torchrun
or srun) the HMAC has an empty key, which anyone can make: values are only validated then.
"""

import hashlib
import hmac
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)

SECRET = "HPCLM_SECRET"
"""The variable with the secret."""
MAX_VALUE_BYTES = 1 << 26  # bytes of a value
TRIES = 10  # to replace a value that others keep writing


class SignedStore:
    """A TCPStore with signed JSON values."""

    def __init__(self, store: "Store", run_id: str, secret: str):
        self.raw = store
        self.run_id, self.secret = run_id, secret
        self._ignored: set[str] = set()

    def clone(self) -> "SignedStore":
        """This store over another connection, for another thread."""
        return SignedStore(self.raw.clone(), self.run_id, self.secret)  # type: ignore[attr-defined]

    def set(self, key: str, value: Any) -> None:
        """Write ``value`` (JSON)."""
        self.raw.set(key, self.sealed(key, value))

    def get(self, key: str) -> Any:
        """The value of ``key``; None if there is none, or if it is not signed, which is logged once and then removed."""
        return self._accepted(key, self.raw.get(key)) if self.raw.check([key]) else None

    def get_all(self, keys: Sequence[str]) -> list[Any] | None:
        """The values of ``keys``, as of ``get``; None until all are there."""
        if not keys or not self.raw.check([*keys]):
            return None
        return [self._accepted(key, data) for key, data in zip(keys, self.raw.multi_get([*keys]), strict=True)]

    def wait(self, key: str, seconds: float, pause: float = 0.05) -> Any:
        """The value of ``key`` once it is there; None if it is not within ``seconds``."""
        until = time.monotonic() + seconds
        while (value := self.get(key)) is None and time.monotonic() < until:
            time.sleep(pause)
        return value

    def put(self, key: str, value: Any, over: Callable[[Any], bool] = lambda present: False) -> Any:
        """Write ``value`` unless there is one, other than one that it may replace (``over``); returns what is there."""
        mine, before = self.sealed(key, value).encode(), b""
        for _ in range(TRIES):
            # atomic: of two ranks that put at once, both learn which value is there
            current = self.raw.compare_set(key, before, mine)  # type: ignore[arg-type]  # bytes are as good
            if current == mine:
                break
            present = self._accepted(key, current)
            if present is not None and not over(present):
                return present
            before = b"" if present is None else current
        return value

    def sealed(self, key: str, value: Any) -> str:
        """``value`` as JSON, signed for ``key``."""
        text = json.dumps(value)
        return f"{self._signature(key, text.encode())} {text}"

    def opened(self, key: str, data: bytes) -> Any:
        """The value that ``sealed`` made ``data`` of; None if it did not."""
        signature, _, text = data[:MAX_VALUE_BYTES].partition(b" ")
        # in constant time: == would tell how much of a forged signature is right
        if not hmac.compare_digest(signature, self._signature(key, text).encode()):
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError):  # without a secret
            return None

    def _signature(self, key: str, text: bytes) -> str:
        about = json.dumps([self.run_id, key]).encode()  # ends where the text begins, whatever is in them
        return hmac.new(self.secret.encode(), about + text, hashlib.sha256).hexdigest()

    def _accepted(self, key: str, data: bytes) -> Any:
        value = self.opened(key, data)
        if value is None and data:
            self.raw.compare_set(key, data, "")  # type: ignore[arg-type]  # it may be long, and is read again and again
            if key not in self._ignored:
                self._ignored.add(key)
                log.warning(
                    "another process wrote %s (%d bytes) into the store of this run; it is ignored, since no rank of this "
                    "launch has signed it (hpclm docs reliability, What is trusted)",
                    key,
                    len(data),
                )
        return value

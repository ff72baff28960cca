"""Webhooks that notify people when a run fails, finishes or restarts (job.notify)."""

import json
import logging
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from hpclm.base.errors import LockedError
from hpclm.config.job import NOTIFY
from hpclm.node import secrets

log = logging.getLogger(__name__)
SECONDS = 2.0  # how long a run waits for delivery as it ends; it may be killed soon after
MAX_MESSAGE_CHARACTERS = 4000
EVENTS = {"failed": "has failed", "finished": "has finished", "restarted": "was restarted"}
NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Treats a redirect as an error."""

    def redirect_request(self, *_: object) -> None:
        """Refuse to follow the redirect."""


class Notifier:
    """Sends an attempt's messages. As a context manager it also reports an error of the block. Its methods never raise."""

    def __init__(
        self,
        targets: Sequence[str],
        run: str,
        out: str,
        job: Mapping[str, Any] = NO_FIELDS,
        env: Mapping[str, str] = os.environ,
    ):
        """``job``: fields of every message, such as the job's ID."""
        self.targets = targets
        self.env = env
        self._about = {"run": run, "out": out, "host": socket.gethostname(), **job}
        self._failed = False

    def __enter__(self) -> "Notifier":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, LockedError):
            self.failed(str(error) or type(error).__name__)

    def begin(self, attempt: int, step: int, reason: str) -> None:
        """Note the number of the attempt. If it is a restart from ``step``, send a message with its ``reason``."""
        self._about["attempt"] = attempt
        if attempt > 1:
            message = f"attempt {attempt} resumes from step {step}"
            if reason:
                message += f"; {reason}"
            self.send("restarted", message, seconds=0)

    def failed(self, message: str) -> None:
        """Send the error that ends the run, once."""
        if not self._failed:
            self._failed = True
            self.send("failed", message)

    def send(self, event: Literal["failed", "finished", "restarted"], message: str, seconds: float = SECONDS) -> None:
        """Send to all targets in parallel, and wait at most ``seconds``; sending continues in the background."""
        message = secrets.Redactor(self.env)(message)[:MAX_MESSAGE_CHARACTERS]
        text = f"hpclm: {self._about['run']} {EVENTS[event]} ({self._about['out']} on {self._about['host']}): {message}"
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        content = {"event": event, **self._about, "message": message, "time": now, "text": text}
        until = time.monotonic() + seconds
        threads = []
        for target in self.targets:
            threads.append(threading.Thread(target=_deliver, args=(target, content, self.env), daemon=True))
            try:
                threads[-1].start()
            except RuntimeError as error:  # the system allows no more threads
                log.warning("job.notify: nobody was notified that the run %s: %s", event, error)
                return
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
            if seconds and thread.is_alive():
                log.warning("job.notify: a message that the run %s was not delivered within %.0f s", event, seconds)


def missing(targets: Sequence[str], env: Mapping[str, str] = os.environ) -> list[str]:
    """The problems of targets on this machine: environment variables that do not hold a webhook."""
    return [
        f"job.notify={target}: the environment variable {target[1:]} must hold https://...; export it where you start "
        "or submit the run"
        for target in targets
        if _address(target, env) is None
    ]


def _address(target: str, env: Mapping[str, str]) -> str | None:
    """The webhook ``target``, or the one in the variable that ``target`` names as $NAME; None if it is not a webhook."""
    if target.startswith("$"):
        target = env.get(target[1:], "")
    if target.startswith("$") or not NOTIFY.fullmatch(target):
        return None
    return target


def _deliver(target: str, content: Mapping[str, Any], env: Mapping[str, str]) -> None:
    """Send ``content`` to one target. A failure is logged, without the secret path of the webhook."""
    try:
        address = _address(target, env)
        if address is None:
            raise ValueError("its value must be https://...")
        headers = {"Content-Type": "application/json", "User-Agent": "hpclm"}
        request = urllib.request.Request(address, json.dumps(content).encode(), headers)
        post = urllib.request.build_opener(_NoRedirects).open
        post(request, timeout=30).close()
    except Exception as error:  # network and server may fail in any way
        if "://" in target:
            target = target.split("/")[2]
        log.warning("job.notify: %s was not notified that the run %s: %s", target, content["event"], error)

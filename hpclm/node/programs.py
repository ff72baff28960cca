"""Run programs that may be missing, hang or fail: every call has a time limit, and what a program started ends with it."""

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpclm.errors import HpclmError

Env = Mapping[str, str]


class NoAnswerError(HpclmError):
    """A program is not installed, does not answer in time, or its answer cannot be parsed."""


def ask(words: Sequence[str], seconds: float, env: Env = os.environ, text: str = "") -> tuple[int, str, str]:
    """Exit code, output and errors of a program that reads ``text`` and must end within ``seconds``; NoAnswerError otherwise."""
    return finish(start(words, env), seconds, text)


def start(words: Sequence[str], env: Env = os.environ) -> subprocess.Popen[bytes]:
    """Start a program, for ``finish``; NoAnswerError if it is missing."""
    program = shutil.which(words[0], path=env.get("PATH")) or words[0]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    try:
        return subprocess.Popen([program, *words[1:]], env=dict(env), start_new_session=True, **pipes)
    except OSError as error:
        raise NoAnswerError(f"{words[0]}: {error.strerror}; is it installed here?") from None


def finish(process: subprocess.Popen[bytes], seconds: float, text: str = "") -> tuple[int, str, str]:
    """As ``ask``, for a program that was started before."""
    try:
        output, errors = process.communicate(text.encode(), timeout=max(0, seconds))
        return process.returncode, output.decode(errors="replace"), errors.decode(errors="replace")
    except subprocess.TimeoutExpired as late:
        raise NoAnswerError(f"{Path(late.cmd[0]).name} did not answer within {seconds:g} s") from None
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

"""One entry for all verbs, ``hpclm VERB``, and how every verb ends.

A verb is a module with ``main(argv)``; ``python -m hpclm.VERB`` runs the same function.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from hpclm import __version__
from hpclm.cluster import threads
from hpclm.errors import HpclmError
from hpclm.registry import hint

VERBS = {
    "train": ("hpclm.train", "train a model, or go on with a run"),
    "config": ("hpclm.config.show", "print and explain settings"),
    "preprocess": ("hpclm.data.preprocess", "turn text into a dataset"),
    "evaluate": ("hpclm.evaluate", "measure the loss of a run's model on held-out data"),
    "generate": ("hpclm.generate", "continue a prompt with a run's model"),
}

EPILOG = """exit codes: 0 done · 1 a fault of hpclm · 2 wrong arguments · 64 wrong settings or input files
            66 no good checkpoint · 75 the run directory is in use · 85 saved, start me again · 93 do not restart"""


def main(argv: Sequence[str] | None = None) -> int:
    """``hpclm VERB ...``."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        verbs = "\n".join(f"  {verb:<12}{what}" for verb, (_, what) in VERBS.items())
        print(
            f"usage: hpclm VERB ...\n\nTrain GPT models on HPC clusters.\n\n{verbs}\n\nhpclm VERB --help says more.\n\n{EPILOG}"
        )
        return 0
    if words[0] == "--version":
        print(f"hpclm {__version__}")
        return 0
    if words[0] not in VERBS:
        print(
            f"error: unknown verb {words[0]!r}; choose one of {', '.join(VERBS)}.{hint(words[0], list(VERBS))}",
            file=sys.stderr,
        )
        return 2
    return run(lambda rest: import_module(VERBS[words[0]][0]).main(rest), words[1:])


def run(verb: Callable[[list[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Call a verb's main; a person's mistake becomes one message and its exit code, without a traceback."""
    threads.wait_politely()
    try:
        code = verb(list(sys.argv[1:] if argv is None else argv)) or 0
        sys.stdout.flush()
        return code
    except HpclmError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader, head or less, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def entry() -> None:
    """The ``hpclm`` command."""
    raise SystemExit(main())

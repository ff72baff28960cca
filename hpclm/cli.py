"""One entry for all verbs, ``hpclm VERB``, and how every verb ends.

A verb is a module with ``main(argv)``; ``python -m hpclm.VERB`` runs the same function.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from hpclm import __version__
from hpclm.cluster import secrets, site, threads
from hpclm.errors import MACHINE, HpclmError
from hpclm.registry import hint

if TYPE_CHECKING:
    from hpclm.config import RunConfig

VERBS = {
    "train": ("hpclm.train", "train a model, or go on with a run"),
    "submit": ("hpclm.submit", "train on Slurm, on machines of a host file, or here"),
    "status": ("hpclm.status", "show how runs stand: queue, step, loss, speed, time left"),
    "logs": ("hpclm.logs", "print or follow the log of a run, of any rank or of its job"),
    "cancel": ("hpclm.cancel", "let a run save and leave, and take its jobs out of the queue"),
    "checkpoints": ("hpclm.checkpoints", "list and verify a run's checkpoints"),
    "save-now": ("hpclm.save_now", "let a run save now, and go on"),
    "stop": ("hpclm.stop", "let a run save and end"),
    "resume": ("hpclm.resume", "submit a run again, from its last checkpoint, with changes if any"),
    "planner": ("hpclm.planner", "say what a run will need of each GPU, and how fast it will be; suggest layouts"),
    "config": ("hpclm.config.show", "print and explain settings"),
    "preprocess": ("hpclm.data.preprocess", "turn text into a dataset"),
    "data": ("hpclm.data.__main__", "inspect, verify, merge and convert datasets"),
    "evaluate": ("hpclm.evaluate", "measure the loss of a run's model on held-out data"),
    "generate": ("hpclm.generate", "continue a prompt with a run's model"),
    "convert": (
        "hpclm.convert",
        "weights for Hugging Face transformers, and from there, Megatron and Megatron-DeepSpeed",
    ),
    "import-deepspeed": ("hpclm.import_deepspeed", "print the settings that a DeepSpeed JSON stands for"),
    "doctor": ("hpclm.doctor", "show what each process really has, and what is wrong"),
    "env": ("hpclm.doctor", "the same"),
}

EPILOG = """exit codes: 0 done · 1 a fault of hpclm · 2 wrong arguments · 64 wrong settings or input files
            66 no good checkpoint · 75 the run directory is in use · 85 saved, start me again · 93 do not restart
            128+n ended by signal n"""


def main(argv: Sequence[str] | None = None) -> int:
    """``hpclm VERB ...``."""
    return run(_dispatch, argv)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        verbs = "\n".join(f"  {verb:<18}{what}" for verb, (_, what) in VERBS.items())
        print(
            f"usage: hpclm VERB ...\n\nTrain GPT models on HPC clusters.\n\n{verbs}\n\nhpclm VERB --help says more.\n\n{EPILOG}"
        )
        return 0
    verb, *rest = words
    if verb == "--version":
        print(f"hpclm {__version__}")
        return 0
    if verb not in VERBS:
        near = hint(verb, list(VERBS))
        print(f"error: unknown verb {verb!r}; choose one of {', '.join(VERBS)}.{near}", file=sys.stderr)
        return 2
    return import_module(VERBS[verb][0]).main(rest) or 0


def run(verb: Callable[[list[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Call a verb's main; what a person or the machine did wrong becomes one message and an exit code, no traceback."""
    _open_streams()
    threads.wait_politely()
    threads.open_many_files()
    redact = secrets.Redactor()
    try:
        code = verb(list(sys.argv[1:] if argv is None else argv)) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except HpclmError as error:
        for line in str(error).splitlines():
            print(f"error: {redact(line)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader, head or less, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except MemoryError as error:
        print(f"error: not enough memory: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in MACHINE:
            return _fault(redact)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or closing it would fail in the same way
        print(
            f"error: {error.filename or 'writing'}: {error.strerror}; free the disk, then start again", file=sys.stderr
        )
        return 1
    except Exception:
        return _fault(redact)


def _fault(redact: Callable[[str], str]) -> int:
    """Print the traceback of the exception that is being handled, without secrets, and give the exit code."""
    print(redact(traceback.format_exc()), end="", file=sys.stderr)
    return 1


def settings(words: Sequence[str]) -> "RunConfig":
    """``[FILE] key=value ...`` on top of the user's site file."""
    from hpclm import config

    return config.from_cli(list(words), site.path())


def _open_streams() -> None:
    """Give a process that was started with closed standard streams something to write to."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            while (opened := os.open(os.devnull, os.O_RDWR)) < number:  # the lowest that is free: 0, 1 or 2
                continue
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, "r" if number == 0 else "w", closefd=False))


def entry() -> None:
    """The ``hpclm`` command."""
    raise SystemExit(main())

"""What a caller of hpclm's Python interface may rely on in its own process: a program that compares it before and after each call.

Run as ``python -m tests.process_snapshot FOLDER``; prints a line of JSON: call -> what has changed, and what training measured.
"""

import faulthandler
import gc
import hashlib
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import torch

import hpclm

TINY = {
    "model": {"layers": 1, "hidden": 16, "attention": {"heads": 2}, "context": 16},
    "batch": {"global_size": 4, "micro_size": 4},
    "evaluate.every": 4,
    "evaluate.batches": 1,
    "engine.device": "cpu",
    "cluster.preflight": False,
}


def digest(value):
    return hashlib.sha256(repr(value).encode()).hexdigest()


def precision():
    matmul = torch.backends.cuda.matmul
    return (
        torch.get_float32_matmul_precision(),
        *(matmul.allow_tf32, matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision),
        *(matmul.allow_bf16_reduced_precision_reduction, torch.backends.cudnn.allow_tf32),
    )


def attention():
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()


def logged():
    root = logging.getLogger()
    return root.level, root.handlers[:], root.manager.disable, logging.raiseExceptions, warnings.showwarning


def mapped():
    """Files that are mapped or open and belong to a run or a dataset."""
    maps = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/runs/" in line}
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return maps, {str(path): str(path.readlink()) for path in links}


def status():
    lines = Path("/proc/self/status").read_text().splitlines()
    return [line for line in lines if line.startswith(("Umask", "SigBlk", "SigIgn"))]


SNAPSHOT = {
    "random": lambda: digest(random.getstate()),
    "numpy": lambda: digest([*map(repr, np.random.get_state(legacy=False)["state"]["key"])]),
    "torch's generator": lambda: (digest(torch.get_rng_state().tolist()), torch.initial_seed()),
    "precision of products": precision,
    "deterministic mode": lambda: (
        torch.get_deterministic_debug_mode(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
    ),
    "default dtype and device": lambda: (torch.get_default_dtype(), torch.get_default_device()),
    "threads of PyTorch": lambda: (torch.get_num_threads(), torch.get_num_interop_threads()),
    "gradients": lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
    "attention": attention,
    "process group": torch.distributed.is_initialized,
    "errors of NumPy": np.geterr,
    "environment": lambda: dict(os.environ),
    "folder": os.getcwd,
    "umask and masks": status,
    "signals": lambda: {number: signal.getsignal(number) for number in signal.valid_signals()},
    "logging": logged,
    "warnings": lambda: warnings.filters[:],
    "sys": lambda: (sys.path[:], sys.argv[:], sys.excepthook, sys.unraisablehook, sys.stdin, sys.stdout, sys.stderr),
    "threading": lambda: (threading.excepthook, threading.enumerate()),
    "recursion": sys.getrecursionlimit,
    "locale": lambda: locale.setlocale(locale.LC_ALL),
    "limits": lambda: [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT_" in name],
    "files": mapped,
    "children": lambda: Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
    "start method": lambda: multiprocessing.get_start_method(allow_none=True),
    "garbage": lambda: (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
    "cores": lambda: os.sched_getaffinity(0),
    "faulthandler": faulthandler.is_enabled,
}


def unusual():
    """Settings that a caller may have, and that training must neither follow nor lose."""
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cuda.enable_flash_sdp(False)
    np.seterr(all="raise")
    multiprocessing.set_start_method("spawn")
    warnings.simplefilter("error", UserWarning)
    threading.excepthook = lambda *_: None
    gc.disable()


def interrupted(run):
    """Train until Ctrl-C comes in the first step that is logged."""

    class Interrupting(logging.Handler):
        def emit(self, record):
            if record.getMessage().startswith("step 5"):
                os.kill(os.getpid(), signal.SIGINT)

    handler = Interrupting()
    logging.getLogger("hpclm.training.metrics").addHandler(handler)
    try:
        run.resume({"log.every": 1}, steps=100_000)
    finally:
        logging.getLogger("hpclm.training.metrics").removeHandler(handler)


def main(folder):
    os.chdir(folder)
    Path("text.jsonl").write_text('{"text": "Once upon a time there was a number."}\n' * 100)
    changes, raised = {}, {}

    def call(name, function):
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        before = {what: read() for what, read in SNAPSHOT.items()}
        try:
            function()
        except BaseException as error:
            raised[name] = type(error).__name__
            print(name, error, file=sys.stderr)
        after = {what: read() for what, read in SNAPSHOT.items()}
        changes[name] = {
            what: [repr(before[what]), repr(after[what])] for what in SNAPSHOT if before[what] != after[what]
        }

    def train(out, *more):
        return hpclm.train("small", TINY, *more, data="text.jsonl", steps=4, out=out)

    call("settings", lambda: hpclm.settings("small"))
    call("train", lambda: train("runs/a"))
    call("train with math attention", lambda: train("runs/b", "model.attention.kernel=math"))
    unusual()
    call("train with unusual settings", lambda: train("runs/c"))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        call("train in blocks", lambda: train("runs/d"))
        run = hpclm.open("runs/a")
        call("evaluate", run.evaluate)
        call("evaluate a text", lambda: run.evaluate(text="text.jsonl", tokens=50))
        call("generate", lambda: run.generate("Once", tokens=3))
        call("convert", lambda: run.convert("exported"))
        call("report", run.report)
        call("read", lambda: (run.status, repr(run), run.rows, run.checkpoints, run.settings))
        call("refused", lambda: train("runs/e", "optim.lr=-1"))
        call("diverged", lambda: train("runs/f", "optim.lr=1e30", "optim.min_lr=0", "optim.warmup=0", "optim.clip=0"))
        call("interrupted", lambda: interrupted(run))
    losses = {
        name: [row.get("loss") for row in hpclm.open(f"runs/{name}").rows]
        for name in "abcd"
        if Path(f"runs/{name}").is_dir()
    }
    print(json.dumps({"changes": changes, "raised": raised, "losses": losses}))


if __name__ == "__main__":
    main(sys.argv[1])

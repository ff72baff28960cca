"""Processes that begin with PyTorch imported, by a fork of one that has done so: a hundred of them cost seconds.

``python -m tests.forks ADDRESS`` is that one; it ends when its standard input is closed.
"""

import functools
import importlib
import os
import select
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from multiprocessing.connection import Client, Listener

from tests.runs import ROOT


@functools.cache
def _server():
    """The process to fork, and its address; it ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="hpclm-forks-")
    address = f"{folder.name}/socket"
    command = [sys.executable, "-W", "ignore", "-m", "tests.forks", address]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert process.stdout.readline() == b"ready\n"
    return process, address, folder


def start(work, *args):
    """Run ``work(pipe, *args)`` in a fork. Gives this end of the pipe; its last word is ("exit", code), -9 when killed."""
    pipe = Client(_server()[1])
    pipe.send((work, args))
    return pipe


def load(module):
    """Load a module once for all forks to come."""
    with Client(_server()[1]) as pipe:
        pipe.send((None, module))
        assert pipe.recv() == "loaded"


def serve(address):
    """Fork for everyone who asks."""
    import torch
    import torch.distributed

    import tests.checkpoint.victims  # noqa: F401

    torch.set_num_threads(1)
    with Listener(address) as listener:
        print("ready", flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nobody reads what works print
        while True:
            ready, _, _ = select.select([sys.stdin, listener._listener._socket], [], [])
            if sys.stdin in ready:
                os._exit(0)
            pipe = listener.accept()
            work, args = pipe.recv()
            if work is None:
                importlib.import_module(args)
                pipe.send("loaded")
            elif os.fork() == 0:
                _one(pipe, work, args)
            pipe.close()
            with suppress(ChildProcessError):  # there is none left
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _one(pipe, work, args):
    """Fork once more: one works, the other tells how it ended."""
    worker = os.fork()
    if worker == 0:
        try:
            work(pipe, *args)
            os._exit(0)
        except BaseException:
            with suppress(OSError):  # nobody may be there any more to hear it
                pipe.send(("failed", traceback.format_exc()))
            os._exit(1)
    _, status = os.waitpid(worker, 0)
    with suppress(BrokenPipeError):
        pipe.send(("exit", os.waitstatus_to_exitcode(status)))
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])

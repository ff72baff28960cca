"""Processes that begin with PyTorch imported, by a fork of one that has done so: a hundred of them cost seconds.

`hpclm` and `Hpclm` run a command so: a process with its own number, signals, output and exit code, as if it had been
started from nothing. What start-up itself does (the interpreter's options, closed streams, imports) needs tests.runs.

``python -m tests.forks ADDRESS PADDING`` is the process that is forked; it ends when its standard input is closed.
"""

import atexit
import ctypes
import functools
import gc
import importlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from contextlib import suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path

from tests import runs
from tests.runs import PATIENCE, ROOT

# what `hpclm train` and the verbs that look at its run import, much of it only when it is needed
PRELOADED = [
    "torch._dynamo",
    "hpclm.commands.train",
    "hpclm.commands.submit",
    "hpclm.commands.status",
    "hpclm.commands.cancel",
    "hpclm.commands.checkpoints",
    "hpclm.commands.evaluate",
    "hpclm.commands.generate",
    "hpclm.engine.native",
    "hpclm.commands.preprocess",
    "hpclm.data.synthetic",
    "tests.checkpoint.victims",
    "tests.faults",
]
ROOM = 4000  # bytes for a fork's own command line


@functools.cache
def _server():
    """The process to fork, and its address; it ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="hpclm-forks-")
    address = f"{folder.name}/socket"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.forks", address, "-" * ROOM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout.readline() == b"ready\n"
    return process, address, folder


def ready():
    """Have the process to fork there, which imports PyTorch first."""
    _server()


def start(work, *args):
    """Run ``work(pipe, *args)`` in a fork. Gives this end of the pipe; its last word is ("exit", code), -9 when killed."""
    pipe = Client(_server()[1])
    pipe.send((work, args))
    return pipe


def call(work, *args):
    """What ``work(*args)``, a function of a module, gives in a fork; it is killed if it does not end."""
    with start(_called, work, args) as pipe:
        pid = pipe.recv()
        if not pipe.poll(PATIENCE):
            os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"{work.__name__}{args} did not end within {PATIENCE:.0f} s")
        word, value = pipe.recv()
    assert word == "answer", value
    return value


def _called(pipe, work, args):
    pipe.send(os.getpid())
    pipe.send(("answer", work(*args)))


class Hpclm:
    """``hpclm WORDS`` in a fork, with the methods of subprocess.Popen; it is killed at the end of a with block.

    It is killed, too, when this process ends or the object is dropped: a test that fails leaves nothing running.
    """

    def __init__(self, *words, env=None, cwd=ROOT, merged=False, before=None):
        """``merged``: what it says on stderr is in stdout; ``before``: a module's function to call first."""
        self.args, self.returncode = [str(word) for word in words], None
        folder = tempfile.mkdtemp(prefix="hpclm-said-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._said = [Path(folder, name) for name in ("out", "out" if merged else "err")]
        for path in self._said:
            path.touch()
        self._pipe = Client(_server()[1])
        env = dict(os.environ if env is None else env)
        said = [str(path) for path in self._said]
        self._pipe.send((_command, (self.args, env, os.path.realpath(cwd), said, before)))
        self.pid = self._pipe.recv()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.wait()

    def poll(self):
        return self.returncode if self._ended(0) else None

    def wait(self, timeout=PATIENCE):
        if not self._ended(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout=PATIENCE):
        """stdout and stderr as text, once it has ended."""
        self.wait(timeout)
        out, err = (path.read_text(errors="replace") for path in self._said)
        return out, err

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout):
        if self.returncode is None and self._pipe.poll(timeout):
            _, self.returncode = self._pipe.recv()
            self._pipe.close()
        return self.returncode is not None


def hpclm(*words, check=None, **more):
    """As tests.runs.hpclm: run ``hpclm WORDS``; ``check`` is the exit code it must end with."""
    with Hpclm(*words, **more) as process:
        out, err = process.communicate()
    assert check is None or process.returncode == check, f"exit {process.returncode}\n{out}\n{err}"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class Ranks(runs.Ranks):
    """As tests.runs.Ranks: the processes of one run on this machine, in forks."""

    def __init__(self, size, words, only=None, before=None, cwd=ROOT, **env):
        """``before``: a module's function that each process calls first."""
        launch, self.processes = {**runs.launch(size), **env}, {}
        for rank in range(size) if only is None else only:
            extra = runs.variables(rank, launch)
            self.processes[rank] = Hpclm("train", *words, env=extra, cwd=cwd, merged=True, before=before)


def steps(process, out, count):
    """Wait until a process's run in ``out`` has written that many lines of metrics."""
    until = time.monotonic() + PATIENCE
    while len(runs.lines(Path(out) / "metrics.jsonl")) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, f"no {count} steps in {out} within {PATIENCE:.0f} s"
        time.sleep(0.02)


def serve(address):
    """Fork for everyone who asks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

        for module in PRELOADED:
            importlib.import_module(module)
    torch.set_num_threads(1)
    gc.freeze()  # or each fork would copy what its collector looks at
    with Listener(address) as listener:
        print("ready", flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nobody reads what works print
        while True:
            ready, _, _ = select.select([sys.stdin, listener._listener._socket], [], [])
            if sys.stdin in ready:
                os._exit(0)
            pipe = listener.accept()
            work, args = pipe.recv()
            if os.fork() == 0:
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
            if work is _command:
                pipe.close()
            else:
                warnings.simplefilter("ignore")
            work(pipe, *args)
            os._exit(0)
        except BaseException:
            with suppress(OSError):  # nobody may be there any more to hear it
                pipe.send(("failed", traceback.format_exc()))
            os._exit(1)
    if work is _command:
        _watch(pipe, worker)
    _, status = os.waitpid(worker, 0)
    with suppress(BrokenPipeError):
        pipe.send(("exit", os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _watch(pipe, worker):
    """Until a command has ended; kill it when the wait is given up."""
    ended = os.pidfd_open(worker)
    with suppress(BrokenPipeError):
        pipe.send(worker)
    if pipe in select.select([ended, pipe], [], [])[0]:  # its other end says nothing: it is closed
        signal.pidfd_send_signal(ended, signal.SIGKILL)


def _command(_, words, env, cwd, said, before):
    """Be ``python -m hpclm WORDS``, started from a shell in ``cwd``."""
    for number, path in zip((0, 1, 2), (os.devnull, *said), strict=True):
        os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and a shell without a terminal SIGINT
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:1] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    importlib.invalidate_caches()
    sys.argv = [str(ROOT / "hpclm" / "__main__.py"), *words]
    sys.orig_argv = [sys.executable, "-m", "hpclm", *words]
    _name("\0".join(sys.orig_argv))
    from hpclm import cli

    try:
        if before:
            before()
        code = cli.main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # as the interpreter ends: threads, then atexit, then the streams
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120
    os._exit(code if isinstance(code, int) else code is not None)


def _name(command):
    """Let /proc show a command line of one's own, in the place of the server's."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, os.fsencode(command), min(len(os.fsencode(command)), end - start - 1))


if __name__ == "__main__":
    # the class that a client's request names is of the module, not of the program
    from tests import forks

    forks.serve(sys.argv[1])

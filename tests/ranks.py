"""Run a function on several processes of this machine, which speak gloo, and hand back what each returned."""

import multiprocessing
import os
import pickle
import signal
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest

from tests.runs import PATIENCE

PRELOADED = [
    "torch",
    "torch.distributed",
    "numpy",
    "hpclm.engine.native",
    "hpclm.engine.fsdp2",
    "hpclm.engine.fairscale",
    "hpclm.config",
    "hpclm.data.synthetic",
    "tests.vendors",
]


def run(size, work, *args):
    """What ``work(*args)``, a function of a module, gives on each of ``size`` ranks of one process group."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    folder = f"{os.environ.get('TMPDIR', '/tmp')}/hpclm-store-{os.getpid()}-{time.monotonic_ns()}"
    ends = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(target=_one, args=(rank, size, folder, ends[rank][1], work, args)) for rank in range(size)
    ]
    try:
        for process, (_, sending) in zip(processes, ends, strict=True):
            process.start()
            sending.close()
        return _values([_answer(receiving) for receiving, _ in ends])
    finally:
        for mine, _ in ends:
            mine.close()  # now all may end
        for process in processes:
            process.join(5)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join()
        if Path(folder).exists():
            Path(folder).unlink()


def _answer(receiving):
    """Whether a rank did its work, and what it says."""
    try:
        return (
            pickle.loads(receiving.recv_bytes())
            if receiving.poll(PATIENCE)
            else (False, f"said nothing within {PATIENCE:.0f} s")
        )
    except EOFError:
        return False, "is gone"


def _values(answers):
    """What the ranks gave; or the failure of one that did not only lose a peer."""
    wrong = [(rank, value) for rank, (good, value) in enumerate(answers) if not good]
    for rank, value in sorted(wrong, key=lambda pair: "closed by peer" in str(pair[1])):
        if isinstance(value, BaseException):
            raise value
        pytest.fail(f"rank {rank}: {value}", pytrace=False)
    return [value for _, value in answers]


def _send(answer, value):
    answer.send_bytes(pickle.dumps(value))  # whole: send() would share a tensor's memory with a process that ends


def _one(rank, size, store, answer, work, args):
    import torch
    import torch.distributed as dist

    from hpclm.base.errors import HpclmError

    torch.set_num_threads(1)
    try:
        if size > 1:
            file = dist.FileStore(store, size)
            dist.init_process_group("gloo", store=file, rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE))
        _send(answer, (True, work(*args)))
        answer.poll(PATIENCE)  # a peer may still need this rank, until all have answered
        os._exit(0)
    except HpclmError as error:
        _send(answer, (False, error))
    except BaseException:
        _send(answer, (False, traceback.format_exc()))
    finally:
        answer.close()
        time.sleep(0.2)  # so that what the others say of a lost peer does not come first
        os._exit(1)

"""A run with plain DeepSpeed, saving and loading as its documentation says: works for tests.traced."""

import hashlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

SETTINGS = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}


def save(gate, folder, tag, steps, meeting=None, rank=0, size=1):
    """Train, and save after each of ``steps``, the last of them watched. Hashes of the state, by step."""
    engine, states = begin(meeting, rank, size), {}
    for step in range(1, steps[-1] + 1):
        train(engine)
        if step == steps[-1]:
            gate()
        if step in steps:
            engine.save_checkpoint(str(folder), tag=tag)
            states[step] = state(engine)
    return states


def load(gate, folder, meeting=None, rank=0, size=1):
    """Go on from what is there: the state's hashes, None where nothing was found, or the error."""
    engine = begin(meeting, rank, size)
    gate()
    try:
        found, _ = engine.load_checkpoint(str(folder))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return found and state(engine)


def begin(meeting, rank, size):
    """A small network under ZeRO."""
    from hpclm.engine.deepspeed import library  # not where a test names the works

    torch.manual_seed(1)
    os.environ["LOCAL_RANK"] = str(rank)
    if meeting:
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(meeting), size), rank=rank, world_size=size, timeout=timedelta(seconds=30)
        )
    library.begin(torch.device("cpu"))
    network = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
    return library.initialize(model=network, optimizer=optimizer, config=SETTINGS)


def train(engine):
    """A step, which differs from the one before."""
    draw = torch.Generator().manual_seed(engine.global_steps)
    engine.backward(engine(torch.randn(2, 16, generator=draw)).square().mean())
    engine.step()


def state(engine):
    """Hashes of the weights and of what the optimizer holds, and the number of steps."""
    held = [value for group in engine.optimizer.optimizer.state.values() for value in group.values()]
    held += engine.optimizer.single_partition_of_fp32_groups
    return hashed(engine.module.parameters()), hashed(held), engine.global_steps


def hashed(values):
    content = b"".join(torch.as_tensor(value).detach().numpy().tobytes() for value in values)
    return hashlib.blake2b(content, digest_size=8).hexdigest()

"""What a process does when a fault strikes it: works for tests.traced. The gate stands where the fault may come from."""

import logging
from datetime import timedelta

import torch.distributed as dist

from hpclm.base.errors import HpclmError
from hpclm.checkpoint import resumable, staging
from hpclm.config import from_cli
from hpclm.distributed.bootstrap import World
from hpclm.distributed.context import DistributedContext, single
from hpclm.interop.average import averaged
from hpclm.launch.branch import branched
from hpclm.training import loop
from hpclm.training.start import RunStart
from tests.checkpoint.state import State, progress, store
from tests.runs import PATIENCE


def save(gate, folder, step, keep=2):
    """Save at once."""
    made = store(folder, keep)
    gate()
    made.save(State(float(step)), progress(step))
    return "saved"


def save_beside(gate, folder, step, keep=2):
    """Save beside the training; the training's side is watched."""
    made = store(folder, keep)
    gate()
    made.begin(State(float(step)), progress(step))
    made.commit()
    return "saved"


def write_beside(gate, folder, step, keep=2):
    """Save beside the training; the side that writes is watched."""
    made, write = store(folder, keep), staging.write_shards

    def watched(*args):
        gate()
        return write(*args)

    staging.write_shards = watched
    made.begin(State(float(step)), progress(step))
    made.commit()
    return "saved"


def save_as_rank(gate, folder, step, rank, meeting):
    """Save a half each, with another process."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(meeting), 2), rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE)
    )
    context = DistributedContext(World("test", rank, 2), single().ranks * 2, single().watchdog)
    made = store(folder, keep=2, context=context)
    engine = State(float(step), rank, 2)
    gate()
    made.save(engine, progress(step))
    return "saved"


def try_to_save(gate, folder, step, beside):
    """Save while something fails; then the next step, when nothing does. What was said, and whether the save was published."""
    made = store(folder, keep=2)
    gate()
    said = None
    try:
        made.begin(State(float(step)), progress(step), background=beside)
        made.commit()
    except HpclmError as error:
        said = str(error)
    made.pending = None
    there = (folder / f"step-{step:08d}").exists()
    made.save(State(float(step + 1)), progress(step + 1))
    return said, there


def try_to_resume(gate, folder):
    """Go on while something fails: the error's kind and words, or the step and whether every bit is right."""
    made, state = store(folder), State()
    gate()
    try:
        found = made.resume(state, "auto").step
    except HpclmError as error:
        return type(error).__name__, str(error)
    return found, state.is_of(found)


def resume(gate, folder, *_):
    """Go on from the newest good one; what was left half done is swept, what is bad is set aside."""
    made, state = store(folder), State()
    gate()
    found = made.resume(state, "auto").step
    return found, state.is_of(found)


def roll_back(gate, out):
    """Go back to where a request says."""
    gate()
    return resumable.roll_back(out)


def train(gate, words):
    """Train; the exit code."""
    logging.getLogger().setLevel("INFO")
    gate()
    return loop.run(RunStart(from_cli(words)), single())


def branch(gate, trunk, target):
    """Make a branch of a run."""
    gate()
    branched(trunk, target, 4, ["optim.min_lr=1e-5"])
    return "branched"


def average(gate, run, target):
    """Write the mean of a run's checkpoints."""
    gate()
    averaged(run, target, 2, [])
    return "averaged"

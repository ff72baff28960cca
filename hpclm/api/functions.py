"""``hpclm.train``, ``hpclm.open``, ``hpclm.load``, ``hpclm.submit`` and ``hpclm.settings``."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from hpclm.api import live
from hpclm.api.checked import checked
from hpclm.api.dataset import Data
from hpclm.api.options import Base, Change, RunKeywords, words
from hpclm.api.run import Run
from hpclm.base import paths
from hpclm.config import RunConfig
from hpclm.rundir import runs

if TYPE_CHECKING:
    from hpclm.api.model import Model


@checked
def train(
    base: Base,
    *changes: Change,
    data: Data | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    steps: int | None = None,
    lr: float | None = None,
    seed: int | None = None,
    out: str | os.PathLike[str] | None = None,
    device: str | None = None,
    resume_step: int | None = None,
) -> Run:
    """Train a model in this process, on one GPU or the CPU. The same call continues a stopped run.

    >>> run = hpclm.train("small", data="text.jsonl", steps=200)
    >>> run = hpclm.train("small", {"model.layers": 6}, "optim.weight_decay=0.1", data="text.jsonl", out="runs/six")

    A notebook shows the loss live; a terminal shows a progress bar. An interrupt saves, then raises KeyboardInterrupt.

    Args:
        base: a preset ("small"), a settings file, settings, or the directory of a run to continue.
        changes: settings that override ``base``, as {"optim.lr": 1e-3}, {"optim": {"lr": 1e-3}} or "optim.lr=1e-3".
        data: the prefix of a dataset; a text that `hpclm preprocess` reads; or a datasets.Dataset with a column "text". Text
            is tokenized once, into a folder `datasets` beside the run, and model.vocab_size is set to fit.
        tokenizer: for text: "bytes" (each byte is a token), a tokenizer.json, a sentencepiece .model file, or
            "package.module:Name". The default is the base's data.tokenizer, else "bytes".
        steps: number of optimizer steps (budget.steps), instead of the base's budget.
        lr: peak learning rate (optim.lr).
        seed: seed of initial weights, dropout and sample order (seed).
        out: the run directory (out); by default runs/NAME.
        device: "auto", "cpu" or "cuda" (engine.device).
        resume_step: the step of the checkpoint to continue from, instead of the newest.

    Returns:
        The run.

    Raises:
        ConfigError: all problems with the settings; other errors are HpclmError.
        KeyboardInterrupt: after a signal; the run has saved, and `hpclm.open` opens it.
    """
    options = RunKeywords(steps, lr, seed, out, device, data=data, tokenizer=tokenizer)
    run = options.run(base, changes)
    live.train(run, resume_step)
    return Run(run.out)


@checked
def submit(
    base: Base,
    *changes: Change,
    nodes: int | None = None,
    gpus: int | None = None,
    time: str | None = None,
    partition: str | None = None,
    data: Data | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    steps: int | None = None,
    lr: float | None = None,
    seed: int | None = None,
    out: str | os.PathLike[str] | None = None,
    device: str | None = None,
    resume_step: int | None = None,
) -> Run:
    """Submit a job that trains a model, to Slurm or the scheduler of job.cluster. The same call continues a stopped run.

    >>> run = hpclm.submit("gpt2-124m", data="data/mine_text_document", nodes=2, gpus=8, time="12:00:00")
    >>> run.status
    'waiting'

    Args:
        base: see `hpclm.train`, also for all arguments that are not listed here.
        changes: settings that override ``base``; settings of the job are "job.…".
        nodes: number of nodes (job.nodes).
        gpus: GPUs, and processes, of each node (job.gpus).
        time: time limit, in Slurm's format (job.time).
        partition: Slurm partition (job.partition).

    Returns:
        The run. Its job has been queued.

    Raises:
        ConfigError: all problems that would prevent the start; nothing is queued.
        LockedError: a job of this run is queued or running.
    """
    from hpclm.launch.arguments import whole
    from hpclm.launch.submit import from_python, queue_of

    options = RunKeywords(steps, lr, seed, out, device, nodes, gpus, time, partition, data, tokenizer)
    queue_of(options.compose(base, changes).job)  # refuse wrong settings before a dataset is written
    run = whole(options.run(base, changes))
    from_python(run, resume_step)
    return Run(run.out)


@checked
def settings(
    base: Base,
    *changes: Change,
    steps: int | None = None,
    lr: float | None = None,
    seed: int | None = None,
    out: str | os.PathLike[str] | None = None,
    device: str | None = None,
) -> RunConfig:
    """The settings of a run, checked and immutable. See `hpclm.train` for the arguments.

    >>> hpclm.settings("small", {"optim.lr": 1e-3}).diff(hpclm.settings("small"))
    {}

    Raises:
        ConfigError: all problems with the settings.
    """
    return RunKeywords(steps, lr, seed, out, device).compose(base, changes)


@checked
def open(run: str | os.PathLike[str]) -> Run:  # shadows the builtin, like gzip.open
    """The run in the directory ``run``, or with this name below runs. It may be running.

    >>> run = hpclm.open("runs/small")

    Raises:
        ConfigError: ``run`` is not a run directory; the message names run directories.
    """
    return Run(runs.resolve(paths.expanded(os.fspath(run)), Path("runs")))


@checked
def load(run: str | os.PathLike[str], *changes: Change, step: int | None = None, ema: bool = False) -> "Model":
    """The trained network of a run as a PyTorch module, on one device. Every network can be loaded, also with your own blocks.

    >>> model = hpclm.load("runs/small", {"engine.device": "cpu"})
    >>> logits = model(torch.tensor([model.tokenizer.encode("Once upon")]))

    Args:
        run: a run, its directory, its name below runs, or one of its checkpoints.
        changes: changes to the run's settings.
        step: the step of the checkpoint; None: the newest.
        ema: load the average of the weights (optim.ema).

    Returns:
        The module, in evaluation mode.

    Raises:
        ConfigError: there is no such run or checkpoint; the message names those that exist. Or the checkpoint has no average.
    """
    live.load_pytorch()
    from hpclm.api.model import loaded
    from hpclm.checkpoint import directory

    path = paths.expanded(os.fspath(run))
    checkpoint = re.fullmatch(r"step-(\d+)", Path(path).name)
    if checkpoint and step is None and directory.run_of(Path(path)) != Path(path):
        path, step = str(directory.run_of(Path(path))), int(checkpoint[1])
    return loaded(runs.resolve(path, Path("runs")), words(changes), step, ema)

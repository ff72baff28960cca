"""A run in Python: its settings, metrics and checkpoints, and functions that use its model."""

import html
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from hpclm import config
from hpclm.api import live
from hpclm.api.checked import checked, positive, prompts_of
from hpclm.api.options import Change, RunKeywords, words
from hpclm.base import extras, files, paths
from hpclm.base.errors import ConfigError, unread
from hpclm.config import RunConfig
from hpclm.launch import jobs
from hpclm.rundir.state import State

if TYPE_CHECKING:
    from pandas import DataFrame

Prompt = TypeVar("Prompt", str, list[str])
PATIENCE = 5.0  # time limit in seconds for a scheduler's answer


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint of a run."""

    step: int
    path: Path
    validation_loss: float | None
    """In nats per token; None if the step was not evaluated."""
    healthy: bool
    """Whether the loss was normal at this step."""


@dataclass(frozen=True)
class Report(os.PathLike[str]):
    """The path of a report page; notebooks show the page inline."""

    path: Path

    @classmethod
    def written(cls, runs: list[Path], output: str | os.PathLike[str], samples: str | None) -> "Report":
        """Write the page of ``runs`` to ``output``; see hpclm.report."""
        from hpclm.reporting.page import Sampler, write

        sampler: Sampler | None = None
        with live.computing() if samples else nullcontext():
            if samples is not None:
                from hpclm.inference.samples import samples_of_runs

                sampler = samples_of_runs
            return cls(write(runs, Path(paths.expanded(os.fspath(output))), True, samples, sampler)[0])

    def __fspath__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        page = html.escape(files.read_text(self.path))
        return f'<iframe srcdoc="{page}" style="box-sizing: border-box; width: 100%; height: 600px; border: 1px solid #ddd"></iframe>'


class Run(os.PathLike[str]):
    """A run and its directory, from ``hpclm.train``, ``hpclm.submit`` or ``hpclm.open``. Each attribute reads the run's files anew.

    >>> run = hpclm.open("runs/small")
    >>> run.metrics.plot(x="step", y="loss")
    >>> run.generate("Once upon", tokens=50)

    Methods that load the model take changes to the run's settings, such as {"engine.device": "cpu"}.
    """

    @checked
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        """The run directory, absolute."""

    def __fspath__(self) -> str:
        """The run directory, relative if it is inside the current folder."""
        here = Path.cwd()
        if self.path.is_relative_to(here):
            return files.shown(self.path.relative_to(here))
        return files.shown(self.path)

    def __repr__(self) -> str:
        status = self._status()
        loss = status.run.summary.get("loss")
        text = f"Run({os.fspath(self)!r}): {status.how()}"
        if "step" not in status.how():
            text += f", step {status.run.step}"
        if loss:
            text += f", loss {loss:.4f}"
        return text

    @property
    def status(self) -> str:
        """waiting, starting, running, completing, done, stopped, exited, cancelled, failed, ended, new or unknown."""
        return self._status().name

    @property
    def settings(self) -> RunConfig:
        """All settings; printing them shows the changed ones only. `run.settings.diff(other.settings)` compares two runs."""
        return config.load(os.fspath(self))

    @property
    def metrics(self) -> "DataFrame":
        """A pandas DataFrame: a row for each step (`step`, `loss`, `lr`, …) and each evaluation (`validation_loss`).

        ConfigError if pandas is not installed; `rows` does not need it.
        """
        if problem := extras.missing("run.metrics", "pandas"):
            raise ConfigError(f"{problem}; without it, run.rows has the same rows as dicts")
        from pandas import DataFrame

        return DataFrame(self.rows)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl in the order of steps."""
        from hpclm.reporting import history

        try:
            return history.by_step(self.path)
        except OSError as error:
            raise unread(error, error.filename or self.path, "check its type and permissions") from error

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Complete checkpoints, oldest first; their hashes are not verified."""
        from hpclm.checkpoint.listing import rows

        folder = self.path / "checkpoints"
        if not folder.is_dir():
            return []
        complete = (row for row in rows(folder, verify=False) if row["state"] == "complete")
        return [
            Checkpoint(row["step"], folder / row["name"], row["validation_loss"], row["healthy"]) for row in complete
        ]

    @checked
    def generate(
        self,
        prompt: Prompt,
        *changes: Change,
        tokens: int = 100,
        temperature: float = 0.8,
        top_k: int | None = 50,
        top_p: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        batch: int = 16,
        ema: bool = False,
    ) -> Prompt:
        """Continue ``prompt`` with the newest checkpoint. Returns the new text, or a list of texts for a list of prompts.

        Each call loads the model, so pass several prompts together.

        Args:
            prompt: text, or a list of texts.
            changes: changes to the run's settings.
            tokens: maximum number of new tokens.
            temperature: 0 takes the most likely token.
            top_k: sample from this many most likely tokens; None: all.
            top_p: sample from the most likely tokens up to this probability.
            stop: a text to stop before, or several.
            seed: the same seed gives the same text.
            batch: number of prompts per batch.
            ema: use the average of the weights (optim.ema).
        """
        from hpclm.inference.generation_settings import Limits, Sampling

        prompts = prompts_of(prompt)
        positive(batch=batch)
        limits = Limits(tokens, (stop,) if isinstance(stop, str) else tuple(stop))
        sampling = Sampling(temperature, top_k, top_p, seed)
        live.load_pytorch()
        from hpclm.inference.completion import Completer

        with live.computing():
            completer = Completer.of_run(self.path, words(changes), ema=ema)
            texts = [completion.text for completion in completer.complete_all(prompts, batch, limits, sampling)]
        if isinstance(prompt, str):
            return texts[0]
        return texts

    @checked
    def evaluate(
        self,
        *changes: Change,
        part: str = "valid",
        text: str | os.PathLike[str] | None = None,
        data: str | os.PathLike[str] | None = None,
        samples: int | None = None,
        tokens: int | None = None,
        ema: bool = False,
    ) -> dict[str, float | int | str]:
        """Measure the newest checkpoint on held-out data: the loss in nats per token, perplexity, and bits per byte if known.

        Args:
            changes: changes to the run's settings.
            part: part of the run's data: valid, test or train.
            text: the path of a text or .jsonl file to read instead.
            data: the prefix of a dataset to read instead.
            samples: number of samples to read of the part; None: all.
            tokens: approximate number of tokens to read of the text or dataset; None: all.
            ema: measure the average of the weights (optim.ema).
        """
        from hpclm.inference.evaluation import on_documents, on_part

        live.load_pytorch()
        positive(samples=samples, tokens=tokens)
        if text is None and data is None:
            if tokens is not None:
                raise ConfigError("tokens= is for text= and data=; use samples=")
            with live.computing():
                return on_part(self.path, words(changes), part, samples, ema)
        if samples is not None or (text is not None and data is not None):
            raise ConfigError("give one of text= and data=, with tokens= instead of samples=")
        file, prefix = (path if path is None else paths.expanded(os.fspath(path)) for path in (text, data))
        if file is not None and not files.is_file(Path(file)):
            raise ConfigError(f"text={file!r} does not exist; text= takes the path of a text or .jsonl file")
        with live.computing():
            return on_documents(self.path, words(changes), file, prefix, tokens, ema=ema)

    @checked
    def report(self, output: str | os.PathLike[str] | None = None, samples: str | None = None) -> Report:
        """Write a page about the run, with its origin, curves and attempts. A notebook shows the page. See `hpclm report`.

        Args:
            output: the page, or a folder for the page and images of its charts; by default report.html in the run directory.
            samples: a text that the models of some checkpoints continue.
        """
        if output is None:
            output = self.path / "report.html"
        return Report.written([self.path], output, samples)

    @checked
    def convert(
        self,
        target: str | os.PathLike[str],
        *changes: Change,
        dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
        shard_gb: float = 5.0,
        allow_nan: bool = False,
        ema: bool = False,
    ) -> Path:
        """Write the newest checkpoint's weights and tokenizer for Hugging Face transformers or llama.cpp. Returns the target.

        Args:
            target: a folder, or a file that ends with .gguf; it must not exist.
            changes: changes to the run's settings.
            dtype: type of the weights.
            shard_gb: maximum size of a file.
            allow_nan: also write weights that are not finite.
            ema: write the average of the weights (optim.ema).
        """
        from hpclm.interop.convert import exported

        live.load_pytorch()
        positive(shard_gb=shard_gb)
        folder = Path(paths.expanded(os.fspath(target)))
        with live.computing():
            exported(self.path, folder, words(changes), dtype, shard_gb, allow_nan, ema)
        return folder

    @checked
    def resume(self, *changes: Change, steps: int | None = None, resume_step: int | None = None) -> "Run":
        """Continue training in this process, optionally with changes to the settings: `run.resume(steps=400)`.

        Args:
            changes: changes to the run's settings.
            steps: the last step, instead of the run's budget.
            resume_step: the step of the checkpoint to continue from, instead of the newest.
        """
        live.train(RunKeywords(steps=steps).compose(self, changes), resume_step)
        return self

    @checked
    def cancel(self, now: bool = False, wait: float = 300) -> "Run":
        """Make the run's jobs or processes save and exit, and wait for them; see `hpclm cancel`. `resume` continues the run.

        If the run is not running, its status is printed. ConfigError if this process trains it: interrupt that call instead.

        Args:
            now: end the run without saving.
            wait: maximum number of seconds to wait; then HpclmError is raised.
        """
        from hpclm.launch import cancel

        if not wait >= 0:
            raise ConfigError(f"wait={wait} must be at least 0")
        if self._status().process == os.getpid():
            raise ConfigError(
                f"{os.fspath(self)} is trained by this process; interrupt the cell or the call that trains it"
            )
        cancel.cancel([Path(os.fspath(self))], now, wait)
        return self

    def _status(self) -> State:
        return jobs.state(self.path, PATIENCE)

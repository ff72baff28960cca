"""The trained network of a run as a PyTorch module: ``hpclm.load``."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hpclm.api import live
from hpclm.api.checked import checked, positive, prompts_of
from hpclm.base import paths
from hpclm.base.errors import ConfigError
from hpclm.checkpoint import directory
from hpclm.config import RunConfig
from hpclm.data.tokenizers import Tokenizer
from hpclm.engine import Shard
from hpclm.inference import run_model, run_settings
from hpclm.inference.completion import Completer
from hpclm.inference.generation_settings import Limits, Sampling
from hpclm.interop import run as interop
from hpclm.model import init
from hpclm.model.stack import Stack
from hpclm.preprocess import run_text
from hpclm.preprocess.run_text import RunText

Prompt = TypeVar("Prompt", str, list[str])


class Model(nn.Module):
    """The trained network of a run, in evaluation mode, on one device. ``hpclm.load`` returns it.

    >>> model = hpclm.load("runs/small")
    >>> ids = torch.tensor([model.tokenizer.encode("Once upon")])
    >>> model(ids).shape  # logits: [batch, tokens, vocabulary]
    >>> model.stack.layers["block0"].register_forward_hook(print)
    """

    def __init__(self, stack: Stack, text: RunText | ConfigError, run: Path, settings: RunConfig, step: int):
        """``text``: the run's, or why it has none."""
        super().__init__()
        self.stack = stack
        """The layers, by name: stack.layers["block0"] and so on."""
        self.settings = settings
        """The settings of the run."""
        self.step = step
        """The step of the checkpoint."""
        self._run = run
        self._text = text
        self.eval()

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer, with encode(), decode() and eod; ConfigError if the run has none."""
        return self._texts.tokenizer

    @property
    def _texts(self) -> RunText:
        if isinstance(self._text, ConfigError):
            raise self._text
        return self._text

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] token ids -> [B, T, vocabulary] logits of each next token, in the run's compute type. T is at most model.context."""
        context = self.settings.model.context
        if not isinstance(ids, Tensor) or ids.ndim != 2 or not 1 <= ids.shape[1] <= context:
            given = [*ids.shape] if isinstance(ids, Tensor) else type(ids).__name__
            raise ConfigError(f"the token ids must be a tensor [batch, tokens] of 1 to {context} tokens, not {given}")
        return self.stack.head(ids).logits()

    @checked
    def generate(
        self,
        prompt: Prompt,
        tokens: int = 100,
        temperature: float = 0.8,
        top_k: int | None = 50,
        top_p: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        batch: int = 16,
    ) -> Prompt:
        """Continue ``prompt``, a text or a list of texts; see ``Run.generate``."""
        prompts = prompts_of(prompt)
        positive(batch=batch)
        limits = Limits(tokens, (stop,) if isinstance(stop, str) else tuple(stop))
        sampling = Sampling(temperature, top_k, top_p, seed)
        completer = Completer(self.stack, self._texts)
        texts = [done.text for done in completer.complete_all(prompts, batch, limits, sampling)]
        if isinstance(prompt, str):
            return texts[0]
        return texts

    @checked
    def save(self, out: str | os.PathLike[str]) -> Path:
        """Write the weights as a new run at step 0, with the run's settings and tokenizer. Returns its directory.

        `hpclm train ... checkpoint.init_from=OUT` trains it further. ConfigError if ``out`` exists.
        """
        target = Path(paths.expanded(os.fspath(out)))
        interop.save_beside(self._run, target, self.settings, _Weights(self.stack))
        return target


class _Weights:
    """The weights of a stack as the state of a checkpoint."""

    def __init__(self, stack: Stack):
        self.stack = stack

    def tensors(self) -> Iterator[Shard]:
        """Every weight whole, in fp32."""
        for name, weight in self.stack.weights():
            yield Shard.whole(f"model.{name}", _stored(weight))
        for spec in self.stack.specs:
            for name, buffer in init.saved_buffers(self.stack.layers[spec.name]):
                yield Shard.whole(f"model.{spec.name}.{name}", _stored(buffer))

    def scalars(self) -> dict[str, Any]:
        """The optimizer has made no step."""
        return {"optimizer_steps": 0}


def _stored(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32).contiguous()


def loaded(run: Path, overrides: list[str], step: int | None, ema: bool) -> Model:
    """The network of a checkpoint of ``run``, by default the newest; see ``hpclm.load``."""
    with live.computing():
        config = run_settings.checked_settings(run, overrides, reads_text=False)
        compute = run_model.place(config)
        checkpoint = directory.newest(run / "checkpoints") if step is None else directory.locate(_of_step(run, step))
        text: RunText | ConfigError
        try:
            text = run_text.of_run(run, config.data, config.model.vocab_size)
            fingerprint = text.tokenizer.fingerprint
        except ConfigError as error:
            text = error
            fingerprint = None
        stack, progress = run_model.load_checkpoint(*checkpoint, config, fingerprint, compute, ema)
    return Model(stack, text, run, config, progress.step)


def _of_step(run: Path, step: int) -> Path:
    there = {int(folder.name.removeprefix("step-")): folder for folder in run_settings.saved_steps(run)}
    if step not in there:
        raise ConfigError(f"{run} has no checkpoint of step {step}; it has {', '.join(map(str, there))}")
    return there[step]

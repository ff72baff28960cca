"""Continues text with a run's model: prompts to ids, ids to text, and the end of a continuation."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hpclm.checkpoint import directory
from hpclm.inference import run_model, run_settings
from hpclm.inference.generation import continue_all
from hpclm.inference.generation_settings import Limits, Sampling
from hpclm.model.stack import Stack
from hpclm.preprocess import run_text
from hpclm.preprocess.run_text import RunText

log = logging.getLogger(__name__)
SPARE = 8  # tokens beyond the longest stop string that are decoded to look for it
Streamed = Callable[[int, str], None]
"""Called with a prompt's number and its continuation so far."""


@dataclass(frozen=True)
class Completion:
    """The continuation of a prompt."""

    prompt: str
    text: str
    """The continuation, without the prompt."""
    tokens: int
    finish: Literal["end", "stop", "length"]
    """Why the continuation ended: the end of the document, a stop string, or the maximum number of tokens."""


class Completer:
    """A model and its text."""

    def __init__(self, model: Stack, text: RunText, step: int = 0):
        """``step``: the step of the model's checkpoint."""
        self.model = model
        self.text = text
        self.step = step
        self._warned = False
        ignored = run_text.without_effect(text.folder.generation)
        if ignored:
            log.warning("the model's own generation settings are not applied: %s", ", ".join(ignored))

    @classmethod
    def of_run(cls, run: Path, overrides: list[str], checkpoint: Path | None = None, ema: bool = False) -> "Completer":
        """The model of a run's ``checkpoint``, by default the newest. ``ema``: with the average of the weights (optim.ema)."""
        config = run_settings.inference_settings(run, overrides, checkpoint)
        text = run_text.of_run(run, config.data, config.model.vocab_size)
        compute = run_model.place(config)
        fingerprint = text.tokenizer.fingerprint
        if checkpoint is None:
            model, progress = run_model.load_model(run, config, fingerprint, compute, ema)
        else:
            good = directory.locate(checkpoint)
            model, progress = run_model.load_checkpoint(*good, config, fingerprint, compute, ema)
        # layers would cast their weights for every token
        return cls(model.to(compute.dtype), text, progress.step)

    def complete_all(
        self, prompts: Sequence[str], size: int, limits: Limits, sampling: Sampling
    ) -> Iterator[Completion]:
        """The completions of all prompts, in order, ``size`` at a time."""
        for begin in range(0, len(prompts), size):
            yield from self.complete(prompts[begin : begin + size], limits, replace(sampling, first=begin))

    def complete(
        self, prompts: Sequence[str], limits: Limits, sampling: Sampling, streamed: Streamed | None = None
    ) -> list[Completion]:
        """Continue a batch of prompts."""
        starts = [self.text.start(prompt) for prompt in prompts]
        ends = self.text.ends
        longest = max(map(len, starts), default=0)
        context = self.model.config.context
        if longest > context and not self._warned:
            self._warned = True
            log.warning(
                "a prompt has %d tokens, and model.context=%d: the model does not see the beginning of longer prompts",
                longest,
                context,
            )
        finishes: list[Literal["end", "stop", "length"]] = ["length"] * len(prompts)

        def ended(number: int, new: list[int]) -> bool:
            if new[-1] in ends:
                finishes[number] = "end"
            elif limits.stop and self._stops(starts[number], new, limits.stop):
                finishes[number] = "stop"
            elif streamed:
                streamed(number, self._text(starts[number], new))
            return finishes[number] != "length"

        continuations = continue_all(self.model, starts, limits.tokens, self.text.generated, sampling, ended)
        completions = []
        for prompt, ids, new, finish in zip(prompts, starts, continuations, finishes, strict=True):
            shown = new[:-1] if finish == "end" else new
            text = self._text(ids, shown)
            places = [place for place in map(text.find, limits.stop) if place >= 0]
            cut = min(places, default=len(text))
            completions.append(Completion(prompt, text[:cut], len(new), finish))
        return completions

    def _text(self, ids: list[int], new: list[int]) -> str:
        """The text of ``new`` after ``ids``; both are decoded together, because otherwise the space between them is lost."""
        return self.text.decode(ids + new)[len(self.text.decode(ids)) :]

    def _stops(self, ids: list[int], new: list[int], stop: tuple[str, ...]) -> bool:
        """Whether the end of ``new`` has a stop string; decodes only the tokens that could hold it."""
        tail = max(len(end.encode()) for end in stop) + SPARE
        if len(new) > tail:
            text = self.text.decode(new[-tail:])
            if not any(end in text for end in stop):
                return False
        return any(end in self._text(ids, new) for end in stop)

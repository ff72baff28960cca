"""Tasks of lm-evaluation-harness, measured on a model of hpclm's as the library measures one of transformers.

Only this file imports the library.
"""

import logging
import random
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hpclm import extras, files
from hpclm.data.tokenizers import Tokenizer
from hpclm.errors import ConfigError
from hpclm.inference.generation import continue_all
from hpclm.inference.sampling import Sampling
from hpclm.model.stack import Stack
from hpclm.registry import hint

NEW = 256  # tokens to generate where a task does not say
Scores = dict[str, dict[str, float]]
"""Task -> metric -> value; a metric's standard error is called METRIC_stderr."""


@dataclass(frozen=True)
class Wanted:
    """What to measure."""

    tasks: Sequence[str]
    """Names of tasks, groups or tags."""
    folder: str | None = None
    """A folder of task files, which are found before the library's own."""
    samples: int | None = None
    """Documents of each task; None: all."""
    shots: int | None = None
    """Examples before each question; None: what the task says."""


@dataclass(frozen=True)
class Scored:
    """The scores of tasks and groups, and how many documents each task has been measured on."""

    scores: Scores
    samples: dict[str, int]


class Tasks:
    """Tasks that have been found, with their data."""

    def __init__(self, wanted: Wanted):
        """ConfigError if the library is missing, a task unknown, or its data cannot be read."""
        self.wanted = wanted
        with extras.needed_for("evaluation on tasks"):
            from lm_eval.tasks import TaskManager
        paths = [name for name in wanted.tasks if "/" in name or name.endswith(".yaml")]
        if paths:
            raise ConfigError(
                f"{paths[0]} is not the name of a task; give the folder of a task file as --tasks-path or evaluate.tasks_path"
            )
        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it tells of every default that a task relies on
        _check_folder(wanted.folder)
        # the library's own 15,000 tasks take seconds to list
        self.manager = TaskManager(include_path=wanted.folder, include_defaults=wanted.folder is None)
        if wanted.folder and set(wanted.tasks) - set(self.manager.all_tasks):
            self.manager = TaskManager(include_path=wanted.folder)
        unknown = sorted(set(wanted.tasks) - set(self.manager.all_tasks))
        if unknown:
            names = [f"{name!r}.{hint(name, self.manager.all_tasks)}" for name in unknown]
            raise ConfigError([f"lm-evaluation-harness has no task {name}" for name in names])
        try:
            with _same_random_state():
                self.manager.load(list(wanted.tasks))
        except Exception as error:  # its template or its code may fail in any way
            raise ConfigError(
                f"the tasks {', '.join(wanted.tasks)} cannot be loaded: {type(error).__name__}: {error}"
            ) from error

    def score(
        self,
        model: Stack,
        tokenizer: Tokenizer,
        begin: int | None = None,
        batch: int = 16,
        between: Callable[[], None] = lambda: None,
        errors: bool = True,
    ) -> Scored:
        """Measure ``model`` on all of them.

        ``begin``: the token that begins a text, where it is not the end-of-document token. ``between`` is called between batches of
        ``batch`` texts, and may raise. ``errors``: also estimate standard errors, which may start processes.
        """
        from lm_eval.evaluator import simple_evaluate

        # where a result may go, the library prints remarks
        with _same_random_state(), _ended_by_sigterm(), redirect_stdout(sys.stderr):
            found = simple_evaluate(
                model=adapted(model, tokenizer, begin, batch, between),
                tasks=list(self.wanted.tasks),
                num_fewshot=self.wanted.shots,
                limit=self.wanted.samples,
                task_manager=self.manager,
                log_samples=False,
                bootstrap_iters=100_000 if errors else 0,
            )
        if found is None:
            raise ConfigError("lm-evaluation-harness gives no results: it takes this process for another rank's")
        scores = {task: dict(_figures(row)) for task, row in {**found["results"], **found.get("groups", {})}.items()}
        return Scored(
            {task: row for task, row in scores.items() if row},
            {task: int(count["effective"]) for task, count in found.get("n-samples", {}).items()},
        )


def _figures(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The metrics of a task: the library calls them metric,filter, and the filter that changes nothing none."""
    for name, value in row.items():
        if isinstance(value, int | float) and "," in name:
            yield name.removesuffix(",none"), float(value)


def _check_folder(folder: str | None) -> None:
    """ConfigError where task files, which may name Python functions, are not there or could be another user's."""
    if folder is None:
        return
    if not Path(folder).is_dir():
        raise ConfigError(f"{folder} is not a folder of task files")
    exposed = files.exposed_folder(Path(folder))
    if exposed:
        raise ConfigError(f"{folder} holds task files, which may name code to run in your name, and {exposed}")


@contextmanager
def _same_random_state() -> Iterator[None]:
    """The library seeds every generator; afterwards they go on from where they were."""
    own, array = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(own)
    np.random.set_state(array)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """The library ends the processes it starts by SIGTERM, and waits for ever if they have inherited that it is ignored."""
    settable = threading.current_thread() is threading.main_thread()
    if not settable or signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def adapted(model: Stack, tokenizer: Tokenizer, begin: int | None, batch: int, between: Callable[[], None]) -> Any:
    """``model`` as a model of the library's."""
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    begins = tokenizer.eod if begin is None else begin
    if begins is None:
        raise ConfigError("the tokenizer has no end-of-document token, which begins every text of a task")
    first: int = begins
    context = model.config.context

    class Adapter(TemplateLM):
        """What the library asks of a model."""

        tokenizer_name = "hpclm"
        max_length = context

        @property
        def eot_token_id(self) -> int:
            return first if tokenizer.eod is None else tokenizer.eod

        @property
        def prefix_token_id(self) -> int:
            return first

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            ids = list(tokenizer.encode(string))
            if tokenizer.ends_itself and ids and ids[-1] == tokenizer.eod:
                ids.pop()
            if ids and max(ids) >= model.config.vocab_size:
                raise ConfigError(
                    f"the tokenizer gives id {max(ids)}, but the run's model.vocab_size is {model.config.vocab_size}"
                )
            return ids

        def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> Any:
            return super().loglikelihood(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            pairs = [(before, after) for _, before, after in requests]
            return log_likelihoods(model, pairs, batch, between)

        def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
            texts = [
                [
                    make_disjoint_window(window)
                    for window in get_rolling_token_windows(self.tok_encode(text), first, context, context_len=1)
                ]
                for (text,) in (request.args for request in requests)
            ]
            found = iter(log_likelihoods(model, [window for text in texts for window in text], batch, between))
            return [sum(next(found)[0] for _ in text) for text in texts]

        def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
            alike: dict[str, list[int]] = defaultdict(list)
            for number, request in enumerate(requests):
                alike[repr(request.args[1])].append(number)
            texts = [""] * len(requests)
            for numbers in alike.values():
                options = dict(normalize_gen_kwargs(requests[numbers[0]].args[1], NEW))
                stop = [options["until"]] if isinstance(options.get("until"), str) else list(options.get("until") or [])
                most = int(options["max_gen_toks"])
                room = context - most if most < context else 3 * context // 4
                starts = [self.tok_encode(requests[number].args[0])[-room:] or [first] for number in numbers]
                order = sorted(range(len(numbers)), key=lambda at: -len(starts[at]))
                for at in range(0, len(order), batch):
                    rows = order[at : at + batch]
                    new = generated(model, tokenizer, [starts[row] for row in rows], most, stop, sampling(options))
                    for row, text in zip(rows, new, strict=True):
                        texts[numbers[row]] = postprocess_generated_text(text, stop, None)
                    between()
            return texts

    return Adapter()


def sampling(options: Mapping[str, Any]) -> Sampling:
    """A task's options of generation."""
    temperature = float(options.get("temperature") or 0.0) if options.get("do_sample") else 0.0
    return Sampling(temperature, options.get("top_k") or None, float(options.get("top_p") or 1.0))


def generated(
    model: Stack, tokenizer: Tokenizer, starts: list[list[int]], most: int, stop: Sequence[str], how: Sampling
) -> list[str]:
    """The text after each of ``starts``, until its document ends, a text of ``stop`` comes, or there are ``most`` tokens."""

    def ended(_: int, new: list[int]) -> bool:
        if new[-1] == tokenizer.eod:
            return True
        return bool(stop) and any(each in tokenizer.decode(new) for each in stop if each)

    found = continue_all(model, starts, most, tokenizer.size, how, ended)
    return [tokenizer.decode(new[:-1] if new and new[-1] == tokenizer.eod else new) for new in found]


@torch.inference_mode()
def log_likelihoods(
    model: Stack, pairs: Sequence[tuple[list[int], list[int]]], size: int, between: Callable[[], None]
) -> list[tuple[float, bool]]:
    """For each pair of tokens before and after: the log-probability of those after, and whether each was the most probable.

    Of a pair that is longer than the context its end is read.
    """
    context, device = model.config.context, next(model.parameters()).device
    by_input: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, (before, after) in enumerate(pairs):
        by_input[tuple([*before, *after][-context - 1 : -1])].append(number)
    found = [(0.0, True)] * len(pairs)
    inputs = sorted(by_input, key=lambda ids: (-len(ids), ids))
    for at in range(0, len(inputs), size):
        rows = inputs[at : at + size]
        ids = torch.tensor([[*row, *[0] * (len(rows[0]) - len(row))] for row in rows], device=device)
        head = model(ids)
        weight = head.rows()[: head.vocab_size]
        for row, read in enumerate(rows):
            longest = max((pairs[number][1] for number in by_input[read]), key=len)
            count = min(len(longest), len(read))
            scores = F.linear(head.hidden[len(read) - count : len(read), row], weight).float().log_softmax(-1)
            for number in by_input[read]:
                found[number] = _of_tokens(scores, pairs[number][1])
        between()
    return found


def _of_tokens(scores: Tensor, after: Sequence[int]) -> tuple[float, bool]:
    """The log-probability of the last tokens ``after``, given [n, V] log-probabilities, and whether each is the most probable."""
    count = min(len(after), len(scores))
    if not count:
        return 0.0, True
    labels = torch.tensor(after[-count:], device=scores.device)
    rows = scores[-count:]
    return float(rows.gather(-1, labels[:, None]).sum()), bool((rows.argmax(-1) == labels).all())

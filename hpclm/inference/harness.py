"""Scores a model of hpclm on tasks of lm-evaluation-harness, as the library itself scores a model of transformers.

Only this file imports the library; import it in ``extras.needed_for("evaluation on tasks")``.
"""

import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import Task
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import Collator, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from hpclm.base import folders
from hpclm.base.errors import ConfigError, HpclmError
from hpclm.inference import task_names
from hpclm.inference.generation import continue_all
from hpclm.inference.generation_settings import Sampling
from hpclm.inference.scoring import by_rotation
from hpclm.model.stack import Stack
from hpclm.preprocess.run_text import RunText

NEW = 256  # default number of tokens to generate
SHOWN = 60  # characters of a text in a message
Scores = dict[str, dict[str, float]]
"""Task -> metric -> value; a metric's standard error is called METRIC_stderr."""


class Tasks:
    """Tasks of the library, with their data."""

    def __init__(self, names: Sequence[str], folder: str | None, samples: int | None, shots: int | None):
        """``names``: names of tasks, groups or tags. ``folder``: folder of task files, which take precedence over the library's.
        ``samples``: documents of each task; None: all. ``shots``: examples before each question; None: the task's default.

        ConfigError if a task is unknown, or its data cannot be read.
        """
        self.names = list(names)
        self.samples = samples
        self.shots = shots
        task_names.check_task_names(names, folder)
        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it logs every default that a task relies on
        exposed = folder is not None and folders.exposed_folder(Path(folder))
        if exposed:
            raise ConfigError(f"{folder} holds task files, which may name code to run in your name, and {exposed}")
        # listing the library's own 15,000 tasks takes seconds
        self.manager = TaskManager(include_path=folder, include_defaults=folder is None)
        if folder and set(names) - set(self.manager.all_tasks):
            self.manager = TaskManager(include_path=folder)
        unknown = sorted(set(names) - set(self.manager.all_tasks))
        if unknown:
            raise ConfigError([task_names.no_task(name, self.manager.all_tasks) for name in unknown])
        try:
            self.manager.load(self.names)
        except Exception as error:  # its template or its code may fail in any way
            raise ConfigError(
                f"the tasks {', '.join(names)} cannot be loaded: {type(error).__name__}: {error}"
            ) from error

    def score(
        self,
        model: Stack,
        text: RunText,
        batch: int = 16,
        check_interrupt: Callable[[], None] = lambda: None,
        errors: bool = True,
    ) -> tuple[Scores, dict[str, int]]:
        """Scores of ``model`` at tasks and groups, and the number of documents read of each task.

        ``text``: encodes the run's text. ``check_interrupt``: called between batches of ``batch`` texts; may raise. ``errors``: also
        estimate standard errors.
        """
        with redirect_stdout(sys.stderr):  # the library prints remarks to stdout, which may carry the result
            results = simple_evaluate(
                model=Adapter(model, text, batch, check_interrupt),
                tasks=self.names,
                num_fewshot=self.shots,
                limit=self.samples,
                task_manager=self.manager,
                log_samples=False,
                bootstrap_iters=100_000 if errors else 0,
            )
        if results is None:
            raise ConfigError("lm-evaluation-harness gives no results: it takes this process for a rank other than 0")
        rows = {**results["results"], **results.get("groups", {})}
        scores = {task: dict(_figures(row)) for task, row in rows.items()}
        scores = {task: figures for task, figures in scores.items() if figures}
        return scores, {task: int(count["effective"]) for task, count in results.get("n-samples", {}).items()}


@contextmanager
def naming_tasks() -> Iterator[None]:
    """Turn an error of a task's own code in the block into a ConfigError that names the task."""
    try:
        yield
    except HpclmError:
        raise
    except Exception as error:
        callers = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
        names = [str(caller.config.task) for caller in callers if isinstance(caller, Task)]
        if not names:
            raise
        raise ConfigError(f"the task {names[-1]} failed: {type(error).__name__}: {error}") from error


def _figures(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The metrics of a task. The library calls each "metric,filter"; the filter that changes nothing is called none."""
    for name, value in row.items():
        if isinstance(value, int | float) and "," in name:
            yield name.removesuffix(",none"), float(value)


class Adapter(TemplateLM):
    """A model with the library's interface."""

    tokenizer_name = "hpclm"

    def __init__(self, model: Stack, text: RunText, batch: int, check_interrupt: Callable[[], None]):
        super().__init__()
        if text.begin is None:
            raise ConfigError("the tokenizer has no end-of-document token, which begins every text of a task")
        self.model = model
        self.text = text
        self.first = text.begin
        self.batch = batch
        self.check_interrupt = check_interrupt
        self.max_length = model.config.context

    @property
    def eot_token_id(self) -> int:
        """Id of the end-of-document token."""
        return self.first if self.text.tokenizer.eod is None else self.text.tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """The token that begins a text."""
        return self.first

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text; ConfigError if the model has no such tokens."""
        return self.text.encode(string, add_special_tokens)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> Any:
        """See TemplateLM; without the library's progress bar."""
        for context, continuation in (request.args for request in requests):
            if context == "" and not self.tok_encode(continuation, add_special_tokens=False):
                raise ConfigError(_unscorable(context, continuation, "the continuation has no tokens"))
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        for (context, continuation), before, after in requests:
            problem = unscorable(before, after, self.max_length)
            if problem:
                raise ConfigError(_unscorable(context, continuation, problem))
        pairs = [(before, after) for _, before, after in requests]
        return log_likelihoods(self.model, pairs, self.batch, self.check_interrupt)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """The log-probability of each text."""
        texts = [
            [
                *map(
                    make_disjoint_window,
                    get_rolling_token_windows(self.tok_encode(text), self.first, self.max_length, 1),
                )
            ]
            for (text,) in (request.args for request in requests)
        ]
        pairs = [pair for text in texts for pair in text]
        scores = iter(log_likelihoods(self.model, pairs, self.batch, self.check_interrupt))
        return [sum(next(scores)[0] for _ in text) for text in texts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """The text after each prompt."""

        def longest_first(args: Any) -> tuple[int, str]:
            return -len(self.tok_encode(args[0])), args[0]

        alike = Collator([request.args for request in requests], longest_first, lambda args: args[1], "gen_kwargs")
        texts: list[str] = []
        for chunk in alike.get_batched(n=self.batch):
            options = dict(normalize_gen_kwargs(chunk[0][1], NEW))
            texts += self._generated([text for text, _ in chunk], options, first=len(texts))
            self.check_interrupt()
        return list(alike.get_original(texts))

    def _generated(self, prompts: Sequence[str], options: Mapping[str, Any], first: int) -> Iterator[str]:
        """The text after each prompt, up to the end of the document, one of the ``until`` texts, or the maximum number of tokens.

        ``first``: number of earlier requests; each request has its own random numbers, independently of the batch size.
        """
        until = options.get("until") or []
        if isinstance(until, str):
            until = [until]
        max_new_tokens = int(options["max_gen_toks"])
        stop = [text for text in until if text]
        end = self.text.decode([self.eot_token_id])
        if end and end not in stop:
            stop.append(end)
        room = self.max_length - max_new_tokens
        if room < 1:
            raise ConfigError(
                f"a task generates up to {max_new_tokens} tokens (its max_gen_toks), which leaves no room for a prompt in "
                f"model.context={self.max_length}; lower max_gen_toks in the task file (--tasks-path)"
            )
        starts = [self.tok_encode(prompt)[-room:] or [self.first] for prompt in prompts]
        temperature = 0.0
        if options.get("do_sample"):
            temperature = float(options.get("temperature") or 0.0)
        sampling = Sampling(temperature, options.get("top_k") or None, float(options.get("top_p") or 1.0), first=first)
        ends = self.text.ends

        def ended(_: int, new: list[int]) -> bool:
            return new[-1] in ends or any(text in self.text.decode(new) for text in stop)

        for new in continue_all(self.model, starts, max_new_tokens, self.text.generated, sampling, ended):
            yield postprocess_generated_text(self.text.decode(new, special=False), stop, None)


def unscorable(before: Sequence[int], after: Sequence[int], context: int) -> str | None:
    """The reason why the library's hf model would not score the tokens ``after`` following ``before``; None if it would."""
    if not before:
        return "the context has no tokens"
    if not after:
        return "the tokenizer merges the continuation into the context, so it has no separate token"
    if len(after) > context:
        return f"the continuation has {len(after)} tokens, but model.context={context}"
    return None


def _unscorable(context: str, continuation: str, problem: str) -> str:
    return (
        f"a task asks for the probability of {_shown(continuation)} after {_shown(context)}, which is undefined: {problem}. "
        "lm-evaluation-harness's own hf model fails here too; change the task's doc_to_text, doc_to_choice or target_delimiter"
    )


def _shown(text: str) -> str:
    """The end of a text, quoted."""
    return repr(text) if len(text) <= SHOWN else f"...{text[-SHOWN:]!r}"


@torch.inference_mode()
def log_likelihoods(
    model: Stack, pairs: Sequence[tuple[list[int], list[int]]], size: int, check_interrupt: Callable[[], None]
) -> list[tuple[float, bool]]:
    """For each pair (tokens before, tokens after): the log-probability of the tokens after, and whether each was the most probable.

    A pair has at least one token before, and from 1 to model.context tokens after. Only the end of a pair longer than the
    context is read. Pairs that differ only in the last token are read once.
    """
    context = model.config.context
    device = next(model.parameters()).device
    by_input: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, (before, after) in enumerate(pairs):
        by_input[tuple([*before, *after][-context - 1 : -1])].append(number)
    results = [(0.0, True)] * len(pairs)
    inputs = sorted(by_input, key=lambda ids: (-len(ids), ids))
    batches = [inputs[at : at + size] for at in range(0, len(inputs), size)]
    for rows in (rows for batch in batches for rows in by_rotation(model.config, batch, len)):
        ids = torch.tensor([[*row, *[0] * (len(rows[0]) - len(row))] for row in rows], device=device)
        head = model.head(ids)
        weight = head.rows()[: head.vocab_size]
        for row, ids_read in enumerate(rows):
            for number in by_input[ids_read]:
                labels = torch.tensor(pairs[number][1], dtype=torch.int64, device=device)
                hidden = head.hidden[len(ids_read) - len(labels) : len(ids_read), row]
                scores = head.shape.of(head.shape.product(hidden, weight)).float().log_softmax(-1)
                greedy = bool((scores.argmax(-1) == labels).all())
                results[number] = float(scores.gather(-1, labels[:, None]).sum()), greedy
        check_interrupt()
    return results

"""``data=TEXT`` and ``tokenizer=TOKENIZER`` on a command line: the same as ``hpclm.train``'s arguments."""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpclm.base.errors import ConfigError
from hpclm.config import RunConfig, compose
from hpclm.config.settings import is_override
from hpclm.node import environment, interruption, preemption
from hpclm.rundir import folder

if TYPE_CHECKING:
    from hpclm.preprocess.text_dataset import NamedDataset


def resolved_settings(
    words: Sequence[str],
    typed: Sequence[str] = (),
    check: Callable[[RunConfig, "NamedDataset"], None] = lambda run, dataset: None,
) -> RunConfig:
    """The settings of ``[FILE] key=value ...``, after tokenizing the text of ``data=``.

    ``typed``: all arguments of the command, for messages. ``check``: called with the settings that ``planned`` returns before a dataset
    is written. ConfigError lists every problem of the settings.
    """
    run, dataset = planned(words, typed)
    if dataset is None or dataset.written:
        return run
    check(run, dataset)
    # a signal ends the start of a run at once (preemption.StartSignals); here that would leave unfinished files
    with environment.preserved(), preemption.handling(signal.default_int_handler), interruption.raising():
        dataset.write()
    return planned(words, typed)[0]


def planned(words: Sequence[str], typed: Sequence[str] = ()) -> "tuple[RunConfig, NamedDataset | None]":
    """The settings of ``[FILE] key=value ...``, and the dataset of ``data=``, which is not written.

    Other words override the settings that follow from the dataset. data.split follows only once the dataset is written.
    """
    data, tokenizer = (_value(words, name) for name in ("data", "tokenizer"))
    others = [word for word in words if not (_is(word, "data") or _is(word, "tokenizer"))]
    run = environment.settings_with_site(others, typed)
    if data is None:
        if tokenizer is not None:
            raise ConfigError(f"tokenizer={tokenizer} has no effect without data=, a text that it tokenizes")
        return run, None
    from hpclm.preprocess import text_dataset  # imports NumPy

    text_dataset.refuse_second_data(data, compose.keys_set(others))
    folder.check_run_directory(Path(run.out))
    with environment.preserved():
        dataset = text_dataset.named_dataset(data, tokenizer, run)
    overrides = [word for word in others if is_override(word)]
    files = [word for word in others if not is_override(word)]
    return environment.settings_with_site([*files, *dataset.settings(run), *overrides], typed), dataset


def names_data(words: Sequence[str]) -> bool:
    """Whether one of ``words`` is data= with a text or the prefix of a dataset."""
    return _value(words, "data") is not None


def _value(words: Sequence[str], name: str) -> str | None:
    """The value of the last word ``name=…``, or None."""
    values = [word.partition("=")[2] for word in words if _is(word, name)]
    return next(reversed(values), None)


def _is(word: str, name: str) -> bool:
    """Whether ``word`` is ``name=…`` with a plain value, not a section of settings: data={prefix: …}."""
    key, sign, value = word.partition("=")
    return bool(sign) and key.strip() == name and not value.lstrip().startswith("{")

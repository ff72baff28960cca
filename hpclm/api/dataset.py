"""The argument ``data=``: the prefix of a dataset, a text, or a ``datasets.Dataset``, which is first written as text."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hpclm.api.checked import PATH, UnfitError, fitted
from hpclm.base import folders
from hpclm.base.errors import ConfigError
from hpclm.config import RunConfig, compose
from hpclm.config.checks import shown


class TextDataset(Protocol):
    """The part of Hugging Face's ``datasets.Dataset`` that hpclm uses."""

    @property
    def column_names(self) -> Any:
        """Names of the columns; one must be ``text``."""

    def iter(self, batch_size: int) -> Iterator[Any]:
        """Batches of rows, as mappings of columns to lists."""
        ...


Data = str | os.PathLike[str] | TextDataset
"""The prefix of a dataset, text that ``hpclm preprocess`` reads, or a ``datasets.Dataset``."""
ROWS = 1000


def data_settings(data: Data, tokenizer: str | os.PathLike[str] | None, run: RunConfig) -> list[str]:
    """Settings to train ``run`` on ``data``. A text without a dataset is first tokenized into one.

    ``tokenizer``: see ``text_dataset.named_dataset``. ConfigError for data that cannot be read.
    """
    from hpclm.preprocess import text_dataset

    if tokenizer is not None:
        tokenizer = os.fspath(tokenizer)
    if not isinstance(data, (str, os.PathLike)):
        return _of_rows(data, tokenizer, run)
    try:
        name = fitted(data, PATH)
    except UnfitError:
        raise ConfigError(f"data={shown(data)} cannot be the name of a file") from None
    dataset = text_dataset.named_dataset(name, tokenizer, run)
    dataset.write()
    return dataset.settings(run)


def refuse_second(data: Data, changes: Sequence[str]) -> None:
    """ConfigError if one of ``changes``, words key=value, also selects the data."""
    from hpclm.preprocess import text_dataset

    name = os.fspath(data) if isinstance(data, (str, os.PathLike)) else "…"
    text_dataset.refuse_second_data(name, compose.keys_set([*changes]))


def _of_rows(data: TextDataset, tokenizer: str | None, run: RunConfig) -> list[str]:
    if not hasattr(data, "iter") and not isinstance(getattr(data, "column_names", None), dict):
        raise ConfigError(
            "data= takes the prefix of a dataset, a text file or a datasets.Dataset (see its from_pandas and from_list), "
            f"not {type(data).__name__}"
        )
    from hpclm.preprocess import text_dataset

    with folders.temporary_folder() as folder:
        path = folder / "rows.jsonl"
        dataset = text_dataset.of_text(path, _write_rows(data, path), tokenizer, run, rows_of="data")
        dataset.write()
        return dataset.settings(run)


def _write_rows(data: TextDataset, path: Path) -> str:
    """Write the texts of a dataset as JSON lines, and return a short hash of them."""
    digest = hashlib.sha256()
    if isinstance(data.column_names, dict):
        raise ConfigError(f"data has the splits {', '.join(data.column_names)}; choose one, such as data['train']")
    with path.open("w", encoding="utf-8") as file:
        for batch in data.iter(batch_size=ROWS):
            rows: Mapping[str, list[str]] = batch
            if "text" not in rows:
                raise ConfigError(f"data must have a column 'text', not {[*rows]}; use rename_column(name, 'text')")
            for text in rows["text"]:
                try:
                    line = json.dumps({"text": text}) + "\n"
                except (TypeError, ValueError):  # such as bytes
                    raise ConfigError(f"data must have text in its column 'text', not {type(text).__name__}") from None
                digest.update(line.encode())
                file.write(line)
    return digest.hexdigest()[:10]

"""What ``data=`` names as a dataset: text is preprocessed on the way, once, into a folder ``datasets`` beside the run."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from hpclm import folders, paths
from hpclm.api import values
from hpclm.config import RunConfig, compose
from hpclm.config.checks import shown
from hpclm.datasets.kinds import PlainFormat
from hpclm.errors import ConfigError
from hpclm.registry import OWN
from hpclm.rundir import attempts


class TextDataset(Protocol):
    """A ``datasets.Dataset`` of Hugging Face's."""

    @property
    def column_names(self) -> Any:
        """Its columns; one must be ``text``."""

    def iter(self, batch_size: int) -> Iterator[Any]:
        """Its rows, as mappings of columns to lists."""
        ...


Data = str | os.PathLike[str] | TextDataset
"""The prefix of a dataset, text that ``hpclm preprocess`` reads, or a ``datasets.Dataset``."""
TOKENIZER = "bytes"
FILES = {".json": "json", ".model": "sentencepiece"}
"""Kinds of tokenizer by the name of the file."""
ROWS = 1000


def settings(data: Data, tokenizer: str | os.PathLike[str] | None, run: RunConfig) -> list[str]:
    """The settings with which ``run`` trains on ``data``; text becomes a dataset first, unless it is one already.

    ``tokenizer``: "bytes", or a tokenizer.json or sentencepiece file; None: "bytes". ConfigError for what cannot be read.
    """
    source = "data.source=indexed"
    if not isinstance(data, (str, os.PathLike)):
        if not hasattr(data, "iter") and not isinstance(getattr(data, "column_names", None), dict):
            raise ConfigError(
                "data= takes the prefix of a dataset, a text file or a datasets.Dataset, which has from_pandas and from_list, "
                f"not {type(data).__name__}"
            )
        with folders.temporary_folder() as folder:
            path = folder / "rows.jsonl"
            try:
                return [source, *_preprocessed(path, _write_rows(data, path), tokenizer, run)]
            except ConfigError as error:
                named = (problem.replace(f"{path}:", "data, row ") for problem in error.problems)
                raise ConfigError(problem.replace(str(path), "data") for problem in named) from None
    try:
        data = values.path(data)
    except values.UnfitError:
        raise ConfigError(f"data={shown(data)} cannot be the name of a file") from None
    path = Path(paths.expanded(data))
    if not data.strip():
        raise ConfigError("data is empty; give the prefix of a dataset, or a text file")
    if not (Path(f"{path}.idx").exists() or path.exists() or re.search(r"[*?[]", path.name)):
        raise ConfigError(
            f"data={str(path)!r}: there is no such text, and no dataset {path}.idx; looked in {Path.cwd()}"
        )
    if not Path(f"{path}.idx").is_file():
        return [source, *_preprocessed(path, None, tokenizer, run)]
    if tokenizer is not None:
        raise ConfigError(f"tokenizer={os.fspath(tokenizer)!r} has no effect: the dataset {path} has its tokenizer")
    return [source, f"data.prefix={paths.literal(path)}"]


def _write_rows(data: TextDataset, path: Path) -> str:
    """Write the texts of a dataset as JSON lines; a short hash of them."""
    digest = hashlib.sha256()
    if isinstance(data.column_names, dict):
        raise ConfigError(f"data has the splits {', '.join(data.column_names)}; choose one, such as data['train']")
    with path.open("w", encoding="utf-8") as file:
        for batch in data.iter(batch_size=ROWS):
            rows: Mapping[str, list[str]] = batch
            if "text" not in rows:
                raise ConfigError(f"data must have a column 'text', not {[*rows]}; rename_column(name, 'text')")
            for text in rows["text"]:
                try:
                    line = json.dumps({"text": text}) + "\n"
                except (TypeError, ValueError):  # bytes, for example
                    raise ConfigError(f"data must have text in its column 'text', not {type(text).__name__}") from None
                digest.update(line.encode())
                file.write(line)
    return digest.hexdigest()[:10]


def _preprocessed(
    path: Path, content: str | None, tokenizer: str | os.PathLike[str] | None, run: RunConfig
) -> list[str]:
    """The settings for the text at ``path``, as ``hpclm preprocess --append-eod`` tokenizes it.

    ``content``: a hash of the text; None: the file has changed when its size or time has.
    """
    from hpclm.datasets import build, options
    from hpclm.datasets.encode import tokenizer_of
    from hpclm.datasets.next_command import dataset_settings

    name, kind = (
        re.sub(r"\W+", "-", path.name.partition(".")[0]).strip("-") or "text",
        TOKENIZER if tokenizer is None else paths.expanded(os.fspath(tokenizer)),
    )
    files: list[str] = []
    if file := FILES.get(Path(kind).suffix):
        kind, files = file, [str(Path(kind).absolute())]
    elif kind != TOKENIZER and not OWN.fullmatch(kind):
        raise ConfigError(f"tokenizer={kind!r} must be {TOKENIZER!r}, a tokenizer.json, or a sentencepiece .model file")
    tokenizer_of.cache_clear()  # its files may have changed since an earlier call
    begun = _data_of_run(Path(run.out))

    def dataset_of(plain: PlainFormat) -> tuple[options.Request, Path]:
        request = options.text_request(path, name, kind, files, plain)
        [corpus] = request.corpora
        facts = build.job_fingerprint(corpus, request) | ({"inputs": content} if content else {})
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:10]
        return request, Path(run.out).parent / "datasets" / f"{name}-{digest}" / corpus.prefixes[0].name

    request, prefix = dataset_of("files")
    of_lines = dataset_of("lines")[1] if begun else prefix
    if begun.get("data.prefix") == str(of_lines.absolute()):  # by a version for which each line was a document
        prefix = of_lines
    [corpus], folder = request.corpora, prefix.parent
    if not Path(f"{prefix}.idx").is_file():
        build.check(request.job)
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folders.writable_folder(folder, "folder of datasets")
        try:
            build.write(corpus, request, [prefix])
        except ConfigError:
            with suppress(OSError):  # another process may have put something there
                for parent in missing:
                    parent.rmdir()
            raise
    settings = dataset_settings(prefix, tokenizer_of(request.job).size, run.model.context)
    if begun.get("data.prefix") != str(prefix.absolute()):
        return settings
    divided = ((key, begun.get(key)) for key in ("data.split", "data.split_by"))
    return [*settings, *(f"{key}={value}" for key, value in divided if value is not None)]


def _data_of_run(out: Path) -> Mapping[str, Any]:
    """The settings of the run in ``out``, by which it goes on; none if it has not begun, or they cannot be read."""
    with suppress(ConfigError):
        return compose.flat_of_run(out) if attempts.read(out) else {}
    return {}

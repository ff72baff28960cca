"""The dataset named by ``data=``: text is tokenized once, into a folder "datasets" beside the run."""

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpclm.base import folders, paths
from hpclm.base.errors import ConfigError
from hpclm.base.registry import OWN
from hpclm.config import RunConfig, compose
from hpclm.data import tokenizer_folder
from hpclm.preprocess import build, options
from hpclm.preprocess.encode import tokenizer_of
from hpclm.preprocess.next_command import dataset_settings
from hpclm.preprocess.options import InputCorpus, PreprocessRequest
from hpclm.rundir import events

TOKENIZER = "bytes"
FILES = {".json": "json", ".model": "sentencepiece"}
"""Kinds of tokenizers by file extension."""
DATASET_FILES = (".idx", ".bin")
LISTS = ("blend", "train", "valid", "test", "validation")
NAMES_DATA = ("data.source", "data.prefix", *(f"data.{name}" for name in LISTS))
"""Settings that name the data to read."""


@dataclass(frozen=True)
class Text:
    """A text, and how it becomes a dataset."""

    path: Path
    name: str
    corpus: InputCorpus
    request: PreprocessRequest
    vocab_size: int


@dataclass(frozen=True)
class NamedDataset:
    """The dataset named by ``data=``."""

    prefix: Path
    text: Text | None = None
    """None: ``data=`` is the prefix."""
    divided: tuple[str, ...] = ()
    """The division of this dataset in a run that has begun with it, as settings."""

    @property
    def preprocess(self) -> str:
        """The ``hpclm preprocess`` command that writes such a dataset; empty for a dataset given by its prefix."""
        if self.text is None:
            return ""
        job = self.text.request.job
        prefix = self.prefix.parent.parent / self.text.name
        words = ["--input", str(self.text.path), "--output-prefix", str(prefix), "--tokenizer", job.tokenizer]
        if job.files:
            words += ["--tokenizer-files", *job.files]
        if job.eod:
            words += ["--eod", job.eod]
        return shlex.join(["hpclm", "preprocess", *words, "--append-eod"])

    @property
    def written(self) -> bool:
        """Whether the dataset is complete; otherwise its text must be tokenized first."""
        return _is_dataset(self.prefix)

    def write(self) -> None:
        """Tokenize the text unless the dataset is complete. A ConfigError or an interrupt leaves nothing behind."""
        if self.text is None or self.written:
            return
        folder = self.prefix.parent
        build.check_job(self.text.request.job)
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folders.writable_folder(folder, "folder of datasets")
            build.write(self.text.corpus, self.text.request, [self.prefix])
        except BaseException as error:
            if isinstance(error, ConfigError) and self.written:
                return  # another run that started at the same time has written it
            for parent in missing:
                with suppress(OSError):  # another process may have put something there
                    parent.rmdir()
            raise

    def settings(self, run: RunConfig) -> list[str]:
        """The settings of ``run`` to train on this dataset; without data.split if it has not been written."""
        lists = [
            f"data.{name}=[]" for name in (*LISTS, "phases") if getattr(run.data, name)
        ]  # set by the file or preset
        if run.data.order == "per_dataset":
            lists.append("data.order=mcore")
        return ["data.source=indexed", *lists, *self._settings(run), *self.divided]

    def _settings(self, run: RunConfig) -> list[str]:
        prefix = f"data.prefix={paths.literal(self.prefix)}"
        if self.text is None:
            return [prefix]
        if self.written:
            return dataset_settings(self.prefix, self.text.vocab_size, run.model.context)
        return [prefix, f"model.vocab_size={self.text.vocab_size}"]


def _is_dataset(prefix: Path) -> bool:
    return Path(f"{prefix}.idx").is_file()


def named_dataset(data: str, tokenizer: str | None, run: RunConfig) -> NamedDataset:
    """The dataset for ``run`` that ``data`` names: the prefix of a dataset, or a text.

    ``tokenizer`` of a text: "bytes", a tokenizer.json or sentencepiece file, or package.module:Name; None: data.tokenizer of the run's
    settings, otherwise "bytes". ConfigError for data that cannot be read.
    """
    if not data.strip():
        raise ConfigError("data is empty; give the prefix of a dataset, or a text file")
    path = Path(paths.expanded(data))
    if path.suffix in DATASET_FILES and all(path.with_suffix(suffix).is_file() for suffix in DATASET_FILES):
        path = path.with_suffix("")
    if _is_dataset(path):
        if tokenizer is not None:
            raise ConfigError(f"tokenizer={tokenizer!r} has no effect: the dataset {path} has its tokenizer")
        return NamedDataset(path)
    if not (path.exists() or re.search(r"[*?[]", str(path))):
        raise ConfigError(
            f"data={str(path)!r}: there is no such text, and no dataset {path}.idx; looked in {Path.cwd()}"
        )
    return of_text(path, None, tokenizer, run)


def of_text(path: Path, content: str | None, tokenizer: str | None, run: RunConfig, rows_of: str = "") -> NamedDataset:
    """The dataset that ``run`` makes of the text at ``path``, tokenized as ``hpclm preprocess --append-eod`` does.

    ``content``: a hash of the text; None: size and time of the file tell whether it has changed. ``tokenizer``: see ``named_dataset``.
    ``rows_of``: see `Input`.
    """
    name = re.sub(r"\W+", "-", path.name.partition(".")[0]).strip("-") or "text"
    kind = TOKENIZER if tokenizer is None else paths.expanded(tokenizer)
    files: list[str] = []
    end = None
    of_run = tokenizer is None and run.data.tokenizer is not None
    if of_run:  # such as the tokenizer of an imported model
        folder = tokenizer_folder.of_data(run.data)
        kind, files, end = folder.kind, list(folder.files), folder.eod
    elif Path(kind).suffix in FILES:
        files = [str(Path(kind).absolute())]
        kind = FILES[Path(kind).suffix]
    elif kind != TOKENIZER and not OWN.fullmatch(kind):
        raise ConfigError(
            f"tokenizer={kind!r} must be {TOKENIZER!r}, a tokenizer.json, a sentencepiece .model file, or package.module:Name"
        )
    tokenizer_of.cache_clear()  # the tokenizer's files may have changed since an earlier call

    request = options.text_request(path, name, kind, files, end, rows_of)
    [corpus] = request.corpora
    facts = build.job_fingerprint(corpus, request)
    if content:
        facts["inputs"] = content
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:10]
    prefix = Path(run.out).parent / "datasets" / f"{name}-{digest}" / corpus.prefixes[0].name
    begun = _data_of_run(Path(run.out))
    divided: Iterable[tuple[str, Any]] = ()
    if begun.get("data.prefix") == str(prefix.absolute()):
        divided = ((key, begun.get(key)) for key in ("data.split", "data.split_by"))
    vocab_size = run.model.vocab_size if of_run else tokenizer_of(request.job).size
    return NamedDataset(
        prefix,
        Text(path, name, corpus, request, vocab_size),
        tuple(f"{key}={value}" for key, value in divided if value is not None),
    )


def _data_of_run(out: Path) -> Mapping[str, Any]:
    """The settings that the run in ``out`` uses when it resumes; empty if it has not begun, or if they cannot be read."""
    with suppress(ConfigError):
        if events.of_kind(events.read_or_refuse(out), "began"):
            return compose.flat_of_run(out)
    return {}


def refuse_second_data(data: str, names: Iterable[str]) -> None:
    """ConfigError if one of the settings ``names`` also selects the data, as ``data`` does."""
    second = [name for name in names if name in NAMES_DATA]
    if second:
        raise ConfigError(f"data={data} and {second[0]} both select the data; omit one of them")

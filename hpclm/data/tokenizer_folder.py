"""The folder with a tokenizer and all that belongs to its text: the tokens that begin and end a text, chat template, generation settings.

A run has it as OUT/tokenizer, a dataset as PREFIX.tokenizer. Its files are transformers', so AutoTokenizer opens it; hpclm.json adds the
kind of tokenizer and the files that hpclm reads. ``hpclm.data.tokenizer_writer`` writes such folders.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpclm.base.errors import ConfigError
from hpclm.base.files import read_text
from hpclm.config.data import TOKENIZERS, DataConfig
from hpclm.config.reading import json_object
from hpclm.data import tokenizers
from hpclm.data.indexed import sidecar
from hpclm.data.tokenizers import Tokenizer

NOTE = "hpclm.json"
CONFIG = "tokenizer_config.json"
GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
FAST = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
"""Settings in tokenizer_config.json for a tokenizer.json."""
Files = tuple[dict[str, bytes], dict[str, Any]]
"""The files of a tokenizer that transformers reads, and the settings of its class; empty if it has no class for it."""
ADDED = ("add_bos_token", "add_eos_token")


@dataclass(frozen=True)
class TokenizerFolder:
    """A tokenizer, and what belongs to its text."""

    kind: str = ""
    """The kind (data.tokenizer); "" if the tokenizer is unknown."""
    files: tuple[str, ...] = ()
    """The paths of its files."""
    eod: str | None = None
    """Text of the end-of-document token; None: the default of the kind."""
    imported: bool = False
    """Whether transformers' files define it: texts get the tokens that the template of its tokenizer.json adds, and a model may generate
    every entry of its network."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Content of tokenizer_config.json; empty for a tokenizer that is in no folder yet."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Content of generation_config.json, with the ids of the tokens that begin and end a text."""
    template: str | None = None
    """The chat template."""

    @property
    def tokens(self) -> dict[str, str]:
        """The special tokens that a template may name, such as {"bos_token": "<s>"}."""
        return {name: text for name, text in self.config.items() if is_text(name) and isinstance(text, str)}

    @property
    def rendered_with(self) -> tuple[str | None, dict[str, str]]:
        """The chat template, and the special tokens that it names."""
        template = self.template or ""
        return self.template, {name: text for name, text in self.tokens.items() if names(template, name)}

    @property
    def ids(self) -> dict[str, Any]:
        """The ids of the tokens that begin, end and pad a text, as in a config.json."""
        return {name: self.generation.get(name) for name in IDS}

    @property
    def ends(self) -> list[int]:
        """All tokens that end a text."""
        return listed(self.generation.get("eos_token_id"))

    def with_further_ends(self, ids: Iterable[int]) -> "TokenizerFolder":
        """This folder, with more tokens that end a text."""
        ends = list(dict.fromkeys([*self.ends, *ids]))
        value = ends[0] if len(ends) == 1 else ends or None
        return replace(self, generation={**self.generation, "eos_token_id": value})

    def build(self) -> Tokenizer:
        """The tokenizer; ConfigError if its files do not make one."""
        return tokenizers.build_tokenizer(self.kind, list(self.files), self.eod)


def read(place: Path) -> TokenizerFolder:
    """The folder ``place``; ConfigError if one of its files is invalid."""
    note = _optional_json(place / NOTE)
    match {"kind": "", "files": [], "eod": None, "imported": False, **note}:
        case {"kind": str(kind), "files": [*names], "eod": str() | None as eod, "imported": bool(imported)}:
            paths = (place / str(name) for name in names)
            # only a class of the user's may name what is no file of the folder
            files = tuple(
                str(path) if kind in TOKENIZERS or path.exists() else str(name)
                for path, name in zip(paths, names, strict=True)
            )
        case _:
            raise ConfigError(f"{place / NOTE} was not written by hpclm; remove {place}, and set data.tokenizer")
    config = _optional_json(place / CONFIG)
    return TokenizerFolder(kind, files, eod, imported, config, _optional_json(place / GENERATION), template_in(place))


def template_in(place: Path) -> str | None:
    """The chat template in a tokenizer's folder, or None."""
    if (place / TEMPLATE).is_file():
        try:
            return read_text(place / TEMPLATE)
        except UnicodeDecodeError as error:
            raise ConfigError(f"chat template {place / TEMPLATE} is not UTF-8: {error}") from None
    given = _optional_json(place / CONFIG).get("chat_template")
    if isinstance(given, list):  # several templates, by name
        named = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
        given = named.get("default")
    return given if isinstance(given, str) else None


def _optional_json(path: Path) -> dict[str, Any]:
    return json_object(path) if path.is_file() else {}


def beside(prefix: str | Path) -> Path:
    """The folder of the dataset ``prefix``."""
    return Path(f"{prefix}.tokenizer")


def of_files(kind: str, files: list[str], eod: str | None = None) -> TokenizerFolder:
    """The folder that has these ``files``; otherwise one with nothing but the tokenizer. ``eod``: None: the folder's, or the default."""
    if files and (Path(files[0]).parent / NOTE).is_file():
        folder = read(Path(files[0]).parent)
        if folder.kind == kind and [*map(Path, folder.files)] == [*map(Path, files)]:
            return replace(folder, eod=eod or folder.eod)
    return TokenizerFolder(kind, tuple(files), eod)


def of_run(run: Path | None, data: DataConfig) -> TokenizerFolder:
    """The tokenizer of the run in the directory ``run``: its own folder, else that of its settings or its dataset; ConfigError without."""
    if run is not None and (run / "tokenizer" / NOTE).is_file():
        return read(run / "tokenizer")
    return of_data(data)


def refuse_second(run: Path, overrides: Iterable[str]) -> None:
    """ConfigError if ``overrides`` (key=value) choose a tokenizer for a run that has its own."""
    chosen = [word for word in overrides if word.startswith(("data.tokenizer", "data.eod="))]
    if chosen and (run / "tokenizer" / NOTE).is_file():
        raise ConfigError(f"{chosen[0]} has no effect: the run has its own tokenizer in {run}/tokenizer; leave it out")


def of_data(data: DataConfig) -> TokenizerFolder:
    """The tokenizer of the datasets, else of the settings. ConfigError without one, if its files are missing, or if the datasets were made
    with different chat templates."""
    folder = of_datasets(data.prefixes(), data.tokenizer)
    if folder is not None:
        return folder
    if data.tokenizer is not None:
        folder = of_files(data.tokenizer, data.tokenizer_files, data.eod)
        if not all(Path(file).exists() for file in folder.files):
            folder.build()  # its error names the file
        return folder
    for prefix, note in ((prefix, sidecar(prefix).get("tokenizer")) for prefix in data.prefixes()):
        if note and note["kind"] in TOKENIZERS and not note["files"]:
            return TokenizerFolder(note["kind"])
        if note:
            raise ConfigError(
                f"{beside(prefix)} is missing: restore it, or set data.tokenizer and data.tokenizer_files"
            )
    if data.source == "synthetic":
        raise ConfigError(
            "the run trained on synthetic data (data.source), so it has no tokenizer, and reads and writes no text"
        )
    raise ConfigError("neither the run nor its dataset names a tokenizer; set data.tokenizer and data.tokenizer_files")


def of_datasets(prefixes: Iterable[str], kind: str | None) -> TokenizerFolder | None:
    """The folder of datasets with one tokenizer: the chat template of those that have one, and the ends of all; None without any folder.

    ``kind``: data.tokenizer, which allows a user-defined class. ConfigError if the datasets were made with different chat templates.
    """
    folders = {prefix: read(beside(prefix)) for prefix in prefixes if (beside(prefix) / NOTE).is_file()}
    if not folders:
        return None
    for prefix, one in folders.items():
        if one.kind not in (*TOKENIZERS, kind):  # a dataset must not decide which code is run
            raise ConfigError(
                f"{beside(prefix)} names the user-defined tokenizer {one.kind!r}; if you trust it, set data.tokenizer={one.kind} and "
                "data.tokenizer_files"
            )
    (first, folder), *others = sorted(folders.items(), key=lambda entry: entry[1].template is None)
    for prefix, other in others:
        if other.template is not None and other.rendered_with != folder.rendered_with:
            raise ConfigError(
                f"datasets {first} and {prefix} were made with different chat templates or special tokens, but a run is tuned with one; "
                "preprocess one of them again with the template of the other (hpclm preprocess --chat-template FILE), or omit it"
            )
        folder = folder.with_further_ends(other.ends)
    return folder


def names(template: str, token: str) -> bool:
    """Whether a template names the special token called ``token``, such as bos_token."""
    return re.search(rf"\b{re.escape(token)}\b", template) is not None


def is_text(name: str) -> bool:
    """Whether this name refers to a special token by its text: bos_token, eos_token, or any other that a template may name."""
    return name.endswith("_token") and name not in ADDED


def listed(value: Any) -> list[int]:
    """All ids in a value of generation_config.json."""
    if not isinstance(value, list):
        value = [value]
    return [one for one in value if type(one) is int and one >= 0]


def first(value: Any) -> int | None:
    """The first id in a value of generation_config.json."""
    return next(iter(listed(value)), None)

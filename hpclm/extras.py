"""Optional libraries: the extra of the package that installs each, and the error for one that is missing."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata, util

from hpclm.errors import ConfigError

EXTRAS = {
    "deepspeed": "deepspeed",
    "fairscale": "fairscale",
    "mpi4py": "mpi",
    "bokeh": "plots",
    "matplotlib": "plots",
    "pandas": "notebook",
    "safetensors": "convert",
    "transformers": "convert",
    "gguf": "convert",
    "sentencepiece": "text",
    "sentencex": "text",
    "zstandard": "text",
    "gigatoken": "text",
    "pyarrow": "parquet",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "lm_eval": "lm-eval",
    "shtab": "completion",
}
"""Library -> extra; setup.cfg has the versions."""


def install(library: str) -> str:
    """The command that installs ``library``."""
    return f"pip install 'hpclm[{EXTRAS[library]}]'"


def missing(what: str, library: str) -> str | None:
    """The message that ``what`` needs ``library``, or None if it is installed; imports nothing."""
    return None if util.find_spec(library) else _message(what, library)


def older(library: str, release: str) -> str | None:
    """The installed version of ``library`` if it is older than ``release``, "major.minor"; None if it is not, if there is none, and
    for builds between releases ("2.12.0a0"), which may have what the release has. Imports nothing."""
    try:
        installed = metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
    plain = re.fullmatch(r"(\d+)\.(\d+)(\.\d+)*(\+.*)?", installed)
    return installed if plain and (int(plain[1]), int(plain[2])) < tuple(map(int, release.split("."))) else None


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """ConfigError that ``what`` needs an optional library if one that the block imports is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in EXTRAS or util.find_spec(library):  # it is there, but broken, or too old
            raise
        raise ConfigError(_message(what, library)) from None


def _message(what: str, library: str) -> str:
    return f"{what} needs {library}, which is not installed: {install(library)}"

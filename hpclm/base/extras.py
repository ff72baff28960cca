"""Optional libraries: the package's extra that installs each library, and the error for a missing library."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata, util

from hpclm.base.errors import ConfigError

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
    """The message that ``what`` needs ``library``, if it is not installed or older than setup.cfg allows; else None. Imports nothing."""
    if not util.find_spec(library):
        return _message(what, library)
    release = _oldest(library)
    installed = older(library, release)
    return too_old(what, library, release, installed, install(library)) if installed else None


def too_old(what: str, library: str, release: str, installed: str, way_out: str) -> str:
    """The message that ``what`` needs a newer release of ``library`` than the installed one."""
    return f"{what} needs {library} {release} or newer, but {library} {installed} is installed; {way_out}"


def older(library: str, release: str) -> str | None:
    """The installed version of ``library`` if it is older than ``release``; else None. Imports nothing.

    None also without the library, and for builds between releases ("2.12.0a0"), which may have the features of the release.
    """
    try:
        installed = metadata.version(library)
    except metadata.PackageNotFoundError:
        return None
    plain = re.fullmatch(r"(\d+(\.\d+)+)(\+.*)?", installed)
    return installed if plain and _numbers(plain[1]) < _numbers(release) else None


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def _oldest(library: str) -> str:
    """The oldest release of an optional library that setup.cfg allows; "0" if hpclm is not installed as a package."""
    with suppress(metadata.PackageNotFoundError):
        for line in metadata.requires("hpclm") or []:
            bound = re.match(rf"{library.replace('_', '-')} ?>=([\d.]+)", line)
            if bound:
                return bound[1]
    return "0"


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """In the block, an import of an optional library that is not installed raises ConfigError: ``what`` needs the library."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in EXTRAS or util.find_spec(library):  # it is installed, but broken or too old
            raise
        raise ConfigError(_message(what, library)) from None


def _message(what: str, library: str) -> str:
    return f"{what} needs {library}, which is not installed: {install(library)}"

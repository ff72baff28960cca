"""A folder of transformers as a run directory."""

from pathlib import Path

from torch import Tensor

from hpclm.config import ModelConfig
from hpclm.errors import ConfigError
from hpclm.interop import run
from hpclm.interop.huggingface import families, tokenizer
from hpclm.interop.huggingface.family import Family
from hpclm.interop.huggingface.shards import Reader, read_json
from hpclm.interop.target import fresh


class Prefixed:
    """A folder's tensors under the names of the model with its head, whichever model was saved."""

    def __init__(self, reader: Reader, family: Family, config: ModelConfig):
        there = {name for name in reader.names() if not name.endswith(family.buffers or ("\0",))}
        bare = not any(name.startswith(family.prefix) for name in there)
        self._reader = reader
        self._names = {family.prefix + name if bare and not _head(name) else name: name for name in there}
        if config.tied:  # some files hold the token table twice
            self._names = {name: own for name, own in self._names.items() if not _head(name)}

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._names)

    def read(self, name: str) -> Tensor:
        """One of them."""
        return self._reader.read(self._names[name])


def convert(folder: Path, target: Path, words: list[str], pickle: bool = False) -> ModelConfig:
    """Make the run directory ``target`` from ``folder``; ``words``: model.… settings on top of what config.json says.

    ConfigError where hpclm has no such network, or config.json and weights do not fit together.
    """
    tree = read_json(folder / "config.json")
    try:
        family = families.of_config(tree)
        config = run.network(families.settings(tree), words)
    except ConfigError as error:
        raise ConfigError([f"{folder / 'config.json'}: {line}" for line in error.problems]) from None
    with Reader(folder, pickle) as reader:
        weights = run.Weights(config, Prefixed(reader, family, config), family.rules(config), str(folder))
        with fresh(target, mode=0o700) as draft:
            data = tokenizer.take(folder, config.vocab_size, draft, target)
            run.save(draft, target, config, data, weights)
    return config


def _head(name: str) -> bool:
    return name in ("lm_head.weight", "embed_out.weight")

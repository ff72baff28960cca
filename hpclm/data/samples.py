"""From documents to samples of a fixed length, in the seeded order that Megatron trains in.

S tokens in a sample (model.context), n sequences in the dataset, N samples wanted. Sample i is S + 1 tokens of the
shuffled documents laid end to end, so neighbours share one. Source: NVIDIA/Megatron-LM megatron/core/datasets/gpt_dataset.py,
bigscience-workshop/Megatron-DeepSpeed megatron/data/gpt_dataset.py, and Megatron-LM v1.1.5.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpclm.config.schema import DataConfig
from hpclm.data import tokenizers
from hpclm.data.indexed import IndexedDataset, sidecar
from hpclm.errors import ConfigError

PARTS = ("train", "valid", "test")
LAST_EPOCH_APART = {"mcore": 0.80, "bigscience": 0.95, "dse": 0.0}
"""The last epoch is shuffled on its own when less than this part of it is wanted."""


@dataclass(frozen=True, eq=False)
class Index:
    """The order of the samples.

    documents [E x sequences]: sequence ids in the order they are laid end to end, E times over.
    samples [M + 1, 2]: where sample i starts, as a place in documents and an offset in tokens; the last row ends the last.
    shuffle [M]: which sample comes i-th.
    """

    documents: NDArray[np.int32 | np.int64]
    samples: NDArray[np.int32 | np.int64]
    shuffle: NDArray[np.uint32 | np.int64]


class IndexedSamples:
    """Samples read from a dataset in an index's order."""

    def __init__(self, dataset: IndexedDataset, index: Index, context: int):
        self.dataset, self.index, self.context = dataset, index, context

    def __len__(self) -> int:
        return len(self.index.shuffle)

    def __getitem__(self, i: int) -> NDArray[np.int64]:
        sample = int(self.index.shuffle[i])
        (first, offset), (last, _) = self.index.samples[sample : sample + 2].tolist()
        found = np.empty(self.context + 1, np.int64)
        filled = 0
        for sequence in self.index.documents[first : last + 1].tolist():
            tokens = self.dataset.tokens(sequence)[offset : offset + len(found) - filled]
            found[filled : filled + len(tokens)] = tokens
            filled, offset = filled + len(tokens), 0
        return found


class IndexedSource:
    """A dataset on disk, divided by ``data.split`` and put in ``data.order``."""

    def __init__(self, dataset: IndexedDataset, data: DataConfig, context: int, seed: int, vocab_size: int):
        self.dataset, self.data, self.context, self.seed = dataset, data, context, seed
        tokenizer = _tokenizer(data, sidecar(dataset.prefix), vocab_size)
        self.eod: int | None = tokenizer.get("eod")
        order = {"split": data.split, "order": data.order}
        self.identity: dict[str, Any] = dataset.fingerprint() | order | {"tokenizer": _nameless(tokenizer)}
        self.bounds = dict(zip(PARTS, split_bounds(data.split, len(dataset), data.order), strict=True))

    def weight(self, part: str) -> float:
        """What ``data.split`` gives to the part."""
        return split_parts(self.data.split)[PARTS.index(part)]

    def tokens(self, part: str) -> int:
        """Tokens in the part."""
        begin, end = self.bounds[part]
        return int(self.dataset.sizes[begin:end].sum(dtype=np.int64))

    def per_epoch(self, part: str) -> int:
        """Samples in one pass of the part; 0 where it is shorter than one."""
        return max(0, (self.tokens(part) - 1) // self.context)

    def samples(self, part: str, wanted: int | None) -> IndexedSamples:
        """At least ``wanted`` samples of the part, or those of one pass; ConfigError where it is shorter than one."""
        begin, end = self.bounds[part]
        if not self.per_epoch(part):
            raise ConfigError(
                f"the {part} part of {self.dataset.prefix} has {self.tokens(part)} tokens ({end - begin} of {len(self.dataset)} "
                f"sequences, data.split={self.data.split}), but one sample needs model.context + 1 = {self.context + 1}; "
                "set a shorter model.context or another data.split, or give more data"
            )
        documents = np.arange(begin, end)
        index = build_index(self.dataset.sizes, documents, wanted, self.context, self.seed, self.data.order)
        return IndexedSamples(self.dataset, index, self.context)


def indexed(data: DataConfig, context: int, seed: int, vocab_size: int) -> IndexedSource:
    """The source for ``data.source=indexed``; ConfigError where the dataset or its tokenizer does not fit the settings."""
    if data.prefix is None:
        raise ConfigError("data.prefix is not set; give the path of a dataset made by 'hpclm preprocess'")
    dataset = IndexedDataset(data.prefix)
    if not len(dataset.flat):
        raise ConfigError(f"dataset {dataset.prefix} holds no tokens ({len(dataset)} sequences)")
    return IndexedSource(dataset, data, context, seed, vocab_size)


def split_parts(split: str) -> list[float]:
    """The three numbers of ``data.split``; missing ones are 0."""
    given = [float(part) for part in split.replace("/", ",").split(",")]
    return given + [0.0] * (3 - len(given))


def split_bounds(split: str, sequences: int, order: str) -> list[tuple[int, int]]:
    """First and last + 1 sequence of the training, validation and test part of ``sequences``."""
    given = split_parts(split)
    parts = (np.array(given) / sum(given)).tolist()
    bounds = [0.0]
    if order == "mcore":
        for part in parts:
            bounds.append(bounds[-1] + part)
        whole = [round(bound * float(sequences)) for bound in bounds]
    else:
        for part in parts:
            bounds.append(bounds[-1] + round(part * float(sequences)))
        overshoot = int(bounds[-1]) - sequences
        whole = [0, *(max(0, int(bound) - overshoot) for bound in bounds[1:])]
    return list(pairwise(whole))


def build_index(
    sizes: NDArray[np.int32], documents: NDArray[np.integer], wanted: int | None, context: int, seed: int, order: str
) -> Index:
    """The order of at least ``wanted`` samples (None: of one pass) of the sequences ``documents``, at least S + 1 tokens.

    sizes [n]: tokens of every sequence of the dataset.
    """
    per_epoch = int(sizes[documents].sum(dtype=np.int64))
    epochs = 1 if wanted is None else max(1, -(-(wanted * context + 1) // per_epoch))
    total = (epochs * per_epoch - 1) // context
    before_last = ((epochs - 1) * per_epoch - 1) // context
    enough = int(LAST_EPOCH_APART[order] * ((per_epoch - 1) // context))
    apart = wanted is not None and epochs > 1 and wanted - before_last < enough
    runs = [epochs - 1, 1] if apart else [epochs]

    rng = np.random.RandomState(seed)  # the peers' generator, drawn from in their order
    wide = len(sizes) > 2**31 - 1 or epochs * len(documents) > 2**31 - 1
    integer = np.int64 if wide else np.int32
    laid = np.tile(documents.astype(integer), epochs)
    _shuffle(rng, laid, [len(documents) * run for run in runs])

    ends = np.cumsum(sizes[laid], dtype=np.int64)
    starts = np.arange(total + 1, dtype=np.int64) * context
    place = np.searchsorted(ends, starts, "right")
    rows = np.empty((total + 1, 2), integer)
    rows[:, 0] = place
    rows[:, 1] = starts - (ends[place] - sizes[laid[place]])

    shuffle = np.arange(total, dtype=np.uint32 if total < 2**32 - 2 else np.int64)
    _shuffle(rng, shuffle, [before_last, total - before_last] if apart else [total])
    return Index(laid, rows, shuffle)


def _nameless(tokenizer: dict[str, Any]) -> dict[str, Any] | None:
    """The identity without the names of its files, which may change."""
    return {**tokenizer, "files": sorted(tokenizer.get("files", {}).values())} if tokenizer else None


def _shuffle(rng: np.random.RandomState, values: NDArray, lengths: list[int]) -> None:
    """Shuffle consecutive stretches of ``values`` in place, each within itself."""
    begin = 0
    for length in lengths:
        rng.shuffle(values[begin : begin + length])
        begin += length


def _tokenizer(data: DataConfig, note: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Identity of the tokenizer that the settings or the dataset's note name, {} where neither does."""
    noted = note.get("tokenizer", {})
    identity = noted
    if data.tokenizer is not None:
        identity = tokenizers.of_run(data).identity
        differ = [key for key in ("size", "eod") if noted and identity.get(key) != noted.get(key)]
        hashes = [sorted(known.get("files", {}).values()) for known in (noted, identity)]
        if noted.get("kind") == identity["kind"] and hashes[0] != hashes[1]:
            differ.append("files")
        if differ:
            raise ConfigError(
                f"data.tokenizer={data.tokenizer} is not what dataset {data.prefix} was made with: "
                + ", ".join(f"{key} {identity.get(key)} against {noted.get(key)}" for key in differ)
                + "; leave data.tokenizer out to use the dataset's own"
            )
    size = identity.get("size", 0)
    if size > vocab_size:
        raise ConfigError(
            f"model.vocab_size={vocab_size} is smaller than the {size} entries of the {identity['kind']} tokenizer "
            f"of dataset {data.prefix}; set model.vocab_size={size}"
        )
    return identity

"""Check code without training: a schedule's values, a source's samples, a tokenizer's texts, a sink's rows."""

import hashlib
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hpclm import sinks
from hpclm.base.errors import ExitCode, HpclmError
from hpclm.config import OptimConfig
from hpclm.data import tokenizers
from hpclm.data.sources import Source

SAMPLES = 32  # samples of the training data that are compared
LENGTH = 100.0  # length of the schedule in steps
TEXTS = ("To be, or not to be", "  two  spaces\n\tand a tab\n", "naïve café, 你好，世界 🙂", "", "x" * 300)
ROWS = [{"step": step, "samples": 8 * step, "time": 1.0 * step, "loss": 4.0 / step, "lr": 1e-3} for step in (1, 2, 3)]


def digests(source: Source, context: int) -> list[str]:
    """A digest of each of the first training samples, read in order. A sample that differs when read again has both digests."""
    samples = source.samples("train", SAMPLES)
    count = min(SAMPLES, len(samples))

    def read(index: int) -> str:
        row = np.zeros(context + 1, samples.dtype)
        samples.read(index, row)
        return hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest()

    first = [read(index) for index in range(count)]
    again = {index: read(index) for index in reversed(range(count))}
    return [one if one == again[index] else f"{one}, then {again[index]}" for index, one in enumerate(first)]


def schedule(function: Callable[..., float], optim: OptimConfig) -> Iterator[str]:
    """An error for the first fault of the schedule ``function``."""
    positions = [float(position) for position in range(int(LENGTH) + 1)]
    first = [function(position, LENGTH, optim) for position in positions]
    again = [function(position, LENGTH, optim) for position in reversed(positions)][::-1]
    for position, one, other in zip(positions, first, again, strict=True):
        if not isinstance(one, (int, float)) or not 0 <= one < float("inf"):
            yield f"at position {position:g} it gives {one!r}, which is not a learning rate"
            return
        if one != other:
            yield f"at position {position:g} it gives {one:.6g} when called in order, and {other:.6g} in reverse"
            return


def tokenizer(kind: str, files: list[str]) -> Iterator[str]:
    """An error for each fault of the tokenizer ``kind``."""
    try:
        mine = tokenizers.build_tokenizer(kind, files)
        other = tokenizers.build_tokenizer(kind, files)
    except HpclmError as error:
        yield str(error)
        return
    if mine.fingerprint != other.fingerprint or mine.fingerprint != json.loads(json.dumps(mine.fingerprint)):
        yield "its fingerprint is not the same JSON each time: checkpoints and datasets of this tokenizer would be refused"
    for text in TEXTS:
        ids = list(mine.encode(text))
        wrong = [number for number in ids if not 0 <= number < mine.size]
        if wrong:
            yield f"encode({text[:24]!r}) has the id {wrong[0]}, outside its size of {mine.size}"
        back = mine.decode(ids)
        if back != text:
            yield f"decode(encode({text[:24]!r})) is {back[:24]!r}: generated text will differ from the training text"
    flat, lengths = mine.encode_batch(list(TEXTS))
    alone = [list(mine.encode(text)) for text in TEXTS]
    if flat.tolist() != [number for ids in alone for number in ids] or lengths.tolist() != [len(ids) for ids in alone]:
        yield "encode_batch gives other ids, or other lengths, than encode of each text"
    try:
        pickle.dumps(mine)
    except Exception as error:
        yield f"it cannot be pickled, which hpclm preprocess --workers does: {error}"


def sink(name: str, folder: Path) -> Iterator[str]:
    """Send rows to the sink ``name``, close it, and continue in another attempt. Faults are exceptions; it yields none itself."""
    make = sinks.lookup(name)
    about = sinks.RunInfo("selftest", folder.name, "selftest", folder, {"optim.lr": 1e-3})
    first = make(about)
    first.send(ROWS[:2], 0)
    first.close(ExitCode.REQUEUE)
    second: Any = make(about)
    second.send(ROWS[2:], 2)
    second.close(ExitCode.DONE)
    yield from ()

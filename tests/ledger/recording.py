"""An instrumented engine: every rank notes the tokens of the micro-batches that each step trains on."""

import json
import os
from pathlib import Path

END, FIRST = 256, 257
"""The end-of-document token, which documents that are left out become, and the token of document 0; padding is 0."""


def record():
    """Have the engine of this process note its micro-batches in a file of the folder TEST_READS."""
    from hpclm.engine.base import BaseEngine

    inner = BaseEngine.train_step
    path = Path(os.environ["TEST_READS"]) / f"{os.environ.get('RANK', '0')}.jsonl"

    def train_step(engine, batches, lr, step, *more):
        samples = {}  # token -> in how many samples of this rank
        for batch in batches:
            for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
                for token in {*tokens, *labels}:
                    samples[token] = samples.get(token, 0) + 1
        with path.open("a") as file:
            file.write(json.dumps([step + 1, engine.mesh.replica, sorted(samples.items())]) + "\n")
        return inner(engine, batches, lr, step, *more)

    BaseEngine.train_step = train_step


def recorded(folder):
    """(step, document) -> number of samples, of one launch; all ranks of a replica must have read the same."""
    replicas = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            step, replica, samples = json.loads(line)
            assert replicas.setdefault((step, replica), samples) == samples
    reads = {}
    for (step, _), samples in replicas.items():
        for token, count in samples:
            if token not in (END, 0):
                document = token - FIRST
                reads[step, document] = reads.get((step, document), 0) + count
    return reads

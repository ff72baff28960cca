"""Shrunken twins: the settings that let a run for a large machine take three steps on a few processes of a small one.

Sizes of the model are cut, and what is measured in them: the attention window in tokens, key/value heads in heads, experts. The parallel
degrees and the micro-batch are halved until they fit the processes. The global batch, which costs time and nothing else, is halved
down to at most BATCH samples, and a batch-size ramp with it. All other settings stay as they are.
"""

from dataclasses import replace

import numpy as np

from hpclm.base.errors import ConfigError
from hpclm.config import RunConfig
from hpclm.config.checks import value_at
from hpclm.data.tokenizers import build_tokenizer
from hpclm.preprocess.writer import Writer

STEPS = 3
BATCH = 64  # samples
CONTEXT, VOCABULARY, HEADS, WIDTH = 32, 257, 8, 8  # 257: bytes, and the end of a document
EXPERTS, EXPERTS_PER_TOKEN = 8, 2


def twin(run: RunConfig, processes: int, weights: bool = False) -> list[str]:
    """The settings that make ``run`` a twin that trains for three steps on ``processes``, to be given after its own.

    ``weights``: it starts from weights that are there, and keeps the sizes of its model.
    """
    words = {**({} if weights else _model(run)), "budget.steps": STEPS}
    if run.optim.wsd_decay is not None and run.optim.schedule_length is None:  # they must not outlast the run
        words |= {"optim.warmup": 1, "optim.wsd_decay": 1}
    return [f"{key}={value}" for key, value in (words | _divided(run, processes)).items()]


def _model(run: RunConfig) -> dict[str, object]:
    model, stages = run.model, run.parallel.pipeline * run.parallel.chunks
    group = model.attention.heads // (model.attention.kv_heads or model.attention.heads)
    heads = group * max(1, min(HEADS, model.attention.heads) // group)
    context = min(model.context, CONTEXT)
    sizes = {
        "layers": min(model.layers, max(2, len(model.attention.pattern), stages)),
        "hidden": min(model.hidden, heads * WIDTH),
        "attention.heads": heads,
        "context": context,
        "vocab_size": min(model.vocab_size, VOCABULARY),
    }
    if model.attention.kv_heads is not None:
        sizes["attention.kv_heads"] = heads // group
    if model.attention.head_dim is not None:
        sizes["attention.head_dim"] = WIDTH
    if model.ffn is not None:
        sizes["ffn"] = min(model.ffn, 3 * heads * WIDTH // 2)
    if model.experts.count:
        sizes |= {
            "experts.count": min(model.experts.count, EXPERTS),
            "experts.per_token": min(model.experts.per_token, EXPERTS_PER_TOKEN),
        }
        if model.experts.ffn is not None:
            sizes["experts.ffn"] = min(model.experts.ffn, heads * WIDTH // 2)
    if model.attention.window is not None:
        sizes["attention.window"] = max(2, model.attention.window * context // model.context)
    return {f"model.{name}": size for name, size in sizes.items() if size != value_at(model, name)}


def _divided(run: RunConfig, processes: int) -> dict[str, object]:
    """The batch, and the parallel degrees, halved until ``processes`` can take them."""
    batch, parallel, words = run.batch, run.parallel, dict[str, object]()
    while batch.global_size > BATCH and not batch.global_size % 2:
        ramp = tuple(size // 2 for size in batch.rampup) if batch.rampup else None
        words["batch.global_size"] = batch.global_size // 2
        if ramp:
            words["batch.rampup"] = list(ramp)
        batch = replace(batch, global_size=batch.global_size // 2, micro_size=0, rampup=ramp)
    batch = replace(batch, micro_size=run.batch.micro_size)
    while processes % parallel.smallest:
        degree = max(("tensor", "pipeline", "context", "expert"), key=lambda name: getattr(parallel, name))
        parallel = replace(parallel, **{degree: getattr(parallel, degree) // 2})
        words[f"parallel.{degree}"] = getattr(parallel, degree)
    while not _plans(run, batch, parallel, processes):
        batch = replace(batch, micro_size=batch.micro_size // 2)
        words["batch.micro_size"] = batch.micro_size
        assert batch.micro_size, "no micro-batch fits"
    return words


def _plans(run, batch, parallel, processes):
    try:
        replace(run, batch=batch, parallel=parallel).plan(processes)
    except ConfigError:
        return False
    return True


def dataset(prefix):
    """A dataset of bytes, 200 documents of 40 tokens, which every twin can read; its tokens depend on its name."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(list(prefix.name.encode()))
    with Writer(prefix, "u2") as writer:
        writer.note = {"tokenizer": build_tokenizer("bytes", []).fingerprint}
        for _ in range(200):
            writer.add_document(np.append(draw.integers(97, 123, 40), 256))

"""Train a small model in some layout, and give all that the layouts must agree on."""

import functools

import torch
import torch.distributed as dist

from hpclm import config
from tests import ranks
from tests.states import Kept

STEPS = 20
TINY = [
    "model.vocab_size=60",
    "model.vocab_multiple=16",
    "model.hidden=32",
    "model.attention.heads=4",
    "model.context=16",
    "model.init_std=0.1",
    "data.source=synthetic",
    "batch.global_size=8",
    f"budget.steps={STEPS}",
    "optim.lr=3e-3",
    "optim.warmup=2",
    "optim.eps=1e-5",  # or Adam would make steps of the rounding errors in gradients that are 0, as those of key biases
    "engine.device=cpu",
    "checkpoint.file_mb=0",  # all ranks write, though there is little
]
STYLES = {
    "gpt2": [],
    "llama": [
        "model.positions=rope",
        "model.norm=rmsnorm",
        "model.activation=swiglu",
        "model.bias=false",
        "model.tied=false",
        "model.attention.kv_heads=2",
        "model.ffn=48",
    ],
    "bloom": ["model.positions=alibi", "model.embed_norm=true", "model.activation=gelu", "model.attention.qk_norm=true"]
    + ["optim.decayed=non_embedding", "optim.z_loss=0.01"],
    "fairseq": ["model.positions=sinusoidal", "model.embed_scale=true", "model.activation=relu", "model.tied=false"]
    + ["optim.groups=[{match: mlp, weight_decay: 0.01, lr: 0.5}, {match: output, lr: 0.25}]"],
    "documents": ["data.eod_mask_loss=true", "data.reset_position_ids=true", "data.reset_attention_mask=true"],
    "geglu": [
        "model.positions=none",
        "model.activation=geglu",
        "optim.decayed=all",
        "model.init_std=0.06",
    ],  # gentle, as below
}
STYLES["llamadocs"] = [*STYLES["llama"], *STYLES["documents"], "batch.loss_norm=microbatch"]
TODAY = {
    "olmo3": [
        *STYLES["llama"],
        *("model.norm_order=post", "model.attention.qk_norm=true", "model.attention.qk_norm_span=projection"),
        *(
            "model.attention.pattern=[window,full]",
            "model.attention.window=5",
            "model.rope.window_base=500",
            "model.rope.window_scaled=false",
        ),
        "model.rope.scaling={rope_type: yarn, factor: 4, original_max_position_embeddings: 4}",
        *("model.attention.score_scale=0.05", "model.embed_multiplier=40"),  # gentle, or rounding errors would grow
    ],
    "gemma2": [
        *STYLES["llama"],
        *(
            "model.norm_order=sandwich",
            "model.attention.head_dim=16",
            "model.activation=geglu_tanh",
            "model.embed_scale=true",
        ),
        *(
            "model.attention.score_cap=2",
            "model.attention.score_scale=0.3",
            "model.logit_cap=3",
            "model.logit_multiplier=0.5",
        ),
        *(
            "model.attention.pattern=[window,full]",
            "model.attention.window=6",
            "model.embed_multiplier=8",
        ),  # gentle, too
    ],
    "sinks": [
        *STYLES["llamadocs"],
        *(
            "model.attention.sinks=true",
            "model.attention.pattern=[window_nope,full]",
            "model.attention.window=6",
            "model.attention.qkv_bias=true",
        ),
        *("model.rope.fraction=0.5", "model.residual_multiplier=0.7", "model.embed_multiplier=2"),
    ],
    "latent": [
        *(word for word in STYLES["llama"] if "kv_heads" not in word),
        *("model.attention.head_dim=8", "model.attention.latent.kv_rank=12", "model.attention.latent.q_rank=20"),
        *("model.attention.latent.rope_dim=4", "model.attention.latent.value_dim=6", "model.attention.qkv_bias=true"),
        *("model.rope.scaling={rope_type: yarn, factor: 4, original_max_position_embeddings: 4}", "optim.qk_clip=0.4"),
        *("optim.name=muon", "optim.newton_schulz_type=fp32"),
    ],
    "xielu": [*STYLES["llama"], "model.activation=xielu", "model.mlp_bias=true", "model.logits_fp32=true"],
    "frozen": ["model.freeze=[tokens.*, block0.*, 'block1.attention.*', norm.*]", "optim.ema=0.8"],
}
"""Shapes of 2025's models; fewer of them are combined."""
NOT_REPORTED = ("counted_tokens", "empty_micro_batches", "loss", "grad_norm", "skipped", "guarded", "z_loss")
"""Metrics of a step that no block has reported."""
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def train(words, steps, first=0, saved=None, device="cpu"):
    """Losses, gradient norms and an evaluation of this rank, and the shards it holds at the end; run on every rank.

    ``saved``: tensors (NumPy) and scalars of a run that came to step ``first``, which this one resumes from.
    """
    from hpclm import engine as engines
    from hpclm.data.batches import Batches
    from hpclm.data.synthetic import synthetic
    from hpclm.optim.schedules import learning_rate
    from hpclm.parallel.mesh import Compute, Mesh

    run = config.load(None, [*TINY, *words])
    size = dist.get_world_size() if dist.is_initialized() else 1
    mesh = Mesh.build(dist.get_rank() if size > 1 else 0, size, run.parallel)
    source = synthetic(run.data, run.model.context, run.seed, run.model.vocab_size)
    compute = Compute(torch.device(device), TYPES[run.engine.precision], mesh)
    batches = Batches(source.samples("train", 1000), run.plan(size), run.data, run.model, source.eod, compute)
    engine = engines.build(run.for_engine(mesh.world.size), compute)
    each = run.batch.global_size
    if saved:
        engine.load(Kept({name: torch.from_numpy(array) for name, array in saved[0].items()}), saved[1])
    gradients = watched(engine) if run.engine.precision == "fp32" else []
    results, expert_counts = [], []
    for step in range(first, steps):
        results.append(engine.train_step(batches.step(step * each), learning_rate(step, 1, STEPS, run.optim), step))
        expert_counts.append(engine.router_state.counts.tolist() if engine.router_state else [])
    averaged = None
    if run.optim.ema:
        with engine.averaged():
            averaged = engine.evaluate(batches.take(0, 5))
    held = [(s.name, s.tensor.float().cpu().numpy().copy(), s.shape, s.start) for s in engine.tensors()]
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "seconds": [dict(result.seconds) for result in results],
        "skipped": [result.skipped for result in results],
        "guarded": [result.numbers.get("guarded", 0.0) for result in results],
        "z_losses": [result.numbers.get("z_loss", 0.0) for result in results],
        "reports": [{n: v for n, v in result.numbers.items() if n not in NOT_REPORTED} for result in results],
        "expert_counts": expert_counts,
        "averaged": averaged,
        "evaluation": engine.evaluate(batches.take(0, 5)),
        "scalars": engine.scalars(),
        "held": held,
        "gradients": gradients,
    }


def watched(engine):
    """A list that gets what this rank knows of the gradients of the first update, as ``held`` above: all that it has, not its share."""
    from hpclm.engine.sharded_parameter import blocks

    optimizer, seen = getattr(engine, "engine", engine).optimizer, []  # DeepSpeed's, where that does the update
    step = optimizer.step

    def gradient(weight):
        """The index of its first value, and the values."""
        if optimizer is engine.optimizer:
            return weight.begin, weight.parameter.grad.view(-1)[: weight.count]
        from deepspeed.utils import safe_get_full_grad

        return 0, safe_get_full_grad(weight.parameter).view(-1)

    def watching(*args, **kwargs):
        optimizer.step = step
        for weight in engine.trained:
            begin, values = gradient(weight)
            for start, block in blocks(weight, begin, values, engine.mesh.tp):
                seen.append((weight.name, block.cpu().numpy().copy(), weight.shape, start))
        return step(*args, **kwargs)

    optimizer.step = watching
    return seen


def trained(size, *words, steps=STEPS, first=0, saved=None):
    """The same for ``size`` processes together: what rank 0 says, with every logical tensor as one.

    ``saved``: what another run gave after step ``first``.
    """
    handed = saved and ({name: tensor.numpy() for name, tensor in saved["tensors"].items()}, saved["scalars"])
    found = ranks.run(size, train, list(words), steps, first, handed)
    for other in found[1:]:
        for what in (
            "losses",
            "norms",
            "guarded",
            "z_losses",
            "reports",
            "expert_counts",
            "averaged",
            "evaluation",
            "scalars",
        ):
            assert repr(other[what]) == repr(found[0][what]), f"ranks disagree on {what}"
    return {**found[0], "tensors": assembled(found), "gradients": reduced(found, "engine.name=deepspeed" in words)}


def assembled(found):
    """Every logical tensor, put together from the shards that the ranks hold; each value must be there exactly once."""
    whole, filled = {}, {}
    for rank in found:
        for name, array, shape, start in rank["held"]:
            target = whole.setdefault(name, torch.full(shape, torch.nan))
            block = target[tuple(slice(a, a + n) for a, n in zip(start, array.shape, strict=True))]
            block.copy_(torch.from_numpy(array))
            filled[name] = filled.get(name, 0) + array.size
    for name, tensor in whole.items():
        assert filled[name] == tensor.numel() and not tensor.isnan().any(), name
    return whole


def reduced(found, deepspeed):
    """The gradient of every logical weight; all ranks that know a value must say the same. DeepSpeed sums the two gradients of a
    tied embedding and then those of replicas, on each stage in an order of its own, so that there the last bits may differ."""
    whole = {}
    for rank in found:
        for name, array, shape, start in rank["gradients"]:
            target = whole.setdefault(name, torch.full(shape, torch.nan))
            block, values = target[tuple(slice(a, a + n) for a, n in zip(start, array.shape))], torch.from_numpy(array)
            difference = 0.0 if block.isnan().all() else (block - values).norm() / block.norm().clamp(min=1e-30)
            assert difference <= (1e-6 if deepspeed else 0.0), f"ranks disagree on the gradient of {name}"
            block.copy_(values)
    return whole


def errors(found, wanted):
    """By weight: the norm of the difference of two gradients, as part of the norm of what it ought to be."""
    assert found.keys() == wanted.keys()
    norms = {name: exact.double().norm() for name, exact in wanted.items()}
    whole = torch.stack([*norms.values()]).norm()
    # softmax does not see what is added to all keys alike: that gradient is 0, but for rounding; and a single value is a sum over
    # all tokens, most of which cancels out
    size = {
        name: whole if "k_norm.bias" in name or exact.numel() == 1 else norms[name] for name, exact in wanted.items()
    }
    return {
        name: ((found[name].double() - exact.double()).norm() / size[name]).item() for name, exact in wanted.items()
    }


@functools.cache
def alone(*words, steps=STEPS):
    """What one process with the native engine learns."""
    return trained(1, *words, steps=steps)

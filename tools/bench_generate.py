"""How fast hpclm generates text, against transformers' cached ``generate`` on the same weights and machine.

Both write the same number of tokens greedily, in turns, in one process: the ratio of their tokens a second does not depend on
what else the machine does. The weights are random, and exported by ``hpclm convert``.

    python tools/bench_generate.py                       # a GPT-2 of 30M parameters, on this machine's processor
    python tools/bench_generate.py model.layers=12 model.hidden=768 model.attention.heads=12 --dtype bf16
    python tools/bench_generate.py --llama --tokens 64
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hpclm import cli
from hpclm import config as configs
from hpclm.checkpoint import CheckpointStore, Progress, Retention
from hpclm.config import RunConfig
from hpclm.engine import build
from hpclm.inference import run_model
from hpclm.inference.generation import continue_all
from hpclm.inference.generation_settings import Sampling
from hpclm.parallel.mesh import Compute

SMALL = [
    "model.layers=6",
    "model.hidden=512",
    "model.attention.heads=8",
    "model.vocab_size=32000",
    "model.context=1024",
]
LLAMA = ["model.positions=rope", "model.norm=rmsnorm", "model.activation=swiglu", "model.bias=false"]
LLAMA += ["model.tied=false", "model.attention.kv_heads=4"]
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    """Print a table of ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="model.key=value", help="shape of the model")
    parser.add_argument("--llama", action="store_true", help="rotary positions, RMSNorm, SwiGLU, grouped queries")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 128, 512], help="new tokens")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="prompts at once")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each; the fastest counts")
    parser.add_argument("--dtype", choices=TYPES, default="fp32", help="type of weights and activations")
    args = parser.parse_intermixed_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    words = [*SMALL, *(LLAMA if args.llama else []), *args.settings, "data.source=synthetic", "budget.steps=1"]
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = models(configs.from_cli(words, None), Path(folder), device, TYPES[args.dtype])
    size = sum(p.numel() for p in ours.parameters())
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{size / 1e6:.0f}M parameters, {args.dtype}, {where}, prompts of {args.prompt} tokens, greedy\n")
    print("| prompts | new tokens | hpclm, tokens/s | transformers, tokens/s | ratio |\n|---|---|---|---|---|")
    for batch in args.batch:
        for tokens in args.tokens:
            mine, peer = rates(ours, theirs, (batch, args.prompt, tokens), args.rounds)
            print(f"| {batch} | {tokens} | {mine:,.0f} | {peer:,.0f} | {mine / peer:.2f} |", flush=True)


def models(config: RunConfig, folder: Path, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """The same weights as hpclm's model and as transformers'."""
    import transformers

    run = folder / "run"
    run.mkdir(0o700)
    configs.dump(config, run / "config.yaml")
    engine = build(config.for_engine(), Compute(torch.device("cpu"), dtype))
    CheckpointStore(run / "checkpoints", Retention(), {}).save(engine, Progress(step=1))
    cli.function("convert")([str(run), str(folder / "hf")])
    ours, _ = run_model.load_model(run, config, None, Compute(device, dtype))
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=dtype)
    return ours.to(dtype), theirs.to(device).eval()


def rates(ours: Any, theirs: Any, shape: tuple[int, int, int], rounds: int) -> tuple[float, float]:
    """Tokens a second of both, in turns; ``shape``: prompts, their tokens, new tokens."""
    batch, length, new = shape
    vocabulary = ours.config.vocab_size
    ids = torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
    prompts, there = ids.tolist(), ids.to(next(theirs.parameters()).device)

    def mine() -> list[list[int]]:
        return continue_all(ours, prompts, new, vocabulary, Sampling(temperature=0), lambda number, new: False)

    def peer() -> list[list[int]]:
        output = theirs.generate(
            there,
            attention_mask=torch.ones_like(there),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        new_tokens: list[list[int]] = output[:, length:].tolist()
        return new_tokens

    # one thread's own time does not count what other processes of the machine take
    alone = there.device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    best: dict[Callable[[], list[list[int]]], float] = {}
    texts = {}
    for _ in range(rounds + 1):  # the first turn warms up
        for way in (mine, peer):
            began = clock()
            texts[way] = way()
            seconds = clock() - began
            best[way] = min(seconds, best.get(way, seconds))
    same = sum(a == b for a, b in zip(texts[mine], texts[peer], strict=True))
    if same < batch:
        print(f"(the texts of {batch - same} of {batch} prompts differ, by rounding)")
    return batch * new / best[mine], batch * new / best[peer]


if __name__ == "__main__":
    main()

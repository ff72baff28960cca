"""Training runs on a GPU, as a person starts them: presets on the sources of Python's standard library, one byte a token.

    python tools/gpu_runs.py gpt2-124m --out gpu-proof     # 40 steps with saves, stopped half-way and resumed
    python tools/gpu_runs.py llama-1b-documents --small    # a rehearsal with a small model

Prints a table and ends with the exit code of the first command that failed. Run directories are in OUT/runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["data.reset_attention_mask=true", "data.reset_position_ids=true", "data.eod_mask_loss=true"]
SMALL = {
    "gpt2-124m": [
        *("model={vocab_size: 320, layers: 2, hidden: 64, context: 64, attention: {heads: 4}}", "batch.micro_size=4"),
        "cluster.self_check=true",  # as on GPUs
    ],
    "llama-1b": [
        *(
            "model.vocab_size=320",
            "model.layers=2",
            "model.hidden=64",
            "model.attention.heads=4",
            "model.attention.kv_heads=2",
        ),
        *("model.ffn=128", "model.context=64", "batch.micro_size=4"),
    ],
}
"""What makes a preset small enough for a CPU."""


@dataclass(frozen=True)
class Run:
    """A preset, the settings that make it short, and the step after which it is stopped and resumed, if it is."""

    preset: str
    steps: int
    settings: tuple[str, ...]
    stop_at: int | None = None


RUNS = {
    "gpt2-124m": Run(
        "gpt2-124m",
        40,
        ("batch.global_size=256", "checkpoint.every=10", "evaluate={every: 20, batches: 4}"),
        stop_at=20,
    ),
    "llama-1b-documents": Run(
        "llama-1b", 8, ("batch.global_size=32", "checkpoint.enabled=false", "cluster.self_check=false", *DOCUMENTS)
    ),
    "llama-1b-dropout": Run(
        "llama-1b",
        8,
        ("batch.global_size=32", "checkpoint.enabled=false", "cluster.self_check=false", "model.dropout=0.1"),
    ),
}


def main() -> int:
    """Read the arguments, train, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=RUNS)
    parser.add_argument("--out", type=Path, default=Path("gpu-proof"))
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--small", action="store_true", help="a small model, for a CPU")
    args = parser.parse_args()
    run, out = RUNS[args.name], args.out / "runs" / args.name
    shutil.rmtree(out, ignore_errors=True)  # of an earlier try
    prefix = dataset(args.out / "data")
    words = [str(ROOT / "configs" / f"{run.preset}.yaml"), f"data.prefix={prefix}", f"out={out}"]
    words += [
        f"budget={{steps: {run.steps}}}",
        f"optim.warmup={run.steps // 4}",
        f"engine.device={args.device}",
        *run.settings,
    ]
    if args.small:
        words += [*SMALL[run.preset], "batch.global_size=8", "engine.compile=false"]
    if lacks := no_compiler(args.out / "facts.json"):
        print(f"compiling is left out: this machine has no {lacks}")
        words.append("engine.compile=false")
    if not has_tensorboard():
        print("TensorBoard is left out: it cannot be imported here")
        words.append("log.tensorboard=false")
    started = []
    for stop_at in [run.stop_at, None] if run.stop_at else [None]:
        began = time.monotonic()
        code = hpclm("train", *words, *([f"stop_at={stop_at}"] if stop_at else []))
        started.append(time.monotonic() - began)
        if code:
            return code
    print(table(args.name, rows(out / "metrics.jsonl"), started))
    return 0 if finished(out, run.steps) else 1


def no_compiler(file: Path) -> str:
    """What torch.compile needs and gpu_machine.py has not found; empty if nothing is known to be missing."""
    facts = json.loads(file.read_text()) if file.exists() else {}
    return " and no ".join(name for name in ("compiler", "Python.h") if not facts.get(name, True))


def has_tensorboard() -> bool:
    """Whether hpclm could write TensorBoard's files here."""
    return all(util.find_spec(name) is not None for name in ("tensorboard", "google"))


def hpclm(*words: str) -> int:
    """Run ``hpclm WORDS``; the exit code."""
    print("$ hpclm", *words, flush=True)
    return subprocess.run([sys.executable, "-m", "hpclm", *words], cwd=ROOT).returncode


def dataset(folder: Path) -> Path:
    """The prefix of the dataset, which is made if it is not there."""
    from hpclm.launch.demo import write_corpus

    prefix = folder.absolute() / "sources"
    if not Path(f"{prefix}_text_document.idx").exists():
        print(write_corpus(folder / "sources.jsonl"))
        code = hpclm(
            *("preprocess", "--input", str(folder / "sources.jsonl"), "--output-prefix", str(prefix)),
            *("--tokenizer", "bytes", "--append-eod"),
        )
        if code:
            sys.exit(code)
    return prefix.with_name(f"{prefix.name}_text_document")


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of steps in metrics.jsonl."""
    parsed = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in parsed if "loss" in row]


def finished(out: Path, steps: int) -> bool:
    """Whether all steps were done, each once, and the loss fell."""
    done = rows(out / "metrics.jsonl")
    if [row["step"] for row in done] != list(range(1, steps + 1)):
        print(f"steps in metrics.jsonl: {[row['step'] for row in done]}, not 1 to {steps}")
        return False
    if not done[-1]["loss"] < done[0]["loss"]:
        print(f"the loss did not fall: {done[0]['loss']} at first, {done[-1]['loss']} at last")
        return False
    return True


def table(name: str, done: list[dict[str, Any]], started: list[float]) -> str:
    """What docs/benchmarks.md says of a run."""
    keys = {"tokens_per_second": "tokens/s", "mfu": "MFU (causal)", "step_seconds": "s a step"}
    half = done[len(done) // 2 :]
    cells = {"": name, "steps": str(len(done)), "loss": f"{done[0]['loss']:.3f} to {done[-1]['loss']:.3f}"}
    for key, title in keys.items():
        values = [row[key] for row in half if isinstance(row.get(key), int | float)]
        if values:
            cells[f"{title}, median of the last half"] = f"{statistics.median(values):,.4g}"
    cells["s from start to end"] = ", ".join(f"{seconds:.0f}" for seconds in started)
    lines = ["| " + " | ".join(cells) + " |", "|---" * len(cells) + "|", "| " + " | ".join(cells.values()) + " |"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

"""Train a small model in 18 layouts, engines and precisions, and record or compare all that they compute, to the last bit.

    tools/layouts.py record FILE     losses, norms, evaluations and hashes of all tensors, of this checkout
    tools/layouts.py compare FILE    the same again, and what differs from the record: exit code 1 if anything does

Record at the commit before a change that must not change results, and compare after it, on the same machine.
"""

import argparse
import hashlib
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

parity, ranks = import_module("tests.parity"), import_module("tests.ranks")  # which have no types
STEPS = 4
PIPELINE = ("engine.name=pipelining", "parallel.pipeline=2")
LLAMA = tuple(parity.STYLES["llama"])
EXPERTS = ("model.experts.count=4", "model.experts.per_token=2", "model.experts.ffn=16")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one process": (1, ()),
    "one process, llama, bf16": (1, (*LLAMA, "engine.precision=bf16")),
    "one process, fp16": (1, ("engine.precision=fp16",)),
    "one process, muon": (1, ("optim.name=muon",)),
    "one process, dropout, recomputed": (1, ("model.dropout=0.1", "engine.recompute=full")),
    "data 2": (2, ()),
    "data 2, bf16": (2, ("engine.precision=bf16",)),
    "ZeRO 1": (2, ("engine.zero_stage=1",)),
    "ZeRO 1, muon": (2, ("engine.zero_stage=1", "optim.name=muon")),
    "tensor 2, llama": (2, ("parallel.tensor=2", *LLAMA)),
    "context 2": (2, ("parallel.context=2",)),
    "fsdp2": (2, ("engine.name=fsdp2",)),
    "fairscale": (2, ("engine.name=fairscale",)),
    "DeepSpeed 1": (2, ("engine.name=deepspeed",)),
    "DeepSpeed 3": (2, ("engine.name=deepspeed", "engine.zero_stage=3")),
    "pipeline 2, data 2": (4, PIPELINE),
    "DeepSpeed's pipeline": (2, ("engine.name=deepspeed", "parallel.pipeline=2")),
    "experts over 2": (2, (*EXPERTS, "parallel.expert=2")),
}


def results(size: int, words: tuple[str, ...]) -> dict[str, Any]:
    """Losses, norms, evaluation, and a hash of the tensors of every rank."""
    parts = ranks.run(size, parity.train, ["engine.precision=fp32", "batch.micro_size=2", *words], STEPS)
    held = hashlib.blake2b(digest_size=16)
    for part in parts:
        for name, values, shape, start in sorted(part["held"], key=lambda entry: (entry[0], entry[3])):
            held.update(f"{name} {shape} {start}".encode() + values.tobytes())
    first = parts[0]
    figures = {name: [value.hex() for value in first[name]] for name in ("losses", "norms")}
    return {**figures, "evaluation": first["evaluation"].hex(), "tensors": held.hexdigest()}


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    computed = {}
    for name, (size, words) in LAYOUTS.items():
        computed[name] = results(size, words)
        print(f"{name}: loss {float.fromhex(computed[name]['losses'][-1]):.6f}", flush=True)
    if given.action == "record":
        given.file.write_text(json.dumps(computed, indent=1))
        return 0
    before = json.loads(given.file.read_text())
    differ = [
        f"{name}: {key} differ"
        for name, figures in computed.items()
        for key, value in figures.items()
        if before.get(name, {}).get(key) != value
    ]
    print("\n".join(differ) or f"all {len(computed)} layouts are equal to the last bit")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())

"""The sides of differential.py: processes that read jobs from standard input and train each in ranks of their own.

A job is a line of JSON: the folder of a case, which has case.json and inputs.pt, the side to run, and how many ranks it has. The
answer is a line as well; each rank leaves its losses, norms, gradients and weights in SIDE-RANK.pt. Ranks are forked from a process
that has imported everything and never trains itself, so each case begins with a clean state and takes tenths of a second.

Sides are ``hpclm`` and ``transformers``; differential_megatron.py adds Megatron-core's, in a venv without hpclm.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Side = Callable[[dict[str, Any], dict[str, Any], int], dict[str, Any]]
"""(case, inputs, rank) -> what the rank computed."""
LIMIT = 120.0  # seconds for a case
REFUSED, FAILED = 3, 4  # exit codes of ranks
IMPORTED = {
    "hpclm": [
        f"hpclm.{name}" for name in ("config", "data.batches", "engine.fsdp2", "engine.native", "engine.pipelining")
    ],
    "transformers": [
        f"transformers.models.{name}.modeling_{name}" for name in ("bloom", "gpt2", "gpt_neox", "llama", "qwen3")
    ],
}
"""What each side imports before it forks ranks."""


class RefusedError(Exception):
    """A side does not support the configuration."""


class Sides:
    """hpclm's process and that of the trainer ``against``, which ``python`` runs if it is Megatron-core."""

    def __init__(self, against: str, python: str):
        self.against, self.python = against, python
        self.log: Any = tempfile.TemporaryFile("w+")  # noqa: SIM115 - close() closes it

    @cached_property
    def workers(self) -> dict[str, Any]:
        """Both processes, from the first case on."""
        here = Path(__file__).parent
        command = [sys.executable, str(here / "differential_worker.py")]
        peer = (
            [self.python, str(here / "differential_megatron.py")]
            if self.against == "megatron"
            else [*command, self.against]
        )
        env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(here.parent), str(here)]), PYTHONWARNINGS="ignore")
        env |= dict(OMP_NUM_THREADS="1", TORCH_COMPILE_DISABLE="1")  # Megatron-core compiles its formulas
        pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=env)
        return {
            "hpclm": subprocess.Popen([*command, "hpclm"], **pipes),
            self.against: subprocess.Popen(peer, **pipes),
        }

    def train(self, request: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
        """What each side's ranks computed; RefusedError, or RuntimeError if one failed."""
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            (folder / "case.json").write_text(json.dumps(request))
            torch.save(inputs, folder / "inputs.pt")
            sizes = {name: 1 if name == "transformers" else request["processes"] for name in self.workers}
            for name, worker in self.workers.items():
                worker.stdin.write(json.dumps({"folder": temporary, "side": name, "size": sizes[name]}) + "\n")
                worker.stdin.flush()
            for name, answer in {name: self._answer(name) for name in self.workers}.items():
                if answer["status"] != "done":
                    kind = RefusedError if answer["status"] == "refused" else RuntimeError
                    raise kind(f"{answer['status']} by {name}", answer["why"])
            return {
                name: [torch.load(folder / f"{name}-{rank}.pt") for rank in range(size)] for name, size in sizes.items()
            }

    def _answer(self, name: str) -> dict[str, Any]:
        line = self.workers[name].stdout.readline()
        if line:
            return dict(json.loads(line))
        self.log.seek(0)
        raise SystemExit(f"the process of {name} is gone:\n{self.log.read()[-3000:]}")

    def close(self) -> None:
        """End both processes."""
        for worker in vars(self).get("workers", {}).values():
            worker.stdin.close()
            worker.wait()
            worker.stdout.close()
        self.log.close()


def serve(sides: dict[str, Side]) -> None:
    """Answer jobs until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        folder = Path(job["folder"])
        status, why = answered(sides[job["side"]], job["side"], folder, job["size"])
        answers.write(json.dumps({"status": status, "why": why}) + "\n")
        answers.flush()


def answered(side: Side, name: str, folder: Path, size: int) -> tuple[str, str]:
    """Run a case on ``size`` ranks: done, refused or failed, and why."""
    running = {}
    for rank in range(size):
        pid = os.fork()
        if not pid:
            os._exit(ranked(side, name, folder, rank, size))
        running[pid] = rank
    deadline, worst, why = time.monotonic() + LIMIT, 0, ""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank, code = running.pop(pid), os.waitstatus_to_exitcode(status)
            if code and not worst:
                note = folder / f"{name}-{rank}.txt"
                worst, why = code, note.read_text() if note.exists() else f"rank {rank} ended with {code}"
        if (worst or time.monotonic() > deadline) and running:
            worst, why = worst or FAILED, why or f"no answer within {LIMIT:.0f} s"
            time.sleep(0.2)  # the others may have the better reason
            for left in running:
                os.kill(left, signal.SIGKILL)
        if not pid:
            time.sleep(0.002)
    return {0: "done", REFUSED: "refused"}.get(worst, "failed"), why


def ranked(side: Side, name: str, folder: Path, rank: int, size: int) -> int:
    """One rank of a case, in a process of its own; its exit code."""
    try:
        store = dist.FileStore(str(folder / f"{name}.store"), size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT)
        )  # for one rank too: Megatron-core asks for it
        result = side(json.loads((folder / "case.json").read_text()), torch.load(folder / "inputs.pt"), rank)
        torch.save(result, folder / f"{name}-{rank}.pt")
        return 0
    except RefusedError as error:
        (folder / f"{name}-{rank}.txt").write_text(str(error))
        return REFUSED
    except BaseException:
        (folder / f"{name}-{rank}.txt").write_text(traceback.format_exc()[-1000:])
        return FAILED


class Weights:
    """The case's weights, as an engine loads a checkpoint."""

    def __init__(self, weights: dict[str, Tensor]):
        self.tensors = {f"model.{name}": whole for name, whole in weights.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor, by name."""
        return {name: tuple(whole.shape) for name, whole in self.tensors.items()}

    def block(self, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        """A block of one of them."""
        return self.tensors[name][tuple(slice(at, at + n) for at, n in zip(start, size, strict=True))]


def hpclm(case: dict[str, Any], inputs: dict[str, Any], rank: int) -> dict[str, Any]:
    """hpclm's own engine, loaded as from a checkpoint and stepped as the training loop does."""
    from hpclm import config
    from hpclm import engine as engines
    from hpclm.base.errors import ConfigError
    from hpclm.parallel.mesh import Compute, Mesh
    from hpclm.parallel.micro_batch import MicroBatch

    size, steps, cpu = case["processes"], inputs["batch"], torch.device("cpu")
    try:
        run = config.load(None, case["words"])
        mesh = Mesh.build(rank, size, run.parallel)
        engine: Any = engines.build(run.for_engine(size), Compute(cpu, torch.float32, mesh))
        engine.load(Weights(inputs["weights"]), {"optimizer_steps": 0})
    except ConfigError as error:
        raise RefusedError(error.problems[0]) from None
    gradients: list[Any] = []
    update = engine.update

    def watched(loss: Tensor, scale: float) -> Any:
        gradients.append([*pieces(engine, mesh)])
        return update(loss, scale)

    engine.update = watched
    results = []
    for number, step in enumerate(steps):
        parts: list[list[Any]] = [
            [None if x is None else x[micro, mesh.dp.rank] for x in step] for micro in range(len(step[0]))
        ]
        batches = [MicroBatch(*part) for part in parts]
        results.append(engine.train_step(batches, run.optim.lr, number))
    shards = [(shard.name, shard.start, shard.shape, shard.tensor.clone()) for shard in engine.tensors()]
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "gradients": gradients,
        "state": shards,
    }


def pieces(engine: Any, mesh: Any) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
    """Of each gradient that this rank holds: the weight's name, and an offset in it, its shape, the values there."""
    from hpclm.engine.sharded_parameter import blocks

    for weight in engine.weights:
        gradient = weight.parameter.grad
        if gradient is not None:
            for start, block in blocks(weight, weight.begin, gradient.reshape(-1)[: weight.count], mesh.tp):
                yield weight.name, start, weight.shape, block.clone()


def transformers(case: dict[str, Any], inputs: dict[str, Any], rank: int) -> dict[str, Any]:
    """transformers' class with its own loss, torch.optim.AdamW and torch's clipping, in one process."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tree, optim = case["theirs"], case["optim"]
    config = AutoConfig.for_model(**tree)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=case["attention"]).train()
    every = dict(model.named_parameters())
    held = {name: every.pop(name if name in every else "lm_head.weight") for name in inputs["theirs"]}
    if every:  # the name that is not there is one that from_pretrained renames
        raise RuntimeError(f"no weights for {', '.join(every)}")
    with torch.no_grad():
        for name, whole in inputs["theirs"].items():
            held[name].copy_(whole)
    min_ndim = 1 if optim["decayed"] == "all" else 2
    decaying = [p for p in held.values() if p.ndim >= min_ndim]
    others = [p for p in held.values() if p.ndim < min_ndim]
    groups: list[dict[str, Any]] = [dict(params=decaying), dict(params=others, weight_decay=0.0)]
    adam = torch.optim.AdamW(
        [group for group in groups if group["params"]], optim["lr"], optim["betas"], optim["eps"], optim["weight_decay"]
    )
    losses, norms, gradients = [], [], []
    for step in inputs["batch"]:
        flat: list[Any] = [None if x is None else x.flatten(0, 1) for x in step]
        tokens, labels, mask, positions, documents = flat
        counts = torch.ones_like(labels) if mask is None else mask
        total = torch.zeros(())
        for micro in range(len(tokens)):
            counted = counts[micro].sum() if case["loss_norm"] == "microbatch" else counts.sum()
            more: dict[str, Any] = {}
            if documents is not None or positions is not None:  # without a mask, positions that restart make one
                allowed = torch.ones(1, 1, *[tokens.shape[-1]] * 2, dtype=torch.bool).tril()
                if documents is not None:
                    allowed = allowed & (documents[micro][:, None, :, None] == documents[micro][:, None, None, :])
                more["attention_mask"] = torch.zeros(allowed.shape).masked_fill(
                    ~allowed, torch.finfo(torch.float32).min
                )
            if positions is not None:
                more["position_ids"] = positions[micro]
            wanted = labels[micro].masked_fill(counts[micro] == 0, -100)
            given = dict(labels=wanted, shift_labels=wanted, num_items_in_batch=counted.clamp(min=1), use_cache=False)
            loss = model(tokens[micro], **given, **more).loss
            loss = loss / len(tokens) if case["loss_norm"] == "microbatch" else loss
            loss.backward()
            total += loss.detach()
        gradients.append({name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in held.items()})
        norms.append(float(torch.nn.utils.clip_grad_norm_(held.values(), optim["clip"] or float("inf"))))
        adam.step()
        adam.zero_grad()
        losses.append(total.item())
    state = {f"model.{name}": p.detach() for name, p in held.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        state |= {f"optim.{moment}.{name}": adam.state[p][moment] for name, p in held.items() if p in adam.state}
    return {"losses": losses, "norms": norms, "gradients": gradients, "state": state}


def main() -> None:
    """Serve hpclm's side, or that of transformers."""
    [chosen] = sys.argv[1:]
    for module in IMPORTED[chosen]:
        importlib.import_module(module)
    serve({"hpclm": hpclm, "transformers": transformers})


if __name__ == "__main__":
    main()

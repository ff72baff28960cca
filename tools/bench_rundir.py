"""The cost of long runs, many runs and many checkpoints for the commands that read them: seconds, CPU seconds and peak memory.

``rows``: a run of N steps is resumed by rank 0 (its metrics only), read, reported and shown; ``--own M`` adds M own metrics.
``runs``: a folder of N runs. ``checkpoints``: a run with N checkpoints without tensors. All are made up in a temporary folder.

    python tools/bench_rundir.py rows --count 2_000_000
    python tools/bench_rundir.py runs --count 5_000
    python tools/bench_rundir.py checkpoints --count 20_000
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEP_SECONDS = 0.37
ENDINGS = ("done", "running", "failed", "exited")
BEGAN = 1_700_000_000
RESUME = """
from pathlib import Path
from hpclm.rundir import metrics_file
from hpclm.rundir.summary import RunSummary
RunSummary(Path({out!r})).resume(metrics_file.forget_after(Path({out!r}), {step}))
"""
HISTORY = "from pathlib import Path; from hpclm.reporting import history; history.read_history(Path({out!r}))"
SAVES = """
from pathlib import Path
from hpclm.checkpoint import directory, retention, resumable
out = Path({out!r})
resumable.candidate(out)
complete = retention.CompleteCheckpoints()
for _ in range(2):
    retention.Retention(last=10**6).prunable(complete.among(directory.steps(out / "checkpoints")))
"""


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rows", "runs", "checkpoints"])
    parser.add_argument("--count", type=int, required=True, metavar="N")
    parser.add_argument("--own", type=int, default=0, metavar="M")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-rundir-") as name:
        folder = Path(name)
        if args.what == "rows":
            rows(folder, args.count, args.own)
        elif args.what == "runs":
            runs(folder, args.count)
        else:
            checkpoints(folder, args.count)


def rows(folder: Path, count: int, own: int) -> None:
    """Read a run of ``count`` steps with this number of own metrics."""
    out = make_run(folder / "run", count, own=own)
    print(f"{count:,} rows, {(out / 'metrics.jsonl').stat().st_size / 1e6:,.0f} MB")
    measure("resume, nothing to drop", ["-c", RESUME.format(out=str(out), step=count)])
    measure("history", ["-c", HISTORY.format(out=str(out))])
    measure("hpclm report", ["-m", "hpclm", "report", str(out)])
    measure("hpclm status", ["-m", "hpclm", "status", str(out)])
    measure("resume, the last tenth is lost", ["-c", RESUME.format(out=str(out), step=count * 9 // 10)])


def runs(folder: Path, count: int) -> None:
    """List ``count`` runs."""
    for number in range(count):
        out = make_run(folder / f"group-{number % 10}" / f"run-{number:05d}", 3, ENDINGS[number % len(ENDINGS)])
        make_checkpoints(out / "checkpoints", 3)
    measure(f"hpclm status of {count:,} runs", ["-m", "hpclm", "status", "--runs", str(folder)])
    measure(f"hpclm top of {count:,} runs", ["-m", "hpclm", "top", "--once", "--runs", str(folder)])


def checkpoints(folder: Path, count: int) -> None:
    """List ``count`` checkpoints, and look through them as a run does that resumes and saves."""
    out = make_run(folder / "run", 3)
    make_checkpoints(out / "checkpoints", count)
    measure(f"hpclm checkpoints --no-verify of {count:,}", ["-m", "hpclm", "checkpoints", "--no-verify", str(out)])
    measure("resume, and two saves", ["-c", SAVES.format(out=str(out))])
    measure("hpclm status", ["-m", "hpclm", "status", str(out)])


def make_run(out: Path, steps: int, state: str = "done", own: int = 0) -> Path:
    """A run with made-up figures; ``state``: in its summary. ``own``: the number of own metrics."""
    out.mkdir(parents=True, mode=0o700)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(BEGAN))
    job = dict(kind="submitted", cluster="slurm", job_id="7", host="login", nodes=1, tasks_per_node=8, log="")
    attempt = dict(kind="began", from_step=0, steps=steps, size=8, hosts=["n1"], host="n1", pid=1, began=float(BEGAN))
    attempt |= dict(command="hpclm train " + "x" * 200, versions={f"library {n}": "1.2.3" for n in range(9)})
    ending = "" if state == "running" else state
    standing = dict(state=state, ending=ending, code=0, step=steps, steps=steps)
    happened = [job, attempt, *([] if state == "running" else [dict(kind="ended", **standing)])]
    (out / "config.yaml").write_text(f"out: {out}\ndata: {{source: synthetic}}\n")
    (out / "events.jsonl").write_text("".join(json.dumps({"time": stamp, **event}) + "\n" for event in happened))
    (out / "summary.json").write_text(json.dumps(standing | dict(curve=[3.0], loss=3.0, time=BEGAN, stepped=BEGAN)))
    (out / "lock").write_text(json.dumps(dict(host="n1", pid=1, job="7")) if state == "running" else "")
    (out / "logs").mkdir()
    (out / "logs" / "job-7.log").write_text("12:00:00 I step 3\n" * 100)
    with (out / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row = step_row(step) | {f"own_{number}": random.random() for number in range(own)}
            file.write(json.dumps(row) + "\n")
            if step % 1000 == 0:
                evaluation = dict(step=step, samples=64 * step, part="valid", validation_loss=3.0 + random.random())
                file.write(json.dumps(evaluation) + "\n")
    return out


def step_row(step: int) -> dict[str, float]:
    """A row of metrics.jsonl."""
    names: tuple[str, ...] = (
        "loss",
        "grad_norm",
        "lr",
        "step_seconds",
        "data_seconds",
        "data_fraction",
        "forward_seconds",
    )
    names += ("backward_seconds", "optimizer_seconds", "tokens_per_second", "mfu")
    row: dict[str, float] = {"step": step, "samples": 64 * step, "time": round(BEGAN + STEP_SECONDS * step, 3)}
    row |= {"skipped": 0, "loss_scale": 1.0, "batch_size": 64, "memory": 71 << 30}
    return row | {name: random.random() for name in names}


def make_checkpoints(folder: Path, count: int) -> None:
    """Checkpoints of one small file each."""
    from hpclm.checkpoint.manifest import Manifest

    file = {"rank-00000.safetensors": {"size": 8, "xxh3": "0" * 16}}
    for step in range(1, count + 1):
        checkpoint = folder / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "rank-00000.safetensors").write_bytes(bytes(8))
        content = Manifest(dict(step=step, samples=64 * step, seconds=1.0), {}, {}, {}, file)
        content.write(checkpoint)


def measure(name: str, words: list[str]) -> None:
    """Run Python in a separate process, and print its time and memory."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    print(
        f"{name:<40} {time.perf_counter() - began:6.1f} s  user {usage.ru_utime:6.1f} s  system {usage.ru_stime:6.1f} s  "
        f"{usage.ru_maxrss / 1024:7.0f} MB" + f"  exit code {process.returncode}" * bool(process.returncode),
        flush=True,
    )


if __name__ == "__main__":
    main()

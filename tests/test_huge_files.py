"""No verb takes much memory because a file of a run is sparse or huge, whichever it is."""

import json
import os
import subprocess
import sys

import pytest

from hpclm.rundir import folder
from tests.reporting import made
from tests.runs import ROOT

MAX_MB = 500  # PyTorch not included: these verbs do not import it
SIZES = {"small": 60 << 20, "of a manifest": 900 << 20, "of rows": (4 << 30) - 1, "large": 1 << 40}
FILES = [
    *folder.FILES,
    *("metrics.lost.jsonl", "scores.jsonl", "preflight.json", "ranks.json", "rollback.json", "corruption.jsonl"),
    *("lock.beat", "checkpoints.saved", "report.html", "logs/job-7.log", "logs/rank-00001.log", "job/script-1.sbatch"),
    *("checkpoints/latest", "checkpoints/step-00000001/MANIFEST.json", "checkpoints/.bad-step-00000002/REASON.txt"),
    *("checkpoints/step-00000001/rank-00000.safetensors", "config-history/0001.yaml", "sinks/wandb.json"),
]
VERBS = """
import contextlib, importlib, io, json, os, sys
from pathlib import Path
from hpclm import cli
from hpclm.errors import HpclmError

class WithoutTorch:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            raise HpclmError("PyTorch is imported")

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1e3

def python(out):
    import hpclm
    from hpclm.node.job import Job
    from hpclm.rundir import metrics_file
    from hpclm.rundir.summary import RunSummary
    from hpclm.training import records
    run = hpclm.open(out)
    for read in (
        lambda: run.rows, lambda: run.status, lambda: repr(run), lambda: run.settings, lambda: run.checkpoints,
        lambda: RunSummary(Path(out)).resume(metrics_file.forget_after(Path(out), 50)),
        lambda: metrics_file.forget_beside_after(Path(out), 50), lambda: list(metrics_file.NewScores(Path(out)).rows()),
        lambda: metrics_file.move_after(Path(out), 50), lambda: records.check_progress(Path(out), 0, Job()),
    ):
        with contextlib.suppress(HpclmError, OSError):
            read()

sys.meta_path.insert(0, WithoutTorch())
out, peaks = sys.argv[1], {}
for words in json.loads(sys.argv[2]) + [["python"]]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(SystemExit):
            python(out) if words == ["python"] else cli.main([word.replace("RUN", out) for word in words])
    peaks[" ".join(words)] = peak()
print(json.dumps(peaks))
"""
COMMANDS = [
    ["status", "RUN"],
    ["status", "RUN", "--json"],
    ["top", "RUN", "--once"],
    ["logs", "RUN", "-n", "5"],
    ["report", "RUN", "--no-png", "-o", "RUN/other.html"],
    ["checkpoints", "RUN", "--no-verify"],
    ["request", "RUN", "save"],
    ["request", "RUN", "stop"],
    ["cancel", "RUN"],
    ["config", "RUN"],
    ["planner", "RUN"],
    ["train", "RUN"],
    ["sync", "RUN"],
    ["evaluate", "RUN"],
    ["generate", "RUN", "--prompt", "a"],
    ["convert", "RUN", "RUN-converted"],
]


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.whole) for size in SIZES])
@pytest.mark.parametrize("name", FILES)
def test_no_verb_takes_much_memory_for_a_sparse_file(name, size, tmp_path):
    grown(tmp_path, [name], size)


@pytest.mark.parametrize("size", SIZES)
def test_no_verb_takes_much_memory_for_a_run_of_sparse_files(size, tmp_path):
    grown(tmp_path, [name for name in FILES if name not in ("config.yaml", "rollback.json")], size)


def grown(tmp_path, names, size):
    """Run every verb on a run whose files ``names`` have this size."""
    out = made.preempted(tmp_path / "run")
    (out / "checkpoints/step-00000001").mkdir(parents=True, mode=0o700)
    (out / "checkpoints/step-00000001/MANIFEST.json").write_text("{}")
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        with (out / name).open("ab") as file:
            file.truncate(SIZES[size])
    done = subprocess.run(
        [sys.executable, "-c", VERBS, str(out), json.dumps(COMMANDS)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    assert max(peaks.values()) < MAX_MB, peaks

"""Ranks with a GPU each that is not there, over a NCCL that moves nothing: every layout gets through its steps, with collectives."""

import os
import subprocess

import pytest

from tests.runs import ROOT, free_port

pytestmark = pytest.mark.whole
MIXED = ["model.dropout=0.1", "engine.recompute=selective", "model.attention.kv_heads=2", "model.positions=rope"]
# not those that stop because nothing was sent: fairscale, ZeRO 3 of deepspeed, pipelines
LAYOUTS = {
    "native": (2, []),
    "native-zero1": (2, ["engine.zero_stage=1"]),
    "native-tp2": (2, ["parallel.tensor=2"]),
    "native-tp2-mixed": (2, ["parallel.tensor=2", *MIXED]),
    "native-tp2-compiled": (2, ["parallel.tensor=2", "engine.compile=true"]),
    "fsdp2": (2, ["engine.name=fsdp2"]),
    "fsdp2-zero2-compiled": (2, ["engine.name=fsdp2", "engine.zero_stage=2", "engine.compile=true"]),
    "fsdp2-hybrid": (4, ["engine.name=fsdp2", "parallel.shard=2"]),
    "fsdp2-tp2": (4, ["engine.name=fsdp2", "parallel.tensor=2", *MIXED]),
    "deepspeed1": (2, ["engine.name=deepspeed", "engine.zero_stage=1"]),
    "deepspeed2": (2, ["engine.name=deepspeed", "engine.zero_stage=2"]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gets_through_its_steps(name, lab, tmp_path):
    size, words = LAYOUTS[name]
    compiled = [] if "engine.compile=true" in words else ["engine.compile=false"]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(size), "--master-port", str(free_port())]
    own = {"FAKEGPU_COUNT": str(size), "FAKEGPU_LOG": f"{tmp_path}/log.%d"}
    done = subprocess.run(
        [lab / "python", *launch, "-m", "tests.standin.rank_steps", "batch.micro_size=1", *compiled, *words],
        cwd=ROOT,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    assert done.stdout.count("is through") == size
    logs = [text for path in tmp_path.glob("log.*") if "nccl init" in (text := path.read_text(errors="replace"))]
    assert len(logs) == size
    for log in logs:
        sent = [line for line in log.splitlines() if line.startswith("nccl") and not line.startswith("nccl init")]
        assert sent

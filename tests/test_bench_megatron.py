"""What bench_train.py times hpclm beside on a GPU trains; here on a CPU, which Megatron-core is made to take for one."""

import subprocess
import sys

import pytest

from tests.runs import ROOT

CODE = """
import sys, warnings
import torch, torch.distributed as dist
warnings.simplefilter("ignore")
sys.path.insert(0, "tools")
import bench_megatron
from bench_train import SHAPES
from hpclm.config import ModelConfig
from tests.interop import mcore_run

dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, 1, is_master=True), rank=0, world_size=1)
from megatron.core import parallel_state
mcore_run.pretend()
rows = torch.randint(0, 128, (1, 4, 33), generator=torch.Generator().manual_seed(0))
with mcore_run.OnCPU():
    parallel_state.initialize_model_parallel(1, 1)
    for shape in ("124m", "llama-1b"):
        small = dict(layers=2, hidden=64, heads=4, vocab_size=128)
        small |= dict(kv_heads=2, ffn=128) if shape == "llama-1b" else {}
        for dtype in (torch.float32, torch.bfloat16):
            step = bench_megatron.stepping(ModelConfig.of(SHAPES[shape] | small | {"context": 32}), rows, dtype)
            losses = [step() for _ in range(4)]
            assert 4.6 < losses[0] < 5.2 and losses == sorted(losses, reverse=True), (shape, dtype, losses)
"""


@pytest.mark.whole
def test_megatron_cores_step_learns():
    pytest.importorskip("megatron.core")
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

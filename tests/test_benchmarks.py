"""The benchmarks under tools/ run: each at its smallest; what they measure is never a test."""

import subprocess
import sys

import pytest

from tests.runs import PATIENCE, ROOT

SMALLEST = [
    "bench_parallel.py engines --rounds 1 --warmup 1 --batch 4 --micro 2 --context 32",
    "bench_parallel.py layouts --rounds 1 --warmup 1 --batch 8 --micro 2 --context 32",
    "bench_parallel.py agreement --rounds 1 --warmup 1 --steps 1 --micro 1 --context 32",
    "bench_checkpoint.py --megabytes 8 --tensors 8 --rounds 1",
    "bench_checkpoint.py --megabytes 8 --tensors 8 --rounds 2 --training",
    "bench_data.py --documents 10_000 --rounds 1",
    "bench_generate.py --tokens 4 --batch 1 2 --rounds 1 model.layers=2 model.hidden=64 model.attention.heads=4",
    "bench_generate.py --llama --tokens 4 --batch 2 --rounds 1",
    "bench_rundir.py rows --count 2000",
    "bench_rundir.py runs --count 8",
    "bench_rundir.py checkpoints --count 8",
    "bench_startup.py meet --clients 4 8",
    "bench_startup.py groups --clients 2 4",
    "bench_startup.py ranks --clients 1 2",
    "bench_startup.py files --clients 2",
    "bench_train.py --batch 2 --context 32 --rounds 1 --warmup 1",
    "count_checkpoint.py --ranks 1 2 --only native fsdp2",
]


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("words", SMALLEST, ids=lambda words: " ".join(words.split()[:2]))
def test_a_benchmark_prints_figures(words, tmp_path):
    tool, *rest = words.split()
    command = [sys.executable, str(ROOT / "tools" / tool), *rest]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert any(letter.isdigit() for line in ended.stdout.splitlines()[1:] for letter in line), ended.stdout
    assert not list(tmp_path.iterdir())

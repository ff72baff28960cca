"""vLLM gives the probabilities of the run: one process for each class, where vLLM is installed (mark whole)."""

import json
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import torch

from hpclm import cli
from hpclm.preprocess.tokenizers.huggingface import train_bpe
from tests.interop import made
from tests.interop.test_gguf import COMPUTED, GEMMA, LLAMA, LLAMA3, POST, WINDOWS, YARN
from tests.interop.test_tokenizer import TEXTS
from tests.runs import PATIENCE

main = cli.function("convert")

CPU = {
    "hidden": 128,
    "attention.heads": 2,
    "attention.kv_heads": 1,
    "ffn": 256,
    "attention.head_dim": 64,
}  # vLLM's kernels for CPUs need heads of 32 or more
NETWORKS = {
    **{kind: COMPUTED[kind] for kind in ("gpt2", "bloom", "gptneox", "llama", "llama 3", "qwen 2", "qwen 3", "olmo 2")},
    **{kind: COMPUTED[kind] for kind in ("olmo 3", "smollm 3", "gemma 2", "gemma 3", "granite", "arcee", "glm 4")},
    "mistral": {**LLAMA, "attention.pattern": ["window"], "attention.window": 5},
    "olmo 3, two bases": {
        **LLAMA,
        **POST,
        **WINDOWS,
        "rope.scaling": YARN,
        "rope.window_scaled": False,
        "rope.window_base": 500.0,
    },
    "seed-oss": {**LLAMA, "attention.qkv_bias": True, "attention.head_dim": 16},
    "apertus": {**LLAMA, "activation": "xielu", "attention.qk_norm": True, "rope.scaling": LLAMA3},
    "gemma 3, one kind of layer": {**GEMMA, "attention.qk_norm": True},
}


@pytest.mark.whole
@pytest.mark.skipif(util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("kind", NETWORKS)
def test_vllm_gives_the_runs_probabilities(kind, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(train_bpe(TEXTS, 300))
    same = {"attention.kv_heads": None, "ffn": None} if "norm" not in NETWORKS[kind] else {}  # the older classes
    network = NETWORKS[kind] | CPU | same
    made.run(tmp_path / "run", network, source="indexed", tokenizer="json", tokenizer_files=[str(path)])
    main([str(tmp_path / "run"), str(tmp_path / "hf")])
    ids = torch.randint(0, 320, (1, 48), generator=torch.Generator().manual_seed(3))
    ours = made.logits(tmp_path / "run", ids)[0].log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    words = [sys.executable, Path(__file__).with_name("vllm_logprobs.py"), tmp_path / "hf", json.dumps(ids[0].tolist())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
    assert not done.returncode, done.stderr[-2000:]
    theirs = torch.tensor(json.loads(done.stdout.splitlines()[-1]))
    assert (ours - theirs).abs().max() < (0.03 if kind == "apertus" else 3e-3)

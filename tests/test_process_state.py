"""A program that calls hpclm's functions finds its process as it was."""

import json
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import torch

from hpclm.node import process_state
from tests.runs import PATIENCE, ROOT


def test_a_block_computes_as_a_new_process_and_leaves_this_one_as_it_was(monkeypatch):
    def state():
        generators = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
        numeric = (
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            np.geterr(),
        )
        return *generators, *numeric, torch.is_grad_enabled(), sys.getrecursionlimit(), [*sys.path], dict(os.environ)

    monkeypatch.setenv("BEFORE", "1")
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), np.errstate(over="raise"):
            before = state()
            with process_state.preserved():
                assert (torch.get_default_dtype(), torch.is_grad_enabled(), np.geterr()["over"]) == (
                    torch.float32,
                    True,
                    "warn",
                )
                for seed in (torch.manual_seed, random.seed, np.random.seed):
                    seed(1)
                torch.set_num_threads(torch.get_num_threads() + 1)
                torch.set_float32_matmul_precision("medium")
                sys.setrecursionlimit(sys.getrecursionlimit() + 1)
                sys.path.append("/nowhere")
                os.environ |= {"BEFORE": "2", "ADDED": "3"}
            assert state() == before
    finally:
        torch.set_default_dtype(dtype)


def test_what_hpclm_changes_in_a_library_is_undone_when_the_block_ends():
    library = SimpleNamespace(limit=1)
    with process_state.preserved():
        process_state.change(library, "limit", 2)
        assert library.limit == 2
    assert library.limit == 1


def test_every_function_leaves_the_process_of_its_caller_as_it_was_and_computes_as_in_a_new_one(tmp_path):
    command = [sys.executable, "-m", "tests.process_snapshot", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert {name: changed for name, changed in results["changes"].items() if changed} == {}
    assert results["raised"] == {"refused": "ConfigError", "diverged": "DivergedError", "interrupted": "Interrupted"}
    losses = results["losses"]
    assert losses["a"][:5] == losses["c"] == losses["d"] and None not in losses["a"][:4]

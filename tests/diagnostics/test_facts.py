import json
import os
import socket

import pytest
import torch

from hpclm.diagnostics import facts
from hpclm.distributed.bootstrap import World
from hpclm.launch.schedulers import current_job
from hpclm.node import python
from tests.runs import PATIENCE


def test_facts_are_json_and_pytorch_reports_itself():
    own = facts.everything(World("single", 0, 1), "node1")
    assert json.loads(json.dumps(own)) == own
    assert own["torch"] == torch.__version__ and own["collect_env"]["torch_version"] == own["torch"]
    assert own["broken"] == [] and own["threads"] >= 1 and "lo" in own["network"]


def test_the_driver_does_not_matter_to_a_run_on_cpus(monkeypatch):
    monkeypatch.setattr(facts, "driver", lambda: "550.54")
    assert facts.of_process("single", {})["driver"] == "550.54"
    assert facts.of_device(torch.device("cpu"))["driver"] is None


def test_the_name_of_a_node_is_slurms_only_for_its_own_ranks():
    env = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURMD_NODENAME": "node1"}
    env["SLURM_JOB_NODELIST"] = "node[1-2]"
    names = [current_job(env=env | more).node for more in ({}, {"OMPI_COMM_WORLD_RANK": "0"}, {"MPI_LOCALRANKID": "0"})]
    assert names == ["node1", "node1", socket.gethostname()]  # MPICH hands on the variables of its first node


@pytest.mark.parametrize(
    "code, error",
    [
        ("raise ImportError('libcudart.so')", "ImportError: libcudart.so"),
        ("import os; os.kill(os.getpid(), 11)", "ended by signal 11"),
        ("import time; time.sleep(3600)", "did not answer within 0.3 s"),
        ("print('hello')", "no answer"),
    ],
)
def test_a_library_that_fails_is_an_answer(code, error):
    assert python.ask(code, os.environ, seconds=0.3 if "sleep" in code else PATIENCE)["error"].endswith(error)


def test_a_process_is_told_in_one_line():
    own = {"rank": 1, "size": 8, "host": "h", "local_rank": 1, "local_size": 4, "launcher": "srun", "threads": 4}
    own |= {"python": "3.12.1", "torch": "2.9", "gpus": 2, "device_name": "H200", "visible": "0,1"}
    head, tail = "rank 1/8  h  local 1/4  srun  ", "  4 threads  python 3.12.1  torch 2.9"
    assert facts.line(own) == f"{head}2 x H200 (CUDA_VISIBLE_DEVICES=0,1){tail}"
    assert facts.line(own | {"gpus": 0, "visible": None}) == f"{head}CPU{tail}"


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "none"),
        ([], "none"),
        (["a", 2], "a; 2"),
        ((1 << 24) - 1, "16777215"),
        (3 << 29, "1.5 GiB"),
        ({"free": 1 << 30, "total": 5}, "free 1.0 GiB, total 5"),
        ("a\nb", "a; b"),
    ],
)
def test_a_value_is_shown_in_one_line_and_bytes_in_gib(value, text):
    assert facts.lines({"x": value}) == [f"{'x':<26}{text}"]


def test_the_variables_of_a_process_have_a_line_each():
    assert facts.lines({"variables": {"RANK": "0", "NCCL_DEBUG": "INFO"}}) == [
        "variables",
        f"  {'RANK':<24}0",
        f"  {'NCCL_DEBUG':<24}INFO",
    ]

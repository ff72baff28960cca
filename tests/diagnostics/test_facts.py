import json
import os
import socket
from types import ModuleType

import pytest
import torch

from hpclm.diagnostics import facts
from hpclm.distributed.bootstrap import World
from hpclm.launch.schedulers import current_job
from hpclm.node import python
from hpclm.node.shadows import Shadow
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


@pytest.mark.parametrize("version, old", [("5.4.1", True), ("6", False), ("10.1", False)])
def test_a_library_from_outside_is_too_old_by_the_numbers_of_its_version(version, old):
    module = ModuleType("yaml")
    module.__version__ = version
    library = Shadow("yaml", "/x/yaml.py", "PYTHONPATH entry '/x'", "unset PYTHONPATH", "")
    said = f"{library}: version {version}, but hpclm needs PyYAML>=6; unset PYTHONPATH"
    assert [*facts._too_old(library, module)] == [said] * old


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

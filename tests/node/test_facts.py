import json
import os
import resource

import pytest
import torch

from hpclm.node import facts, python


def test_the_preflight_check_and_doctor_see_the_same_machine():
    ours, machine = facts.of_process("single", torch.device("cpu"), {}), facts.machine()
    changing = ("load", "memory_free", "shm", "driver")
    assert {name: ours[name] for name in machine if name not in changing} == {
        name: value for name, value in machine.items() if name not in changing
    }
    assert json.loads(json.dumps(ours)) == ours and machine["memory_free"] > 0


def test_the_driver_does_not_matter_to_a_run_on_cpus(monkeypatch):
    monkeypatch.setattr(facts, "driver", lambda: "550.54")
    assert facts.machine()["driver"] == "550.54"
    assert facts.of_process("single", torch.device("cpu"), {})["driver"] is None


def test_a_resource_without_a_limit_has_none(monkeypatch):
    assert facts.limit(resource.RLIMIT_NOFILE) == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert facts.limit(resource.RLIMIT_NOFILE) is None


@pytest.mark.parametrize(
    "code, error",
    [
        ("raise ImportError('libcudart.so')", "ImportError: libcudart.so"),
        ("import os; os.kill(os.getpid(), 11)", "ended by signal 11"),
        ("import time; time.sleep(30)", "did not answer within 0.3 s"),
        ("print('hello')", "no answer"),
    ],
)
def test_a_library_that_fails_is_an_answer(code, error):
    assert python.ask(code, os.environ, seconds=0.3 if "sleep" in code else 30)["error"].endswith(error)


def test_programs_answer_with_their_first_line_or_an_error():
    assert facts.ask_program("sh", "-c", "echo one; echo two")["says"] == "one"
    assert facts.ask_program("sh", "-c", "echo broken >&2; exit 3")["error"] == "broken"
    assert facts.ask_program("no-such-program") == {"error": "no-such-program is not in PATH"}

import json
import os
import secrets
import subprocess
import sys

import pytest

from hpclm.diagnostics import diagnosis
from tests.runs import ROOT, free_port, hpclm

CALM = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "HPCLM_"))}


def test_doctor_and_env_show_what_this_process_has():
    shown = hpclm("env", check=0, env=CALM).stdout
    names = ("hpclm", "version", "backends", "os", "open_files", "shm", "lo", "mpirun", "sbatch", "launcher")
    assert [name for name in names if f"\n  {name} " not in shown] == []


def test_no_secret_is_shown():
    canary = secrets.token_hex(8)
    env = CALM | {"WANDB_API_KEY": canary, "NCCL_PASSWORD": canary, "SLURM_TOKEN": canary, "HPCLM_SECRET": canary}
    for words in ((), ("--json",)):
        assert canary not in hpclm("doctor", *words, env=env).stdout


def test_the_site_file_is_shown(tmp_path):
    shown = hpclm("doctor", env=CALM | {"HPCLM_SITE": str(tmp_path / "site.yaml")}).stdout
    assert f"{tmp_path}/site.yaml" in shown


def test_json_has_everything_and_the_problems():
    shown = json.loads(hpclm("doctor", "--json", check=0, env=CALM).stdout)
    assert shown["ok"] and shown["problems"] == []
    found = shown["found"]
    assert found["process"]["launcher"] == "single" and found["torch"]["backends"]
    assert found["machine"]["threads"] >= 1 and "lo" in found["network"]


def package(folder, name, code, version=None):
    """A package that Python finds before the installed one."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)
    if version:
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return CALM | {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    "code, reason",
    [
        ("raise ImportError('no libcudart.so.12')", "ImportError: no libcudart.so.12"),
        ("import os; os.abort()", "ended by signal 6"),
    ],
)
def test_a_torch_that_cannot_be_loaded_or_crashes_is_a_problem(code, reason, tmp_path):
    shown = hpclm("doctor", check=1, env=package(tmp_path, "torch", code)).stdout
    assert f"problem: PyTorch cannot be loaded ({reason})" in shown


def test_an_apex_that_cannot_be_loaded_is_reported(tmp_path):
    env = package(tmp_path, "apex", "raise SystemExit('imported')", version="0.9.10")
    shown = hpclm("doctor", check=0, env=env).stdout
    assert "hint: apex 0.9.10 cannot be loaded (imported): PyPI's is an unrelated package" in shown


def test_variables_of_launchers_that_contradict_each_other_are_a_problem():
    env = CALM | {"RANK": "5", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    done = hpclm("doctor", check=1, env=env | {"TORCHELASTIC_RUN_ID": "x"})
    assert "problem: torchrun says rank 5 of 2" in done.stdout


def ranks(size, *words, env=CALM):
    """Start ``hpclm doctor`` as each rank of a local launch."""
    launch = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    return [
        subprocess.Popen(
            [sys.executable, "-m", "hpclm", "doctor", *words],
            env=env | launch | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def test_of_several_processes_the_first_prints_a_line_for_each():
    results = [process.communicate(timeout=120) for process in ranks(3, "--ranks")]
    lines = results[0][0].splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["rank", "0/3", "1/3", "2/3"]
    assert [line.split()[2] for line in lines[1:4]] == ["0/3", "1/3", "2/3"]
    assert {out for out, _ in results[1:]} == {""}


def test_processes_without_pytorch_cannot_meet_and_each_shows_itself(tmp_path):
    env = package(tmp_path, "torch", "raise ImportError('broken')")
    processes = ranks(2, "--json", env=env)
    said = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    assert [json.loads(out)["process"]["rank"] for out, _ in said] == [0, 1]
    assert "the processes cannot find each other: PyTorch cannot be loaded: broken" in said[0][1]


@pytest.mark.slow
def test_processes_that_do_not_meet_show_themselves():
    first, second = ranks(2)
    first.kill()
    first.communicate()
    shown, _ = second.communicate(timeout=120)
    assert second.returncode == 1 and shown.startswith("1/2  ") and shown.count("\n") == 1


HEALTHY = {
    "process": {"host": "a", "launcher": "local", "local_size": 1},
    "software": {"hpclm": "1", "python": "3.11", "apex": None},
    "torch": {"version": "2.6", "cuda": "12.4", "gpus": [], "architectures": []},
    "machine": {"driver": None, "gpu_files": 0, "shm": None, "locked_memory": None, "infiniband": []},
    "variables": {},
    "programs": {name: {"error": "not in PATH"} for name in ("mpirun", "sbatch", "controller")},
}
GPU = {"uuid": "GPU-1", "capability": "9.0"}


def but(**parts):
    """A healthy process but for these."""
    return HEALTHY | {name: HEALTHY[name] | value for name, value in parts.items()}


@pytest.mark.parametrize(
    "parts, said",
    [
        ({"torch": {"gpus": [GPU, GPU | {"uuid": "2"}]}, "process": {"local_size": 4}}, "4 processes see 2 GPUs"),
        ({"torch": {"gpus": [GPU], "architectures": ["sm_70", "sm_80"]}}, "no code for sm_90, only for sm_70, sm_80"),
        ({"torch": {"gpus": [GPU | {"capability": "6.1"}], "architectures": ["sm_70"]}}, "no code for sm_61"),
        ({"process": {"launcher": "Open MPI"}}, "Open MPI started this process, but mpi4py is not installed"),
    ],
)
def test_what_would_stop_a_run_is_a_problem(parts, said):
    problems, _ = diagnosis.diagnose([but(**parts)])
    assert len(problems) == 1 and said in problems[0]


@pytest.mark.parametrize(
    "parts, said",
    [
        ({"machine": {"gpu_files": 8}, "torch": {"cuda": None}}, "build without CUDA"),
        ({"machine": {"gpu_files": 8}, "variables": {"CUDA_VISIBLE_DEVICES": ""}}, "hides the GPUs"),
        ({"machine": {"gpu_files": 8, "driver": "550"}}, "sees none with driver 550"),
        ({"machine": {"shm": {"size": 64 << 20, "free": 1}}}, "/dev/shm has only 64 MiB"),
        ({"machine": {"infiniband": ["mlx5_0"], "locked_memory": 65536}}, "ulimit -l unlimited"),
        (
            {"programs": {"mpi4py": {"library": "Open MPI v4.1.4"}, "mpirun": {"says": "HYDRA build details"}}},
            "each rank would be on its own",
        ),
    ],
)
def test_what_may_surprise_is_a_hint(parts, said):
    problems, hints = diagnosis.diagnose([but(**parts)])
    assert problems == [] and any(said in hint for hint in hints)


def test_a_healthy_process_gives_nothing_to_say():
    assert diagnosis.diagnose([but(torch={"gpus": [GPU], "architectures": ["sm_80", "sm_90"]})]) == ([], [])


def test_what_differs_between_hosts_is_a_problem_and_a_hint_says_where():
    other = but(process={"host": "b"}, software={"python": "3.12"}, machine={"shm": {"size": 64 << 20, "free": 1}})
    problems, hints = diagnosis.diagnose([HEALTHY, other])
    assert problems == ["python differs: 3.11 on a; 3.12 on b"]
    assert len(hints) == 1 and hints[0].startswith("on b: /dev/shm has only 64 MiB")

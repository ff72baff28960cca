"""tools/gpu_proof.sh and tools/gpu_wheels.sh, which are for a machine with a GPU, as far as they can be tried without one."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
import torch

from tests.runs import PATIENCE, ROOT, until

sys.path.insert(0, str(ROOT / "tools"))
import gpu_archive
import gpu_machine
import gpu_profile
import gpu_proof
import gpu_runs

SLEEPS = "import os, time; print('| a table |', os.getpid(), flush=True); time.sleep(600)"


def proof(*words, **more):
    return subprocess.run(
        [ROOT / "tools/gpu_proof.sh", *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=1800, **more
    )


def stage(name, code, budget=600, **more):
    return gpu_proof.Stage(name, [sys.executable, "-c", code], budget, **more)


def proven(tmp_path, seconds=600):
    made = gpu_proof.Proof(tmp_path, tmp_path / "OUT", seconds)
    made.results["device"] = "cpu"
    return made


def content(folder):
    """Name -> bytes of what is in the one file of a folder, an archive."""
    [file] = folder.iterdir()
    assert file.name == "gpu-proof.tar.gz" and file.stat().st_size <= 15e6
    return unpacked(file)


def unpacked(file):
    """Name -> bytes of what is in an archive; nothing if there is none."""
    if not file.exists():
        return {}
    with tarfile.open(file) as archive:
        return {
            entry.name.removeprefix("gpu-proof/"): archive.extractfile(entry).read() for entry in archive.getmembers()
        }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_leaves_nothing_that_looks_like_a_result(tmp_path):
    done = proof("--out", tmp_path / "out")
    assert done.returncode == 64 and "finds no GPU here; --device cpu rehearses without one" in done.stderr
    assert not (tmp_path / "out/report.md").exists()
    assert "Nothing is proven yet" in (tmp_path / "out/summary.txt").read_text()


def test_there_are_many_tests_that_only_a_gpu_can_pass():
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "tests/gpu"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE).stdout
    assert (
        found.count("::")
        + sum(int(n) for n in [line.rpartition(": ")[2] for line in found.splitlines()] if n.isdigit())
        >= 40
    )


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_first_call_has_the_most_telling_stages_and_time_for_all_of_them(device, tmp_path):
    planned = gpu_proof.stages(device, tmp_path, small=device == "cpu")
    names = ["measure first", "several ranks, fp32", "several ranks, bf16", "limits", "gpt2-124m"]
    assert [stage.name for stage in planned[:5]] == names and planned[5].name.startswith("training speed")
    assert sum(stage.budget for stage in planned[:6]) <= 570 - gpu_proof.RESERVE
    # the second, with what is left of a quarter of an hour
    assert [stage.name for stage in planned[6:9]] == ["tests", "llama-1b, documents", "llama-1b, dropout"]
    assert sum(stage.budget for stage in planned[6:9]) <= 300
    for one in planned:
        assert one.min_seconds < one.budget


KERNELS = {
    "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT": "GEMM",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "GEMM",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16>": "GEMM",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x64x64": "attention",
    "void pytorch_flash::flash_fwd_kernel<>": "attention",
    "void at::native::(anonymous namespace)::indexing_backward_kernel<float, 4>": "table",
    "void at::native::(anonymous namespace)::compute_grad_weight<float>": "table",
    "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<>": "table",
    "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>": "optimizer",
    "Memcpy HtoD (Pinned -> Device)": "copies",
    "void at::native::CatArrayBatchedCopy<>": "copies",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "communication",
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>": "elementwise",
    "triton_poi_fused__to_copy_addmm_gelu_view_3": "elementwise",
    "triton_red_fused__log_softmax_nll_loss_backward_scatter_0": "elementwise",
    "triton_per_fused_embedding_native_layer_norm_0": "table",
    "triton_tem_fused_addmm_5": "GEMM",
    "aten::addmm": "GEMM",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten::_fused_adamw_": "optimizer",
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_counts_among_those_of_its_kind(name):
    assert gpu_profile.category(name) == KERNELS[name]


def test_a_device_is_busy_while_any_of_its_streams_is():
    assert gpu_profile.busy([(5, 6), (0, 2), (1, 3), (1.5, 2.5)]) == 4
    assert gpu_profile.busy([]) == 0


@pytest.mark.slow
def test_the_first_stage_compares_steps_by_category_and_single_operations(tmp_path, monkeypatch, capsys):
    tiny = {"layers": 1, "hidden": 16, "attention.heads": 2, "vocab_size": 40, "vocab_multiple": 1}
    monkeypatch.setitem(gpu_profile.bench_train.SHAPES, "small", tiny)
    monkeypatch.setattr(sys, "argv", ["gpu_profile.py", "--out", str(tmp_path), "--device", "cpu", "--small"])
    assert gpu_profile.main() == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads((tmp_path / "measure-first.json").read_text())
    measure = gpu_proof.stages("cpu", tmp_path, small=True)[0]
    assert f"{gpu_proof.slug(measure.name)}.json" == gpu_profile.FILE  # where the report looks for it
    assert len(found["operations"]) == 15 and all(spent > 0 for spent in found["operations"].values())
    assert list(found["steps"]) == ["hpclm", "plain PyTorch"]
    for name, figures in found["steps"].items():
        assert sum(line.startswith(f"| {name} |") for line in lines) == 1
        assert all(figures[kind] > 0 for kind in ("step", "GEMM", "table", "optimizer", "elementwise"))
        assert figures["until it returns"] <= figures["step"] and figures["dearest"]
    assert found["steps"]["plain PyTorch"]["attention"] > 0  # a CPU computes hpclm's short sequences by products


def test_a_stage_that_fails_stops_no_other_and_is_tried_again(tmp_path, capsys):
    fails = stage("fails", "print('FAILED tests/gpu/x.py::test_y'); raise SystemExit(3)")
    works = f"print('| a |\\nb is left out: c'); open(r'{tmp_path}/works.json', 'w').write('[1]')"
    made = proven(tmp_path)
    made.work([fails, stage("works", works)])
    report = (tmp_path / "report.md").read_text()
    assert "| fails | exit 3 |" in report and "- FAILED tests/gpu/x.py::test_y" in report
    assert "| works | done |" in report and "| a |\n\n- b is left out: c" in report
    assert json.loads((tmp_path / "results.json").read_text())["stages"]["works"]["figures"] == [1]
    assert {"summary.txt", "fails.log", "works.log", "results.json"} <= content(tmp_path / "OUT").keys()
    capsys.readouterr()
    made.work([stage("fails", "print('well')"), stage("works", "raise SystemExit(1)")])
    assert capsys.readouterr().out.count("==") == 1  # what is done is not done again
    assert "| fails | done |" in (tmp_path / "report.md").read_text()
    assert "| works | done |" in gpu_proof.report(made.results, [])  # whatever is chosen now


def test_a_stage_that_takes_too_long_or_is_killed_costs_only_its_own_budget(tmp_path, monkeypatch):
    """The one that takes too long has started another process, which ends with it."""
    child = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print(p.pid); {SLEEPS}"
    killed = stage("killed", "import os; print('begun', flush=True); os.kill(os.getpid(), 9)")
    made, log, clock = proven(tmp_path, seconds=1e6), tmp_path / "slow.log", time.monotonic

    def later():
        """The time: much later once the slow stage has said something."""
        return clock() + (1e5 if log.exists() and "table" in log.read_text() else 0)

    monkeypatch.setattr(gpu_proof.time, "monotonic", later)
    monkeypatch.setattr(gpu_proof, "RENEW", 0.1)
    made.work([stage("slow", child, budget=30), killed, stage("last", "print('| done |')")])
    monkeypatch.undo()
    results = made.results["stages"]
    assert [results[name]["code"] for name in ("slow", "killed", "last")] == [None, -9, 0]
    assert "| a table |" in results["slow"]["shown"]
    text = content(tmp_path / "OUT")["summary.txt"].decode()
    assert re.search(r"out of time +\S+ s  slow", text) and re.search(r"killed by signal 9 +\S+ s  killed", text)
    pid = int(log.read_text().split()[0])
    until(lambda: not running(pid), "the end of what the stage had started")


def running(pid):
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_no_stage_is_begun_for_which_too_little_time_is_left(tmp_path):
    made = proven(tmp_path, seconds=gpu_proof.RESERVE + 30)
    made.work([stage("long", SLEEPS, min_seconds=60), stage("short", "print('done')", min_seconds=0)])
    assert list(made.results["stages"]) == ["short"]
    assert "not begun" in (tmp_path / "summary.txt").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_an_archive_is_left_whatever_ends_it(number, tmp_path):
    """Here the only stage would take 10 minutes; the archive is renewed meanwhile."""
    code = (
        "import sys; sys.path.insert(0, 'tools'); import gpu_proof as p\n"
        f"p.look = lambda proof, wheels, device: 'cpu'; p.RENEW = 0.2\n"
        f"p.stages = lambda *_: [p.Stage('first', [sys.executable, '-c', 'print(1)'], 600), p.Stage('long', [sys.executable, '-c', {SLEEPS!r}], 600)]\n"
        f"sys.argv[1:] = ['--out', {str(tmp_path / 'out')!r}]; sys.exit(p.main())"
    )
    taken = tmp_path / "OUT"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"OUT": str(taken)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        until(lambda: (tmp_path / "out/long.log").exists(), "the second stage", process)
        until(
            lambda: b"a table" in unpacked(taken / gpu_archive.NAME).get("long.log", b""),
            "a renewed archive",
            process,
        )
        process.send_signal(number)
        assert process.wait(PATIENCE) == (-9 if number == signal.SIGKILL else 128 + number)
        if number == signal.SIGKILL:  # its stage has nobody left to end it
            os.kill(int((tmp_path / "out/long.log").read_text().split()[-1]), signal.SIGKILL)
    told = unpacked(taken / gpu_archive.NAME) if number == signal.SIGKILL else content(taken)
    summary = told["summary.txt"].decode()
    assert re.search(r"^done +\S+ s  first$", summary, re.M)
    if number != signal.SIGKILL:
        assert f"cut off by {number.name}" in summary and "| a table |" in summary
        assert json.loads(told["results.json"])["stages"]["long"]["code"] is None
    else:
        assert re.search(r"^running +long$", summary, re.M)


def test_an_archive_never_exceeds_its_limit_and_says_what_it_left_out(tmp_path):
    noise = random.Random(0).randbytes
    (tmp_path / "summary.txt").write_text("told")
    (tmp_path / "runs/x").mkdir(parents=True)
    (tmp_path / "runs/x/big.json").write_bytes(noise(9_000_000))
    for name in "ab":
        (tmp_path / f"{name}.log").write_bytes(noise(8_000_000))
    (tmp_path / "runs/x/metrics.jsonl").write_text("{}\n")
    (tmp_path / "runs/x/weights.bin").write_text("not taken")
    gpu_archive.renew(tmp_path, tmp_path / "OUT")
    taken = content(tmp_path / "OUT")
    assert taken.keys() == {"summary.txt", "a.log", "runs/x/metrics.jsonl", "left-out.txt"}
    assert taken["left-out.txt"] == b"b.log\nruns/x/big.json\n"


def test_wheels_of_another_python_are_named_and_the_rest_installed(tmp_path, capsys):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name, tag in (("fits", "py3-none-any"), ("other", "cp27-cp27m-win32")):
        with zipfile.ZipFile(wheels / f"{name}-1.0-{tag}.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "VALUE = 1\n")
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(f"{name}-1.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
            wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    site = tmp_path / "site"
    assert gpu_machine.install(wheels, site) == 1
    told = capsys.readouterr().out
    assert "other-1.0-cp27-cp27m-win32.whl is left out: " in told and "1 of 2 wheels installed" in told
    assert (site / "fits.py").exists() and not (site / "other.py").exists()
    path = gpu_proof.environment(tmp_path)["PYTHONPATH"].split(os.pathsep)
    assert path[:2] == [str(site), str(ROOT)]
    assert gpu_machine.install(tmp_path / "none", site) == 1 and not site.exists()


def test_the_list_of_wheels_has_one_version_of_all_that_a_machine_with_pytorch_may_lack():
    lines = [line for line in (ROOT / "tools/gpu_wheels.txt").read_text().splitlines() if not line.startswith("#")]
    names = [re.fullmatch(r"([a-z0-9-]+)==[\w.]+(  # source only)?", line)[1] for line in lines]
    assert len(set(names)) == len(names)
    assert {"omegaconf", "orjson", "submitit", "cloudpickle", "wcwidth", "xxhash", "pytest"} <= set(names)
    assert not {"torch", "numpy", "triton"} & set(names) and not any(name.startswith("nvidia") for name in names)


def test_what_is_told_of_a_run_is_its_steps_its_loss_and_its_speed(tmp_path, capsys):
    rows = [{"step": n, "loss": 5 - n, "tokens_per_second": 1e5 * n, "step_seconds": 0.5} for n in (1, 2, 3, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"step": 4, "val": 1}]))
    lines = gpu_runs.table("x", gpu_runs.rows(tmp_path / "metrics.jsonl"), [3.2, 1.0]).splitlines()
    assert lines[2] == "| x | 4 | 4.000 to 1.000 | 3.5e+05 | 0.5 | 3, 1 |"
    assert gpu_runs.finished(tmp_path, 4) and not gpu_runs.finished(tmp_path, 5)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row | {"loss": 1}) + "\n" for row in rows))
    assert not gpu_runs.finished(tmp_path, 4) and "the loss did not fall" in capsys.readouterr().out


@pytest.mark.whole
def test_a_rehearsal_that_is_out_of_time_goes_on_in_the_next_call(tmp_path):
    began = time.monotonic()
    first = proof("--device", "cpu", "--out", tmp_path, "--minutes", "0.8")
    assert first.returncode == 1 and "not begun" in first.stdout, first.stdout + first.stderr
    assert "tests" not in json.loads((tmp_path / "results.json").read_text())["stages"]
    second = proof("--device", "cpu", "--out", tmp_path, "--minutes", str(20 + (time.monotonic() - began) / 60))
    assert second.returncode == 0, second.stdout + second.stderr
    assert "== tests" in second.stdout
    report = (tmp_path / "report.md").read_text()
    assert (
        "a rehearsal" in report and "| hpclm |" in report and "| plain PyTorch |" in report and "host waits" in report
    )
    assert "| gpt2-124m | 40 |" in report and "| llama-1b-documents | 8 |" in report
    with tarfile.open(tmp_path / gpu_archive.NAME) as archive:
        assert "gpu-proof/runs/gpt2-124m/metrics.jsonl" in archive.getnames()


@pytest.mark.whole
def test_the_listed_wheels_can_be_had_and_are_small(tmp_path):
    done = subprocess.run(
        [ROOT / "tools/gpu_wheels.sh", tmp_path / "wheels"], capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    wheels = [file.name for file in (tmp_path / "wheels").iterdir()]
    assert len(wheels) == done.stdout.count("wheels,") * int(done.stdout.split()[1]) >= 10
    assert all("cp312" in name or "abi3" in name or "-none-" in name for name in wheels)

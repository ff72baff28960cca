"""PyTorch's flight recorder: when it is on, and where its records go."""

import os
import pickle
import stat
import threading

import pytest

from hpclm.distributed import flight_recorder

NEW = {"TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"}


@pytest.mark.parametrize(
    "env, wanted",
    [
        ({}, NEW),
        ({"TORCH_FR_BUFFER_SIZE": "0"}, NEW - {"TORCH_FR_BUFFER_SIZE"}),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}, NEW - {"TORCH_FR_BUFFER_SIZE"}),
        (dict.fromkeys(NEW, "x"), set()),
    ],
)
def test_the_recorder_is_on_unless_the_environment_says_otherwise(env, wanted, tmp_path):
    found = flight_recorder.settings(tmp_path, env)
    assert found.keys() == wanted
    assert all(value.startswith(str(tmp_path)) for name, value in found.items() if name.endswith("TEMP_FILE"))


def test_a_dump_is_its_owner_s_alone_and_how_to_read_it_is_said(tmp_path):
    folder = tmp_path / "stacks" / flight_recorder.FOLDER
    assert flight_recorder.how_to_read(folder) == ""
    path = flight_recorder.dump(folder, 3, lambda: b"record")
    assert path == folder / "rank_3" and path.read_bytes() == b"record"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert flight_recorder.how_to_read(folder).endswith(f"torchfrtrace --prefix rank_ {folder}")


def test_no_dump_is_written_without_a_recorder_or_by_one_that_fails_or_takes_long(tmp_path, monkeypatch):
    def fails():
        raise RuntimeError("not initialised")

    for name in flight_recorder.SIZE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(flight_recorder, "PATIENCE", 0.05)
    stuck = threading.Event()
    for source in (None, fails, lambda: b"", lambda: stuck.wait(60) and b""):
        assert flight_recorder.dump(tmp_path / "none", 0, source) is None
    stuck.set()
    assert not (tmp_path / "none").exists()


@pytest.mark.gpu
def test_nccl_records_its_collectives_on_a_gpu(tmp_path, monkeypatch):
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    for name in (*NEW, *flight_recorder.SIZE, *flight_recorder.FILE):
        monkeypatch.delenv(name, raising=False)
    for name, value in flight_recorder.settings(tmp_path, os.environ).items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        dist.all_reduce(torch.ones(4, device="cuda"))
        torch.cuda.synchronize()
        path = flight_recorder.dump(tmp_path / "dump", 0)
    finally:
        dist.destroy_process_group()
    assert path is not None
    assert any("all_reduce" in entry["profiling_name"] for entry in pickle.loads(path.read_bytes())["entries"])

"""Engines that need a newer PyTorch than hpclm itself."""

import inspect
from dataclasses import replace
from importlib import metadata

import pytest

from hpclm import cli
from hpclm.base import extras
from hpclm.config.engine import EngineConfig
from hpclm.config.supports import SUPPORTS
from hpclm.engine import unavailable
from tests import runs
from tests.forks import Hpclm

PIPELINE = ["engine.name=pipelining", "parallel.pipeline=2"]
REFUSED = (
    "engine.name=pipelining needs PyTorch 2.12 or newer, but PyTorch {} is installed; "
    "install a newer one, or use engine.name=deepspeed (parallel.schedule=1f1b)"
)
UNCOMPILED = (
    "engine.compile=true with engine.name=deepspeed engine.zero_stage=3 needs PyTorch 2.12 or newer, but PyTorch {} is installed; "
    "install a newer one, or leave engine.compile out"
)


class Stage211:
    """PipelineStage as PyTorch 2.11 declares it."""

    def __init__(
        self,
        submodule,
        stage_index,
        num_stages,
        device,
        input_args=None,
        output_args=None,
        group=None,
        dw_builder=None,
    ):
        raise AssertionError("a stage is built although its shapes of gradients cannot be given")


def as_with_2_11():
    """Give this process the PipelineStage of PyTorch 2.11."""
    from hpclm.engine import pipelining

    pipelining.PipelineStage = Stage211


def installed(version, monkeypatch):
    ask = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "torch" else ask(name))


@pytest.mark.parametrize(
    "version, old",
    [
        *[(version, True) for version in ("2.11.0", "2.11.0+cu130", "2.11.1+cpu", "2.9")],
        *[(version, False) for version in ("2.12.0", "2.12.1+cu130", "2.13.0+cpu", "2.100.0", "3.0.0")],
        *[(version, False) for version in ("2.12.0a0+nv26.4", "2.11.0a0+git1234567", "unknown")],  # only trying tells
    ],
)
def test_only_pipelining_is_refused_with_an_old_pytorch(version, old, monkeypatch):
    installed(version, monkeypatch)
    assert extras.older("torch", "2.12") == (version if old else None)
    assert EngineConfig(name="pipelining").missing_libraries() == ([REFUSED.format(version)] if old else [])
    for name in SUPPORTS.keys() - {"pipelining"}:
        assert not EngineConfig(name=name).missing_libraries()
    sharded = EngineConfig(name="deepspeed", zero_stage=3, compile=True)
    assert sharded.missing_libraries() == ([UNCOMPILED.format(version)] if old else [])
    for other in (replace(sharded, compile=False), replace(sharded, zero_stage=2), replace(sharded, name="fsdp2")):
        assert not other.missing_libraries()


@pytest.mark.parametrize("verb", [["train"], ["submit", "--cluster", "local"]], ids=["train", "submit"])
def test_pipelining_is_refused_before_pytorch_is_imported(verb, tiny, tmp_path, monkeypatch, capsys):
    installed("2.11.0+cu130", monkeypatch)
    more = ["job.gpus=2"] if verb == ["submit", "--cluster", "local"] else []
    assert cli.main([*verb, *tiny("run", *PIPELINE, *more)]) == 64
    assert REFUSED.format("2.11.0+cu130") in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_what_pipelining_needs_is_looked_for_in_pytorch_itself(monkeypatch):
    from hpclm.engine import pipelining

    has = "input_grads" in inspect.signature(pipelining.PipelineStage).parameters
    assert (unavailable("pipelining") is None) == has
    monkeypatch.setattr("hpclm.engine.pipelining.PipelineStage", Stage211)
    assert unavailable("pipelining").startswith("engine.name=pipelining needs PyTorch 2.12 or newer")
    assert not any(unavailable(name) for name in SUPPORTS.keys() - {"pipelining"})
    assert unavailable("my.own:Engine") is None


def ranks(words):
    """Exit code and output of two ranks of ``hpclm train`` that have the PipelineStage of PyTorch 2.11."""
    launch = runs.launch(2)
    started = [
        Hpclm("train", *words, env=runs.variables(rank, launch), merged=True, before=as_with_2_11) for rank in range(2)
    ]
    output = [process.communicate(runs.PATIENCE)[0] for process in started]
    return [process.returncode for process in started], "\n".join(output)


def test_ranks_whose_pytorch_lacks_it_write_nothing(tiny, tmp_path):
    codes, output = ranks(tiny("run", *PIPELINE))
    assert codes == [64, 64], output
    assert "engine.name=pipelining needs PyTorch 2.12 or newer" in output and "Traceback" not in output
    assert not (tmp_path / "run").exists()


@pytest.mark.whole
def test_a_pipeline_of_deepspeed_trains_without_it_and_says_that_steps_are_not_compared(tiny, tmp_path):
    codes, output = ranks(tiny("run", "engine.name=deepspeed", "parallel.pipeline=2", "cluster.self_check=true"))
    assert codes == [0, 0], output
    assert "steps are not compared: engine.name=pipelining needs PyTorch 2.12" in output
    assert len(runs.lines(tmp_path / "run/metrics.jsonl")) >= 12

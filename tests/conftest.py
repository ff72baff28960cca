import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.slurm import cluster, group, session_cluster  # noqa: F401 - fixtures

torch.set_num_threads(1)  # several workers share the cores

# A busy machine is slow, which is no fault of what is tested.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture
def tiny(tmp_path):
    """Words of a run that takes well under a second: `hpclm train *tiny("out", ...)`."""

    def words(out="run", *more):
        shape = "model={vocab_size: 64, layers: 2, hidden: 32, heads: 4, context: 16}"
        batch = "batch={global_size: 8, micro_size: 4}"
        rest = ["data.source=synthetic", "budget.steps=12", "optim.lr=3e-3", "optim.min_lr=1e-4", "engine.device=cpu"]
        quiet = ["evaluate.every=0", "checkpoint.every=4", "log.tensorboard=false", "engine.precision=fp32"]
        return [shape, batch, *rest, *quiet, f"out={tmp_path / out}", *more]

    return words


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    group(items)
    if "whole" not in config.option.markexpr:
        left = [item for item in items if item.get_closest_marker("whole")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("whole")]

import gc
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

from hpclm.base.errors import ConfigError
from tests import sizes
from tests.slurm import cluster, group, session_cluster  # noqa: F401 - fixtures

torch.set_num_threads(1)  # several workers share the cores

# A busy machine is slow; that is not a fault of what is tested.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture
def tiny(tmp_path):
    """Words of a run that takes well under a second: `hpclm train *tiny("out", ...)`."""

    def words(out="run", *more):
        shape = "model={vocab_size: 64, layers: 2, hidden: 32, context: 16, attention: {heads: 4}}"
        batch = "batch={global_size: 8, micro_size: 4}"
        rest = ["data.source=synthetic", "budget.steps=12", "optim.lr=3e-3", "optim.min_lr=1e-4", "engine.device=cpu"]
        quiet = ["evaluate.every=0", "checkpoint.every=4", "engine.precision=fp32"]
        return [shape, batch, *rest, *quiet, f"out={tmp_path / out}", *more]

    return words


@pytest.fixture(autouse=True)
def hear():
    """What a test starts hears the signals that nohup, a shell without a terminal, or a run inside pytest's own process
    left ignored."""
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def no_slurm(tmp_path_factory):
    """Whatever asks Slurm outside a test cluster hears at once that there is none, and never asks one of this machine."""
    conf = tmp_path_factory.mktemp("no-slurm") / "slurm.conf"
    lines = ["ClusterName=none", "SlurmctldHost=localhost(127.0.0.1)", "SlurmctldPort=1", "MessageTimeout=1"]
    conf.write_text("\n".join([*lines, "AuthType=auth/none", "NodeName=none", ""]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(conf))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    """Skip a test of what hpclm refuses to do with the PyTorch that is installed, an old one."""
    try:
        return (yield)
    except (AssertionError, ConfigError) as error:
        if f"or newer, but PyTorch {torch.__version__.partition('+')[0]}" in str(error):
            pytest.skip(str(error))
        raise


def pytest_addoption(parser):
    parser.addoption(
        "--size", choices=sizes.SIZES, default="more", help="which tests, cheap ones or all: tests/README.md"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    group(items)
    config.stash[sizes.COLLECTED] = {item.nodeid for item in items}
    left = sizes.left_out(items, sizes.of_options(config))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
    items[:] = [item for item in items if item.nodeid not in left]


def pytest_collection_finish():
    """What all tests share stays out of the garbage collector, which would else look through it, for tenths of a second each time."""
    gc.collect()
    gc.freeze()

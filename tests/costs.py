"""A plugin for pytest that measures what each test costs; `tools/test_costs.py` asks for it.

`--costs FILE` appends a line for each test: CPU-seconds, seconds, and its name. The CPU time is that of a cgroup, to which all processes of a
test belong, those of Slurm's daemons too; where no cgroup can be made, that of this process and of those it has waited for. What a fixture
costs that several tests share is divided among them.
"""

import importlib
import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

CONTROL = Path("/sys/fs/cgroup")
VERSIONS = ("cpuacct", "tasks", "cpuacct.usage"), ("", "cgroup.procs", "cpu.stat")
"""Of each version of cgroups: the folder, the file that takes a process in, the file that tells the CPU time."""
SHARED = ("torch._dynamo", "transformers", "deepspeed", "fairscale", "hpclm.commands.train", "hpclm.commands.submit")
"""What many tests import: the first of them would be said to cost it."""


class Meter:
    """CPU time of this process and all that it starts from now on."""

    def __init__(self) -> None:
        self._told: Path | None = None
        for below, members, told in VERSIONS:
            folder = CONTROL / below / f"hpclm-tests-{os.getpid()}"
            with suppress(OSError):
                folder.mkdir()
                (folder / members).write_text(str(os.getpid()))  # fails where no cgroups are kept
                self._told = folder / told
                return

    def seconds(self) -> float:
        """CPU-seconds so far."""
        if self._told is None:
            return sum(os.times()[:4])
        words = self._told.read_text().split()
        return int(words[0]) / 1e9 if len(words) == 1 else int(words[words.index("usage_usec") + 1]) / 1e6


class Costs:
    """Measures each test from its set-up to the end of its tear-down; coverage, where it measures, hears the test's name."""

    def __init__(self, path: Path) -> None:
        self._path, self._meter = path, Meter()
        # CPU-seconds of a shared fixture, by its name and place, for each of its tests
        self._shares: Counter[tuple[str, str]] = Counter()
        # CPU-seconds and seconds of shared fixtures that the present test was the first to need
        self._set_up = 0.0, 0.0
        self._current = os.environ.get("HPCLM_CURRENT_TEST")
        if self._current:
            self._current += f"-{os.getpid()}"
            os.environ["HPCLM_CURRENT_TEST"] = self._current  # for the processes that tests start
            self._tell("")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        name = item.nodeid.partition("@")[0]
        self._tell(name)
        cpu, wall = self._meter.seconds(), time.monotonic()
        try:
            return (yield)
        finally:
            cpu, wall = self._meter.seconds() - cpu - self._set_up[0], time.monotonic() - wall - self._set_up[1]
            cpu += sum(share for fixture, share in self._shares.items() if _needs(item, *fixture))
            self._set_up = 0.0, 0.0
            with self._path.open("a") as file:
                file.write(f"{cpu:.3f} {wall:.2f} {name}\n")
            self._tell("")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        cpu, wall = self._meter.seconds(), time.monotonic()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                cpu, wall = self._meter.seconds() - cpu, time.monotonic() - wall
                fixture = fixturedef.argname, fixturedef.baseid
                self._shares[fixture] += cpu / sum(_needs(item, *fixture) for item in request.session.items)
                self._set_up = self._set_up[0] + cpu, self._set_up[1] + wall

    def _tell(self, name):
        if not self._current:
            return
        import coverage

        Path(self._current).write_text(name)
        measuring = coverage.Coverage.current()
        measuring.switch_context(name)
        if not name:
            measuring.save()  # or all that a test forks would write it again


def _needs(item, fixture, place):
    return fixture in item.fixturenames and item.nodeid.startswith(place)


def pytest_addoption(parser):
    parser.addoption("--costs", type=Path, help="append what each test costs to this file")


def _measures(config):
    return config.option.costs and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None))


def pytest_configure(config):
    if _measures(config):
        config.pluginmanager.register(Costs(config.option.costs))


def pytest_sessionstart(session):
    if not _measures(session.config):
        return
    from tests import forks

    forks.ready()
    for module in SHARED:
        with suppress(ImportError):
            importlib.import_module(module)

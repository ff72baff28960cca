"""What tests cost: of whom the plugin of tools/test_costs.py tells it, and what of it is kept."""

import subprocess
import sys

import pytest

from tests import sizes
from tests.runs import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import test_costs as tool

TESTS = """
import os, time, pytest

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

@pytest.fixture(scope="module")
def shared():
    burn(0.4)

def test_shares(shared): pass
def test_shares_too(shared): pass
def test_has_a_child():
    if os.fork() == 0:
        burn(0.3)
        os._exit(0)
    os.wait()
def test_does_nothing(): pass
"""


@pytest.mark.slow
def test_a_test_costs_what_its_processes_use_and_its_part_of_what_it_shares(tmp_path):
    (tmp_path / "test_x.py").write_text(TESTS)
    words = ["-p", "tests.costs", "--costs", str(tmp_path / "costs"), "-p", "no:cacheprovider", "-c", "/dev/null", "-q"]
    command = [sys.executable, "-m", "pytest", *words, "--rootdir", str(tmp_path), str(tmp_path / "test_x.py")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
    rows = [line.split(" ") for line in (tmp_path / "costs").read_text().splitlines()]
    found = {name.partition("::")[2]: float(cpu) for cpu, _, name in rows}
    assert 0.2 <= found["test_shares"] < 0.4 and 0.2 <= found["test_shares_too"] < 0.4
    assert found["test_has_a_child"] >= 0.3 and found["test_does_nothing"] < 0.1


def test_costs_above_the_bounds_replace_those_of_before_and_lower_ones_remove_them(tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "COSTS", tmp_path / "costs.txt")
    sizes.COSTS.write_text("5.0 a\n2.0 b\n9.0 other\n")
    sizes.costs.cache_clear()
    tool.written(["0.100 0.20 a", "3.456 1.00 b", f"0.100 {sizes.SECONDS} waits", "0.499 0.70 cheap [x y]"])
    assert sizes.COSTS.read_text() == "3.5 b\n9.0 other\n0.1 waits\n"
    sizes.costs.cache_clear()

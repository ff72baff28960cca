"""Which tests `tools/test.sh` runs, of three sizes: `first`, `more` with the costly ones, `whole` with every row of every table.

The first size is chosen by a rule:

1. every test that costs less than 0.5 CPU-seconds and 3 seconds, and is not marked slurm, mpi or slow;
2. a few marked `always`, one of each way to start ranks;
3. for faults of tools/mutations.yaml whose test is none of these, that test, most faults per CPU-second first, until `BUDGET` is spent.

tests/costs.txt has what the others cost: `tools/test_costs.py` makes it. A new test above that is marked slow, or is the test of a
fault.
"""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

SIZES = ("first", "more", "whole")
COSTS = Path(__file__).with_name("costs.txt")
FAULTS = Path(__file__).parents[1] / "tools" / "mutations.yaml"
CPU_SECONDS, SECONDS = 0.5, 3.0
BUDGET = 150.0
"""CPU-seconds."""
MARKS = ("slurm", "mpi", "slow")
COLLECTED = pytest.StashKey[set[str]]()
"""Names of all tests that pytest has found, before a size is chosen."""


def of_options(config: pytest.Config) -> str:
    """The size that a command line asks for; ``-m whole`` asks for the whole too."""
    return "whole" if "whole" in config.option.markexpr else str(config.option.size)


@functools.cache
def costs() -> dict[str, float]:
    """CPU-seconds of each test that costs too much for rule 1, by its name in pytest."""
    rows = [line.split(" ", 1) for line in COSTS.read_text().splitlines()]
    return {name: float(seconds) for seconds, name in rows}


def tests_of_faults() -> Counter[str]:
    """The tests that the table of faults names, with the number of faults of each."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return Counter(row["test"] for row in yaml.load(FAULTS.read_text(), loader) if "test" in row)


def of_faults(needed: Mapping[str, int], prices: Mapping[str, float]) -> set[str]:
    """Names that rule 3 chooses of costly tests: ``needed`` has the number of faults that need each, ``prices`` its CPU-seconds."""
    chosen, spent = set[str](), 0.0
    for name in sorted(needed, key=lambda name: (prices[name] / needed[name], name)):
        if spent + prices[name] <= BUDGET:
            chosen.add(name)
            spent += prices[name]
    return chosen


def left_out(items: Sequence[pytest.Item], size: str) -> set[str]:
    """Names of the tests that are not of this size."""
    if size == "whole":
        return set()
    whole = {item.nodeid for item in items if item.get_closest_marker("whole")}
    if size == "more":
        return whole
    marked = {item.nodeid for item in items if any(map(item.get_closest_marker, MARKS))}
    always = {item.nodeid for item in items if item.get_closest_marker("always")}
    costly = costs().keys() | marked
    needed = {name: faults for name, faults in tests_of_faults().items() if name in costly - always}
    prices = {name: costs().get(name, CPU_SECONDS) for name in needed}
    return whole | (costly - always - of_faults(needed, prices))

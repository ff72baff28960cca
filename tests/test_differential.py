"""hpclm and other trainers do the same with configurations that are drawn (tools/differential.py)."""

import json
import os
import subprocess
import sys

import pytest

from tests.runs import PATIENCE, ROOT

MEGATRON = os.environ.get("HPCLM_MEGATRON_PYTHON")
DRAWN = ["--count", "3", "--seed", "2", "--processes", "2"]
CASE = ["model.layers=1", "model.hidden=16", "model.attention.heads=1", "model.context=8", "model.vocab_size=16"]
CASE += ["optim.weight_decay=1.0", "optim.lr=1e-3", "optim.clip=0.0", "batch.micro_size=1", "model.bias=true"]
CODE = """
import functools, json, sys
import differential, differential_cases

made, close = functools.cache(differential.Sides), differential.Sides.close
differential.Sides.close = lambda sides: None  # both processes are started once, and closed at the end
differential.Sides = made
prepared = differential_cases.prepared

def other(case, against):
    told, inputs = prepared(case, against)
    told["optim"]["weight_decay"] *= 1.5
    return told, inputs

given, drawn, case = json.loads(sys.argv[1])
codes = []
for name, words in ("first", drawn), ("again", drawn), ("other", ["--case", *case]):
    sys.argv[1:] = [*given, *words]
    differential_cases.prepared = other if name == "other" else prepared
    print(f"--- {name} ---")
    codes.append(differential.main())
print("--- codes ---")
print(json.dumps(codes))
close(made(given[1], given[3]))
"""


@pytest.mark.parametrize("against", ["transformers", "megatron"])
def test_drawn_configurations_agree_and_another_setting_is_found(against, tmp_path):
    """None is tried again, and the other side's weight decay differs in what it decays."""
    if against == "megatron" and not MEGATRON:
        pytest.skip("HPCLM_MEGATRON_PYTHON does not name a Python with megatron-core; docs/benchmarks.md makes one")
    pytest.importorskip("transformers")
    results = tmp_path / "results.jsonl"
    given = ["--against", against, "--python", MEGATRON or sys.executable]
    words = json.dumps([given, [*DRAWN, "--results", str(results)], CASE])
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tools")]))
    done = subprocess.run(
        [sys.executable, "-c", CODE, words], env=env, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    first, again, other, codes = (part.partition("---\n")[2] for part in done.stdout.split("--- ")[1:])
    assert json.loads(codes) == [0, 0, 1] and first == again and "| same | 3 |" in first
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["number"] for row in rows] == [0, 1, 2]
    assert all(0 < row["largest"]["gradient"] <= 1 for row in rows)
    found = json.loads(other)
    wrong = found["why"]
    assert found["status"] == "differs" and "update of tokens.weight" in wrong
    assert not any(kept in wrong for kept in ("norm", "bias", "gradient", "loss"))


def test_what_differs_is_made_as_simple_as_it_can_be(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import differential_cases as cases

    drawn = [cases.drawn("megatron", 0, number, 4) for number in range(200)]
    assert drawn == [cases.drawn("megatron", 0, number, 4) for number in range(200)]
    case = next(each for each in drawn if each["data"] == 2 and each["optim.clip"] and each["model.layers"] > 1)
    less = cases.shrunk(
        case, lambda tried: tried["optim.clip"] > 0 and tried["data"] == 2 and tried["model.layers"] > 1
    )
    assert (less["optim.clip"], less["data"], less["model.layers"]) == (case["optim.clip"], 2, 2)
    rest = less.keys() - {"optim.clip", "data", "model.layers", "engine.name", "engine.zero_stage"}
    assert all(less[name] == cases.SIMPLEST[name] for name in rest)
    assert cases.parsed(cases.words(less)) == {**cases.PLAIN, **less}

"""Give random configurations, with the same weights and batches, to hpclm and to another trainer, and compare what they do.

    python tools/differential.py --against transformers --count 100
    python tools/differential.py --against megatron --python SCRATCH/megatron/bin/python --count 100 --results SCRATCH/megatron.jsonl

Compared are the loss, every gradient, the global norm, Adam's moments and the updated weights, in fp32 on the CPU; also, on both
sides, that ranks which hold the same values hold the same bits. What differs is made simpler as long as it still differs, and printed
as a command. Configurations depend only on --seed, --processes and their number; those that --results has are not run again. Exit
code 1 if there is an unexplained difference, or if a side fails.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import differential_cases as cases
import torch
from differential_cases import Case
from differential_compare import SIDES, compared
from differential_worker import RefusedError, Sides

from hpclm.base.errors import ConfigError

EXPLAINED: dict[str, tuple[Callable[[Case, str], bool], Case]] = {
    "Megatron-core's rotary positions do not restart with those of documents": (
        lambda case, against: (
            against == "megatron" and case["documents"] == "positions" and case.get("model.positions") == "rope"
        ),
        {"documents": "none"},
    ),
}
"""Differences that are known and right: the cases that have them, and a change without which they must not differ."""
ROUNDED = "rounding: hpclm's own results change as much if its weights do by their last bit"
SHAKEN, SHAKES = 4.0, 3
"""A difference is one of rounding if it is at most so many times the largest that so many roundings of the weights make."""
KEY = ("against", "seed", "number", "processes")
"""What a configuration depends on."""


def tried(sides: Sides, case: Case, against: str) -> dict[str, Any]:
    """What became of a case: its status, why, and the largest figure of each kind."""
    try:
        request, inputs = cases.prepared(case, against)
        computed = sides.train(request, inputs)
        model, weights = cases.loaded(case)[0].model, inputs["weights"]
        ours, theirs = (SIDES[name](ranks, model, request) for name, ranks in computed.items())
        figures = dict(compared(request, model, weights, ours, theirs))
        wrong = [name for name, figure in figures.items() if not figure <= 1.0]
        reasons = [
            reason
            for reason, (applies, change) in EXPLAINED.items()
            if wrong and applies(case, against) and tried(sides, {**case, **change}, against)["status"] == "same"
        ]
        if wrong and not reasons:
            draw, moved = torch.Generator().manual_seed(1), []
            for _ in range(SHAKES):
                rounded = {name: cases.rounded(whole, draw) for name, whole in weights.items()}
                again = SIDES["hpclm"](sides.train(request, {**inputs, "weights": rounded})["hpclm"], model, request)
                moved.append(dict(compared(request, model, weights, ours, again)))
            if all(figures[name] <= SHAKEN * max(changes.get(name, 0.0) for changes in moved) for name in wrong):
                reasons = [ROUNDED]
    except ConfigError as error:
        return {"status": "refused by hpclm", "why": error.problems[0]}
    except (RefusedError, RuntimeError) as error:
        return {"status": str(error.args[0]), "why": str(error.args[-1])}
    largest: dict[str, float] = {}
    for name, figure in figures.items():
        kind = name.partition(" of ")[0]
        largest[kind] = max(largest.get(kind, 0.0), figure)
    status = "same" if not wrong else f"explained: {reasons[0]}" if reasons else "differs"
    return {"status": status, "why": ", ".join(f"{name} ({figures[name]:.3g})" for name in wrong), "largest": largest}


def main() -> int:
    """Try configurations, and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", choices=["megatron", "transformers"], required=True)
    parser.add_argument("--python", default=sys.executable, help="a Python with megatron-core")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--processes", type=int, default=4, help="most ranks of a side")
    parser.add_argument(
        "--results", type=Path, help="file with a line of each configuration, to which new ones are added"
    )
    parser.add_argument("--case", nargs="+", help="one configuration, as key=value")
    args = parser.parse_args()
    sides = Sides(args.against, args.python)
    try:
        if args.case:
            print(json.dumps(result := tried(sides, cases.parsed(args.case), args.against), indent=1))
            return int(bad(result))
        return several(sides, args)
    finally:
        sides.close()


def bad(result: dict[str, Any]) -> bool:
    """Whether a case ended in an unexplained difference, or in a failure."""
    return result["status"] == "differs" or result["status"].startswith("failed")


def ends(sides: Sides, against: str, status: str, case: Case) -> bool:
    """Whether a case ends like that."""
    return bool(tried(sides, case, against)["status"] == status)


def several(sides: Sides, args: argparse.Namespace) -> int:
    """Try --count configurations; the exit code."""
    lines = args.results.read_text().splitlines() if args.results and args.results.exists() else []
    done = {tuple(row[name] for name in KEY): row for row in map(json.loads, lines)}
    rows = []
    for number in range(args.count):
        key = dict(zip(KEY, (args.against, args.seed, number, args.processes), strict=True))
        row = done.get(tuple(key.values()))
        if row is None:
            case = cases.drawn(**key)
            row = key | tried(sides, case, args.against)
            if bad(row):
                row["shrunk"] = shlex.join(
                    cases.words(cases.shrunk(case, partial(ends, sides, args.against, row["status"])))
                )
                print(f"{number}: {row['status']}: {row['why'].splitlines()[-1]}")
                print(f"    python tools/differential.py --against {args.against} --case {row['shrunk']}", flush=True)
            if args.results:
                with args.results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        rows.append(row)
    table(rows)
    return int(any(map(bad, rows)))


def table(rows: list[dict[str, Any]]) -> None:
    """Print what became of the configurations, why some were refused, and the largest differences."""
    print("| | configurations |\n|---|---|")
    same = [row for row in rows if row["status"] == "same"]
    print(f"| drawn | {len(rows)} |")
    for status, count in sorted(Counter(row["status"] for row in rows).items()):
        print(f"| {status} | {count} |")
    for (status, why), count in sorted(
        Counter((r["status"], re.sub(r"=\d+", "=N", r["why"])) for r in rows if "refused" in r["status"]).items()
    ):
        print(f"| {status}: {why} | {count} |")
    print("\n| | largest difference, as a share of what is tolerated |\n|---|---|")
    for kind in dict.fromkeys(kind for row in same for kind in row["largest"]):
        print(f"| {kind} | {max(row['largest'].get(kind, 0.0) for row in same):.2g} |")


if __name__ == "__main__":
    sys.exit(main())

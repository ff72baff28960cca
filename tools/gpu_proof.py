"""The stages of gpu_proof.sh: run those that are not done, within the time there is, and keep what they tell in one archive.

Imports nothing that has to be installed, so that a machine on which nothing else works still gives its logs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import gpu_archive

TOOLS = Path(__file__).parent
PYTHON = sys.executable
RENEW = 15
"""Seconds between renewals of the archive while a stage runs."""
SEVERAL_RANKS = "tests/gpu/test_several_ranks.py"
RESERVE = 5
"""Seconds at the end in which no stage runs: for the last archive."""


@dataclass(frozen=True)
class Stage:
    """One command, the seconds it may take in a call of 10 minutes, and those without which it is not begun."""

    name: str
    words: list[str]
    budget: int
    min_seconds: int = 5
    environment: dict[str, str] = field(default_factory=dict)


def stages(device: str, out: Path, small: bool) -> list[Stage]:
    """All stages, the most telling first; ``small``: with models that are computed anywhere.

    Those of the first call, which are before the tests, have 565 seconds together.
    """
    settings = {"HPCLM_TEST_DEVICE": device} | ({"HPCLM_TEST_SHAPE": "cpu"} if small else {})
    where, rehearsal = ["--out", str(out), "--device", device], ["--small"] if small else []
    parallel = PathFinder.find_spec("xdist", [str(out / "site"), *sys.path]) is not None
    workers = str(min(8, max(1, (os.cpu_count() or 1) // 2)))
    tests = ["-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "--tb=short", "-vv"]
    tests += ["-W", "default"]  # a warning that is new in this machine's versions is not an error
    tests += ["-n", workers] if parallel else ["-p", "no:xdist"]

    def run(name: str, budget: int, **variables: str) -> Stage:
        words = [PYTHON, str(TOOLS / "gpu_runs.py"), slug(name), *where, *rehearsal]
        return Stage(name, words, budget, min_seconds=20, environment=variables)

    def speed(shape: str, context: int, batch: int, budget: int, *subjects: str, accumulate: int = 1) -> Stage:
        name = f"training speed, {shape}"
        words = ["--shape", shape, "--context", str(context), "--batch", str(batch), "--device", device, "--no-memory"]
        words += ["--accumulate", str(accumulate)]
        words += ["--json", str(out / f"{slug(name)}.json"), "--warmup-seconds", str(budget * 2 // 3)]
        words += ["--rounds", "2" if small else "7", "--only", *subjects]
        return Stage(name, [PYTHON, str(TOOLS / "bench_train.py"), *words], budget, min_seconds=30)

    def test(name: str, budget: int, *words: str) -> Stage:
        return Stage(name, [PYTHON, *tests, *words], budget, min_seconds=30, environment=settings)

    def ranks(precision: str) -> Stage:
        chosen = f"{precision} and context" if small else precision
        return test(f"several ranks, {precision}", 120, SEVERAL_RANKS, "-k", chosen)

    others = ["plain PyTorch, compiled", "transformers, compiled", "Megatron-core"]
    measure = [PYTHON, str(TOOLS / "gpu_profile.py"), *where, *rehearsal]
    rest = ["-k", "chance or native-accumulating or gpus_checkpoint"] if device == "cpu" else []
    planned = [
        Stage("measure first", measure, 90, min_seconds=20),
        ranks("fp32"),
        ranks("bf16"),
        Stage("limits", [PYTHON, str(TOOLS / "gpu_machine.py"), "limits", *where, *rehearsal], 15),
        run("gpt2-124m", 110),
        speed("small", 64, 2, 110, "hpclm", "limit")
        if small
        else speed("124m", 1024, 16, 110, "limit", "hpclm", *others),
        test("tests", 170, "tests/gpu", "--ignore", SEVERAL_RANKS, *rest),
        run("llama-1b, documents", 80),
        # with what docs/launch.md recommends to try
        run("llama-1b, dropout", 50, PYTORCH_ALLOC_CONF="expandable_segments:True"),
    ]
    if device == "cpu":
        return planned
    compiled = ["limit", "hpclm, compiled", *others[1:]]
    if not small:
        planned += [
            speed("1.3b", 2048, 4, 120, *compiled),
            speed("llama-1b", 2048, 4, 150, *compiled, "--fp8", accumulate=4),
        ]
    checkpoints = [PYTHON, str(TOOLS / "bench_checkpoint.py"), *(["--megabytes=20"] if small else [])]
    return [*planned, Stage("checkpoints", checkpoints, 240, min_seconds=60)]


def slug(name: str) -> str:
    """A stage's name as that of a file."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower())


def environment(out: Path) -> dict[str, str]:
    """Of every stage: what was installed for it comes first, its caches are in the output folder, and it asks no network."""
    site, cache = out.absolute() / "site", out.absolute() / "cache"
    paths = [*([str(site)] if site.exists() else []), str(TOOLS.parent.absolute()), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "XDG_CACHE_HOME": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "HF_HUB_OFFLINE": "1",
    }


class UnfitError(Exception):
    """This machine cannot run the stages."""


class Proof:
    """What is known, the folder it is in, and the time there is."""

    def __init__(self, out: Path, archive: Path, seconds: float, again: bool = False):
        self.out, self.archive, self.seconds, self.began = out, archive, seconds, time.monotonic()
        saved = out / "results.json"
        self.results: dict[str, Any] = json.loads(saved.read_text()) if saved.exists() and not again else {}
        self.results = {"device": None, "facts": {}, "stages": {}, **self.results, "cut": None}
        self.todo: list[Stage] = []
        self.running: str | None = None

    @property
    def left(self) -> float:
        """Seconds in which stages may still run."""
        return self.seconds - RESERVE - (time.monotonic() - self.began)

    def work(self, todo: list[Stage]) -> None:
        """Run all stages that are not done, those that failed before last, and write after each what is known."""
        self.todo = todo
        longer = max(1.0, self.seconds / 600)
        for stage in sorted(todo, key=lambda stage: stage.name in self.results["stages"]):
            if self.results["stages"].get(stage.name, {}).get("code") == 0 or self.left < stage.min_seconds:
                continue
            print(f"== {stage.name} ({self.left:.0f} s left)", flush=True)
            self.stage(stage, min(self.left, stage.budget * longer))
            print(self.results["stages"][stage.name]["shown"], flush=True)

    def stage(self, stage: Stage, seconds: float) -> int | None:
        """Run one stage, at most ``seconds``; its exit code, None if it was out of time."""
        self.running = stage.name
        self.results["stages"][stage.name] = run(stage, self.out, seconds, self.write)
        self.running = None
        self.write()
        code: int | None = self.results["stages"][stage.name]["code"]
        return code

    def write(self) -> None:
        """Write what is known, and the archive of it."""
        used = time.monotonic() - self.began
        for name, text in (
            ("results.json", json.dumps(self.results, indent=1)),
            *([("report.md", report(self.results, self.todo))] if self.results["device"] else []),
            ("summary.txt", summary(self.results, self.todo, self.running, used, self.seconds)),
        ):
            half = self.out / f"{name}.new"
            half.write_text(text)
            half.replace(self.out / name)
        gpu_archive.renew(self.out, self.archive)


def run(stage: Stage, out: Path, seconds: float, renew: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Run one stage, at most ``seconds``; its output goes to a file beside the report, and what it wrote as JSON into the results.

    ``renew`` is called from time to time meanwhile.
    """
    log = out / f"{slug(stage.name)}.log"
    log.with_suffix(".json").unlink(missing_ok=True)
    began = time.monotonic()
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            stage.words,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | environment(out) | stage.environment,
            cwd=TOOLS.parent,
            start_new_session=True,
        )
        code: int | None = None
        try:
            while code is None and (left := seconds - (time.monotonic() - began)) > 0:
                try:
                    code = process.wait(min(left, RENEW))
                except subprocess.TimeoutExpired:
                    renew()
        finally:
            kill_group(process)  # out of time, or this program was asked to stop; what a stage has left behind ends too
    taken, text = round(time.monotonic() - began, 1), log.read_text(encoding="utf-8", errors="replace")
    result = {"code": code, "seconds": taken, "shown": shown(text, code != 0), "log": log.name}
    figures = log.with_suffix(".json")
    if figures.exists():
        result["figures"] = json.loads(figures.read_text())
    return result


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill a stage and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(
        ChildProcessError
    ):  # not process.wait(): a signal may have interrupted it, with its lock held
        _, status = os.waitpid(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)


def ending(result: dict[str, Any] | None) -> str:
    """How a stage ended, in a few words."""
    if result is None:
        return "not begun"
    code = result["code"]
    if code is None:
        return "out of time"
    return "done" if code == 0 else f"killed by signal {-code}" if code < 0 else f"exit {code}"


def named(results: dict[str, Any], todo: list[Stage]) -> list[str]:
    """The names of all stages, in their order."""
    return list(dict.fromkeys([*results["stages"], *(stage.name for stage in todo)]))


def title(results: dict[str, Any]) -> str:
    """On what this was."""
    return (
        f"Proof on {results['facts'].get('GPU', 'a CPU: a rehearsal')}"
        if results["device"]
        else "Nothing is proven yet"
    )


def facts_line(results: dict[str, Any]) -> str:
    """The machine in a line."""
    return ", ".join(
        f"{name} {value}" for name, value in results["facts"].items() if value not in (None, [], "", "GPU")
    )


def report(results: dict[str, Any], todo: list[Stage]) -> str:
    """All that is known, and what of ``todo`` is not, as Markdown."""
    text = [f"# {title(results)}", "", facts_line(results), "", "| stage | result | seconds |", "|---|---|---|"]
    for name in named(results, todo):
        result = results["stages"].get(name)
        text.append(f"| {name} | {ending(result)} | {result['seconds'] if result else ''} |")
    for name in named(results, todo):
        if result := results["stages"].get(name):
            text += ["", f"## {name}", "", result["shown"]]
    return "\n".join(text) + "\n"


def summary(results: dict[str, Any], todo: list[Stage], running: str | None, used: float, seconds: float) -> str:
    """How every stage ended, and its figures, as plain text."""
    text = [title(results), facts_line(results), f"{used:.0f} of {seconds:.0f} s used", ""]
    if results["cut"]:
        text += [f"cut off by {results['cut']}", ""]
    for name in named(results, todo):
        result = results["stages"].get(name)
        how = "running" if name == running else ending(result)
        took = f"{result['seconds']:7.1f} s" if result and name != running else " " * 9
        text.append(f"{how:22} {took}  {name}")
    for name in named(results, todo):
        result = results["stages"].get(name)
        if result and result["shown"]:
            text += ["", f"{name}:", *(f"  {line}" for line in result["shown"].splitlines() if line.strip())]
    return "\n".join(text) + "\n"


def shown(text: str, failed: bool) -> str:
    """What a report says of a stage's output: its table, what was left out, tests that failed; the last line unless the table is all."""
    lines = [line for line in text.splitlines() if line.strip()]
    table = [line for line in lines if line.startswith("|")]
    heads = [line for line, below in itertools.pairwise(table) if below.startswith("|---")]
    notes = [line for line in lines if " is left out: " in line or line.startswith(("FAILED ", "ERROR ", "error: "))]
    if not notes:  # tests that were stopped give no summary
        notes = [line for line in lines if re.search(r"::.* (FAILED|ERROR)\b", line)]
    last = lines[-1:] if failed or not table else []
    table = [f"\n{line}" if line in heads[1:] else line for line in table]
    return "\n\n".join("\n".join(part) for part in (table, [f"- {note}" for note in notes[:40]], last) if part)


def look(proof: Proof, wheels: Path, device: str) -> str:
    """Install the wheels, and read what the machine is; the device to use. UnfitError if there is none, or a module is missing."""
    command = [PYTHON, str(TOOLS / "gpu_machine.py")]
    where = ["--out", str(proof.out), "--wheels", str(wheels)]
    if wheels.is_dir():
        proof.stage(Stage("wheels", [*command, "install", *where], 60), min(60, proof.left))
    proof.stage(Stage("machine", [*command, "facts", *where], 120), min(120, proof.left))
    file = proof.out / "facts.json"
    facts = json.loads(file.read_text()) if proof.results["stages"]["machine"]["code"] == 0 else {}
    if facts.get("missing"):
        raise UnfitError(
            f"{PYTHON} lacks {' '.join(facts['missing'])}: run tools/setup.sh --dev, or pip install -e '.[dev]' beside your PyTorch, or, "
            f"without a network, carry {wheels} here (tools/gpu_wheels.sh)"
        )
    if not facts:
        raise UnfitError(f"{PYTHON} cannot say what this machine is: {proof.results['stages']['machine']['shown']}")
    if device == "cpu":
        facts = {name: value for name, value in facts.items() if name != "GPU"}
    elif not facts["cuda"]:
        raise UnfitError(f"PyTorch {facts['torch']} finds no GPU here; --device cpu rehearses without one")
    proof.results["facts"] = facts
    return "cpu" if device == "cpu" else "cuda"


def main() -> int:
    """Read the arguments, and run the stages that are not done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes",
        type=float,
        default=9.5,
        help="time there is (default 9.5); with more than 10, stages may take longer",
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-proof"), help="where the results go (default gpu-proof)")
    parser.add_argument(
        "--wheels", type=Path, default=Path("gpu-wheels"), help="from tools/gpu_wheels.sh, if it is there"
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--small", action="store_true", help="small models, to rehearse; always so on a CPU")
    parser.add_argument("--only", nargs="*", metavar="WORD", help="only stages whose name contains one of these words")
    parser.add_argument("--again", action="store_true", help="begin afresh, whatever is done")
    args = parser.parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    proof = Proof(out, Path(os.environ.get("OUT") or out).absolute(), 60 * args.minutes, args.again)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        device = look(proof, args.wheels.absolute(), args.device)
        if proof.results["device"] not in (None, device):  # of a rehearsal
            kept = ("wheels", "machine")
            proof.results["stages"] = {name: result for name, result in proof.results["stages"].items() if name in kept}
        proof.results["device"] = device
        todo = stages(device, out, args.small or device == "cpu")
        proof.work([stage for stage in todo if not args.only or any(word in stage.name for word in args.only)])
    except UnfitError as error:
        print(error, file=sys.stderr)
        return 64
    except SystemExit as end:
        proof.results["cut"] = signal.Signals(int(str(end.code)) - 128).name
        return int(str(end.code))
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the archive is being written
        if proof.results["cut"] and proof.running:
            proof.results["stages"].setdefault(proof.running, cut(out, proof.running))
        proof.write()
    print(f"\n{report(proof.results, proof.todo)}\n{proof.archive / gpu_archive.NAME}")
    return 0 if all(proof.results["stages"].get(stage.name, {}).get("code") == 0 for stage in proof.todo) else 1


def cut(out: Path, name: str) -> dict[str, Any]:
    """What is known of the stage that was running when the program was asked to stop."""
    log = out / f"{slug(name)}.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return {"code": None, "seconds": 0.0, "shown": shown(text, True), "log": log.name}


if __name__ == "__main__":
    sys.exit(main())

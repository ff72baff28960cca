"""Runs with phases: what is added later is what was known from the start, and what has been read cannot change."""

import json
import re
import shutil

import numpy as np
import pytest

from hpclm.preprocess.writer import Writer
from tests.events import began
from tests.forks import Ranks, hpclm

RUN = [
    *(
        "debug",
        "model.layers=1",
        "model.hidden=16",
        "model.attention.heads=2",
        "model.context=16",
        "model.positions=rope",
    ),
    *("model.vocab_size=257", "cluster.preflight=false", "engine.device=cpu", "log.every=1", "optim.schedule=constant"),
    "checkpoint.keep_every=1",
    *("batch.global_size=4", "batch.micro_size=1", "checkpoint.every=3", "evaluate.every=6", "evaluate.batches=1"),
    *(
        "data.source=indexed",
        "data.order=per_dataset",
        "optim.warmup=0",
        "optim.lr=1e-2",
        "optim.min_lr=1e-3",
        "budget.steps=18",
    ),
]
PHASES = [
    "{from: 256, data.train: [1, a, 1, b]}",  # after step 4
    "{from: 512, model.context: 32, model.rope.base: 50000, batch.global_size: 2, again: true}",  # after step 8
    "{from: 700, optim.schedule: linear, optim.schedule_length: 4, optim.z_loss: 1e-4, data.train: [c]}",  # after step 11
]


def phases(*entries):
    return f"data.phases=[{', '.join(entries)}]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Datasets a, b and c, and the run ``known``, which has all phases from the start."""
    folder = tmp_path_factory.mktemp("phases")
    draw = np.random.default_rng(1)
    for name in "abc":
        with Writer(folder / name, "u2") as writer:
            writer.note = {"tokenizer": {"kind": "bytes", "size": 257, "eod": 256, "files": {}}}
            for size in draw.integers(3, 60, 12):
                writer.add_document(np.append(draw.integers(0, 256, size), 256))
    assert train(folder, "known", phases(*PHASES)) == [85, 85, 0]
    return folder


def train(folder, name, *words, train="data.train=[a]"):
    """Start a run until it ends with another code than 85; returns the exit codes."""
    codes = []
    while not codes or (codes[-1] == 85 and len(codes) < 6):
        ended = hpclm("train", *RUN, train, "data.valid=[c]", f"out={name}", *words, cwd=folder)
        codes.append(ended.returncode)
        assert ended.returncode in (0, 85), ended.stderr
    return codes


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    return {row["step"]: row["loss"] for row in rows(run) if "loss" in row}


def test_each_phase_has_its_rates_batches_and_datasets(folder):
    steps = {row["step"]: row for row in rows(folder / "known") if "loss" in row}
    assert sorted(steps) == [*range(1, 19)]
    assert [steps[step]["phase"] for step in (1, 4, 5, 8, 9, 11, 12, 18)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [steps[step]["batch_size"] for step in (8, 9, 18)] == [4, 2, 2]
    rates = [steps[step]["lr"] for step in (8, 11, 12, 14, 16, 18)]
    assert rates == pytest.approx([1e-2, 1e-2, 1e-2, 5.5e-3, 1e-3, 1e-3])
    read = {name: [steps[step].get(f"tokens_of/{name}", 0) for step in (4, 8, 11, 18)] for name in "abc"}
    assert read == {"a": [256, 384, 480, 480], "b": [0, 128, 224, 224], "c": [0, 0, 0, 448]}
    assert "z_loss" in steps[12] and "z_loss" not in steps[11]
    begun = re.findall(r"phase (\d) begins with step (\d+), after (\d+) tokens", (folder / "known/log.txt").read_text())
    assert begun == [("1", "5", "256"), ("2", "9", "512"), ("3", "12", "704")]


def test_a_report_shows_the_phases_and_what_was_read_of_each_dataset(folder):
    hpclm("report", "known", cwd=folder, check=0)
    [page] = (folder / "known").glob("report*.html")
    text = page.read_text()
    assert "2, steps 9 to 11: from=512 model.context=32 model.rope.base=50000.0 batch.global_size=2 again=true" in text
    assert "a: 480 tokens (41.7%) in 27 samples" in text and "1,152 seen, in 52 samples" in text
    assert "Tokens read of each dataset" in text and "context 32" in text


def test_phases_that_are_added_later_are_those_that_were_known_from_the_start(folder):
    assert train(folder, "later", "stop_at=3") == [0]
    assert train(folder, "later", "stop_at=7", phases(PHASES[0], "{from: 600, data.train: [b]}")) == [0]
    assert train(folder, "later", phases(*PHASES)) == [85, 85, 0]
    assert losses(folder / "later") == losses(folder / "known")
    log = (folder / "later/log.txt").read_text()
    assert str(folder / "b") in (folder / "later/config.yaml").read_text().split("phases:")[1]
    assert re.search(r"settings have changed since the last attempt: .*data\.phases=\[.*\] \(was \[\]\)", log)
    assert re.search(r"data\.phases=\[.*\] \(was \[.*'from': 600.*\]\)", log)


def test_a_phase_that_has_been_read_cannot_change(folder):
    shutil.copytree(folder / "known", folder / "changed")
    ended = hpclm("train", "changed", phases(PHASES[0], PHASES[1].replace("50000", "60000"), PHASES[2]), cwd=folder)
    assert ended.returncode == 64
    assert "data.phases[1] has been read: model.rope.base was 50000.0 and is now 60000.0" in ended.stderr
    ended = hpclm("train", "changed", phases(PHASES[0].replace("1, a, 1, b", "1, a, 2, b"), *PHASES[1:]), cwd=folder)
    assert (
        ended.returncode == 64
        and "data.phases[0] has been read: data.train has other datasets or weights" in ended.stderr
    )
    ended = hpclm("train", "changed", phases(PHASES[0]), cwd=folder)
    assert ended.returncode == 64 and "data.phases has 1 phase, but 3 have been read" in ended.stderr


def test_a_branch_has_other_phases_from_its_step_on(folder):
    other = PHASES[0], "{from: 600, data.train: [b]}"
    said = hpclm("branch", "known", "late", "--at", "9", phases(*other), cwd=folder, check=64).stderr
    assert "data.phases[1] has been read: from was 512 and is now 600" in said
    said = hpclm(
        "branch", "known", "past", "--at", "6", phases(PHASES[0], "{from: 300, data.train: [b]}"), cwd=folder, check=64
    ).stderr
    assert "a phase from 300 tokens on cannot begin any more, because 384 tokens have been read" in said
    hpclm("branch", "known", "branch", "--at", "6", phases(*other), cwd=folder, check=0)
    hpclm("train", "branch", cwd=folder, check=0)
    branched, trunk = losses(folder / "branch"), losses(folder / "known")
    assert {step: branched[step] for step in (7, 8)} == {step: trunk[step] for step in (7, 8)}
    last = rows(folder / "branch")[-2]
    assert (last["step"], last["samples"], last["phase"]) == (18, 72, 2)
    assert "settings have changed" not in (folder / "branch/log.txt").read_text()


def test_exit_interval_ends_a_run_at_the_end_of_a_phase(folder):
    assert train(folder, "interval", phases(*PHASES), "exit_interval=8") == [0]
    assert [attempt["from_step"] for attempt in began(folder / "interval")] == [0]
    assert train(folder, "interval", phases(*PHASES), "exit_interval=null") == [85, 0]
    assert losses(folder / "interval") == losses(folder / "known")


def test_longer_samples_have_a_micro_batch_of_their_own(folder):
    """An automatic size that fits short samples may not fit long ones."""
    words = ["batch.micro_size=auto", "batch.global_size=512", "budget.steps=3", "evaluate.every=0"]
    assert train(folder, "auto", *words, phases("{from: 1, model.context: 32}"), "exit_interval=2") == [85, 0]
    assert train(folder, "auto", *words, phases("{from: 1, model.context: 32}"), "exit_interval=null") == [0]
    sizes = [attempt["micro_size"] for attempt in began(folder / "auto")]
    assert sizes == [256, 128, 128]


def test_two_processes_and_stops_read_the_same(folder):
    words = [*RUN, "data.train=[a]", "data.valid=[c]", "out=ranks", phases(*PHASES)]
    codes = []
    for stop in (2, 4, 10, 10, 12, 12, 18):
        ranks = Ranks(2, [*words, f"stop_at={stop}"], cwd=folder)
        codes.append({process.wait() for process in ranks.processes.values()})
    assert codes == [{0}, {0}, {85}, {0}, {85}, {0}, {0}]
    assert losses(folder / "ranks") == pytest.approx(losses(folder / "known"), abs=2e-6)


def test_a_model_is_used_with_the_settings_of_its_phase(folder, tmp_path):
    shown = hpclm("evaluate", folder / "known", "--json", cwd=tmp_path, check=0).stdout
    assert json.loads(shown)["step"] == 18
    hpclm("convert", "known", "exported", cwd=folder, check=0)
    exported = json.loads((folder / "exported/config.json").read_text())
    assert exported["max_position_embeddings"] == 32
    hpclm("average", "known", "mean", "--last", "2", cwd=folder, check=0)
    text = (folder / "mean/config.yaml").read_text()
    assert "context: 32" in text and "phases: []" in text


def test_a_bad_checkpoint_that_leaves_one_of_an_earlier_phase_starts_the_ranks_again(folder):
    assert train(folder, "bad", "stop_at=9", phases(*PHASES)) == [85, 0]
    newest = folder / "bad/checkpoints/step-00000009"
    assert newest.is_dir()
    [shard] = newest.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    shutil.rmtree(folder / "bad/checkpoints/step-00000008")  # saved where the phase begins
    assert train(folder, "bad", phases(*PHASES)) == [85, 85, 85, 0]
    assert losses(folder / "bad") == losses(folder / "known")
    assert "is in an earlier phase, with other settings; start again" in (folder / "bad/log.txt").read_text()

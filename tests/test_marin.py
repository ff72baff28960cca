"""The whole recipe of Marin 8B: all its phases, acted out by a tiny network, with the preset's learning rates, batches and mixtures."""

import json

import pytest
import yaml

from hpclm.base.errors import ExitCode
from hpclm.checkpoint import Progress, manifest
from hpclm.config.data import mixture
from hpclm.data.indexed import IndexedDataset
from hpclm.data.scan import SharedFacts
from tests import twins
from tests.forks import hpclm
from tests.runs import ROOT, figures

STEPS, BATCH, CONTEXT = 1000, 512, 256
"""Each number of steps, samples and positions of the preset is divided by these: 12.75T tokens become 97,000."""
LENGTHS = ("warmup", "period", "wsd_decay", "schedule_length")
TINY = {"vocab_size": 257, "layers": 1, "hidden": 16, "ffn": 16, "attention": {"heads": 4, "kv_heads": 2}}
RATES = {
    # Kestrel: warm-up, cycles of 10 steps, from step 200 on of 20
    1: 0.0,
    2: 1e-3,
    200: 1e-3,
    219: 1e-3,
    220: 1 / (0.5 / 1e-3 + 0.5 / 1e-4),
    221: 1e-3,
    660: 1 / (0.5 / 1e-3 + 0.5 / 1e-4),
    # Ocelot
    661: 1.7e-3,
    741: 1.7e-3,
    # Jellyfish
    742: 1.7e-3,
    743: 1.7e-3 - 1.53e-3 / 80,
    820: 1.7e-4 + 1.53e-3 * 2 / 80,
    # Phoenix
    821: 1.7e-4,
    822: (1.7e-4 + 1.7e-3) / 2,
    823: 1.7e-3,
    1320: 1.7e-3,
    # Starling
    1321: 1.7e-3,
    1322: 1.7e-3 - 1.683e-3 / 80,
    1400: 1.7e-5 + 1.683e-3 / 80,
    # Deeper Starling
    1401: 1.7e-5,
    1420: 1.7e-5,
}
"""step -> learning rate"""
BEGINS = [0, 200, 660, 741, 820, 822, 1320, 1400]
"""Steps before each phase."""


def scaled(values, prefix=""):
    """Settings of the preset, or of a phase, with smaller numbers of steps, samples and tokens."""
    small = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name == "from":
            value = round(value / STEPS / BATCH / CONTEXT)
        elif name in ("budget.steps", *(f"optim.{length}" for length in LENGTHS)):
            value = round(value / STEPS)
        elif name == "batch.global_size":
            value //= BATCH
        elif name == "model.context":
            value //= CONTEXT
        elif name == "data.phases":
            value = [scaled(phase) for phase in value]
        elif isinstance(value, dict) and "." not in name:
            value = scaled(value, f"{name}.")
        small[key] = value
    return small


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The settings of the run, its folder, and what its attempts said."""
    folder = tmp_path_factory.mktemp("marin")
    settings = scaled(yaml.safe_load((ROOT / "configs/marin-8b.yaml").read_text()))
    settings["model"] |= TINY
    settings["parallel"] = {}
    settings["engine"] = {"name": "native", "device": "cpu", "precision": "fp32"}
    settings["checkpoint"] = {"every": 0}
    settings["batch"]["micro_size"] = 2
    (folder / "marin.yaml").write_text(yaml.safe_dump(settings))
    for train in mixtures(settings):
        for prefix in train.prefixes:
            twins.dataset(folder / prefix)
    said = []
    code = ExitCode.REQUEUE
    while code == ExitCode.REQUEUE:
        attempt = hpclm("train", "marin.yaml", cwd=folder)
        code = attempt.returncode
        said.append(attempt.stderr)
    assert code == 0, said[-1]
    return settings, folder, said


def mixtures(settings):
    """The mixture of each phase."""
    entries = settings["data"]["train"]
    for phase in [{}, *settings["data"]["phases"]]:
        entries = phase.get("data.train", entries)
        yield mixture([str(entry) for entry in entries], "data.train")


def test_learning_rates_and_batches_are_those_of_each_phase(run):
    _, folder, _ = run
    rates = dict(figures(folder / "runs/marin-8b", "step", "lr"))
    assert len(rates) == 1420
    assert {step: rates[step] for step in RATES} == pytest.approx(RATES)
    sizes = dict(figures(folder / "runs/marin-8b", "step", "batch_size"))
    assert [sizes[step] for step in (1, 660, 661, 1320, 1321, 1420)] == [2, 2, 6, 6, 8, 8]


def test_the_ranks_start_again_only_for_another_network_or_batch(run):
    _, _, said = run
    assert len(said) == 3
    assert "phase 2 begins after step 660 (21,120 tokens) with batch.global_size=6, model.rope.base=500000" in said[0]
    assert "optim.weight_decay=0.1" in said[0]
    assert "phase 6 begins after step 1320" in said[1] and "optim.z_loss=0.0001" in said[1]


def test_each_dataset_has_its_share_of_the_samples_of_each_phase(run):
    settings, folder, _ = run
    [last] = (folder / "runs/marin-8b/checkpoints").glob("step-00001420")
    progress = Progress.of(json.loads((last / manifest.NAME).read_text())["progress"])
    assert [begin.step for begin in progress.phases] == BEGINS
    for train, begin, end in zip(mixtures(settings), progress.phases, progress.phases[1:], strict=False):
        read = end.samples - begin.samples
        for prefix, weight in zip(train.prefixes, train.weights, strict=True):
            key = IndexedDataset(str(folder / prefix), SharedFacts()).fingerprint["bin"]
            _, before, *_ = (begin.sources or {}).get(key, (0, 0))
            _, after, *_ = end.sources.get(key, (0, 0))  # none where its share is less than a sample
            assert after - before == pytest.approx(read * weight / sum(train.weights), abs=1), (prefix, begin.step)
        assert sum(state[1] for state in end.sources.values()) == end.samples

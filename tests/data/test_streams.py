"""The samples of drawn phases, against a simulation of the order that reads one token after the other."""

import random

import numpy as np
import pytest

from hpclm import config
from hpclm.base.errors import ConfigError
from hpclm.config.length import run_length
from hpclm.config.phases import Timeline
from hpclm.config.plan import Position
from hpclm.data import sources
from hpclm.preprocess.writer import Writer

SEED = 5
SIZES = {"a": [5, 1, 40, 3, 8, 17], "b": [9, 2, 2, 30], "c": [70]}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Datasets a, b and c: a folder, and the documents of each."""
    folder = tmp_path_factory.mktemp("streams")
    found = {}
    for number, (name, sizes) in enumerate(SIZES.items()):
        with Writer(folder / name, "u2") as writer:
            writer.note = {"tokenizer": {"kind": "bytes", "size": 257, "eod": 256, "files": {}}}
            tokens = iter(range(80 * number, 80 * number + 80))
            found[name] = [[next(tokens) for _ in range(size)] for size in sizes]
            for document in found[name]:
                writer.add_document(np.array(document))
    return folder, found


class Stream:
    """A dataset as one long list of tokens."""

    def __init__(self, documents, key):
        self.tokens = []
        self.starts = set()
        for epoch in range(400 // sum(map(len, documents)) + 1):
            order = np.arange(len(documents))
            np.random.RandomState([SEED, epoch, int(key[:8], 16), int(key[8:16], 16)]).shuffle(order)
            for number in order:
                self.starts.add(len(self.tokens))
                self.tokens += documents[number]


def simulated(run, phases, streams, steps):
    """The rows of a run, and the step after which each phase begins. ``phases``: settings of each, with from and again."""
    place = dict.fromkeys(streams, 0)
    context_before = {}
    rows, begins, tokens, current = [], {0: 0}, 0, -1
    for step in range(steps):
        due = max(number for number, phase in enumerate(phases) if phase["from"] <= tokens)
        phase = phases[due]
        context, batch = phase["context"], phase["batch"]
        if due != current:
            current = due
            begins[due] = step
            count = dict.fromkeys(phase["weights"], 0)
            for name in phase["weights"]:
                if phase.get("again"):
                    place[name] = 0
                if context_before.get(name, context) != context:
                    while place[name] not in streams[name].starts:
                        place[name] += 1
        for _ in range(batch):
            number = max(1, sum(count.values()))
            whole = sum(phase["weights"].values())
            behind = {name: number * (weight / whole) - count[name] for name, weight in phase["weights"].items()}
            name = max(behind, key=behind.get)
            count[name] += 1
            rows.append(streams[name].tokens[place[name] : place[name] + context + 1])
            place[name] += context
            context_before[name] = context
        tokens += batch * context
    return rows, begins


def drawn(draw):
    """The settings of a run, as phases of ``simulated``."""
    phases = [{"from": 0}]
    for _ in range(draw.randint(0, 4)):
        phases.append({"from": phases[-1]["from"] + draw.randint(1, 60)})
    for number, phase in enumerate(phases):
        before = phases[number - 1]
        phase["batch"] = draw.choice([before.get("batch", 2), 1, 2, 3])
        phase["context"] = draw.choice([before.get("context", 4), 4, 7])
        names = draw.sample(sorted(SIZES), draw.randint(1, 3))
        phase["weights"] = {name: draw.randint(1, 9) for name in names}
        phase["again"] = number > 0 and draw.random() < 0.2
    return phases


def words_of(phases, folder):
    first, *later = phases
    listed = [train(first, folder), f"batch.global_size={first['batch']}", f"model.context={first['context']}"]
    entries = [
        f"{{from: {phase['from']}, again: {phase['again']}, data.train: {mixture(phase, folder)}, batch.global_size: {phase['batch']}, "
        f"model.context: {phase['context']}}}"
        for phase in later
    ]
    return [*listed, f"data.phases=[{', '.join(entries)}]"]


def mixture(phase, folder):
    return "[" + ", ".join(f"{weight}, {folder / name}" for name, weight in phase["weights"].items()) + "]"


def train(phase, folder):
    return f"data.train={mixture(phase, folder)}"


COMMON = [
    "data.order=per_dataset",
    "model.positions=rope",
    "model.vocab_size=300",
    f"seed={SEED}",
    "batch.micro_size=1",
]


def opened(run):
    return sources.build_source(run.data, run.model, run.seed)


def attempts(run, source, steps, draw):
    """The rows of a run in attempts that end at a phase with other settings, or at a drawn step."""
    position = Position()
    rows = []
    while position.step < steps:
        timeline = Timeline(run, position)
        samples = source.in_phases(timeline, run_length(run, None, position).samples)
        phase = timeline.next_restart(position.samples)
        ends = [steps, position.step + draw.randint(1, 12)]
        ends += [begin.step for begin in timeline.begins[phase : phase + 1]]
        step, read = position.step, position.samples
        while step < min(ends):
            settings = timeline.settings[timeline.phase(read)]
            for index in range(read, read + settings.batch.global_size):
                row = np.zeros(settings.model.context + 1, samples.dtype)
                samples.read(index, row)
                rows.append(row.tolist())
            read += settings.batch.global_size
            step += 1
        position = Position(step, read, samples.begun(read))
    return rows


@pytest.mark.parametrize("seed", range(100))
def test_drawn_phases_read_what_a_simulation_of_the_order_reads(seed, documents):
    folder, found = documents
    draw = random.Random(seed)
    phases = drawn(draw)
    steps = draw.randint(5, 25)
    run = config.load(None, [*COMMON, *words_of(phases, folder), f"budget.steps={steps}"])
    source = opened(run)
    streams = {name: Stream(found[name], source._streams[str(folder / name)].key) for name in run_names(phases)}
    rows, begins = simulated(run, phases, streams, steps)
    assert attempts(run, source, steps, draw) == rows
    expected = Timeline(run).begins
    assert {phase: expected[phase].step for phase in begins} == begins


def run_names(phases):
    return {name for phase in phases for name in phase["weights"]}


def test_a_phase_that_is_added_later_leaves_what_was_read_before(documents):
    folder, _ = documents
    known = [
        *COMMON,
        f"data.train=[1, {folder / 'a'}, 2, {folder / 'b'}]",
        "batch.global_size=2",
        "model.context=4",
        "budget.steps=20",
    ]
    entry = f"data.phases=[{{from: 80, data.train: [{folder / 'c'}]}}]"
    before, after = config.load(None, known), config.load(None, [*known, entry])
    source = opened(before)
    first = source.in_phases(Timeline(before), 40)
    position = Position(5, 10, first.begun(10))
    later = opened(after)
    rest = later.in_phases(Timeline(after, position), 40)
    whole = later.in_phases(Timeline(after), 40)

    def row(samples, index):
        values = np.zeros(5, samples.dtype)
        samples.read(index, values)
        return values.tolist()

    assert [row(first, index) for index in range(20)] == [row(whole, index) for index in range(20)]
    assert [row(rest, index) for index in range(10, 40)] == [row(whole, index) for index in range(10, 40)]
    assert row(first, 20) != row(whole, 20)


def test_a_phase_in_the_past_is_refused():
    words = [*COMMON, "data.train=[a]", "batch.global_size=2", "model.context=4", "budget.steps=20"]
    run = config.load(None, [*words, "data.phases=[{from: 33, optim.lr: 1e-3}]"])
    assert Timeline(run, Position(5, 10)).begins[1].step == 5  # 40 tokens: the last step began after 32
    with pytest.raises(ConfigError, match="cannot begin any more, because 48 tokens have been read"):
        _ = Timeline(run, Position(6, 12)).begins


def test_a_long_step_may_pass_the_beginning_of_several_phases():
    words = [*COMMON, "data.train=[a]", "batch.global_size=2", "model.context=4", "budget.steps=20"]
    phases = "{from: 8, batch.global_size: 8}, {from: 9, batch.global_size: 1}, {from: 20, optim.lr: 1e-3}"
    run = config.load(None, [*words, f"data.phases=[{phases}]"])
    assert [begin.tokens for begin in Timeline(run).begins] == [0, 8, 40, 40]


def test_a_phase_begins_after_the_ramp_of_the_batch():
    words = [
        *COMMON,
        "data.train=[a]",
        "batch.global_size=6",
        "batch.rampup=[2,2,8]",
        "model.context=4",
        "budget.steps=20",
    ]
    config.load(None, [*words, "data.phases=[{from: 33, optim.lr: 1e-3}]"])
    with pytest.raises(ConfigError, match=r"phase begins, more than 32, the end of batch\.rampup"):
        config.load(None, [*words, "data.phases=[{from: 32, optim.lr: 1e-3}]"])


def test_a_dataset_is_not_read_more_often_than_data_max_epochs_allows(documents):
    folder, _ = documents
    words = [*COMMON, f"data.train=[1, {folder / 'a'}, 1, {folder / 'c'}]", "batch.global_size=2", "model.context=4"]
    phase = f"data.phases=[{{from: 80, data.train: [1, {folder / 'c'}]}}]"
    run = config.load(None, [*words, phase, "data.max_epochs=2"])
    source = opened(run)
    source.check_phases(Timeline(run), 45)  # 40 + 100 of 70 tokens
    with pytest.raises(ConfigError, match=r"c, which has 70 tokens, 2\.06 times; data\.max_epochs=2"):
        source.check_phases(Timeline(run), 46)


def test_copies_of_one_dataset_are_refused_in_a_mixture(documents, tmp_path):
    folder, _ = documents
    for kind in ("bin", "idx", "json"):
        (tmp_path / f"copy.{kind}").write_bytes((folder / f"a.{kind}").read_bytes())
    run = config.load(None, [*COMMON, f"data.train=[1, {folder / 'a'}, 1, {tmp_path / 'copy'}]", "budget.steps=2"])
    with pytest.raises(ConfigError, match="have the same tokens; add up their weights"):
        opened(run).in_phases(Timeline(run), 8)

"""The ledger against what instrumented engines have trained on: over kills, layouts, engines, a step back and a branch."""

import signal

import numpy as np
import pytest

from hpclm import cli
from hpclm.ledger.reads import Ledger
from hpclm.preprocess.writer import Writer
from tests.forks import Ranks
from tests.ledger.recording import END, FIRST, record, recorded

DOCUMENTS = 300  # in each of the two datasets


def written(prefix, first):
    """Documents of 0 to 60 tokens, each of which is FIRST + the document's number, counted from ``first``."""
    draw = np.random.default_rng(first)
    with Writer(prefix, "i4") as writer:
        writer.note = {"tokenizer": {"kind": "bytes", "files": {}, "size": FIRST, "eod": END}}
        for number in range(DOCUMENTS):
            writer.add_document(np.full(draw.integers(0, 60), FIRST + first + number))
    return str(prefix)


SHAPE = [
    "model={vocab_size: 900, layers: 2, hidden: 32, context: 16, attention: {heads: 4}}",
    "cluster.preflight=false",
]
LAUNCHES = [
    (1, "engine.name=native", "kill", 6),
    (2, "engine.name=fsdp2", signal.SIGTERM, 9),
    (2, "engine.name=pipelining parallel.pipeline=2", "kill", 15),
    (4, "engine.name=native parallel.tensor=2", signal.SIGUSR2, 20),
    (3, "engine.name=fsdp2", "back", 12),
    (2, "engine.name=deepspeed engine.zero_stage=2", "kill", 17),
    (2, "engine.name=native", "end", 34),
]


def launched(folder, out, words, size, ending, step):
    """One launch of a run that ends as it should; what it trained on."""
    notes = folder / f"reads-{len([*folder.glob('reads-*')])}"
    notes.mkdir()
    if ending == "end":
        words = [*words, f"stop_at={step}"]
    with Ranks(size, words, before=record, TEST_READS=notes) as ranks:
        if ending not in ("end", "back"):
            ranks.wait_for(out, step)
            for process in ranks.processes.values():
                process.kill() if ending == "kill" else process.send_signal(ending)
        ended = ranks.wait()
    assert ending == "kill" or {code for code, _ in ended.values()} <= {0, 85}, ended
    return recorded(notes)


def every_read(out):
    """(run, attempt, step, document) -> number of samples, by the ledger's two ways."""
    ledger = Ledger(out)
    by_document, by_step = {}, {}
    for name, first in ("one", 0), ("two", DOCUMENTS):
        dataset = ledger.dataset(name)
        for number in range(DOCUMENTS):
            for reads in ledger.document(dataset, number):
                for step, samples in zip(reads.steps.tolist(), reads.samples.tolist(), strict=True):
                    by_document[reads.span.out.name, reads.span.attempt, step, first + number] = samples
    for span in ledger.spans:
        for step in span.steps():
            for key in {(part.sample, part.dataset, part.document) for part in ledger.parts(span, step)}:
                first = DOCUMENTS * key[1].endswith("two")
                read = span.out.name, span.attempt, step, first + key[2]
                by_step[read] = by_step.get(read, 0) + 1
    assert by_document == by_step
    return ledger, by_document


def checked(out, launches):
    """Compare the ledger with what the launches trained on; only steps that a kill kept from metrics.jsonl may be missing."""
    ledger, reads = every_read(out)
    own = [span for span in ledger.spans if span.out == out]
    assert [span.attempt for span in own] == [*launches]
    for span in own:
        trained = launches[span.attempt]
        missing = {step for step, _ in trained} - {*span.steps()}
        assert not missing or (min(missing) == span.last + 1 and len(missing) <= 2), (span, missing)
        expected = {(out.name, span.attempt, *key): count for key, count in trained.items() if key[0] in span.steps()}
        assert {key: count for key, count in reads.items() if key[:2] == (out.name, span.attempt)} == expected
    return ledger, reads


@pytest.mark.slow
def test_the_ledger_knows_what_every_step_has_read(tiny, tmp_path, capsys):
    """Every token is the number of its document, so that engines see which documents they train on."""
    blend = f"data.blend=[0.3,{written(tmp_path / 'one', 0)},0.7,{written(tmp_path / 'two', DOCUMENTS)}]"
    more = [
        *SHAPE,
        "data.source=indexed",
        "batch={global_size: 12, micro_size: 1}",
        "checkpoint.every=4",
        "budget.steps=40",
    ]
    words = tiny(
        "run",
        *more,
        blend,
        "checkpoint.keep_last=100",
        "data.split=1",
        "batch.rampup=[12,12,1000]",
        "batch.global_size=24",
    )
    out = tmp_path / "run"
    launches = {}
    for size, layout, ending, step in LAUNCHES:
        back = ["--from", str(step)] if ending == "back" else []
        stop = ["stop_at=16"] if ending == "back" else []
        launches[len(launches) + 1] = launched(
            tmp_path, out, [*words, *layout.split(), *stop, *back], size, ending, step
        )
    ledger, reads = checked(out, launches)
    assert cli.main(["ledger", str(out), "--verify"]) == 0
    assert "34 steps verified" in capsys.readouterr().out

    branch = tmp_path / "branch"
    assert cli.main(["branch", str(out), str(branch), "--at", "20", "batch.rampup=null", "budget.steps=26"]) == 0
    of_branch = launched(tmp_path, branch, [branch], 2, "end", 25)
    _, own = checked(branch, {1: of_branch})
    trunk = {key: count for key, count in own.items() if key[0] == "run"}
    kept = {(span.attempt, step) for span in ledger.spans for step in span.steps(undone=False) if step <= 20}
    assert trunk == {key: count for key, count in reads.items() if key[1:3] in kept}
    assert {step for *_, step, _ in own} == {*range(1, 26)}


@pytest.mark.slow
def test_the_ledger_follows_phases(tiny, tmp_path, capsys):
    """Another mixture in phase 2; in phase 3 another batch size, and in phase 4 another context, for which the ranks start again."""
    one, two = written(tmp_path / "one", 0), written(tmp_path / "two", DOCUMENTS)
    phases = f"[{{from: 1500, data.train: [0.2,{one},0.8,{two}]}}, {{from: 2500, batch.global_size: 24}}, "
    phases += f"{{from: 4000, model.context: 8, data.train: [1,{two}]}}]"
    more = [
        *SHAPE,
        "model.positions=rope",
        "data.source=indexed",
        "data.order=per_dataset",
        f"data.train=[0.6,{one},0.4,{two}]",
    ]
    more += [f"data.phases={phases}", "batch={global_size: 12, micro_size: 1}", "checkpoint.every=4", "budget.steps=40"]
    words, out = tiny("run", *more), tmp_path / "run"
    launches = {}
    for size, layout, ending, step in [
        (1, "engine.name=native", "kill", 2),
        (2, "engine.name=fsdp2", "end", 11),
        (2, "engine.name=native parallel.tensor=2", "end", 40),
        (4, "engine.name=fsdp2", "end", 40),
        (3, "engine.name=native", "end", 24),
    ]:
        launches[len(launches) + 1] = launched(tmp_path, out, [*words, *layout.split()], size, ending, step)
    ledger, _ = checked(out, launches)
    assert [ledger.config(span).model.context for span in ledger.spans] == [16, 16, 16, 16, 8]
    assert [ledger.config(span).batch.global_size for span in ledger.spans] == [12, 12, 12, 24, 24]
    assert cli.main(["ledger", str(out), "--verify"]) == 0
    assert "24 steps verified" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("order", ["mcore", "packed", "per_dataset"])
def test_documents_that_a_run_leaves_out_are_read_until_then_and_the_order_stays(order, tiny, tmp_path):
    one, two = written(tmp_path / "one", 0), written(tmp_path / "two", DOCUMENTS)
    more = [
        *SHAPE,
        "data.source=indexed",
        f"data.order={order}",
        f"data.train=[0.6,{one},0.4,{two}]",
        "checkpoint.every=4",
    ]
    more += ["batch={global_size: 12, micro_size: 1}", "budget.steps=20"]
    listed = tmp_path / "list.txt"
    gone = {*range(0, 200), *range(310, 320)}
    listed.write_text("".join(f"{'one' if number < DOCUMENTS else 'two'} {number % DOCUMENTS}\n" for number in gone))
    words, out, launches = tiny("run", *more), tmp_path / "run", {}
    for size, ending, step, without in [
        (1, "end", 8, []),
        (2, "kill", 14, [f"data.without={listed}"]),
        (1, "end", 20, []),
    ]:
        launches[len(launches) + 1] = launched(tmp_path, out, [*words, *without], size, ending, step)
    listed.unlink()  # the run has kept it
    _, reads = checked(out, launches)
    assert {attempt for _, attempt, _, document in reads if document in gone} == {1, 3}
    whole = tmp_path / "whole"
    trained = launched(tmp_path, whole, tiny("whole", *more), 1, "end", 20)
    assert {key: count for key, count in trained.items() if key[1] not in gone} == {
        key: count for trained in launches.values() for key, count in trained.items() if key[1] not in gone
    }
    assert cli.main(["ledger", str(out), "--verify"]) == 0
    assert "from step 9 on" in (out / "log.txt").read_text()

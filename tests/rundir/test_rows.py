"""Files of JSON lines: a last line without its end does not count; any other damage is an error that names the file and the line."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpclm.base.errors import ConfigError
from hpclm.launch import cancel, resume
from hpclm.node.job import OwnJob
from hpclm.reporting import run_table
from hpclm.rundir import metrics_file, rows, runs
from hpclm.rundir.state import process_here, state_of
from hpclm.rundir.summary import RunSummary
from hpclm.training import records

HUGE = 10**400
ENDS = {
    "nothing": b"",
    "half a line": b'{"step": 2',
    "a line without its newline": b'{"step": 2}',
    "NUL bytes": bytes(9000),
    "half a line and NUL bytes": b'{"step": 2' + bytes(9000),
    "more than a block": b"x" * 200_000,
}


@pytest.mark.parametrize("before", [0, 1, 20_000])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_what_a_kill_or_a_power_cut_leaves_at_the_end_is_cut_off_with_one_warning(end, before, tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    lines = b'{"step": 1}\n' * before
    path.write_bytes(lines + end)
    assert len([*rows.stream(path, metrics_file.STEP, ["step"])]) == before
    assert path.read_bytes() == lines + end and not caplog.records
    rows.append(path, {"step": 3})
    assert path.read_bytes() == lines + b'{"step": 3}\n'
    assert [record.levelname for record in caplog.records] == ["WARNING"] * bool(end)
    assert str(path) in caplog.text or not end


DAMAGE = [b"", b"x", bytes(20), b"\xff", b"[1]", b'{"loss": 1.0}', b'{"step": "3"}', b'{"step": 3, "lo{"step": 4}']
DAMAGE += [b'{"step": true}', b'{"step": 3, "loss": 1e999}', b'{"step": 1' + b"0" * 5000 + b"}", b"[" * 10_000]


@pytest.mark.parametrize("number", [1, 2, 200_001])
@pytest.mark.parametrize("line", DAMAGE, ids=range(len(DAMAGE)))
def test_damage_elsewhere_is_an_error_that_names_the_file_and_the_line(line, number, tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = b'{"step": 1}\n'
    path.write_bytes(good * (number - 1) + line + b"\n" + good)
    for read in (
        lambda: [*rows.stream(path, metrics_file.STEP, ["step"])],
        lambda: rows.last(path, metrics_file.STEP, ["step"]),
        lambda: [*metrics_file.blocks(tmp_path)],
        lambda: [*metrics_file.forget_after(tmp_path, 1)],
    ):
        with pytest.raises(ConfigError, match=rf"^{path}, line {number}, is damaged: remove the line"):
            read()


def test_the_last_rows_begin_with_a_whole_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for count in (0, 1, 3, 10_000):
        path.write_text("".join(f'{{"step": {step}}}\n' for step in range(count)) + '{"st')
        steps = [row["step"] for row in rows.last(path, metrics_file.STEP, ["step"])]
        assert steps == [*range(count)][count - len(steps) :] and len(steps) >= min(count, 4000)


ODD = [
    "x",
    "",
    True,
    -1,
    1.5,
    HUGE,
    float("inf"),
    float("nan"),
    None,
    [],
    [1],
    {},
    {"a": 1},
    "\ud800",
    "a\nb",
    "\x1b[31m",
]
GOOD = {
    "metrics.jsonl": {"step": 3, "loss": 2.5, "step_seconds": 1.0, "tokens_per_second": 10.0, "loss_scale": 1.0},
    "summary.json": {
        **{"state": "running", "ending": "", "step": 3, "steps": 20, "loss": 2.5, "step_seconds": 1.0, "stepped": 1.0},
        **{"tokens_per_second": 10.0, "curve": [2.5], "spiking_since": None, "code": None},
    },
    "lock": {"host": "elsewhere", "pid": 1, "job": None},
}
EVENTS = {
    "submitted": {
        "cluster": "local",
        "job_id": "999999",
        "host": "elsewhere",
        "nodes": 1,
        "tasks_per_node": 2,
        "log": "log",
    },
    "began": {"from_step": 0, "steps": 20, "size": 2, "hosts": ["n1"], "host": "n1", "pid": 1, "launcher": "Slurm"},
    "slow": {"ranks": [{"rank": 1, "host": "elsewhere", "times": 2.0}]},
    "cancelled": {"by": "ada"},
    "roll back": {"step": 3},
    "ended": {"code": 85, "step": 3, "state": "exited", "ending": "SIGTERM", "generation": 1},
}
EVENTS = {kind: {"time": "2026-01-01T00:00:00+0000", "kind": kind, **facts} for kind, facts in EVENTS.items()}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


def line(row):
    return json.dumps(row) + "\n"


def told(out):
    """All that the verbs make of a run's files, in the text that they print."""
    run = runs.read_run(out)
    standing = state_of(run, {})
    parts = [
        *run_table.table([standing]),
        *run_table.detail(standing),
        json.dumps(run_table.values(standing), allow_nan=False),
    ]
    RunSummary(out).write()
    parts += [cancel.outcome(out), *resume.words(run, []), *run.jobs, str(process_here(run))]
    "\n".join(parts).encode()
    return standing


def write(out, changed=None, change=None, times=1):
    """All files of a run, with ``change`` in one of them, or in an event."""
    for name, row in GOOD.items():
        (out / name).write_text(line(row | change) * times if name == changed else line(row))
    lines = [line(row | change) * times if kind == changed else line(row) for kind, row in EVENTS.items()]
    (out / "events.jsonl").write_text("".join(lines))


@pytest.mark.parametrize("name", [*GOOD, *EVENTS])
def test_commands_work_with_any_value_in_a_field(name, tmp_path):
    @given(st.dictionaries(st.sampled_from(sorted({**GOOD, **EVENTS}[name])), JSON, min_size=1), st.integers(1, 4))
    def whatever(change, times):
        write(tmp_path, name, change, times)
        told(tmp_path)
        with suppress(ConfigError):  # the file is damaged
            records.check_progress(tmp_path, 0, OwnJob("Slurm", "7"))
            list(metrics_file.forget_after(tmp_path, 100))

    whatever()


def test_a_damaged_record_makes_a_run_unknown_and_the_commands_name_the_line(tmp_path):
    write(tmp_path)
    assert told(tmp_path).name == "exited"
    write(tmp_path, "cancelled", {"by": 3})
    number = 1 + [*EVENTS].index("cancelled")
    damage = f"{tmp_path}/events.jsonl, line {number}, is damaged: remove the line, or restore the file from a copy"
    standing = told(tmp_path)
    assert (standing.name, standing.ending) == ("unknown", damage)
    with pytest.raises(ConfigError, match=damage):
        records.check_progress(tmp_path, 0, OwnJob("Slurm", "7"))

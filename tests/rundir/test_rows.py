"""Files of a run that hold what hpclm did not write: what reads them ignores it, by whatever verb a person comes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpclm import files
from hpclm.errors import ConfigError
from hpclm.launch import cancel, resume
from hpclm.node.job import Job
from hpclm.reporting import run_table
from hpclm.rundir import attempts, metrics_file, rows, runs, submissions
from hpclm.rundir.status import process_here, status_of
from hpclm.rundir.summary import RunSummary
from hpclm.training import records
from tests.forks import hpclm
from tests.rundir.test_runs import make
from tests.work import calls

HUGE = 10**400


def lines_of(blocks):
    """The offset and content of every line that is not empty."""
    for offset, block in blocks:
        for line in block.split(b"\n"):
            if line:
                yield offset, line
            offset += len(line) + 1


@pytest.mark.parametrize("before", [b"", b"x", b'{"step": 1}\n', b'{"step": 1}\n' * 200_000])
@pytest.mark.parametrize("hole", [100, 1 << 20, 5 << 20, 70 << 20])
@pytest.mark.parametrize("after", [b"", b"x\n", b'\n{"step": 2}\n' * 3])
def test_the_lines_around_a_hole_are_those_of_a_file_of_nul_bytes(before, hole, after, tmp_path):
    (tmp_path / "written").write_bytes(before + bytes(hole) + after)
    with (tmp_path / "holey").open("wb") as file:
        file.write(before)
        file.truncate(len(before) + hole)
        file.seek(0, 2)
        file.write(after)
    written, holey = (list(rows.blocks(tmp_path / name)) for name in ("written", "holey"))
    assert list(lines_of(holey)) == list(lines_of(written))
    assert sum(block.count(b"\n") for _, block in holey) == sum(block.count(b"\n") for _, block in written)


def test_the_hole_of_a_file_of_rows_is_not_read(tmp_path):
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.truncate(rows.MAX_FILE_BYTES - 1)
    assert calls(lambda: list(rows.stream(tmp_path / "metrics.jsonl", metrics_file.STEP))) < 1000  # of 4,096 blocks


@pytest.mark.parametrize("name, read", [("attempts.jsonl", attempts.read), ("ends.jsonl", attempts.read_ends)])
def test_attempts_in_a_file_that_is_too_large_are_refused_before_it_is_read(name, read, tmp_path):
    with (tmp_path / name).open("wb") as file:
        file.truncate(files.MAX_READ_BYTES + 1)
    with pytest.raises(ConfigError, match=rf"{name} cannot be read: larger than 67.1 MB, the limit; move it away"):
        read(tmp_path)


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
    "attempts.jsonl": {
        "time": "2026-01-01T00:00:00+0000",
        "from_step": 0,
        "steps": 20,
        "size": 2,
        "hosts": ["elsewhere"],
        "host": "elsewhere",
        "pid": 1,
        "launcher": "Slurm",
    },
    "ends.jsonl": {"time": "2026-01-01T00:00:00+0000", "attempt": 1, "code": 85, "step": 3},
    "summary.json": {
        **{"state": "running", "ending": "", "step": 3, "steps": 20, "loss": 2.5, "step_seconds": 1.0, "stepped": 1.0},
        **{"tokens_per_second": 10.0, "attempts": 1, "curve": [2.5], "spiking_since": None},
        **{
            "attempt": {"time": "2026-01-01T00:00:00+0000", "from_step": 0, "host": "elsewhere", "pid": 1},
            "code": None,
        },
    },
    "jobs.jsonl": json.loads(json.dumps(vars(submissions.Submission("local", "999999", "elsewhere", 1, 2, "log")))),
    "lock": {"host": "elsewhere", "pid": 1, "job": None},
    "ranks.json": {"slow": [{"rank": 1, "host": "elsewhere", "times": 2.0}]},
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


def line(row):
    return json.dumps(row) + "\n"


def told(out):
    """All that the verbs make of a run's files, in the text that they print."""
    run = runs.read(out)
    standing = status_of(run, {})
    parts = [
        *run_table.table([standing]),
        *run_table.detail(standing),
        json.dumps(run_table.values(standing), allow_nan=False),
    ]
    RunSummary(out).write()
    parts += [cancel.outcome(out), *resume.words(run, []), *run.jobs, str(process_here(run))]
    "\n".join(parts).encode()
    return standing


@pytest.mark.parametrize("name", GOOD)
def test_commands_work_with_any_value_in_a_field(name, tmp_path):
    @given(st.dictionaries(st.sampled_from(sorted(GOOD[name])), JSON, min_size=1), st.integers(1, 4))
    def whatever(change, times):
        for each, row in GOOD.items():
            (tmp_path / each).write_text(line(row))
        (tmp_path / name).write_text(line(GOOD[name] | change) * times)
        told(tmp_path)
        records.check_progress(tmp_path, 0, Job())
        list(metrics_file.forget_after(tmp_path, 100))

    whatever()


ROWS = [
    ("metrics.jsonl", {"step": "3"}),
    ("metrics.jsonl", {"step": True}),
    ("metrics.jsonl", {"step": -3}),
    ("metrics.jsonl", {"step": 1 << 60}),
    ("metrics.jsonl", {"step": 3.5}),
    ("metrics.jsonl", {"loss": "2.5"}),
    ("metrics.jsonl", {"loss": [2.5]}),
    ("metrics.jsonl", {"loss_scale": [1]}),
    ("metrics.jsonl", {"step_seconds": "fast"}),
    ("metrics.jsonl", {"validation_loss": 1e301}),
    ("attempts.jsonl", {"from_step": "0"}),
    ("attempts.jsonl", {"size": [2]}),
    ("attempts.jsonl", {"hosts": 5}),
    ("attempts.jsonl", {"steps": "20"}),
    ("attempts.jsonl", {"pid": -1}),
    ("attempts.jsonl", {"host": "a" * 5000}),
    ("jobs.jsonl", {"nodes": "1"}),
    ("jobs.jsonl", {"log": 1}),
    ("jobs.jsonl", {"job_id": 7}),
]


@pytest.mark.parametrize("name, change", ROWS, ids=str)
def test_an_invalid_row_is_skipped(name, change, tmp_path):
    for each, row in GOOD.items():
        (tmp_path / each).write_text(line(row))
    before = runs.read(tmp_path)
    (tmp_path / name).write_text(line(GOOD[name]) + line(GOOD[name] | change))
    after = runs.read(tmp_path)
    assert (after.step, after.summary["loss"], after.attempt) == (3, 2.5, before.attempt)
    assert after.submissions == before.submissions
    assert before.attempt and before.submissions and before.holder and before.slow
    told(tmp_path)


def test_lines_that_are_nested_too_deep_or_have_too_many_digits_are_no_rows():
    for text in ("[" * 100_000, '{"step": ' * 10_000, '{"step": 1' + "0" * 5000 + "}", '{"step": 1', "\xff"):
        assert rows.parsed(text, metrics_file.STEP, ["step"]) is None
    assert rows.parsed('{"step": 1, "new": [1]}', metrics_file.STEP, ["step"]) == {"step": 1, "new": [1]}


def test_no_command_ends_in_a_traceback_on_odd_files(tmp_path):
    odd = [{**GOOD["metrics.jsonl"], key: value} for key in GOOD["metrics.jsonl"] for value in ODD]
    begun = [{**GOOD["attempts.jsonl"], key: value} for key in GOOD["attempts.jsonl"] for value in ODD]
    out = make(
        tmp_path / "run", begun, odd, summary=False, config_yaml="budget: {steps: many}\nbatch: {global_size: 8}\n"
    )
    (out / "ends.jsonl").write_text("".join(line({"attempt": value}) for value in ODD))
    (out / "jobs.jsonl").write_text("".join(line({**GOOD["jobs.jsonl"], "nodes": value}) for value in ODD))
    for words in (["status"], ["status", "--json"], ["logs"], ["cancel"], ["checkpoints"], ["resume"]):
        done = hpclm(*words, out)
        assert done.returncode in (0, 64) and "Traceback" not in done.stderr, (words, done.stderr)


def test_the_line_after_a_truncated_one_is_read(tmp_path):
    path = tmp_path / "attempts.jsonl"
    rows.append(path, {"from_step": 1})
    path.write_bytes(path.read_bytes() + b'{"from_st\0\0')
    rows.append(path, {"from_step": 2})
    rows.append(path, {"from_step": 3})
    assert [each["from_step"] for each in rows.parsed_lines(path.read_text(errors="replace"), attempts.ATTEMPT)] == [
        1,
        2,
        3,
    ]

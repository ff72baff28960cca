"""metrics.jsonl as a stream gives what its lines say, whatever they hold."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpclm.base.errors import ConfigError
from hpclm.rundir import metrics_file, rows

NUMBERS = st.one_of(
    st.integers(-(10**17), 10**17),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0, -0.0, 1e300, -1e300, 1e299, 5e-324, 1 << 53, (1 << 53) - 1, 0.00012345678901234567]),
    st.none(),
)
STEPS = st.fixed_dictionaries(
    {"step": st.integers(0, 40), "samples": NUMBERS, "time": NUMBERS, "loss": NUMBERS, "new": NUMBERS},
    optional={"spiking_since": st.integers(0, 9), "lr": NUMBERS},
)
OTHERS = [
    '{"step": 3, "part": "valid", "validation_loss": 2.5}',
    '{"step": 2, "tasks": {"a": {"acc": 1.0}}}',
    '{"step": 03, "loss": 1.0}',
    '{"step": 3, "loss": 1.0, "loss": 2.0}',
    '{"step": 3, "samples": 1, "time": 1.0, "loss": 1.0, "new": 1.}',
    '{"step": 3, "samples": 1, "time": 1.0, "loss": 1.0, "new": 1.0, "x": true}',
    '{"step": 3, "samples": 1, "time": 1.0, "loss": 1e999, "new": 1.0}',
    '{"step": 3, "samples": 1, "ti\0\0',
    '{"step": 3, "samp{"step": 4, "loss": 1.0}',
    "null",
    "",
    "\x0c",
]
LINES = st.lists(STEPS.map(json.dumps) | st.sampled_from(OTHERS), max_size=30)


def valid(line):
    return rows.parsed(line, metrics_file.STEP, ["step"])


def plain(path):
    """Every line as JSON."""
    lines = path.read_bytes().decode(errors="replace").split("\n")[:-1]
    return [valid(line) for line in lines]


@given(LINES, st.booleans())
def test_a_stream_has_the_rows_that_json_has(tmp_path_factory, lines, torn):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    path.write_text("".join(line + "\n" for line in lines) + '{"step": 9, "loss": 1.0}' * torn)
    if None in plain(path):
        with pytest.raises(ConfigError, match=rf"metrics\.jsonl, line {plain(path).index(None) + 1}, is damaged"):
            list(metrics_file.stream(path.parent))
    else:
        assert list(metrics_file.stream(path.parent)) == plain(path)


@given(st.lists(STEPS.map(json.dumps).filter(valid) | st.sampled_from(OTHERS[:2]), max_size=30), st.integers(0, 40))
def test_the_rows_up_to_a_step_are_kept_and_those_past_it_are_lost(tmp_path_factory, lines, step):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    pairs = [*zip(lines, plain(path), strict=True)]
    kept = list(metrics_file.forget_after(path.parent, step))
    said = [(row["step"], row.get("loss"), "validation_loss" in row, "tasks" in row) for row in kept]
    assert said == [
        (row["step"], row.get("loss"), "validation_loss" in row, "tasks" in row)
        for _, row in pairs
        if row["step"] <= step
    ]
    assert path.read_text() == "".join(f"{line}\n" for line, row in pairs if row["step"] <= step)
    lost, moved = path.with_name("metrics.lost.jsonl"), [line for line, row in pairs if row["step"] > step]
    assert (lost.read_text() if lost.exists() else "") == "".join(f"{line}\n" for line in moved)
    assert sorted(file.name for file in path.parent.iterdir()) in (["metrics.jsonl"], ["metrics.jsonl", lost.name])


def test_later_rows_move_to_a_file_of_their_own_once_whenever_that_is_killed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1, 7)]
    path.write_text("".join(lines))
    (tmp_path / "metrics.rolled-back-1.jsonl").write_text(lines[5])  # of another time
    metrics_file.move_after(path.parent, 3)
    assert path.read_text() == "".join(lines[:3])
    path.write_text("".join(lines))  # as if it had been killed between the two
    metrics_file.move_after(path.parent, 3)
    assert path.read_text() == "".join(lines[:3])
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "metrics.jsonl": "".join(lines[:3]),
        "metrics.rolled-back-1.jsonl": lines[5],
        "metrics.rolled-back-2.jsonl": "".join(lines[3:]),
    }

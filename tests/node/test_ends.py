"""How ranks ended, for what started them."""

import pytest

from hpclm.node import ends


@pytest.mark.parametrize(
    "env, rank",
    [
        ({}, 0),
        ({"SLURM_PROCID": "3"}, 3),
        ({"RANK": "5", "SLURM_PROCID": "1"}, 5),
        ({"OMPI_COMM_WORLD_RANK": "2", "SLURM_PROCID": "0"}, 2),
    ],
)
def test_a_rank_leaves_its_code_and_the_cause_once_under_its_innermost_launcher_s_number(env, rank, tmp_path):
    env = {**env, ends.FOLDER: str(tmp_path / "errors")}
    ends.note(0, "done", env)
    assert ends.read_ends(tmp_path / "errors") == {}
    ends.note(1, "Traceback:\n  somewhere\nValueError: no\x1b[2J", env)
    ends.note(85, "another thread's", env)
    [(number, end)] = ends.read_ends(tmp_path / "errors").items()
    assert (number, end.rank, end.exit_code) == (rank, rank, 1)
    assert end.cause == "Traceback: ... ValueError: no [2J"
    ends.forget(tmp_path / "errors", [rank])
    assert ends.read_ends(tmp_path / "errors") == {}


def test_without_a_folder_nothing_is_left_and_what_is_no_end_is_not_read(tmp_path):
    ends.note(1, "x", {})
    for number, text in enumerate(
        ("{", "[]", '{"rank": "a"}', '{"rank": 1, "exit_code": "1", "cause": "", "time": 1.0}')
    ):
        (tmp_path / f"rank-{number}.json").write_text(text)
    assert ends.read_ends(tmp_path) == {}


def test_the_first_end_counts_and_of_those_alike_the_first_that_says_why():
    silent, told, later = (
        ends.End(1, 64, "", 1.0),
        ends.End(0, 64, "no data", 2.0),
        ends.End(2, 1, "a consequence", 1.5),
    )
    assert ends.first([later, told, silent]) == told
    assert ends.first([later, silent]) == silent
    assert ends.first([]) is None

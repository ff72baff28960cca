"""A job as its own processes name it."""

import time

import pytest

from hpclm.node.job import OwnJob

DEADLINE = time.mktime(time.strptime("2026-11-27 14:03", "%Y-%m-%d %H:%M"))
TEN = tuple(f"n{number}" for number in range(10))


@pytest.mark.parametrize(
    "more, text",
    [
        ({}, "job 12 of Slurm"),
        (
            dict(restart=1, hosts=("a", "b"), deadline=DEADLINE),
            "job 12 of Slurm, start 2, on a, b, until 2026-11-27 14:03",
        ),
        (dict(hosts=TEN[:8]), "job 12 of Slurm, on n0, n1, n2, n3, n4, n5, n6, n7"),
        (dict(hosts=TEN), "job 12 of Slurm, on n0, n1, n2, n3, n4, n5, n6, n7 and 2 more"),
    ],
)
def test_a_job_is_named_with_its_start_its_first_nodes_and_its_end(more, text):
    assert str(OwnJob("Slurm", "12", **more)) == text


def test_the_files_of_a_run_record_the_job_and_how_often_it_was_started_again():
    assert OwnJob("Slurm", "12_3", restart=2).row() == {"job_id": "12_3", "restart": 2}
    assert OwnJob().row() == {} and OwnJob().scheduler == "" and OwnJob("PBS", "1", node="n1").node == "n1"

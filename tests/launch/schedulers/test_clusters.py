"""Several clusters on one slurmdbd: a run's job is looked for on the cluster that it was sent to, however that was said.

The stand-ins for Slurm's commands know the jobs of another cluster only by --clusters or its variables, as Slurm's do."""

import json
import os

import pytest

from hpclm.launch.schedulers import of_job, scheduler_named
from hpclm.launch.schedulers import slurm_commands as slurm
from hpclm.node import environment
from tests.events import of_kind, rewrite, without
from tests.forks import hpclm
from tests.runs import ROOT

COMMAND = r"""#!/bin/bash
# jobs are files QUEUE/CLUSTER/ID, which hold the path of the script
name=$(basename "$0") queue=QUEUE
echo "$name: jwt=${SLURM_JWT:-} clusters=${SLURM_CLUSTERS:-} $*" >> $queue/log
IFS=, read -ra clusters <<< "${SLURM_CLUSTERS:-here}"
last=${clusters[-1]} id=""
for word in "$@"; do case $word in [0-9]*) id=$word ;; jobid=*) id=${word#*=} ;; esac; done
case $name in
sbatch)
    for script in "$@"; do :; done
    asked=$(sed -n 's/^#SBATCH --clusters="\?\([^"]*\)"\?/\1/p' "$script")
    asked=${SBATCH_CLUSTERS:-${SLURM_CLUSTERS:-$asked}}
    last=${asked:-here} last=${last##*,}
    mkdir -p $queue/$last && echo "$script" > $queue/$last/4242
    echo "${BANNER:-}"
    echo "Submitted batch job 4242${asked:+ on cluster $last}" ;;
squeue)
    [ -z "$id" ] || ls $queue/$last/$id > /dev/null 2>&1 || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
    for cluster in "${clusters[@]}"; do
        [ -z "${SLURM_CLUSTERS:-}" ] || echo "CLUSTER: $cluster"
        for job in $(ls $queue/$cluster 2> /dev/null); do
            script=$(cat $queue/$cluster/$job)
            case "$*" in *%M*) echo "$job|PENDING|0:00|1:00|N/A|1||Resources|$script" ;; *) echo "$job|PENDING|Resources|$script" ;; esac
        done
    done ;;
scontrol | scancel)
    case "$*" in *config*) echo "GresTypes = gpu"; exit ;; esac
    [ -f "$queue/$last/$id" ] || { echo "$name: error: Invalid job id specified" >&2; exit 1; }
    [ $name = scontrol ] || rm $queue/$last/$id
    echo "JobId=$id JobState=PENDING Reason=Resources" ;;
esac
"""
SMALL = ["debug", "budget.steps=5", "engine.device=cpu", "evaluate.every=0"]


@pytest.fixture
def clusters(tmp_path):
    """`hpclm WORDS` where several clusters are, and the folder of their queues."""
    queue, programs = tmp_path / "queue", tmp_path / "bin"
    queue.mkdir()
    programs.mkdir()
    for name in ("sbatch", "squeue", "scontrol", "scancel", "sinfo"):
        (programs / name).write_text(COMMAND.replace("QUEUE", str(queue)))
        (programs / name).chmod(0o755)
    env = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "HPCLM_SITE": ""}

    def call(*words, check=None, **more):
        return hpclm(*words, check=check, cwd=ROOT, env={**env, **more})

    call.queue = queue
    return call


@pytest.mark.parametrize(
    "cluster, options, variables",
    {
        "a variable of sbatch": ("wice", [], {"SBATCH_CLUSTERS": "wice"}),
        "a variable of all commands": ("wice", [], {"SLURM_CLUSTERS": "wice"}),
        "an option before both": (
            "wice",
            ["--sbatch", "clusters=wice"],
            dict.fromkeys(("SBATCH_CLUSTERS", "SLURM_CLUSTERS"), "x"),
        ),
        "several, of which Slurm takes one": ("wice", ["--sbatch", "clusters=genius,wice"], {}),
    }.values(),
    ids=["sbatch's", "all commands'", "option", "several"],
)
def test_a_job_that_was_sent_to_another_cluster_is_followed_there(cluster, options, variables, clusters, tmp_path):
    out, jwt = tmp_path / "run", {"SLURM_JWT": "x.y.z"}
    submit = ["submit", *SMALL, *options, f"out={out}"]
    assert f"submitted to cluster {cluster}" in clusters("submit", *submit[1:], check=0, **variables, **jwt).stdout
    [submission] = of_kind(out, "submitted")
    assert (submission["job_id"], submission["slurm_cluster"]) == ("4242", cluster)
    assert json.loads(clusters("status", "--json", out, check=0, **jwt).stdout)[0]["state"] == "waiting"
    assert "is in the queue" in clusters(*submit, check=75, **variables, **jwt).stderr
    assert "is waiting (job 4242" in clusters("resume", out, check=75, **jwt).stderr
    assert "job 4242: cancelled" in clusters("cancel", out, check=0, **jwt).stdout
    assert not list((clusters.queue / cluster).iterdir())
    assert "jwt= " not in (clusters.queue / "log").read_text()  # every command could log in
    assert "submitted to cluster wice" in clusters("resume", out, check=0, **jwt).stdout


def test_a_job_whose_submission_was_killed_is_found_on_its_cluster(clusters, tmp_path):
    out = tmp_path / "run"
    clusters("submit", *SMALL, "--sbatch", "clusters=wice", f"out={out}", check=0)
    rewrite(out, without("submitted"))
    assert "job 4242: cancelled" in clusters("cancel", out, check=0).stdout


def test_the_job_of_a_script_is_the_one_in_the_queue_whatever_else_a_cluster_prints(clusters, tmp_path):
    (clusters.queue / "here").mkdir()
    (clusters.queue / "here" / "17").write_text("/home/me/other.sh\n")
    banner = "Welcome\n--> your last job 17 took 3 SU of the budget\n"
    said = clusters("submit", *SMALL, f"out={tmp_path}/run", check=0, BANNER=banner).stdout
    assert said.startswith("job 4242: ") and of_kind(tmp_path / "run", "submitted")[0]["job_id"] == "4242"


def test_a_job_on_the_cluster_here_is_looked_for_here_whatever_the_variables_say_later(clusters, tmp_path):
    out = tmp_path / "run"
    assert "submitted\n" in clusters("submit", *SMALL, f"out={out}", check=0).stdout
    assert json.loads(clusters("status", "--json", out, check=0, SLURM_CLUSTERS="wice").stdout)[0]["state"] == "waiting"
    assert "is in the queue" in clusters("submit", *SMALL, f"out={out}", check=75, SLURM_CLUSTERS="wice").stderr


def test_sbatch_finds_the_clusters_that_slurm_s_other_commands_find():
    env = {"SLURM_JWT": "x", "SLURM_CLUSTERS": "a", "SLURM_CONF": "/c", "SBATCH_CLUSTERS": "b", "SLURM_NTASKS": "8"}
    login = {"SLURM_JWT": "x", "SLURM_CONF": "/c"}
    assert environment.of_a_job([], env) == {**login, "SBATCH_CLUSTERS": "b"} and slurm.clusters({}, env) == "b"
    assert environment.of_a_job(["clusters"], env) == login and slurm.clusters({"clusters": "c"}, env) == "c"
    del env["SBATCH_CLUSTERS"]
    assert environment.of_a_job([], env) == {**login, "SLURM_CLUSTERS": "a"} and slurm.clusters({}, env) == "a"
    assert slurm.clusters({}, {}) == "" and slurm.env_for("", env) == {**login, "SLURM_NTASKS": "8"}


def test_two_clusters_are_two_schedulers_and_one_is_one():
    here = scheduler_named("slurm")
    assert of_job("slurm", here.clusters, os.getuid()) is here
    assert here.on("wice") is scheduler_named("slurm").on("wice") and here.on("wice") != here.on("genius")

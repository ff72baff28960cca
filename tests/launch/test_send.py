"""Submission to a real Slurm."""

import random
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpclm import config
from hpclm.launch.schedulers import slurm_script
from tests import forks
from tests.events import of_kind, rewrite, without
from tests.launch.schedulers.test_template import NASTY, script
from tests.runs import ROOT, until
from tests.slurm import ENDED

SMALL = ["budget.steps=5", "engine.device=cpu", "evaluate.every=0", "log.tensorboard=false"]
HOLD = ["--sbatch", "hold"]


@pytest.fixture
def submit(cluster, tmp_path):
    """`hpclm submit WORDS`, typed in an empty folder on the cluster."""
    here = tmp_path / "h e'r\"e"
    here.mkdir()
    options = {"env": {**cluster.env, "HPCLM_SITE": "", "OMP_NUM_THREADS": "1"}, "cwd": here}

    def call(*words, check=0):
        return forks.hpclm("submit", *words, check=check, **options)

    call.here, call.cluster, call.options = here, cluster, options
    return call


def jobs(cluster):
    return cluster.run(["squeue", "-h", "-o", "%i %T %j"]).stdout.split("\n")[:-1]


def log_of(done):
    return Path(next(line.split(None, 1)[1] for line in done.stdout.splitlines() if line.startswith("log ")))


def test_more_gpus_than_a_node_has_are_explained_and_the_time_limit_is_told(submit):
    said = submit(
        "--gpus", 16, "--time", "24:00", *SMALL, "engine.device=cuda", "batch.global_size=16", check=64
    ).stderr
    assert "--gpus counts those of each node" in said
    assert "submitted; time limit 24 min\n" in submit(*SMALL, *HOLD, "--time", "24:00").stdout


def job_id(done):
    return done.stdout.split()[1].rstrip(":")


def test_a_job_trains_in_a_directory_with_spaces_and_quotes_and_the_words_that_follow_are_right(submit):
    out = submit.here / "a b'c\"d $(touch canary) `x` %x é"
    done = submit("--gpus", 1, *SMALL, f"out={out}", "job.env.MINE=a b'c", "--time", 60)
    job = job_id(done)
    assert submit.cluster.wait(job) == "COMPLETED", log_of(done).read_text()
    assert log_of(done) == out / "logs" / f"job-{job}.log"
    assert "done at step 5" in log_of(done).read_text()
    relative = shlex.quote(out.name)
    for line in (f"follow         hpclm logs -f {relative}", f"resume         hpclm resume {relative}"):
        assert line in done.stdout
    (said,) = of_kind(out, "submitted")
    assert (said["cluster"], said["job_id"], said["nodes"], said["tasks_per_node"]) == ("slurm", job, 1, 1)
    assert said["command"][:4] == ["hpclm", "submit", "--gpus", "1"]
    assert Path(said["script"]) == out / "job/script-1.sbatch"
    assert not list(submit.here.rglob("canary")) and not list(out.rglob("*.pkl"))
    assert sorted(path.name for path in (out / "job").iterdir()) == ["lock", "script-1.sbatch"]


def test_the_script_of_the_dry_run_is_what_the_job_runs_and_slurm_checks_that(submit):
    words = [
        "--nodes",
        2,
        "--gpus",
        1,
        *SMALL,
        *HOLD,
        "--sbatch",
        "comment=a # b \"c\" \\ 'd' $(e) é",
        "job.env.A=x\ny",
        "name=医疗 问答",
    ]
    dry = submit(*words, "--dry-run")
    assert "to start at" in dry.stderr
    assert not (submit.here / "runs").exists()
    done = submit(*words)
    text = next((submit.here / "runs").glob("*/job/script-1.sbatch")).read_bytes()
    assert text == dry.stdout.encode()
    kept = submit.cluster.run(["scontrol", "write", "batch_script", job_id(done), "-"]).stdout
    kept, _, payload = kept.rpartition(" # ")  # which submitit adds, and the job does not run
    assert kept + "\n" == text.decode() and payload.startswith("-u -m submitit")
    assert submit.cluster.run(["squeue", "-h", "-o", "%j %k"]).stdout.strip() == "医疗_问答 a # b \"c\" \\ 'd' $(e) é"
    refused = submit("--dry-run", *SMALL, "--partition", "none", check=64)
    assert "Slurm refuses the job" in refused.stderr and "partition" in refused.stderr


def test_what_slurm_refuses_ends_with_64_and_can_be_submitted_again(submit):
    done = submit(*SMALL, "--partition", "none", check=64)
    assert "Slurm refuses the job" in done.stderr and jobs(submit.cluster) == []
    settings = submit.here / "runs/debug/config.yaml"
    assert not settings.parent.exists()  # it leaves nothing
    submit(*SMALL, *HOLD)
    assert len(jobs(submit.cluster)) == 1
    submit.cluster.cancel_all()
    before = settings.read_bytes()
    submit(*SMALL, *HOLD, "--partition", "none", check=64)
    assert settings.read_bytes() == before


@pytest.fixture
def partition(cluster):
    """Makes a partition with such limits, for one test."""
    made = []

    def make(name, *limits):
        cluster.run(["scontrol", "create", f"PartitionName={name}", "Nodes=ALL", "State=UP", *limits])
        made.append(name)

    yield make
    cluster.cancel_all()
    for name in made:
        cluster.run(["scontrol", "delete", f"PartitionName={name}"])


def test_what_a_job_waits_for_is_told_where_it_is_not_its_turn_and_no_job_is_cancelled(submit, partition):
    partition("closed")
    submit.cluster.run(["scontrol", "update", "PartitionName=closed", "State=DOWN"])
    partition("short", "MaxTime=10")
    for words, reason in {("closed",): "PartitionDown", ("short", "--time", 60): "Partition"}.items():
        done = submit(*SMALL, "--partition", *words, f"out={words[0]}")
        assert f"warning: job {job_id(done)} waits for {reason}" in done.stderr
        assert submit.cluster.state(job_id(done)) == "PENDING"
    for words in (["--cpus-per-task", 100], ["--nodes", 2, "--gpus", 8, "engine.device=cuda", "--cpus-per-task", 9]):
        assert "Slurm refuses the job: " in submit(*SMALL, *words, "out=refused", check=64).stderr
        assert not (submit.here / "refused/config.yaml").exists() and len(jobs(submit.cluster)) == 2


def test_a_job_that_one_of_its_partitions_can_never_take_starts_in_another(submit, partition):
    partition("one", "MaxNodes=1")
    busy = submit.cluster.batch("sleep 600", "--nodes=4", "--exclusive", "--partition=high")
    submit.cluster.wait(busy, "RUNNING")
    job = job_id(submit(*SMALL, "--nodes", 2, "--partition", "one,main", "--time", 60))
    submit.cluster.run(["scancel", busy])
    assert submit.cluster.wait(job) == "COMPLETED" and submit.cluster.show(job)["Partition"] == "main"


def test_a_run_that_is_in_the_queue_is_not_submitted_twice(submit):
    first = submit(*SMALL, *HOLD)
    again = submit(*SMALL, *HOLD, check=75)
    assert f"job {job_id(first)} (pending" in again.stderr and "hpclm cancel" in again.stderr
    other = submit(*SMALL, *HOLD, "seed=5", check=75)
    assert f"job {job_id(first)}" in other.stderr
    assert config.load(submit.here / "runs/debug/config.yaml").seed == 1234  # the job's own settings are untouched
    next_one = submit(*SMALL, "--again", "--dependency", f"afterany:{job_id(first)}")
    assert len(jobs(submit.cluster)) == 2
    assert f"job {job_id(next_one)}" in submit(*SMALL, check=75).stderr
    submit.cluster.cancel_all()
    submit(*SMALL, *HOLD)
    assert len(of_kind(submit.here / "runs/debug", "submitted")) == 3


def test_a_sweep_is_a_job_for_each_run_and_what_is_queued_already_is_left_alone(submit):
    first = submit(*SMALL, *HOLD, "out=runs/debug-lr-3e-3", "name=x")
    done = submit(*SMALL, *HOLD, "--sweep", "optim.lr=1e-3,3e-3,9e-3", check=75)
    assert f"job {job_id(first)}" in done.stderr
    assert len(jobs(submit.cluster)) == 3 and done.stdout.count("run directory") == 2
    rates = [config.load(path).optim.lr for path in sorted((submit.here / "runs").glob("debug*/config.yaml"))]
    assert rates == [0.001, 0.003, 0.009]


@pytest.mark.parametrize("times", [4, pytest.param(30, marks=[pytest.mark.whole, pytest.mark.slow])])
def test_submit_killed_at_any_moment_and_typed_again_leaves_exactly_one_job(submit, times):
    began = time.monotonic()
    submit(*SMALL, *HOLD, "out=runs/timed")
    usual = time.monotonic() - began
    submit.cluster.cancel_all()
    chance, codes, lost = random.Random(4), [], 0
    for number in range(times):
        out = submit.here / f"runs/k{number}"
        with forks.Hpclm("submit", *SMALL, *HOLD, f"out={out}", **submit.options):
            time.sleep(chance.uniform(0.0, 1.2) * usual)
        recorded = len(of_kind(out, "submitted"))
        done = submit(*SMALL, *HOLD, f"out={out}", check=None)
        codes.append(done.returncode)
        assert done.returncode == (75 if recorded else 0), done.stderr
        lost += "an earlier submission was interrupted" in done.stdout
        assert len(of_kind(out, "submitted")) == 1
        (queued,) = jobs(submit.cluster)
        assert queued.split()[0] == of_kind(out, "submitted")[0]["job_id"]
        submit.cluster.run(["scancel", queued.split()[0]])
        assert not list(out.rglob("*.tmp-*"))
    print(f"refused {codes.count(75)}, went on {codes.count(0)}, of which {lost} found a job that was not recorded")
    assert times < 30 or {0, 75} <= set(codes)


def test_a_job_whose_submission_was_not_recorded_is_found_again_and_cancelled(submit):
    first = submit(*SMALL, *HOLD)
    out = submit.here / "runs/debug"
    rewrite(out, without("submitted"))
    found = submit(*SMALL, *HOLD)
    assert job_id(found) == job_id(first) and "already queued" in found.stdout
    rewrite(out, without("submitted"))
    assert f"job {job_id(first)}" in submit(*SMALL, *HOLD, "out=runs/debug", "seed=9", check=75).stderr
    assert [each["job_id"] for each in of_kind(out, "submitted")] == [job_id(first)]
    rewrite(out, without("submitted"))
    assert f"job {job_id(first)}: cancelled" in forks.hpclm("cancel", "debug", check=0, **submit.options).stdout
    assert submit.cluster.wait(job_id(first)) == "CANCELLED"


def test_an_sbatch_that_outlives_its_killed_submit_is_waited_for(submit, tmp_path):
    slow = tmp_path / "slow" / "sbatch"
    slow.parent.mkdir()
    real = submit.cluster.run(["which", "sbatch"]).stdout.strip()
    slow.write_text(f'#!/bin/bash\ntouch {tmp_path}/begun\nsleep 4\nexec {real} "$@"\n')
    slow.chmod(0o755)
    env = {**submit.options["env"], "PATH": f"{slow.parent}:{submit.cluster.env['PATH']}"}
    with forks.Hpclm("submit", *SMALL, *HOLD, env=env, cwd=submit.here):
        until((tmp_path / "begun").exists)
    assert jobs(submit.cluster) == []
    done = submit(*SMALL, *HOLD)
    assert "already queued" in done.stdout
    assert [line.split()[0] for line in jobs(submit.cluster)] == [job_id(done)]


def test_submit_inside_a_job_starts_a_job_of_its_own_size(submit):
    inner = shlex.join(
        [sys.executable, "-m", "hpclm", "submit", "--gpus", "2", "--time", "60", *SMALL, f"out={submit.here}/inner"]
    )
    outer = submit.cluster.batch(
        f"#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=4 --cpus-per-task=2\nexport HPCLM_SITE=\nsrun -N1 -n1 {inner}\n",
        f"--chdir={submit.here}",
        f"--output={submit.here}/outer.log",
    )
    assert submit.cluster.wait(outer) == "COMPLETED", (submit.here / "outer.log").read_text()
    (said,) = of_kind(submit.here / "inner", "submitted")
    submit.cluster.wait(said["job_id"], ("RUNNING", *ENDED))
    shown = submit.cluster.show(said["job_id"])
    assert (shown["NumNodes"], shown["NumTasks"], shown["CPUs/Task"]) == ("1", "2", "1")


def test_an_option_arrives_in_slurm_as_it_was_written(submit):
    values = [text for text in NASTY if text.strip() and text.isprintable()] + ["a " * 20, 'x"', "\\\\", "\"' \\", "#"]
    draw = random.Random(7)
    values += ["".join(draw.choices("ab \"'\\#$%é-", k=8)).strip() or "x" for _ in range(30)]
    for value in values:
        run = config.load("debug", ["engine.device=cpu", "job.options={hold: ''}", f"out={submit.here}/x"])
        job = replace(run.job, options={**run.job.options, "comment": value})
        job = submit.cluster.batch(
            slurm_script.render(replace(run, job=job), submit.here / "x" / "config.yaml", [], ["true"]).text
        )
        assert submit.cluster.run(["squeue", "-h", "-j", job, "-o", "%k"]).stdout.strip("\n") == value, value
        submit.cluster.run(["scancel", job])


RANK = """
import os, signal, sys, time
words = sys.orig_argv[sys.orig_argv.index("-m") + 1 :] if "-m" in sys.orig_argv else [""]
if words[0] != "hpclm.train":
    raise ImportError(name="sitecustomize")  # nothing of this Python's is changed
sys.argv = words
settings = dict(word.split("=", 1) for word in os.environ["HPCLM_STAND_IN"].split())
names = ["SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "RANK", "SLURM_RESTART_COUNT"]
said = {name: os.environ[name] for name in names if name in os.environ}
os.write(1, f"rank {said} {sys.argv[1:]}\\n".encode())
heard = []
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: heard.append(number))
until = time.monotonic() + float(settings.get("seconds", 0))
while time.monotonic() < until and not heard and "SLURM_RESTART_COUNT" not in os.environ:
    time.sleep(0.05)
if heard or (settings.get("again") and "SLURM_RESTART_COUNT" not in os.environ):
    time.sleep(0.5)
    os.write(1, f"saved after {heard[:1]}\\n".encode())
    os._exit(85)
ranks = [os.environ.get(name) for name in ("OMPI_COMM_WORLD_RANK", "RANK", "SLURM_PROCID")]
alone = next(rank for rank in ranks if rank) == "2"
while settings.get("alone") and not alone:
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(85))  # as a rank that has not met the others yet
    time.sleep(60)
from hpclm.node import ends
ends.note(int(settings.get("code", 0)))
os._exit(int(settings.get("code", 0)))
"""


@pytest.fixture
def by_hand(cluster, tmp_path):
    """`sbatch OPTIONS slurm/TEMPLATE.sbatch WORDS`, with a stand-in for the processes of a run."""
    site = tmp_path / "stand in"
    site.mkdir()
    (site / "sitecustomize.py").write_text(RANK)
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/bash\necho "container: $*" | head -c 300\nwhile [ "$1" != an.sif ]; do shift; done\nshift\nexec "$@"\n'
    )
    program.chmod(0o755)
    paths = f"{program.parent}:{Path(sys.executable).parent}:{cluster.env['PATH']}"
    env = {**cluster.env, "PATH": paths, "PYTHONPATH": f"{site}:{ROOT}", "HPCLM_SITE": "", "OMP_NUM_THREADS": "1"}
    env |= {"OMPI_MCA_btl": "self,tcp"}

    (tmp_path / "a b.yaml").write_text((ROOT / "configs" / "debug.yaml").read_text() + "engine: {device: cpu}\n")

    def call(template, *words, options=()):
        command = ["sbatch", "--parsable", "--time=60", f"--output={tmp_path}/job-%j.log", *options]
        script = ROOT / "slurm" / f"{template.replace('container', 'srun')}.sbatch"
        inside = ["job.container=an.sif"] if template == "container" else []
        settings = ["a b.yaml", f"out={tmp_path}/run", *inside]
        acts = {"HPCLM_STAND_IN": " ".join(words)}
        done = cluster.run([*command, script, *settings], env=env | acts, cwd=tmp_path)
        return done.stdout.strip(), tmp_path / f"job-{done.stdout.strip()}.log"

    return call


def ranks(log):
    return sum(line.count("rank {") for line in log.read_text().splitlines()) if log.exists() else 0


TEMPLATES = ["srun", "container", "torchrun", pytest.param("mpirun", marks=pytest.mark.mpi)]
REST = [
    *(pytest.param(name, marks=pytest.mark.whole) for name in TEMPLATES[1:3]),
    pytest.param("mpirun", marks=[pytest.mark.mpi, pytest.mark.whole]),
]
TWO_BY_TWO = ["--nodes=2", "--ntasks-per-node=2"]


@pytest.mark.parametrize("template", [TEMPLATES[0], REST[0], TEMPLATES[2], REST[-1]])
def test_a_template_works_by_hand_and_a_run_that_saved_is_started_again_once(cluster, by_hand, template):
    job, log = by_hand(template, "again=1", options=TWO_BY_TWO)
    cluster.wait(job, ["COMPLETED", "FAILED"])
    text = log.read_text()
    shown = cluster.show(job)
    assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "1"), text
    assert (
        text.count("rank {") == 8 and "rank {" in text and "['a b.yaml', 'out=" in text
    )  # appended to, not begun anew
    assert ("container: exec" in text) == (template == "container")


@pytest.mark.parametrize("template", ["srun", *REST])
@pytest.mark.parametrize(
    "words", [pytest.param(["code=64"], marks=pytest.mark.whole), ["code=93"], ["code=1", "alone=1"]]
)
def test_any_other_exit_code_is_the_jobs_own_also_that_of_one_rank_while_the_others_start(
    cluster, by_hand, template, words
):
    job, log = by_hand(template, *words, options=TWO_BY_TWO)
    code = words[0].removeprefix("code=")
    assert cluster.wait(job) == "FAILED", log.read_text()
    shown = cluster.show(job)
    assert (shown["ExitCode"], shown["Restarts"]) == (f"{code}:0", "0")


@pytest.mark.parametrize("template", ["srun", *REST[:-1], TEMPLATES[-1]])  # mpirun is warned differently
def test_a_warning_reaches_every_rank_and_the_job_is_started_again(cluster, by_hand, template):
    job, log = by_hand(template, "seconds=3600", options=TWO_BY_TWO)
    until(lambda: ranks(log) == 4)
    cluster.run(["scancel", *(["--batch"] if template == "mpirun" else []), "--signal=USR2", job])
    until(lambda: cluster.show(job)["Restarts"] == "1")
    cluster.wait(job, ["COMPLETED", "FAILED"])
    text = log.read_text()
    assert text.count("saved after [<") + text.count("saved after [12]") == 4, text


@pytest.mark.parametrize("template", ["srun", *REST])
def test_a_job_that_a_person_cancels_stays_cancelled(cluster, by_hand, template):
    job, log = by_hand(template, "seconds=3600", options=TWO_BY_TWO)
    until(lambda: ranks(log) == 4)
    cluster.run(["scancel", job])
    assert cluster.wait(job) == "CANCELLED"
    until(lambda: not cluster.processes(r"a b\.yaml"), "the end of all processes")
    assert (cluster.state(job), cluster.show(job)["Restarts"]) == ("CANCELLED", "0"), log.read_text()


def test_every_preset_renders_to_a_script_that_slurm_would_take(cluster, tmp_path):
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        text = script(config.load(path, ["job.gpus=8", "job.nodes=2"]), tmp_path / "config.yaml")
        done = cluster.run(["sbatch", "--test-only"], stdin=None, input=text, check=False)
        assert done.returncode == 0, (path, done.stderr)


@pytest.mark.parametrize(
    "template", [*(pytest.param(t, marks=pytest.mark.whole) for t in ("srun", "torchrun")), "container", TEMPLATES[-1]]
)
def test_a_job_trains_with_each_template(submit, tmp_path, template):
    words = [] if template == "container" else ["--template", template]
    if template == "container":
        program = tmp_path / "bin" / "apptainer"
        program.parent.mkdir()
        program.write_text('#!/bin/bash\nwhile [ "$1" != a\\ b.sif ]; do shift; done\nshift\nexec "$@"\n')
        program.chmod(0o755)
        (submit.here / "a b.sif").touch()
        words = [
            "job.container=a b.sif",
            f"job.setup=['export PATH={program.parent}:{Path(sys.executable).parent}:$PATH']",
        ]
    done = submit(*SMALL, "--time", 60, "job.env.OMPI_MCA_btl=self,tcp", *words)
    submit.cluster.wait(job_id(done))
    assert "done at step 5" in log_of(done).read_text(), log_of(done).read_text()


@pytest.mark.parametrize("start", ["srun --het-group=0,1 ", ""], ids=["srun", "alone"])
def test_a_heterogeneous_job_is_refused(start, submit, tmp_path):
    train = f"'{sys.executable}' -m hpclm train debug engine.device=cpu out={tmp_path}/het"
    script = f"#!/bin/bash\n#SBATCH -N1 -n1\n#SBATCH hetjob\n#SBATCH -N1 -n1\n{start}{train}\n"
    job = submit.cluster.batch(script, f"--chdir={ROOT}", f"--output={tmp_path}/het.log")
    assert submit.cluster.wait(job) == "FAILED"
    text = (tmp_path / "het.log").read_text()
    assert "this is a heterogeneous Slurm job" in text, text
    assert not (tmp_path / "het").exists() and submit.cluster.show(job)["ExitCode"] == "64:0"

import os
import shlex
import socket
import stat
import subprocess
import sys

import pytest

from hpclm.base.errors import ConfigError
from hpclm.config import compose
from hpclm.diagnostics import report
from hpclm.launch import arguments
from hpclm.node import environment
from tests.events import note, of_kind
from tests.forks import hpclm
from tests.launch.schedulers.test_slurm import NOT_CONFIGURED
from tests.rundir.test_runs import make
from tests.runs import ROOT, until

SMALL = ["budget.steps=5", "optim.warmup=0", "engine.device=cpu", "evaluate={every: 0, batches: 10}"]


def submitting(folder):
    """`hpclm submit WORDS` in an empty folder, on a machine without Slurm and without a site file."""
    (folder / "bin").mkdir()
    for program in ("bash", "tee"):
        (folder / "bin" / program).symlink_to(f"/usr/bin/{program}")
    env = {"PATH": f"{folder}/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    here = folder / "here"
    here.mkdir()

    def call(*words, check=None, **more):
        return hpclm("submit", *words, check=check, cwd=here, env={**env, **more})

    call.here = here
    return call


@pytest.fixture
def submit(tmp_path):
    return submitting(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The same where a toy run has been submitted; and how that ended."""
    submit = submitting(tmp_path_factory.mktemp("trained"))
    return submit, submit("--cluster", "auto", *SMALL, check=0)


def test_a_dry_run_prints_a_script_and_writes_nothing(submit):
    done = submit("--nodes", 2, "--gpus", 1, "--time", "1:00:00", "--dry-run", *SMALL, check=0)
    assert done.stdout.startswith("#!/bin/bash\n") and done.stdout.splitlines()[-1].startswith("exec ")
    for option in ("nodes=2", "ntasks-per-node=1", "time=1:00:00"):
        assert f"#SBATCH --{option}\n" in done.stdout
    assert f"-m hpclm.launch.job {submit.here}/runs/debug/config.yaml\n" in done.stdout
    assert done.stderr == "time limit: 1 h 00 min\n" and list(submit.here.iterdir()) == []
    assert submit("--time", "24:00", "--dry-run", *SMALL, check=0).stderr == "time limit: 24 min\n"


@pytest.mark.parametrize("nodes", ["2", "4"])
def test_the_job_that_the_readme_submits_may_be_divided_as_it_says(nodes, submit):
    """On two nodes, and resumed on four."""
    readme = (ROOT / "README.md").read_text()
    [words] = [line.split()[3:] for line in readme.splitlines() if line.startswith("python -m hpclm.submit --nodes 2")]
    words = [word.replace("configs/", f"{ROOT}/configs/") for word in words if not word.startswith("data.prefix=")]
    done = submit(*words, "--nodes", nodes, "data.source=synthetic", "--dry-run", check=0)
    assert f"#SBATCH --nodes={nodes}\n" in done.stdout and "#SBATCH --gpus-per-node=8\n" in done.stdout
    assert "hpclm resume gpt2-124m --nodes 4 " in readme


MISTAKES = {
    "--nodes 3 --gpus 8": "16 must be a multiple of batch.micro_size=1 x 24 data-parallel replicas = 24; "
    "batch.global_size=24 fits; this job has "
    "job.nodes=3 x job.gpus=8 = 24 processes",
    "modle.layers=3": "Did you mean 'model.layers'",
    "--nodes two": "job.nodes='two' must be a whole number",
    "--time soon": "job.time='soon' must be minutes, HH:MM:SS or D-HH:MM:SS",
    "--time 2": "job.time=2 must be longer than job.warn_seconds=120: otherwise the warning would come at the start",
    "--mem much": "job.mem='much' must be a number and K, M, G or T",
    "--partition 'a b'": "job.partition='a b' must not have spaces",
    "--account 'a\nb'": "must be one line of text",
    "--job-name 'a\nb'": "must be one line of text",
    "--account ''": "job.options.account is empty; give its value, or leave it out",
    "--sbatch reservation": "job.options.reservation is empty",
    "--sbatch Array=1": "use long names without leading dashes",
    "--sbatch array=1-5": "job.options.array: a run is one job; --sweep submits several runs",
    "--sbatch gpus=4": "set job.gpus, which is per node",
    "job.env.1A=x": "names of variables are letters, digits and _",
    "job.env.SLURM_PROCID=1": "is set by the shell or the launcher",
    "job.env.WANDB_API_KEY=abcdefgh": "contains a secret",
    "'job.env={A: [b]}'": "job.env.A must be text",
    "data.source=indexed data.prefix=/none/of_this": "/none/of_this",
    "data.source=indexed": "data.prefix is not set",
    "out=s3://bucket/run": "out=s3://bucket/run: this is a URL, but only files of this machine are read and written",
    "data.source=indexed data.blend=[s3://a/b]": "data.blend=s3://a/b: this is a URL",
    "job.container=x.sif job.mounts=[] kill_switch=file:///a/b": "kill_switch=file:///a/b: this is a URL, but only files of this "
    "machine are read and written; write /a/b",
    "out=/dev/null/x": "run directory /dev/null/x: Not a directory",
    """job.setup="['if true']\"""": "bash cannot read the script",
    "--exclude-bad /none": "/none is not a run directory",
    "--sweep optim.lr": "is not key=a,b,c",
    "--sweep optim.lr=1,,2": "is not key=a,b,c",
    "--sweep optim.lr=1e-3,1e-3": "two runs would be called lr-1e-3",
    "job.cluster=nowhere": "unknown job.cluster 'nowhere'",
}


@pytest.mark.parametrize("words, answer", MISTAKES.items(), ids=[*MISTAKES])
def test_a_mistake_ends_with_64_before_anything_is_written(submit, words, answer):
    done = submit("--dry-run", *SMALL, *shlex.split(words), check=64)
    assert answer in done.stderr, done.stderr
    assert done.stdout == "" and list(submit.here.iterdir()) == []


def test_a_run_that_is_done_is_not_queued_unless_it_has_more_to_do(submit, tmp_path):
    words = [str(ROOT / "configs" / "debug.yaml"), *SMALL, f"out={tmp_path}/run"]
    rows = [{"step": 4, "loss": 1.0}, {"step": 5, "loss": 1.0}]
    make(tmp_path / "run", [{"steps": 5}], rows, ("done", "done at step 5, 80 samples", 0), lock="{}")
    compose.dump(compose.load(words[0], words[1:]), tmp_path / "run" / "config.yaml")
    before = sorted((tmp_path / "run").rglob("*"))
    said = submit("--dry-run", *words, check=64).stderr
    assert f"{tmp_path}/run is done: done at step 5, 80 samples; extend it" in said
    assert sorted((tmp_path / "run").rglob("*")) == before
    submit("--dry-run", *words, "budget.steps=6", check=0)
    make(tmp_path / "run", [{"steps": 5}], rows[:1], ("stopped", "stopped at step 4 (stop_at)", 0, True), lock="{}")
    compose.dump(compose.load(words[0], [*words[1:], "stop_at=4"]), tmp_path / "run" / "config.yaml")
    assert "is done: stopped at step 4 (stop_at)" in submit("--dry-run", *words, "stop_at=4", check=64).stderr
    submit("--dry-run", *words, check=0)


def test_slurm_without_a_cluster_still_prints_the_script(submit, tmp_path):
    """The words are those of Slurm's own sbatch, which here would find any cluster that other tests have started."""
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text(f"#!/bin/bash\nprintf %s '{NOT_CONFIGURED}' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    done = submit("--dry-run", *SMALL, check=0)
    assert done.stdout.startswith("#!/bin/bash\n") and "no cluster is configured" in done.stderr
    assert not list(submit.here.iterdir())


def test_a_toy_run_that_is_done_leaves_its_directory_and_the_next_has_one_of_its_own(trained):
    submit, _ = trained
    folder = submit.here / "runs"
    submit("--cluster", "local", *SMALL, check=0)
    for name in ("debug", "debug-2"):
        assert (folder / name / "checkpoints" / "step-00000005").is_dir()
    script = submit("--dry-run", *SMALL, check=0).stdout
    assert f"-m hpclm.launch.job {folder}/debug-3/config.yaml\n" in script
    assert f"{folder}/debug is done" in submit("--dry-run", *SMALL, "out=runs/debug", check=64).stderr
    for other in ("budget.steps=3", "budget.steps=9"):
        assert (
            f"-m hpclm.launch.job {folder}/debug-3/config.yaml\n" in submit("--dry-run", *SMALL, other, check=0).stdout
        )
    longer = submit("--dry-run", *SMALL, "out=runs/debug", "budget.steps=9", check=0)  # continues the first
    assert f"-m hpclm.launch.job {folder}/debug/config.yaml\n" in longer.stdout
    assert (
        "debug trained on" in longer.stderr
        and "will continue in a Slurm job; to train on this machine" in longer.stderr
    )


def test_wrong_options_end_with_2(submit):
    assert "unrecognized arguments: --node" in submit("--node", "3", check=2).stderr


def test_without_slurm_a_job_cannot_be_submitted_and_the_answer_says_what_can(submit):
    done = submit("--cluster", "slurm", *SMALL, check=64)
    assert "--cluster local" in done.stderr


def test_a_run_directory_that_others_can_write_is_refused(submit, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    for mode in (0o770, 0o707, 0o1777):
        shared.chmod(mode)
        assert "can be written by others" in submit("--dry-run", *SMALL, f"out={shared}", check=64).stderr
    shared.chmod(0o755)
    submit("--dry-run", *SMALL, f"out={shared}", check=0)
    (tmp_path / "file").touch()
    assert "is a file" in submit("--dry-run", *SMALL, f"out={tmp_path}/file", check=64).stderr


def test_every_option_is_a_setting_and_goes_before_it(submit):
    words = "-N 1 --gpus 2 -p long -A me -q high -C a100&ib -x n1 -w n2 --mem 4G -c 3 -d afterok:7 job.nodes=9"
    more = ["-J", "my:job", "--sbatch", "mail-type=END", "--sbatch", "exclusive"]
    script = submit("--dry-run", *SMALL, *words.split(), *more, check=0).stdout
    lines = (
        "job-name=my:job nodes=1 ntasks-per-node=2 cpus-per-task=3 partition=long account=me qos=high "
        'constraint="a100&ib" exclude=n1 nodelist=n2 mem=4G dependency=afterok:7 mail-type=END exclusive requeue '
        "open-mode=append signal=USR2@120"
    )
    directives = {word for line in script.splitlines() if line.startswith("#SBATCH ") for word in shlex.split(line[8:])}
    for line in shlex.split(lines):
        assert f"--{line}" in directives, line


def test_a_site_file_lies_below_the_settings_file_and_mappings_are_joined(submit, tmp_path):
    folder = tmp_path / ".config" / "hpclm"
    folder.mkdir(parents=True)
    (folder / "site.yaml").write_text(
        "job:\n  partition: gpu\n  account: lab\n  time: 10:00:00\n  env: {A: site, B: '${HOME}'}\n  options: {reservation: r}\n"
        "  setup: ['export LIB=${HOME:-/x}']\ncluster: {interface: ib0}\n"
    )
    mine = submit.here / "mine.yaml"
    mine.write_text((ROOT / "configs/debug.yaml").read_text() + "job: {account: me, env: {A: file, C: file}}\n")
    script = submit(mine, "job.env.C=typed words", "--dry-run", *SMALL, check=0).stdout
    for line in (
        "#SBATCH --partition=gpu",
        "#SBATCH --account=me",
        "#SBATCH --reservation=r",
        "#SBATCH --time=10:00:00",
    ):
        assert line + "\n" in script
    assert "export A=file\n" in script and "export C='typed words'\n" in script
    assert "export B='${HOME}'\n" in script and "\nexport LIB=${HOME:-/x}\n" in script
    bare = submit(mine, "--dry-run", *SMALL, "job.env={}", check=0, HPCLM_SITE="").stdout
    assert "partition" not in bare and "export A=" not in bare
    (folder / "site.yaml").write_text("model: {layers: 3}\n")
    wrong = submit("--dry-run", check=64)
    assert f"model.layers cannot be set in a site file, only job and cluster ({folder}/site.yaml:1)" in wrong.stderr
    assert "site file /none does not exist" in submit("--dry-run", check=64, HPCLM_SITE="/none").stderr
    shown = hpclm("config", "debug", cwd=submit.here, env={**os.environ, "HPCLM_SITE": ""}, check=0).stdout
    assert "partition: null" in shown
    (folder / "site.yaml").write_text("job: {partition: gpu}\n")
    shown = hpclm(
        "config", "debug", cwd=submit.here, env={**os.environ, "HPCLM_SITE": str(folder / "site.yaml")}, check=0
    ).stdout
    assert "partition: gpu" in shown


def test_the_site_file_is_found_where_it_is_said_to_be(tmp_path):
    usual = tmp_path / ".config/hpclm/site.yaml"
    usual.parent.mkdir(parents=True)
    assert environment.site_file({"HOME": str(tmp_path)}) is None
    usual.touch()
    assert environment.site_file({"HOME": str(tmp_path)}) == usual
    assert environment.site_file({"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "other")}) is None
    assert environment.site_file({"HOME": "/nonexistent", "XDG_CONFIG_HOME": str(tmp_path / ".config")}) == usual
    assert str(environment.site_file({"HOME": str(tmp_path), "HPCLM_SITE": "/a"})) == "/a"
    assert environment.site_file({"HOME": str(tmp_path), "HPCLM_SITE": ""}) is None
    assert environment.site_file({}) is None


def test_a_resolved_file_is_not_resolved_again(tmp_path):
    place = tmp_path / "site.yaml"
    place.write_text("job: {env: {A: site}, partition: gpu}\n")
    first = compose.load("debug", ["job.env={}", "job.partition=null"], place)
    assert first.job.env == {} and first.job.partition is None
    compose.dump(first, tmp_path / "config.yaml")
    assert compose.load(tmp_path / "config.yaml", [], place) == first


@pytest.mark.parametrize(
    "value", ["${HOME}", "${", "\\${x}", "a\\\\${b}\\", "$(x) `y` \"z\" 'w'", "a\nb", "10:00:00", "0123", "yes", "é"]
)
def test_what_a_shell_reads_is_kept_as_it_is_written(value, tmp_path):
    run = compose.load("debug", [f"job.env.A={value}"])
    assert run.job.env == {"A": value}
    compose.dump(run, tmp_path / "config.yaml")
    assert compose.load(tmp_path / "config.yaml") == run


def test_a_time_in_a_settings_file_is_not_a_number_to_the_base_of_60(tmp_path):
    (tmp_path / "a.yaml").write_text("job: {time: 10:00:00, account: 0123}\n")
    job = compose.load(tmp_path / "a.yaml").job
    assert (job.time, job.options) == ("10:00:00", {"account": "0123"})
    (tmp_path / "a.yaml").write_text("job: {partition: no}\n")
    assert compose.load(tmp_path / "a.yaml").job.partition == "no"


def test_a_sweep_is_a_run_for_each_combination(submit):
    found = arguments.variants(["optim.lr=1e-3,3e-3", "seed=1,2"])
    assert [each.suffix for each in found] == [
        "-lr-1e-3-seed-1",
        "-lr-1e-3-seed-2",
        "-lr-3e-3-seed-1",
        "-lr-3e-3-seed-2",
    ]
    assert found[3].overrides == ("optim.lr=3e-3", "seed=2")
    assert arguments.variants([]) == [arguments.Variant()]
    assert [each.overrides for each in arguments.variants(["optim.betas=[0.9,0.95],[0.9,0.99]"])] == [
        ("optim.betas=[0.9,0.95]",),
        ("optim.betas=[0.9,0.99]",),
    ]
    assert [each.suffix for each in arguments.variants(["out=a,b"])] == ["", ""]
    with pytest.raises(ConfigError, match="two runs would be called"):
        arguments.variants(["model.norm=a/b,a_b"])
    done = submit("--dry-run", *SMALL, "--array", "optim.lr=1e-3,3e-3", check=0)
    assert done.stdout.count("#!/bin/bash") == 2
    assert f"-m hpclm.launch.job {submit.here}/runs/debug-lr-3e-3/config.yaml\n" in done.stdout


def test_bad_nodes_of_a_run_are_added_to_those_that_are_excluded(submit):
    run = submit.here / "old"
    run.mkdir()
    note(run, "preflight", bad=["node3", "node5"])
    assert report.bad_nodes([str(run), str(run)]) == ["node3", "node5"]
    script = submit("--dry-run", *SMALL, "--exclude", "node1", "--exclude-bad", "old", check=0).stdout
    assert "#SBATCH --exclude=node1,node3,node5\n" in script
    note(run, "preflight", bad=["x; rm"])
    with pytest.raises(ConfigError, match="which is not a node name"):
        report.bad_nodes([str(run)])


def test_of_two_launches_into_one_directory_the_second_changes_nothing(submit):
    out = submit.here / "run"
    words = [*map(str, SMALL), "budget.steps=100000", f"out={out}"]
    command = [sys.executable, "-m", "hpclm", "submit", "--cluster", "local", *words]
    first = subprocess.Popen(
        [*command, "optim.lr=1e-3"], cwd=submit.here, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until((out / "config.yaml").exists)
        before = (out / "config.yaml").read_text()
        said = submit("--cluster", "local", *words, "optim.lr=2e-3", check=75).stderr
        holder = f"process {first.pid} on {socket.gethostname()}"
        assert f"error: {out} is in use by another run ({holder}); wait for it, end it (hpclm cancel {out}), or" in said
        assert (out / "config.yaml").read_text() == before and "lr: 0.001\n" in before
    finally:
        first.terminate()
        first.wait()


def test_variables_of_the_surrounding_job_are_kept_from_a_new_one():
    names = "SLURM_JOB_ID SLURM_NTASKS SBATCH_ACCOUNT SLURM_CONF PMI_RANK PMIX_RANK HOME OMPI_COMM_WORLD_RANK"
    job = dict.fromkeys([*names.split(), "OMPI_MCA_btl", "CUDA_VISIBLE_DEVICES", "RANK", "HPCLM_SITE"], "1")
    assert set(environment.of_a_job([], job)) == {"SLURM_CONF", "HOME", "HPCLM_SITE"}
    shell = "SBATCH_ACCOUNT SBATCH_PARTITION SBATCH_TIMELIMIT OMPI_MCA_btl CUDA_VISIBLE_DEVICES"
    kept = environment.of_a_job(["partition"], dict.fromkeys(shell.split(), "x"))
    assert list(kept) == ["SBATCH_ACCOUNT", "OMPI_MCA_btl", "CUDA_VISIBLE_DEVICES"]


def test_submit_does_not_load_torch_for_a_dry_run(tmp_path):
    code = (
        "import sys; from hpclm import cli; code = cli.main(['submit', '--dry-run', 'engine.device=cpu', 'out=%s']); "
        "print({'torch'} & set(sys.modules), file=sys.stderr)" % (tmp_path / "x")
    )
    env = {**os.environ, "PATH": "/nonexistent:/bin", "HPCLM_SITE": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.stderr.strip().splitlines()[-1] == "set()", done.stderr


def test_without_slurm_the_run_trains_here_in_a_directory_of_its_owner_alone(trained):
    submit, done = trained
    out = submit.here / "runs/debug"
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    assert compose.load(out / "config.yaml").budget.steps == 5
    [log] = (out / "logs").glob("job-local-*.log")
    for text in (done.stdout + done.stderr, log.read_text()):
        assert (
            "done at step 5" in text
            and "engine.device=cpu: job.nodes=1 x job.gpus=1 = 1 process of this machine" in text
        )
    assert of_kind(out, "submitted")[0]["command"][:2] == ["hpclm", "submit"]

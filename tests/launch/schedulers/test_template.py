"""The script of a Slurm job, as it is written for a person and for a run."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hpclm import config
from hpclm.base import shipped
from hpclm.base.errors import ConfigError
from hpclm.base.paths import expanded
from hpclm.config import JobConfig
from hpclm.launch import container, setup
from hpclm.launch.schedulers import slurm_script
from hpclm.launch.schedulers.slurm_script import name, options_of
from tests.runs import PATIENCE

SHIPPED = sorted(shipped.folder("slurm").glob("*.sbatch"))


def run(*words):
    return config.load("debug", list(words))


def script(config, path):
    """The text of a job's script."""
    return slurm_script.render(config, path, list(setup.lines(config, path)), setup.supervisor(config.job, path)).text


def rendered(*words, path="/scratch/run/config.yaml"):
    return script(run(*words), Path(path))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_a_shipped_script_is_short_and_runs_the_supervisor_with_what_survives_preemption(path):
    text = path.read_text()
    assert subprocess.run(["bash", "-n", path], capture_output=True).stderr == b""
    assert len(text.splitlines()) <= 25 and max(map(len, text.splitlines())) <= 100
    for needed in ("--requeue", "--propagate=NONE", "--open-mode=append", "--ntasks-per-node=", "USR2@120"):
        assert f"{needed}" in text
    assert text.splitlines()[-1] == f'exec python -P -u -m hpclm.launch.job "$@" job.template={path.stem}'
    assert ("--signal=B:" in text) == (path.stem == "mpirun")


def test_the_shipped_scripts_differ_in_the_launcher_only():
    texts = {path.stem: path.read_text() for path in SHIPPED}
    assert sorted(texts) == ["mpirun", "srun", "torchrun"]
    commands = {
        re.sub(stem, "LAUNCHER", "".join(line for line in text.splitlines() if line[:1] != "#"))
        for stem, text in texts.items()
    }
    assert len(commands) == 1


@pytest.mark.parametrize("line, code", [("false", 64), ("true", 0), ("false; true", 0)])
def test_a_set_up_whose_last_line_fails_ends_the_job_before_any_rank_starts(line, code, tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\necho started\n")
    (tmp_path / "python").chmod(0o755)
    for text in (
        (shipped.folder("slurm") / "srun.sbatch").read_text().replace("# Your set-up", f"{line}\n# Your set-up"),
        rendered(f"job.setup=['{line}']").replace(shlex.quote(sys.executable), "python"),
    ):
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        text = re.sub("^export PATH.*$", "", text, flags=re.MULTILINE)
        done = subprocess.run(["bash", "-s", "x"], input=text, env=env, capture_output=True, text=True)
        assert (done.returncode, "started" in done.stdout) == (code, not code), done.stderr


def test_options_of_the_job_are_directives_and_a_job_without_requeue_says_so():
    made = rendered(
        "job.time=2:00:00", "job.warn_seconds=30", "job.requeue=false", "job.options.reservation=mine"
    ).splitlines()
    for line in ("--time=2:00:00", "--reservation=mine", "--signal=USR2@30", "--no-requeue", "--propagate=NONE"):
        assert f"#SBATCH {line}" in made
    assert "#SBATCH --requeue" not in made
    assert "#SBATCH --signal=B:USR2@120" in rendered("job.template=mpirun")


@pytest.mark.parametrize("time", ["2", "1:59", "0:2:0", "0-0:2", "0-0:1:30"])
def test_a_time_limit_that_the_warning_takes_up_whole_is_refused(time):
    with pytest.raises(ConfigError, match=f"job.time={time} must be longer than job.warn_seconds=120"):
        run(f"job.time={time}")
    for longer in ("3", "2:01", "0:2:1", "0-1", "1-0", "0-0:2:1", "0", "unlimited"):
        assert run(f"job.time={longer}").job.time == longer


@pytest.mark.parametrize("line", ["if true", "echo 'x", "cat <<END", "f() {"])
def test_set_up_that_would_swallow_the_rest_of_the_script_is_refused(line):
    with pytest.raises(ConfigError, match=r"bash cannot read the script with job\.setup"):
        rendered(f"job.setup=[{line!r}]")


def test_gpus_are_asked_for_unless_the_cpu_trains_or_an_option_names_them():
    assert "#SBATCH --gpus-per-node=2" in rendered("job.gpus=2")
    assert "#SBATCH --gpus-per-node" not in rendered("job.gpus=2", "engine.device=cpu")
    named = rendered("job.gpus=2", "job.options.gres=gpu:a100:2")
    assert "#SBATCH --gres=gpu:a100:2" in named and "#SBATCH --gpus-per-node" not in named


@pytest.mark.parametrize(
    "option, gpus",
    [
        ("gres=gpu:4", 4),
        ("gres=gpu", 1),
        ("gres=gpu:a100", 1),
        ("gres=gres/gpu:a100:2", 2),
        ("gres=gpu:a100:2,gpu:v100:1,lscratch:100", 3),
        ("gpus-per-node=a100:4", 4),
        ("gpus-per-node=a100:1,v100:1", 2),
        ("gres=gpu:1g.10gb:3", 3),
    ],
)
def test_gpus_that_an_option_names_are_as_many_as_processes(option, gpus):
    assert "#SBATCH --gpus-per-node=8" not in rendered(f"job.gpus={gpus}", f"job.options.{option}")
    with pytest.raises(ConfigError, match=f"asks for {gpus} GPUs of each node, but job.gpus=8.*set job.gpus={gpus}"):
        rendered("job.gpus=8", f"job.options.{option}")


def test_resources_other_than_gpus_leave_a_job_its_gpus():
    assert "#SBATCH --gpus-per-node=2\n" in rendered("job.gpus=2", "job.options.gres=lscratch:100")
    for option in ("gres=none", "gres=mps:50", "gres=shard:1", "gpus-per-socket=1"):
        assert "#SBATCH --gpus-per-node" not in rendered("job.gpus=2", f"job.options.{option}")


def test_a_job_has_the_name_that_was_given_and_else_one_of_safe_letters_from_its_run_directory():
    """Some clusters refuse a job whose name has another form, such as project-subproject:*."""
    assert "#SBATCH --job-name=project-sub:test1\n" in rendered("job.options.job-name=project-sub:test1")
    assert "#SBATCH --job-name='a \"b\" %j'\n" in rendered('job.options.job-name=a "b" %j')
    assert "#SBATCH --job-name=a_b\n" in rendered(path="/scratch/a:b/config.yaml")


def test_a_flag_has_no_value_and_a_name_is_made_from_safe_letters():
    assert "#SBATCH --exclusive\n" in rendered("job.options={exclusive: ''}")
    assert name("a b/$(x)\n`é`") == "a_b_x_é_"
    assert name("--x") == "x" and name("...") == "..." and name("医疗-1") == "医疗-1"


def test_environments_are_entered_in_place_of_the_python_of_the_submitter(tmp_path):
    assert f"exec {shlex.quote(sys.executable)} -P -u -m hpclm.launch.job " in rendered()
    there = rendered(f"job.venv={tmp_path}/v e", "job.modules=[cuda/12, gcc]").splitlines()
    assert f". '{tmp_path}/v e/bin/activate' || exit 64" in there and any(
        line.startswith("exec python -P ") for line in there
    )
    assert "module load cuda/12 gcc || exit 64" in there
    assert "conda activate lab || exit 64" in rendered("job.conda=lab")


CONTAINERS = {
    "apptainer": ["apptainer", "exec", "--nv", "--pwd", "HERE", "--bind", "/data:/data", "--bind", "/o:/i"],
    "pyxis": ["--container-image=my image.sif", "--container-mounts=/data:/data,/o:/i,HERE:HERE,OUT:OUT,/sets:/sets"],
    "docker": ["bash", "-c"],
}


def inside(*words):
    """The words that start a command in the container of a run with these settings."""
    return container.words(run(*words))


@pytest.mark.parametrize("runtime, begin", CONTAINERS.items(), ids=CONTAINERS)
def test_a_container_sees_the_run_the_data_and_what_it_is_given(runtime, begin):
    words = ["job.container=my image.sif", f"job.runtime={runtime}", "job.mounts=[/data, /o:/i]", "job.env.A=1"]
    found = inside(*words, "out=/scratch/run", "data={source: indexed, prefix: /sets/x}")
    begin = [word.replace("HERE", str(Path.cwd())).replace("OUT", "/scratch/run") for word in begin]
    assert found[: len(begin)] == begin
    assert any("/sets:/sets" in word for word in found)
    with pytest.raises(ConfigError, match="has a colon or a comma"):
        inside(*words, "out=/scratch/a:b")


def test_docker_runs_the_command_whatever_the_images_entry_point_with_a_home_that_can_be_written():
    words = inside("job.container=hpclm", "job.runtime=docker", "job.env.HOME=/mine")
    options = words[words.index("docker") : words.index("hpclm")]
    assert "--entrypoint=" in options
    homes = [word for word in options if word.startswith("--env=HOME")]
    assert homes == ["--env=HOME=/tmp", "--env=HOME"]  # docker takes the last


CANARY = "canary"
NASTY = [
    f"$(touch {CANARY})",
    f"`touch {CANARY}`",
    f"; touch {CANARY};",
    f"\ntouch {CANARY}\n",
    f"'; touch {CANARY}; '",
    f'"; touch {CANARY}; "',
    f"\\'; touch {CANARY} #",
    f"\n#SBATCH --wrap='touch {CANARY}'\n",
    f"${{x:=$(touch {CANARY})}}",
    "-n",
    "--",
    "-rf /",
    "*",
    "~",
    "a b",
    "\t",
    "\r",
    "\x00",
    "\x1b[2J",
    "\u2028",
    "\ud800",
    "é漢字",
    "\\",
    "%j %%",
    "!!",
    "#x",
    "&",
    "|",
    "<x",
    ">x",
    "$HOME",
    "''",
    '""',
    "\\\n",
]
texts = st.lists(st.one_of(st.sampled_from(NASTY), st.text(max_size=5)), min_size=1, max_size=4).map("".join)
PRINTABLE = [text for text in NASTY if text.isprintable()]
lines = st.lists(
    st.one_of(
        st.sampled_from(PRINTABLE),
        st.text(st.characters(codec="ascii", min_codepoint=32, max_codepoint=126), max_size=5),
    )
)
lines = lines.map("".join).map(lambda text: f"x{text}"[:60].strip())
words = lines.map(lambda text: "".join(text.split()))
paths = lines.map(lambda text: text.replace("\\", "").replace("/", "_"))
bytes_ = st.lists(
    st.one_of(st.sampled_from([text for text in NASTY if text not in ("\x00", "\ud800")]), lines), min_size=1
).map("".join)


def mostly(usual):
    """Nineteen of ``usual``, one of anything."""
    return st.integers(0, 19).flatmap(lambda n: usual if n else texts)


NAMES = st.from_regex(r"[A-Z_]{1,5}", fullmatch=True).map(lambda name: f"X_{name}")
FREE = ["job.venv", "job.conda", "job.container", "name"]
IN_ONE_WORD = ["job.partition", "job.exclude", "job.nodelist"]
ANY = ["job.time", "job.mem", *FREE, *IN_ONE_WORD]
SAID = st.one_of(
    st.just({}),
    st.dictionaries(st.sampled_from(FREE), mostly(lines), max_size=1),
    st.dictionaries(st.sampled_from(IN_ONE_WORD), mostly(words), max_size=2),
    st.dictionaries(st.sampled_from(ANY), texts, max_size=1),
)


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """A folder with a stand-in for Python that notes its arguments and variables, each ended by NUL."""
    folder = tmp_path_factory.mktemp("stage")
    (folder / "bin").mkdir()
    for program in ("python", "module", "conda"):
        text = "#!/bin/bash\n"
        if program == "python":
            text += 'printf "%s\\0" "$@" > "$NOTES/argv"\nenv -0 > "$NOTES/env"\n'
        (folder / "bin" / program).write_text(text)
        (folder / "bin" / program).chmod(0o755)
    return folder


EXAMPLES = int(os.environ.get("HPCLM_FUZZ", 40))
seen = {"made": 0, "refused": 0}


@pytest.mark.slow
@settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(
    fields=SAID,
    env=st.dictionaries(mostly(NAMES), mostly(bytes_), max_size=3),
    option=st.dictionaries(
        st.sampled_from(["comment", "job-name", "qos", "constraint", "gres"]), mostly(lines), max_size=1
    ),
    modules=st.lists(mostly(words), max_size=1),
    folder=mostly(paths),
)
@example({}, {"X_A": "a\nb'c\"d$(touch canary)"}, {"comment": "x y"}, [], "a 'b\" $(touch canary)")
def test_nothing_that_a_person_can_say_escapes_into_the_script(stage, fields, env, option, modules, folder):
    said = {key: value for key, value in fields.items() if key != "name"}
    path = Path("/scratch") / folder.replace("/", "_") / "config.yaml"
    try:
        job = JobConfig(
            **{key.removeprefix("job."): value for key, value in said.items()}, env=env, options=option, modules=modules
        )
        base = run("name=x")
        made = script(
            type(base)(**(vars(base) | {"job": job, "name": fields.get("name", "x"), "out": str(path.parent)})), path
        )
    except ConfigError:
        seen["refused"] += 1
        return
    seen["made"] += 1
    head, _, rest = made.partition("# setup\n")
    assert all(line.startswith("#") or not line for line in head.splitlines()) and rest.startswith(setup.TRAP), head
    asked = [line for line in head.splitlines() if line.startswith("#SBATCH")]
    assert len(asked) == len(options_of(base_of(job, base), path.parent))
    for note in ("argv", "env"):
        (stage / note).unlink(missing_ok=True)
    done = subprocess.run(
        ["bash"],
        input=made.replace(f"exec {sys.executable} ", "exec python ")
        .replace(f"export PATH={Path(sys.executable).parent}:", "export PATH=")
        .encode(),
        cwd=stage,
        capture_output=True,
        timeout=PATIENCE,
        env={
            "PATH": f"{stage}/bin:/usr/bin:/bin",
            "NOTES": str(stage),
        },
    )
    assert not (stage / CANARY).exists(), made
    if job.venv:  # there is none of that name: the script ends, as it should
        assert done.returncode == 64
        return
    argv = (stage / "argv").read_bytes().decode().split("\0")[:-1]
    assert expanded(argv[-1]) == str(path), made
    assert argv[:-1] == ["-P", "-u", "-m", "hpclm.launch.job"]
    variables = dict(line.partition("=")[::2] for line in (stage / "env").read_bytes().decode().split("\0"))
    for variable, value in env.items():
        assert variables[variable] == value


def base_of(job, base):
    return type(base)(**(vars(base) | {"job": job}))


def test_the_fuzz_has_seen_scripts_and_refusals():
    if seen["made"] + seen["refused"]:
        assert seen["made"] > EXAMPLES / 5 and seen["refused"] > EXAMPLES / 20, seen


def test_no_container_shows_the_ranks_the_users_site_unless_it_is_asked_for_or_hpclm_is_there(tmp_path):
    assert container.environment_of_ranks({})["PYTHONNOUSERSITE"] == "1"
    (tmp_path / ".local/lib/python3.12/site-packages/hpclm-0.1.0.dist-info").mkdir(parents=True)
    assert "PYTHONNOUSERSITE" not in container.environment_of_ranks({"HOME": str(tmp_path)})
    assert container.environment_of_ranks({"PYTHONNOUSERSITE": ""})["PYTHONNOUSERSITE"] == ""
    assert "--container-env=PYTHONNOUSERSITE" in inside("job.container=an.sif", "job.runtime=pyxis")


def test_ranks_in_a_container_run_its_hpclm_except_in_the_folder_of_the_clone(tmp_path, monkeypatch):
    clone = str(shipped.PACKAGE.parent)
    env = {"PYTHONPATH": f"{clone}:/mine"}
    monkeypatch.chdir(clone)
    assert container.environment_of_ranks(env)["PYTHONPATH"] == f"{clone}:/mine"
    monkeypatch.chdir(tmp_path)
    assert container.environment_of_ranks(env)["PYTHONPATH"] == "/mine"

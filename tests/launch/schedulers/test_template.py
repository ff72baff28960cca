import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hpclm import config, shipped
from hpclm.config import JobConfig
from hpclm.config.job import TEMPLATES
from hpclm.errors import ConfigError
from hpclm.launch import setup
from hpclm.launch.schedulers import slurm_script as template
from hpclm.launch.schedulers.slurm_script import directive, name, options_of
from hpclm.node import python
from hpclm.paths import expanded
from tests.runs import PATIENCE

SHIPPED = sorted(shipped.folder("slurm").glob("*.sbatch"))


def run(*words):
    return config.load("debug", list(words))


def script(config, path, folders=()):
    return template.render(config, path, list(setup.lines(config, path, folders)))


def rendered(*words, path="/scratch/run/config.yaml"):
    return script(run(*words), Path(path))


def test_the_templates_are_those_that_the_settings_know_and_short_enough_to_read():
    assert sorted(path.stem for path in SHIPPED) == sorted(TEMPLATES)
    for path in SHIPPED:
        assert len(path.read_text().splitlines()) <= 54, path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_a_template_is_a_whole_script_and_carries_what_a_job_that_survives_needs(path):
    text = path.read_text()
    assert subprocess.run(["bash", "-n", path], capture_output=True).stderr == b""
    assert os.access(path, os.R_OK)
    for needed in (
        "#SBATCH --requeue",
        "#SBATCH --propagate=NONE",
        "#SBATCH --open-mode=append",
        "#SBATCH --ntasks-per-node=",
        "USR2@120",
        "in 85 | ",
    ):
        assert needed in text
    if "srun " in text:
        for needed in (
            "--export=ALL",
            "--kill-on-bad-exit=1",
            "--nodes=",
            "--ntasks=",
            "--ntasks-per-node=",
            "--cpus-per-task=",
        ):
            assert needed in text


@pytest.mark.parametrize("path", [path for path in SHIPPED if path.stem != "mpirun"], ids=lambda p: p.stem)
def test_a_template_draws_a_secret_for_the_ranks_of_each_start_and_does_not_show_it_even_when_it_is_traced(path):
    [line] = [line for line in path.read_text().splitlines() if "HPCLM_SECRET" in line]
    shown = [
        subprocess.run(["bash", "-xc", f"{line}\nset +x; env"], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    values = [dict(word.partition("=")[::2] for word in done.stdout.splitlines())["HPCLM_SECRET"] for done in shown]
    assert len({*values}) == 2 and all(len(value) == 32 for value in values)
    assert not any(value in done.stderr for value, done in zip(values, shown, strict=True))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_a_submitted_script_is_the_template_but_for_its_options_and_its_set_up(path):
    words = ["job.container=a.sif"] if path.stem == "container" else [f"job.template={path.stem}"]
    made, by_hand = rendered(*words).splitlines(), path.read_text().splitlines()
    mark = next(n for n, line in enumerate(by_hand) if line.startswith(template.MARK))
    assert made[-len(by_hand[mark + 1 :]) :] == by_hand[mark + 1 :]
    assert [line for line in made if line.startswith("# ")][:-1] == [
        line for line in by_hand[:mark] if line[:2] == "# "
    ]


def test_options_of_the_job_replace_those_of_the_template_and_others_stay(tmp_path):
    mine = tmp_path / "my own.sbatch"
    mine.write_text(
        "#!/bin/bash\n#SBATCH --time=1:00\n#SBATCH --reservation=mine\n#SBATCH --signal=B:USR2@5\n# SET-UP\n"
        'srun python -m hpclm.train "$@"\n'
    )
    made = rendered(f"job.template={mine}", "job.time=2:00:00", "job.warn_seconds=30", "job.requeue=false").splitlines()
    assert "#SBATCH --time=2:00:00" in made and "#SBATCH --time=1:00" not in made
    assert "#SBATCH --reservation=mine" in made
    assert "#SBATCH --signal=B:USR2@30" in made
    assert "#SBATCH --no-requeue" in made and "#SBATCH --requeue" not in made
    assert made[-1] == 'srun python -m hpclm.train "$@"'
    silent = rendered(f"job.template={mine}", "job.warn_seconds=0")
    assert "--signal" not in silent and "#SBATCH --time=1:00" in silent


@pytest.mark.parametrize("time", ["2", "1:59", "0:2:0", "0-0:2", "0-0:1:30"])
def test_a_time_limit_that_the_warning_takes_up_whole_is_refused(time):
    with pytest.raises(ConfigError, match=f"job.time={time} must be longer than job.warn_seconds=120"):
        run(f"job.time={time}")
    for longer in ("3", "2:01", "0:2:1", "0-1", "1-0", "0-0:2:1", "0", "unlimited"):
        assert run(f"job.time={longer}").job.time == longer


@pytest.mark.parametrize(
    "text, answer",
    {
        '#!/bin/bash\npython "$@"\n': "it has 0 lines that begin",
        '#!/bin/bash\n# SET-UP\n# SET-UP\npython "$@"\n': "it has 2 lines that begin",
        '#!/bin/bash\n# SET-UP\n#SBATCH -N1\npython "$@"\n': "#SBATCH in line 3 comes after the set-up",
        '#!/bin/bash\n#SBATCH hetjob\n# SET-UP\npython "$@"\n': "it asks for a heterogeneous job",
        "#!/bin/bash\n# SET-UP\npython x\n": 'does not use "$@"',
        '# SET-UP\npython "$@"\n': "its first line must be",
        '#!/bin/bash\r\n# SET-UP\r\npython "$@"\r\n': "Windows line endings",
        '#!/bin/bash\n# SET-UP\npython "$@" \'\n': "bash cannot read the script",
    }.items(),
)
def test_a_template_that_cannot_work_is_refused(text, answer, tmp_path):
    (tmp_path / "t.sbatch").write_bytes(text.encode())
    with pytest.raises(ConfigError) as caught:
        rendered(f"job.template={tmp_path / 't.sbatch'}")
    assert answer in str(caught.value)


ARRAY = {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
@pytest.mark.parametrize("array, name", [({}, "9"), (ARRAY, "9_3")], ids=["job", "task of an array"])
def test_a_job_that_has_saved_requeues_itself_alone(array, name, path, tmp_path):
    for program in ("srun", "mpirun", "scontrol"):
        act = f"echo $* >> {tmp_path}/asked; echo JobState=RUNNING Requeue=1" if program == "scontrol" else "exit 85"
        (tmp_path / program).write_text(f"#!/bin/bash\n{act}\n")
        (tmp_path / program).chmod(0o755)
    env = {"SLURM_JOB_ID": "9", "SLURM_JOB_NUM_NODES": "1", "PATH": f"{tmp_path}:/usr/bin:/bin", "image": "x", **array}
    done = subprocess.run(["bash", path], env=env, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 85, done.stderr
    assert (tmp_path / "asked").read_text() == f"show job --oneliner {name}\nrequeue {name}\n"


def test_steps_of_a_template_of_ones_own_get_the_script_s_environment_unless_its_set_up_says_otherwise(tmp_path):
    mine = tmp_path / "my.sbatch"
    mine.write_text('#!/bin/bash\n# SET-UP\nsrun python -m hpclm.train "$@"\n')
    lines = rendered(f"job.template={mine}", "job.setup=['export SLURM_EXPORT_ENV=NONE']").splitlines()
    assert lines.index("export SLURM_EXPORT_ENV=ALL SRUN_EXPORT_ENV=ALL") < lines.index("export SLURM_EXPORT_ENV=NONE")


def test_a_template_that_is_not_there_is_said_to_be_so(tmp_path):
    with pytest.raises(ConfigError, match=r"job.template .*none.sbatch does not exist"):
        rendered(f"job.template={tmp_path}/none.sbatch")
    with pytest.raises(ConfigError, match=r"must be one of srun, .* Did you mean 'torchrun'"):
        run("job.template=torchrn")


@pytest.mark.parametrize("line", ["if true", "echo 'x", "cat <<END", "f() {"])
def test_set_up_that_would_swallow_the_rest_of_the_script_is_refused(line):
    with pytest.raises(ConfigError, match="bash cannot read the script made from"):
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
    assert '#SBATCH --job-name="a \\"b\\" %j"\n' in rendered('job.options.job-name=a "b" %j')
    assert "#SBATCH --job-name=a_b\n" in rendered(path="/scratch/a:b/config.yaml")


def test_a_flag_has_no_value_and_a_name_is_made_from_safe_letters():
    assert directive("exclusive", "") == "#SBATCH --exclusive"
    assert name("a b/$(x)\n`é`") == "a_b_x_é_"
    assert name("--x") == "x" and name("...") == "..." and name("医疗-1") == "医疗-1"


def test_environments_are_entered_in_place_of_the_python_of_the_submitter(tmp_path):
    assert f"python={shlex.quote(sys.executable)}\n" in rendered()
    there = rendered(f"job.venv={tmp_path}/v e", "job.modules=[cuda/12, gcc]").splitlines()
    assert f". '{tmp_path}/v e/bin/activate' || exit 64" in there and "python=python" in there
    assert "module load cuda/12 gcc || exit 64" in there
    assert "conda activate lab || exit 64" in rendered("job.conda=lab")


CONTAINERS = {
    "apptainer": ["apptainer", "exec", "--nv", "--pwd", "HERE", "--bind", "/data:/data", "--bind", "/o:/i"],
    "pyxis": ["--container-image=my image.sif", "--container-mounts=/data:/data,/o:/i,HERE:HERE,OUT:OUT,/sets:/sets"],
    "docker": ["bash", "-c"],
}


def inside(*words, folders=()):
    """The words that start a command in the container of a run with these settings."""
    text = script(run(*words), Path("/scratch/run/config.yaml"), folders)
    line = next(line for line in text.splitlines() if line.startswith("inside=("))
    return shlex.split(line.removeprefix("inside=(").removesuffix(")"))


@pytest.mark.parametrize("runtime, begin", CONTAINERS.items(), ids=CONTAINERS)
def test_a_container_sees_the_run_the_data_and_what_it_is_given(runtime, begin):
    words = ["job.container=my image.sif", f"job.runtime={runtime}", "job.mounts=[/data, /o:/i]", "job.env.A=1"]
    found = inside(*words, folders=[Path("/sets")])
    begin = [word.replace("HERE", str(Path.cwd())).replace("OUT", "/scratch/run") for word in begin]
    assert found[: len(begin)] == begin
    assert any("/sets:/sets" in word for word in found)
    with pytest.raises(ConfigError, match="has a colon or a comma"):
        script(run(*words), Path("/scratch/a:b/config.yaml"))


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
ANY = ["job.template", "job.time", "job.mem", *FREE, *IN_ONE_WORD]
SAID = st.one_of(
    st.just({}),
    st.dictionaries(st.sampled_from(FREE), mostly(lines), max_size=1),
    st.dictionaries(st.sampled_from(IN_ONE_WORD), mostly(words), max_size=2),
    st.dictionaries(st.sampled_from(ANY), texts, max_size=1),
)


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """A folder with a stand-in for srun that notes its arguments and variables, each ended by NUL."""
    folder = tmp_path_factory.mktemp("stage")
    (folder / "bin").mkdir()
    for program in ("srun", "module", "conda"):
        text = (
            '#!/bin/bash\nprintf "%s\\0" "$@" > "$NOTES/argv"\nenv -0 > "$NOTES/env"\n'
            if program == "srun"
            else "#!/bin/bash\n"
        )
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
    head = made[: made.index(template.MARK)].splitlines()
    *comments, trap = head
    assert all(line.startswith("#") for line in comments) and trap.startswith("trap warned=yes"), head
    asked = [line for line in head if line.startswith("#SBATCH") and line != "#SBATCH --propagate=NONE"]
    assert len(asked) == len([v for v in options_of(base_of(job, base), path.parent).values() if v is not None])
    for note in ("argv", "env"):
        (stage / note).unlink(missing_ok=True)
    done = subprocess.run(
        ["bash"],
        input=made.encode(),
        cwd=stage,
        capture_output=True,
        timeout=PATIENCE,
        env={
            "PATH": f"{stage}/bin:/usr/bin:/bin",
            "NOTES": str(stage),
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_ID": "1",
        },
    )
    assert not (stage / CANARY).exists(), made
    if job.venv:  # there is none of that name: the script ends, as it should
        assert done.returncode == 64
        return
    argv = (stage / "argv").read_bytes().decode().split("\0")[:-1]
    assert expanded(argv[-1]) == str(path), made
    assert argv[-2] == "hpclm.train"
    variables = dict(line.partition("=")[::2] for line in (stage / "env").read_bytes().decode().split("\0"))
    for variable, value in env.items():
        assert variables[variable] == value


def base_of(job, base):
    return type(base)(**(vars(base) | {"job": job}))


def test_the_fuzz_has_seen_scripts_and_refusals():
    if seen["made"] + seen["refused"]:
        assert seen["made"] > EXAMPLES / 5 and seen["refused"] > EXAMPLES / 20, seen


def test_no_job_sees_the_users_site_unless_it_is_asked_for(tmp_path):
    """What the lines do is tested in tests/node/test_shadows.py."""
    own = tmp_path / "own.sbatch"
    own.write_text('#!/bin/bash\n#SBATCH --nodes=1\n# SET-UP\n"$python" -m hpclm.train "$@"\n')
    for words in (["job.template=srun"], ["job.template=torchrun"], ["job.template=mpirun"], [f"job.template={own}"]):
        text = rendered(*words, "log.sinks=[wandb]")
        assert text.count(setup.HIDDEN) == text.count(f"sees='{python.SEES}'") == 1 and "needs=(wandb)\n" in text
    for words in ([], ["job.runtime=pyxis"], ["job.runtime=docker"], [f"job.template={own}"]):
        text = rendered(*words, "job.container=an.sif")
        assert text.count(setup.HIDDEN_IN_IMAGE) == 1
    assert "--container-env=PYTHONNOUSERSITE " in rendered("job.container=an.sif", "job.runtime=pyxis").replace(
        ")", " "
    )
    assert "--env=PYTHONNOUSERSITE" in rendered("job.container=an.sif", "job.runtime=docker")

"""Names of code in settings: whose they must be, and what they must name, before anything is imported or called."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpclm import cli, config
from hpclm.base.errors import ConfigError
from hpclm.base.folders import exposed
from hpclm.config import DataConfig, JobConfig, LogConfig, ModelConfig, OptimConfig, compose
from hpclm.config.engine import EngineConfig
from hpclm.config.monitoring import TrainConfig
from hpclm.data import sources, tokenizers
from hpclm.engine import engine_class
from hpclm.model import gpt
from hpclm.optim import schedules

NOBODY = 65534
OWN = ["model.block=mine:Thing", "data.source=mine:Thing", "optim.schedule=mine:Thing", "engine.name=mine:Thing"]
BUDGET = ["data.source=synthetic", "budget.steps=5", "engine.device=cpu"]


def given_away(*paths):
    """Files and folders as another user's; where only root could do that, as ones that others can write."""
    for path in paths:
        if os.geteuid():
            path.chmod(path.stat().st_mode | 0o022)
        else:
            os.chown(path, NOBODY, NOBODY)


def run_directory(out, *words):
    """A run directory by its files, without any training."""
    out.mkdir(mode=0o700)
    config.dump(config.load(None, [*BUDGET, f"out={out}", *words]), out / "config.yaml")
    (out / "events.jsonl").touch()
    (out / "checkpoints").mkdir(mode=0o700)
    return out


@pytest.fixture
def trap(tmp_path):
    """A run directory of somebody else's whose tokenizer is a command, and the file that the command would make."""
    proof = tmp_path / "proof"
    words = ["data.tokenizer=subprocess:check_output", f'data.tokenizer_files=[/bin/sh, -c, "touch {proof}"]']
    out = run_directory(tmp_path / "theirs", *words, f"data.prefix={tmp_path}/none", "data.source=indexed")
    given_away(out / "config.yaml", out)
    return out, proof


@pytest.mark.parametrize(
    "verb",
    {
        "generate": ["generate", "OUT", "--prompt", "x"],
        "evaluate": ["evaluate", "OUT"],
        "convert": ["convert", "OUT", "TO"],
        "resume": ["resume", "OUT", "--cluster", "local"],
        "submit": ["submit", "OUT/config.yaml", "out=TO", "--cluster", "local"],
        "train": ["train", "OUT/config.yaml", "out=TO"],
        "config": ["config", "OUT/config.yaml"],
        "planner": ["planner", "OUT/config.yaml"],
    }.values(),
    ids=lambda words: words[0],
)
def test_a_run_directory_of_another_user_runs_no_code(verb, trap, tmp_path, capfd):
    out, proof = trap
    to = tmp_path / "to"
    words = [word.replace("OUT", str(out)).replace("TO", str(to)) for word in verb]
    assert cli.main(words) == 64
    said = capfd.readouterr().err
    assert f"data.tokenizer='subprocess:check_output' in {out}/config.yaml:" in said, said
    assert ("belongs to another user" if not os.geteuid() else "can be written by others") in said
    assert not proof.exists() and not to.exists() and "Traceback" not in said


@pytest.mark.parametrize("what", ["file", "folder", "link", "link's folder"])
def test_a_file_that_others_can_write_or_replace_names_no_code(what, tmp_path):
    for name in ("real", "seen"):
        (tmp_path / name).mkdir(mode=0o755)
    real, seen = tmp_path / "real" / "mine.yaml", tmp_path / "seen" / "mine.yaml"
    real.write_text("model: {block: mine:Block}\n")
    seen.symlink_to(real)
    real.chmod(0o644)
    assert config.load(seen).model.block == "mine:Block"
    {
        "file": lambda: real.chmod(0o664),
        "folder": lambda: real.parent.chmod(0o775),
        "link": lambda: given_away(seen.parent),
        "link's folder": lambda: seen.parent.chmod(0o757),
    }[what]()
    with pytest.raises(
        ConfigError, match=r"model.block='mine:Block' in .* would run code in your name, and .*seen|real"
    ):
        config.load(seen)
    assert config.load(seen, ["model.block=mine:Block"]).model.block == "mine:Block"  # said by the user
    assert config.load(seen, ["model.block=gpt"]).model.block == "gpt"


def test_a_sticky_folder_lets_nobody_replace_a_file(tmp_path):
    tmp_path.chmod(0o1777)
    (tmp_path / "mine.yaml").write_text("model: {block: mine:Block}\n")
    assert exposed(tmp_path / "mine.yaml", (tmp_path / "mine.yaml").stat()) is None


def test_no_other_setting_lends_a_name_to_code(tmp_path):
    file = tmp_path / "sly.yaml"
    file.write_text("name: subprocess:check_output\ndata: {tokenizer: '${name}'}\n")
    file.chmod(0o666)
    with pytest.raises(ConfigError, match=r"data.tokenizer='\$\{name\}' in .* would run code"):
        config.load(file)


SHELL = {
    "setup": ["touch proof"],
    "env": {"LD_PRELOAD": "/tmp/evil.so"},
    "options": {"chdir": "/tmp"},
    "template": "/tmp/evil.sbatch",
    "venv": "/tmp/venv",
    "conda": "/tmp/conda",
    "modules": ["/tmp/evil"],
    "container": "/tmp/evil.sif",
    "mounts": ["/tmp:/usr"],
    "hostfile": "/tmp/hosts",
}


@pytest.mark.parametrize("name", compose.RUNS_CODE)
def test_a_job_is_not_set_up_by_a_file_of_others(name, tmp_path):
    run = config.load(None, BUDGET)
    more = {"container": "/x.sif"} if name == "mounts" else {}
    run = replace(run, job=JobConfig(**more, **{name: SHELL[name]}))
    (tmp_path / "theirs").mkdir(mode=0o755)
    file = tmp_path / "theirs" / "config.yaml"
    config.dump(run, file)
    assert getattr(config.load(file).job, name) == SHELL[name]
    given_away(file)
    with pytest.raises(ConfigError, match=rf"job.{name}[=.].* would run code in your name"):
        config.load(file)
    assert getattr(config.of_run(file.parent, []).job, name) == getattr(
        JobConfig(), name
    )  # reading its model is harmless


def test_every_setting_that_can_name_code_is_known_to_do_so():
    sections = {
        "model": ModelConfig,
        "data": DataConfig,
        "optim": OptimConfig,
        "engine": EngineConfig,
        "log": LogConfig,
        "train": TrainConfig,
        "job": JobConfig,
    }
    for key in compose.NAMES_CODE:
        section, name = key.split(".")
        named = ["mine:Thing"] if name in ("sinks", "callbacks") else "mine:Thing"
        assert getattr(sections[section](**{name: named}), name) == named
    documented = Path(__file__).parents[1] / "docs" / "settings.md"
    rows = [row for row in documented.read_text().splitlines() if "package.module:" in row]
    assert sorted(row.split("`")[1].partition("=")[0] for row in rows) == sorted(compose.NAMES_CODE)


MODULE = """
import functools
from subprocess import check_output
from torch.nn import Module

def touch(*files):
    open({proof!r}, "w").close()

def few(one):
    touch()

class Init:
    def __init__(self, *words, **more):
        touch()

class Half(Init):
    def encode(self): pass
    def train_step(self): pass

half, part, text, number = Half.__new__(Half), functools.partial(touch), "text", 5
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of the user's own, none of whose names may be called; and the file that would show that one was."""
    (tmp_path / "calls_nothing.py").write_text(MODULE.format(proof=str(tmp_path / "called")))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "called"
    sys.modules.pop("calls_nothing", None)


@pytest.mark.parametrize("name", ["check_output", "touch", "few", "Init", "Half", "half", "part", "text", "number"])
def test_what_is_named_is_of_the_expected_kind_before_it_is_called(name, mine):
    cpu = ["engine.device=cpu", f"engine.name=calls_nothing:{name}"]
    looked_up = [
        lambda name: tokenizers.build_tokenizer(name, ["/bin/true"]),
        lambda name: gpt.layers(ModelConfig(block=name), EngineConfig(), None, 1),
        lambda name: engine_class(config.load(None, [*BUDGET, *cpu]).for_engine(), __import__("torch").device("cpu")),
    ]
    if name not in ("touch", "Init", "Half"):  # a function that takes anything may be a source, and is called as one
        looked_up += [
            lambda name: sources.build_source(DataConfig(source=name), ModelConfig(), 1),
            lambda name: schedules.shape(OptimConfig(schedule=name)),
        ]
    for look_up in looked_up:
        with pytest.raises(ConfigError, match=f"'calls_nothing:{name}' (is|has|cannot be called)"):
            look_up(f"calls_nothing:{name}")
    assert not mine.exists()


OLD = """
from hpclm.engine.native import NativeEngine

class Four(NativeEngine):
    def __init__(self, config, mesh, device, dtype):
        pass

class Empty(NativeEngine):
    def __init__(self, config):
        pass
"""


@pytest.mark.parametrize("name", ["Four", "Empty"])
def test_an_engine_that_takes_other_arguments_is_refused_with_those_that_engines_take(name, tmp_path, monkeypatch):
    (tmp_path / "older_engines.py").write_text(OLD)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [*BUDGET, "engine.device=cpu", f"engine.name=older_engines:{name}"]
    with pytest.raises(ConfigError) as error:
        engine_class(config.load(None, words).for_engine(), __import__("torch").device("cpu"))
    assert f"engine 'older_engines:{name}' cannot be called with config, compute" in str(error.value)


@pytest.mark.parametrize(
    "name", ["subprocess:check_output", "os:system", "builtins:exec", "runpy:run_path", "a:b.c", ":f"]
)
def test_the_standard_library_has_nothing_that_settings_may_name(name):
    with pytest.raises(ConfigError, match=r"standard library|unknown"):
        tokenizers.build_tokenizer(name, ["/bin/sh", "-c", "true"])


def test_a_source_that_is_none_is_refused_with_what_it_lacks(mine):
    with pytest.raises(ConfigError, match="gives Half, which lacks eod, fingerprint, held_out, per_epoch, samples"):
        sources.build_source(DataConfig(source="calls_nothing:Half"), ModelConfig(), 1)


def test_the_current_folder_is_searched_for_modules_only_where_PYTHONPATH_names_it(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("class Tok: pass\n")
    monkeypatch.chdir(tmp_path)
    text = rf"No module named 'only_here'; the current folder is not searched: start with PYTHONPATH={tmp_path}"
    with pytest.raises(ConfigError, match=text):
        tokenizers.build_tokenizer("only_here:Tok", [])
    assert "only_here" not in sys.modules
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="'only_here:Tok' has no encode, encode_batch, decode"):
        tokenizers.build_tokenizer("only_here:Tok", [])
    del sys.modules["only_here"]


def test_a_site_file_that_everyone_can_write_is_refused(tmp_path):
    site = tmp_path / "site.yaml"
    site.write_text("job: {setup: [module load cuda]}\n")
    site.chmod(0o664)  # by a group of administrators, it may
    assert config.load(None, BUDGET, site).job.setup == ["module load cuda"]
    site.chmod(0o666)
    with pytest.raises(ConfigError, match="is writable by everyone"):
        config.load(None, BUDGET, site)


def test_requests_to_slurm_run_no_code_and_other_options_may(tmp_path):
    file = tmp_path / "theirs.yaml"
    file.write_text(
        "job: {account: me, qos: high, gres: 'gpu:4', name: x, constraint: a, reservation: r, dependency: 'singleton'}\n"
    )
    given_away(file)
    assert config.load(file, BUDGET).job.options["qos"] == "high"
    file.write_text("job: {qos: high, export: ALL}\n")
    with pytest.raises(ConfigError) as caught:
        config.load(file, BUDGET)
    [problem] = caught.value.problems
    assert problem.startswith(f"job.options.export='ALL' in {file}:1 would run code in your name")
    assert config.load(file, [*BUDGET, "job.export=NONE"]).job.options == {"qos": "high", "export": "NONE"}

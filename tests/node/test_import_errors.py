"""Libraries that Python finds outside its environment, in processes of their own: what start-up does is the subject."""

import configparser
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from hpclm.base.errors import ConfigError
from hpclm.distributed import network
from hpclm.node import import_errors, python
from tests.runs import PATIENCE, ROOT

VERSION = f"python{sys.version_info[0]}.{sys.version_info[1]}"
CALM = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PYTHON"))}


def hpclm(*words, **env):
    command = [Path(sys.executable).with_name("hpclm"), *words]
    return subprocess.run(command, env=CALM | env, capture_output=True, text=True, timeout=PATIENCE)


BROKEN = {
    "an old version": ("yaml", "__version__ = '3.1'"),
    "another Python's": (
        "numpy",
        "raise ImportError('do not import numpy from\\nits source directory; No module named numpy._core')",
    ),
    "part of it": ("omegaconf", "from ._utils import *"),
    "for Python 2": ("omegaconf", "print 'hello'"),
    "what hpclm.cli imports": ("psutil", "import psutil._psutil_of_another_python"),
    "any exception": ("tqdm", "raise RuntimeError('no')"),
    "a file of the standard library's name": ("random", "x = 1"),
    "one that the first module imports": ("ctypes", "x = 1"),
    "a library of a library": ("typing_extensions", "x = 1"),
}


@pytest.mark.parametrize("name, code", BROKEN.values(), ids=BROKEN)
def test_a_library_in_PYTHONPATH_that_breaks_the_start_is_named_in_one_line(name, code, tmp_path):
    (tmp_path / f"{name}.py").write_text(code)
    done = hpclm("train", "debug", f"out={tmp_path}/run", PYTHONPATH=str(tmp_path))
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: {name} comes from {tmp_path}/{name}.py, outside the environment, and does not work")
    assert line.endswith(import_errors.WAY_OUT)
    assert done.returncode == 64 and not (tmp_path / "run").exists()


def test_the_current_folder_counts_where_PYTHONPATH_has_an_empty_entry_or_python_is_given_code(tmp_path):
    (tmp_path / "yaml.py").write_text("")
    for path in (":/nowhere", "/nowhere"):
        command = [sys.executable, "-c", "import hpclm; hpclm.train"]
        done = subprocess.run(command, cwd=tmp_path, env=CALM | {"PYTHONPATH": path}, capture_output=True, text=True)
        assert f"ImportError: yaml comes from {tmp_path}/yaml.py, outside" in done.stderr


def test_in_python_a_library_that_is_imported_late_is_named_too(tmp_path):
    (tmp_path / "tqdm.py").write_text("")
    code = f"import hpclm\ntry: hpclm.train('debug', out='{tmp_path}/run')\nexcept hpclm.ConfigError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=CALM, capture_output=True, text=True)
    assert done.stdout.startswith(f"tqdm comes from {tmp_path}/tqdm.py, outside the environment")


def test_a_path_that_the_encoding_cannot_have_is_refused_with_the_way_out(tmp_path):
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = hpclm("train", "debug", f"out={tmp_path}/中文", **env)
    assert done.returncode == 64 and "this process reads ascii, not UTF-8; export PYTHONUTF8=1" in done.stderr


def test_an_interface_that_gloo_s_variable_names_must_exist():
    with pytest.raises(ConfigError, match=r"^GLOO_SOCKET_IFNAME=ib7: .* has only lo.*left over from another machine"):
        network.check_interface("lo", {"GLOO_SOCKET_IFNAME": "ib7"})
    network.check_interface("ib7", {"GLOO_SOCKET_IFNAME": "lo"})


def test_an_error_in_code_of_the_users_own_is_not_blamed_on_its_folder(tmp_path):
    (tmp_path / "my_block.py").write_text("import nothing_of_this_name\nclass Block: ...\n")
    done = hpclm("train", "debug", "model.block=my_block:Block", f"out={tmp_path}/run", PYTHONPATH=str(tmp_path))
    assert done.returncode == 64 and "comes from" not in done.stderr and "No module named 'nothing_of" in done.stderr


def test_the_variable_that_names_a_shared_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    error = ImportError(f"{tmp_path}/libstdc++.so.6: version `GLIBCXX_3.4.30' not found (required by /x/_core.so)")
    assert import_errors.explained(error).endswith(f"by /x/_core.so); perhaps because of LD_LIBRARY_PATH={tmp_path}")
    assert import_errors.explained(FileNotFoundError(2, "No such file or directory", "text.so")) is None
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert import_errors.explained(error) is None


MISSING = {
    "a library that hpclm needs": ("psutil", "import hpclm.node.processes", "hpclm"),
    "a library of a library": ("cloudpickle", "import submitit", "submitit"),
}


@pytest.mark.parametrize("library, code, importer", MISSING.values(), ids=MISSING)
def test_a_library_that_is_not_installed_is_named_with_what_to_do(library, code, importer):
    hide = f"import sys\nsys.modules[{library!r}] = None\nfrom hpclm.node import import_errors\n"
    code = f"{hide}import_errors.report_uncaught()\n{code}\n"
    done = subprocess.run([sys.executable, "-c", code], env=CALM, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.startswith(f"error: {importer} needs {library}, which {sys.executable} does not have: activate ")
    assert done.returncode == 64 and done.stderr.count("\n") == 1


def test_the_libraries_that_hpclm_needs_are_those_of_setup_cfg():
    setup_cfg = configparser.ConfigParser()
    setup_cfg.read(ROOT / "setup.cfg")
    names = re.findall(r"^[\w-]+", setup_cfg["options"]["install_requires"], re.MULTILINE)
    assert {*import_errors.REQUIRED, "setuptools"} == {"yaml" if name == "PyYAML" else name for name in names}


@pytest.fixture(scope="module")
def plain_python(tmp_path_factory):
    """A Python with hpclm that is not a venv, as conda's or an image's: it looks at the user's site first."""
    folder = tmp_path_factory.mktemp("python")
    library = folder / "lib" / VERSION
    library.mkdir(parents=True)
    for path in Path(os.__file__).parent.iterdir():
        if path.name != "site-packages":
            (library / path.name).symlink_to(path)
    (library / "site-packages").symlink_to(sysconfig.get_path("purelib"))
    (folder / "bin").mkdir()
    return shutil.copy(Path(sys.base_prefix) / "bin" / VERSION, folder / "bin" / "python")


@pytest.fixture
def home(tmp_path):
    """A home directory with a tqdm for another Python."""
    broken = tmp_path / "home" / ".local" / "lib" / VERSION / "site-packages" / "tqdm"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('of another Python')")
    return tmp_path / "home"


def test_the_ranks_of_a_conda_environment_do_not_see_the_users_site(plain_python, home, tmp_path):
    env = CALM | {"HOME": str(home), "HPCLM_SITE": ""}
    words = ["debug", "budget.steps=2", "engine.device=cpu"]

    def call(*words):
        command = [plain_python, *python.command("hpclm", *words)[1:]]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)

    alone = call("train", *words, f"out={tmp_path}/alone")
    assert (
        alone.returncode == 64
        and alone.stderr.startswith(f"error: tqdm comes from {home}/.local/")
        and "PYTHONNOUSERSITE=1" in alone.stderr
    )
    job = call("submit", "--cluster", "local", *words, f"out={tmp_path}/job")
    assert job.returncode == 0, job.stderr


CHOICES = {
    "nothing chosen": (False, "unset", "1"),
    "shown by the user": (False, "", ""),
    "hidden by the user": (True, "yes", "yes"),
    "hpclm is installed there": (True, "unset", "unset"),
}


@pytest.mark.parametrize("installed, before, after", CHOICES.values(), ids=CHOICES)
def test_the_users_site_is_hidden_unless_hpclm_is_there_or_the_user_chose(installed, before, after, home, monkeypatch):
    folder = home / ".local" / "lib" / VERSION / "site-packages"
    if installed:
        (folder / "hpclm-0.1.0.dist-info").mkdir()
    monkeypatch.setattr(site, "USER_SITE", str(folder))
    env = CALM | {"HOME": str(home)} | ({} if before == "unset" else {"PYTHONNOUSERSITE": before})
    assert python.safe_env(env).get("PYTHONNOUSERSITE", "unset") == after

"""Optional libraries: who brings them, and what is said without them."""

import configparser
import re
import sys
from importlib import metadata

import pytest

from hpclm import cli
from hpclm.base import extras
from hpclm.base.errors import ConfigError
from hpclm.preprocess import build, inputs
from hpclm.preprocess.encode import EncodeJob
from tests.runs import ROOT
from tests.test_house import NAMES, imported

SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
PACKAGES = {
    "PyYAML": "yaml",
    "mlflow-skinny": "mlflow",
    "lm-eval": "lm_eval",
}  # package -> import name, where they differ
FROM_ELSEWHERE = {
    *("apex", "fused_layer_norm_cuda", "fused_rotary_positional_embedding"),  # NVIDIA's apex is not on PyPI
    "pydantic",  # comes with deepspeed
    "IPython",  # imported only where a notebook has loaded it
}


def libraries(text):
    names = [re.split(r"[><=;\[ ]", line)[0] for line in text.splitlines() if line and not line.startswith("#")]
    return {PACKAGES.get(name, name) for name in names}


REQUIRED = libraries(SETUP["options"]["install_requires"])
OPTIONAL = {name: libraries(text) for name, text in SETUP["options.extras_require"].items()}


def test_every_library_is_required_or_brought_by_the_extra_that_its_error_names():
    used = {module.partition(".")[0] for name in NAMES for module in imported(name)}
    foreign = used - set(sys.stdlib_module_names) - {"hpclm", *FROM_ELSEWHERE}
    assert foreign <= REQUIRED | set(extras.EXTRAS)
    assert not REQUIRED & set(extras.EXTRAS)
    for library, extra in extras.EXTRAS.items():
        assert library in OPTIONAL[extra]
    [everything] = re.findall(r"hpclm\[(.*)\]", SETUP["options.extras_require"]["all"])
    assert set(everything.split(",")) == set(extras.EXTRAS.values())


@pytest.mark.parametrize("name", ["deepspeed", "fairscale"])
@pytest.mark.parametrize("verb", [["train"], ["submit", "--cluster", "local"]], ids=["train", "submit"])
def test_an_engine_without_its_library_is_refused_before_the_start(name, verb, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, name, None)
    assert cli.main([*verb, *tiny("run", f"engine.name={name}")]) == 64
    wanted = f"engine.name={name} needs {name}, which is not installed: pip install 'hpclm[{name}]'"
    assert wanted in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "installed, old",
    [("0.18.9", True), ("0.19.7", True), ("0.19.7+cu130", True)]
    + [(newer, False) for newer in ("0.19.8", "0.19.10", "0.20.0", "1.0", "0.19.8+cu130", "0.19.7.dev1", "unknown")],
)
def test_a_library_that_is_older_than_the_package_allows_is_refused(installed, old, monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda _: ["torch>=2.11", 'deepspeed>=0.19.8; extra == "deepspeed"'])
    monkeypatch.setattr(metadata, "version", lambda _: installed)
    wanted = (
        f"this needs deepspeed 0.19.8 or newer, but deepspeed {installed} is installed; pip install 'hpclm[deepspeed]'"
    )
    assert extras.missing("this", "deepspeed") == (wanted if old else None)
    assert extras.missing("this", "fairscale") is None  # its oldest release is not known here


def test_the_package_says_which_release_of_every_library_is_the_oldest():
    bounds = {re.split(r"[>;]", line)[0] for line in metadata.requires("hpclm") or [] if ">=" in line}
    assert {library.replace("_", "-") for library in extras.EXTRAS} - bounds == {
        "mlflow"
    }  # it is mlflow-skinny, or mlflow


def test_the_job_of_another_environment_may_have_what_is_not_installed_here(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/activate").touch()
    words = ["submit", "--dry-run", *tiny("run", "engine.name=deepspeed", f"job.venv={tmp_path}/venv")]
    assert cli.main(words) == 0, capsys.readouterr().err


def test_mpirun_without_mpi4py_is_refused_before_the_start(tiny, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert cli.main(["submit", "--dry-run", "--template", "mpirun", *tiny()]) == 64
    assert "starting ranks with mpirun needs mpi4py, which is not installed: pip install 'hpclm[mpi]'" in (
        capsys.readouterr().err
    )


def test_text_that_needs_an_optional_library_is_refused_with_the_extra(tmp_path, monkeypatch, capsys):
    for name in ("sentencepiece", "sentencex", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "some words"}\n')
    text.with_name("text.jsonl.zst").touch()
    with pytest.raises(ConfigError, match=r"text.jsonl.zst needs zstandard, .*'hpclm\[text\]'"):
        inputs.find([f"{text}.zst"], None)
    with pytest.raises(ConfigError, match=r"--split-sentences needs sentencex, .*'hpclm\[text\]'"):
        build.check_job(EncodeJob("bytes", (), language="en"))
    model = tmp_path / "t.model"
    assert cli.main(["train-tokenizer", "--input", str(text), "--output", str(model), "--vocab-size", "300"]) == 64
    assert "a sentencepiece tokenizer needs sentencepiece, which is not installed" in capsys.readouterr().err
    assert not model.exists()


def test_an_optional_library_that_lacks_one_of_its_own_is_not_called_missing():
    with pytest.raises(ModuleNotFoundError), extras.needed_for("this"):
        raise ModuleNotFoundError("No module named 'hjson'", name="hjson")

"""The user's own code is looked for without importing it."""

import pytest

from hpclm.base import own_code, registry

SOURCES = {
    "own_plain": "import json as other\n\ndef block(): pass\n\nvalue = 1\n",
    "own_dynamic": "def __getattr__(name): return 1\n",
    "own_broken": "def (:\n",
    "own_star": "from os import *\n",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for name, text in SOURCES.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "own_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "own_plain:block",
        "own_plain:value",
        "own_plain:other",
        "own_dynamic:x",
        "own_broken:x",
        "own_star:x",
        "no name",
        "math",
    ],
)
def test_what_is_there_or_may_be_there_is_not_missing(name):
    assert own_code.missing("model.block", name) is None


@pytest.mark.parametrize(
    "name, said",
    [
        ("own_plain:blok", "own_plain.py has no 'blok'. Did you mean 'block'?"),
        ("own_nowhere:x", "No module named 'own_nowhere'"),
        ("own_folder.inner:x", "No module named 'own_folder.inner'"),
        ("own_folder:x", "own_folder has no 'x'."),
        ("json:loads", "json is part of Python's standard library, which contains no model.block"),
    ],
)
def test_what_is_missing_is_named(name, said):
    assert said in own_code.missing("model.block", name)


def test_code_in_the_current_folder_that_is_not_searched_is_said_to_be_there(tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    (here / "own_here.py").write_text("")
    monkeypatch.chdir(here)
    way_out = f"; the current folder is not searched: start with PYTHONPATH={here}"
    assert registry.not_loaded("model.block", "own_here:X", "why").endswith(f"cannot be loaded: why{way_out}")
    monkeypatch.syspath_prepend(here)
    assert registry.not_loaded("model.block", "own_here:X", "why").endswith("cannot be loaded: why")


class Made:
    def __init__(self, x):
        self.x = x

    def send(self):
        """Does nothing."""


@pytest.mark.parametrize(
    "loaded, more, wrong",
    [
        (Made, dict(made_with=["x"], named=True), None),
        (Made, dict(made_with=["y"]), None),
        (Made, dict(made_with=["y"], named=True), "cannot be called with y"),
        (Made, dict(made_with=["x", "y"]), "cannot be called with x, y"),
        (Made, dict(made_with=["x"], base=dict), "is not a subclass of builtins.dict"),
        (dict, dict(), "has no send"),
        (Made("x"), dict(), "is not a class"),
    ],
)
def test_a_class_of_ones_own_has_the_methods_and_takes_the_arguments(loaded, more, wrong):
    assert registry.class_check("send", **more)(loaded) == wrong

"""Paths as people type them."""

from pathlib import Path

import pytest

from hpclm.base import paths
from hpclm.base.errors import ConfigError


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    monkeypatch.setenv("HPCLM_X", "value")
    monkeypatch.setenv("HPCLM_EMPTY", "")
    monkeypatch.delenv("HPCLM_NONE", raising=False)
    monkeypatch.setenv("HOME", "/home/me")


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("a/$HPCLM_X/b", "a/value/b"),
        ("${HPCLM_X}b", "valueb"),
        ("${oc.env:HPCLM_X}", "value"),
        ("${oc.env:HPCLM_NONE, d}", "d"),
        ("${oc.env:HPCLM_NONE,'d e'}", "d e"),
        (r"\$HPCLM_X", "$HPCLM_X"),
        (r"\\$HPCLM_X", r"\value"),
        (r"\\\$HPCLM_X", r"\$HPCLM_X"),
        ("$1", "$1"),
        ("~/x", "/home/me/x"),
        ("a~", "a~"),
    ],
)  # fmt: skip
def test_variables_and_home_folders_are_expanded_and_what_is_escaped_is_not(typed, meant):
    assert paths.expanded(typed) == meant


def test_a_folder_that_is_called_like_a_home_folder_stays_what_it_is():
    assert paths.expanded("./~x") == f"{Path.cwd()}/~x"


@pytest.mark.parametrize(
    "typed, said",
    [
        (
            "$HPCLM_NONE/x",
            "the environment variable HPCLM_NONE is not set here; export it, or write \\$HPCLM_NONE for a folder",
        ),
        ("$HPCLM_EMPTY", "the environment variable HPCLM_EMPTY is empty here; "),
        ("${a b}", "${a b} is not a variable; write $NAME or ${NAME}"),
        ("file:///a/b", "this is a URL, but only files of this machine are read and written; write /a/b"),
        ("s3://a/b", "mount the storage, or copy what is there, and give the path"),
        ("~no_such_user/x", "no home folder ~no_such_user; write ./~no_such_user/x for a folder of that name"),
    ],
)
def test_what_cannot_be_expanded_is_refused_with_what_to_write(typed, said):
    with pytest.raises(ConfigError) as caught:
        paths.expanded(typed)
    assert str(caught.value).startswith(f"{typed}: ") and said in str(caught.value)


@pytest.mark.parametrize("name", ["a", "a $x", "${x}", r"\$x", r"\\$x", "a$", "~x", "$"])
def test_the_text_of_a_path_that_exists_is_expanded_to_it(name):
    assert Path(paths.expanded(paths.literal(name))).absolute() == Path.cwd() / name


def test_paths_between_commas_are_expanded_each():
    assert paths.option_paths("~/a,$HPCLM_X") == "/home/me/a,value"

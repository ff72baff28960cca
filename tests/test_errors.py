"""Errors: what they say, and with what a verb ends."""

import errno
import re
import sys

import pytest

from hpclm.base import errors, extras
from hpclm.base.errors import (
    ConfigError,
    ExitCode,
    HpclmError,
    LockedError,
    NoCheckpointError,
    unread,
    unwritten,
)
from hpclm.node.failures import PerRunErrors
from tests.runs import ROOT


def test_exit_codes_are_those_that_the_documentation_promises():
    page = (ROOT / "docs" / "commands.md").read_text().partition("## Exit codes\n")[2]
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE))
    assert [int(code) for code in rows] == [*ExitCode]
    assert all(rows[str(code)].startswith(code.meaning) for code in ExitCode)
    assert [code for code in ExitCode if code.requeue] == [85]
    assert [code for code in ExitCode if code.final] == [64, 66, 75, 93]
    assert [errors.shell_code(returned) for returned in (-15, 0, 3)] == [143, 0, 3]


@pytest.mark.parametrize(
    "failed, code",
    [([], 0), ([LockedError("x")], 75), ([LockedError("x")] * 2, 75), ([LockedError("x"), NoCheckpointError("y")], 1)],
)
def test_the_exit_code_of_several_runs_is_that_of_those_that_failed_or_1_if_these_differ(failed, code, capsys):
    per_run = PerRunErrors(3)
    for error in failed:
        with per_run:
            raise error
    assert per_run.code == code and capsys.readouterr().err.count("error: ") == len(failed)
    with pytest.raises(LockedError), PerRunErrors(1):
        raise LockedError("x")


@pytest.mark.parametrize(
    "number, named, kind, said",
    [
        (errno.ENOSPC, "/d/x.tmp-1-2", HpclmError, "/d/x: why; do this"),
        (errno.EACCES, "/d/y", ConfigError, "/d/y: why; do this"),
        (errno.EACCES, None, ConfigError, "/d/x: why; do this"),
    ],
)
def test_what_cannot_be_written_is_named_as_its_reader_knows_it(number, named, kind, said):
    error = unwritten(OSError(number, "why", named), "/d/x", "do this")
    assert type(error) is kind and str(error) == said


@pytest.mark.parametrize(
    "number, way_out, kind, said",
    [
        (errno.EIO, "remove it", HpclmError, "x cannot be read now: why; check the disk, then start again"),
        (errno.ENOENT, "remove it", ConfigError, "x cannot be read: why; remove it"),
        (errno.ENOENT, "", ConfigError, "x cannot be read: why"),
    ],
)
def test_what_cannot_be_read_is_a_fault_of_the_disk_or_of_the_path(number, way_out, kind, said):
    error = unread(OSError(number, "why"), "x", way_out)
    assert type(error) is kind and str(error) == said


def test_a_library_is_missing_only_where_it_is_not_installed(monkeypatch):
    with pytest.raises(ModuleNotFoundError), extras.needed_for("a chart"):
        raise ModuleNotFoundError("broken", name="numpy.gone")
    with pytest.raises(ModuleNotFoundError), extras.needed_for("a chart"):
        raise ModuleNotFoundError("broken", name="pandas.gone")  # an extra, which is installed
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError) as caught, extras.needed_for("a chart"):
        import pandas  # noqa: F401
    assert str(caught.value) == "a chart needs pandas, which is not installed: pip install 'hpclm[notebook]'"
    assert extras.missing("x", "pandas") == "x needs pandas, which is not installed: pip install 'hpclm[notebook]'"
    assert extras.missing("x", "numpy") is None


def test_a_release_is_older_by_its_numbers_and_what_is_not_installed_is_not():
    from importlib import metadata

    installed = metadata.version("numpy")
    major, minor = installed.split(".")[:2]
    assert (
        extras.older("numpy", f"{major}.{int(minor) + 1}") == installed == extras.older("numpy", f"{int(major) + 1}.0")
    )
    assert (
        extras.older("numpy", f"{major}.{minor}")
        is extras.older("numpy", "1.9")
        is extras.older("no-such-thing", "1.0")
        is None
    )

"""Logging to the terminal and to log files."""

import logging

import pytest

from hpclm.base import log
from hpclm.base.errors import HpclmError

RECORD = logging.LogRecord("x", logging.WARNING, __file__, 0, "so \x1b", (), None)


@pytest.mark.parametrize(
    "rank, quiet, level, begins",
    [(0, False, 0, ""), (0, True, logging.WARNING, ""), (3, False, logging.WARNING, "[rank 3] ")],
)
def test_ranks_other_than_0_and_quiet_ones_print_warnings_only(rank, quiet, level, begins):
    before = logging.getLogger().handlers[:]
    with log.restored():
        log.setup(rank, quiet=quiet)
        console = logging.getLogger().handlers[0]
        assert console.level == level
        text = console.format(RECORD)
        assert text.startswith(begins) and text.startswith("[") == bool(begins) and text.endswith(r" W so \x1b")
    assert logging.getLogger().handlers == before


@pytest.mark.parametrize("error, traced", [(HpclmError("no luck"), False), (ValueError("no luck"), True)])
def test_the_error_that_ends_a_run_is_in_its_log_with_a_traceback_only_where_it_is_a_fault(error, traced, tmp_path):
    with pytest.raises(type(error)), log.also_to(tmp_path / "log.txt", lambda text: text.replace("luck", "***")):
        logging.getLogger("x").warning("before")
        raise error
    # what was logged before, if no other handler had it, comes first
    _, before, rest = (tmp_path / "log.txt").read_text().rpartition(" W before\n")
    assert before and rest.splitlines()[0].endswith(" E no ***") and ("Traceback" in rest) == traced
    assert not [handler for handler in logging.getLogger().handlers if isinstance(handler, log.LogFile)]

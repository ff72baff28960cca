"""Which nodes ``hpclm submit --exclude-bad`` excludes."""

import pytest

from hpclm.base.errors import ConfigError
from hpclm.diagnostics.report import bad_nodes
from tests.events import note


def test_a_record_that_lists_no_nodes_is_damaged(tmp_path):
    note(tmp_path, "preflight", bad=3)
    with pytest.raises(ConfigError, match=r"events\.jsonl, line 1, is damaged"):
        bad_nodes([str(tmp_path)])


def test_a_run_without_a_check_says_so(tmp_path):
    note(tmp_path, "began")
    with pytest.raises(ConfigError, match=r"--exclude-bad: .* has neither a preflight check nor silent corruption"):
        bad_nodes([str(tmp_path)])

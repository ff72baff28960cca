"""Which nodes ``hpclm submit --exclude-bad`` excludes."""

import pytest

from hpclm.diagnostics.report import bad_nodes
from hpclm.errors import ConfigError


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"bad": 3}', "null", "[" * 100_000], ids=["a list", "half", "a number", "null", "nested"]
)
def test_a_report_that_lists_no_nodes_is_refused(content, tmp_path):
    (tmp_path / "preflight.json").write_text(content)
    with pytest.raises(ConfigError, match=r"preflight\.json does not list bad nodes"):
        bad_nodes([str(tmp_path)])


def test_a_run_that_notes_no_corruption_needs_a_report(tmp_path):
    (tmp_path / "corruption.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"--exclude-bad: the preflight report .*preflight\.json"):
        bad_nodes([str(tmp_path)])

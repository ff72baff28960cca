import io
import sys

import pytest

from hpclm import config
from hpclm.sinks import worker
from tests import forks


def ended(name, out):
    """The exit code of the process that sends to a sink, when an attempt has ended well."""
    sys.stdin = io.StringIO("0")
    return worker.main(name, out)


@pytest.mark.parametrize("name, code", [("Written", 0), ("Breaks", 1)])
def test_a_sink_that_lacks_rows_at_the_end_says_so(name, code, tmp_path):
    config.dump(config.RunConfig(), tmp_path / "config.yaml")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert forks.call(ended, f"tests.sinks.own:{name}", tmp_path) == code

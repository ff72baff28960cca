import os
from importlib.util import find_spec

import pytest

from hpclm.sinks import RunInfo
from tests import forks


def names(folder):
    """What Trackio calls two runs of one name."""
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    from hpclm.sinks.trackio import TrackioSink

    sinks = [TrackioSink(RunInfo(id, "run", "proof", folder, {})) for id in ("1a", "2b")]
    return [sink.run.name for sink in sinks]


@pytest.mark.skipif(not find_spec("trackio"), reason="needs Trackio")
def test_runs_of_one_name_are_several_in_trackio(tmp_path):
    assert forks.call(names, tmp_path) == ["run-1a", "run-2b"]

"""What a job's set-up names and this machine does not have is warned of."""

import pytest

from hpclm import config
from hpclm.launch.setup import missing_here


@pytest.mark.parametrize(
    "words, missing",
    [
        (["job.venv={here}/none"], "job.venv: {here}/none/bin/activate does not exist here"),
        (["job.container={here}/none.sif"], "job.container: {here}/none.sif does not exist here"),
        (["job.container=docker://x", "job.mounts=[{here}/none:/data]"], "job.mounts: {here}/none does not exist here"),
        (["job.venv={here}/env"], None),
        (["job.container=docker://x", "job.mounts=['${{HOME}}/x:/x']"], None),
    ],
)
def test_a_missing_path_is_warned_of(words, missing, tmp_path):
    (tmp_path / "env/bin").mkdir(parents=True)
    (tmp_path / "env/bin/activate").touch()
    job = config.load(None, [word.format(here=tmp_path) for word in words]).job
    warnings = [warning.partition(";")[0] for warning in missing_here(job)]
    assert warnings == ([missing.format(here=tmp_path)] if missing else [])

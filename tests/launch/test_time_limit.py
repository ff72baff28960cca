"""A job that would be warned of its end before it can do a step is refused before it is queued."""

import json

import pytest

from hpclm.base.errors import ConfigError
from hpclm.launch import prechecks
from hpclm.launch.schedulers import slurm_commands


def script(time=None, signal="USR2@120", partition=None):
    options = {"time": time, "signal": signal, "partition": partition}
    return "#!/bin/bash\n" + "".join(f"#SBATCH --{name}={value}\n" for name, value in options.items() if value)


def summary_of(out, **figures):
    content = {"state": "exited", "ending": "", "step": 0, "attempts": 1, "attempt": {}, **figures}
    (out / "summary.json").write_text(json.dumps(content))


# the script, the last start's seconds and a step's; what the refusal says, or None
LIMITS = {
    "room": (script("3"), 40, 1, None),
    "a long start": (script("3", "USR2@170"), 40, 1, r"job.time=3 leaves no room .*=170 s before .* start took 40 s"),
    "the start fills it": (script("3"), 60, 0, "took 60 s or more"),
    "a long step": (script("3"), 40, 20, r"which takes 20.0 s; set job.time to 4 minutes or more"),
    "hours": (script("1:00:00"), 3000, 400, None),
    "hours that do not suffice": (script("1:00:00", "USR2@600"), 3000, 1, "job.warn_seconds=600 s"),
    "the script has the signal": (script("3", "B:USR2@175"), 10, 1, "job.warn_seconds=175 s"),
    "without a warning": (script("1", None), 50, 1, None),
    "without a warning, and a longer start": (script("1", None), 61, 1, "job.warn_seconds=0 s"),
    "no start is known": (script("3", "USR2@170"), None, None, None),
    "no start, no time": (
        script("2"),
        None,
        None,
        "leaves no room for a step: Slurm's warning comes job.warn_seconds=120 s before the end;",
    ),
    "no limit": (script("UNLIMITED"), 1e6, 1, None),
    "a word": (script("soon"), 1e6, 1, None),
}


@pytest.mark.parametrize("text, start, step, refusal", LIMITS.values(), ids=LIMITS)
def test_a_job_needs_time_for_its_start_a_step_and_the_warning(text, start, step, refusal, tmp_path):
    if start is not None:
        summary_of(tmp_path, start_seconds=float(start), step_seconds=float(step))
    if refusal is None:
        return prechecks.refuse_without_room(tmp_path, text)
    with pytest.raises(ConfigError, match=refusal):
        prechecks.refuse_without_room(tmp_path, text)


SHOWN = (
    "PartitionName=long Default=NO DefaultTime=NONE MaxTime=2-00:00:00 State=UP\n"
    "PartitionName=short Default=YES DefaultTime=00:02:00 MaxTime=01:00:00 State=UP\n"
)


@pytest.mark.parametrize(
    "partition, refusal",
    [
        (None, "the default of partition short=00:02:00 leaves no room"),
        ("long", None),
        ("short,long", "partition short"),
    ],
)
def test_without_a_time_limit_that_of_the_partition_counts(partition, refusal, tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    lines = "\n".join(
        f"[ -n \"$4\" ] && [ $3 != {line[14:].split()[0]} ] || echo '{line}'" for line in SHOWN.splitlines()
    )
    scontrol.write_text(f"#!/bin/bash\n{lines}\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert slurm_commands.default_time("long") == ("long", "2-00:00:00")
    if refusal is None:
        return prechecks.refuse_without_room(tmp_path, script(None, partition=partition))
    with pytest.raises(ConfigError, match=refusal):
        prechecks.refuse_without_room(tmp_path, script(None, partition=partition))

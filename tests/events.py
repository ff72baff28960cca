"""The events of a run, for tests: written as quickly as a line is, and read."""

import json
import time
from contextlib import suppress

from hpclm.rundir import events


def note(out, kind, **facts):
    """Add an event to a run. It is not synced."""
    row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "kind": kind, **facts}
    with (out / events.NAME).open("a") as file:
        file.write(json.dumps(row) + "\n")


def submit(out, cluster, job_id, host="login", nodes=1, tasks_per_node=1, log="", script=None, **more):
    """Add a submission."""
    size = {"nodes": nodes, "tasks_per_node": tasks_per_node}
    note(out, "submitted", cluster=cluster, job_id=job_id, host=host, **size, log=log, script=script, **more)


def of_kind(out, kind):
    """The events of this kind, with all of their facts; those so far, while the run goes on."""
    found = []
    with suppress(OSError):
        for event in events.of_kind(events.read_events(out), kind):
            found.append(events.whole(out, event))
    return found


def began(out):
    """The attempts, as they began."""
    return of_kind(out, "began")


def rewrite(out, change):
    """Replace each event of a run by what ``change`` gives; it goes if that is None."""
    changed = [change(event) for event in events.read_events(out)]
    (out / events.NAME).write_text("".join(json.dumps(event) + "\n" for event in changed if event is not None))


def without(*kinds):
    """A change that drops events of these kinds."""
    return lambda event: None if event["kind"] in kinds else event

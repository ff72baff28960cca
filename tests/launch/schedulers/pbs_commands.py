"""qsub, qstat, qdel and qrerun of one queue, in the folder SERVER: python pbs_commands.py SERVER COMMAND ARGUMENT...

A job is a file ID.json, and a process (``run``) that starts its script, and again while it has been requeued. As in PBS, a job has
few of the variables of who submits it, what is deleted is not requeued, and TERM goes to all processes of a job.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def job_at(path):
    """A job's row, written at the end of the block."""
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        row = json.load(file)
        yield row
        file.seek(0)
        file.truncate()
        json.dump(row, file)


def qsub(server, script):
    number = len(list(server.glob("*.json"))) + 1
    path = server / f"{number}.pbs.json"
    row = {"job_state": "Q", "Submit_arguments": script, "run_count": 0, "exec_host": "", "group": 0, "deleted": False}
    path.write_text(json.dumps(row))
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    subprocess.Popen([sys.executable, __file__, str(server), "run", path.stem], start_new_session=True, **quiet)
    print(path.stem)


def run(server, job):
    """What PBS does for a job."""
    path, nodes = server / f"{job}.json", server / f"{job}.nodes"
    nodes.write_text("node1\nnode1\n")
    env = {name: os.environ[name] for name in ("PATH", "HOME", "OMP_NUM_THREADS") if name in os.environ}
    env |= {"PBS_JOBID": job, "PBS_NODEFILE": str(nodes), "PBS_ENVIRONMENT": "PBS_BATCH"}
    while True:
        with job_at(path) as row:
            if row["deleted"]:
                row["job_state"] = "F"
                return
            started = subprocess.Popen(["bash", row["Submit_arguments"]], env=env, start_new_session=True)
            row |= {"job_state": "R", "run_count": row["run_count"] + 1, "group": started.pid, "exec_host": "node1/0"}
        started.wait()
        with job_at(path) as row:
            if row["job_state"] != "Q":
                row["job_state"] = "F"
                return


def qstat(server, *words):
    """qstat -f -F json [JOB]: the jobs that have not finished."""
    jobs = {path.stem: json.loads(path.read_text()) for path in server.glob("*.json")}
    shown = {job: row for job, row in jobs.items() if row["job_state"] != "F" and (words[-1] in (job, "json"))}
    print(json.dumps({"Jobs": shown}))


def qdel(server, *words):
    with job_at(server / f"{words[-1]}.json") as row:
        row["deleted"] = True
        with suppress(ProcessLookupError):
            if row["group"]:
                os.killpg(row["group"], signal.SIGKILL if "force" in words else signal.SIGTERM)


def qrerun(server, job):
    with job_at(server / f"{job}.json") as row:
        if row["deleted"]:
            sys.exit("qrerun: Request invalid for state of job")
        row["job_state"] = "Q"


if __name__ == "__main__":
    folder, command, *arguments = sys.argv[1:]
    {"qsub": qsub, "run": run, "qstat": qstat, "qdel": qdel, "qrerun": qrerun}[command](Path(folder), *arguments)

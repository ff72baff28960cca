"""Ranks that meet and hold the preflight check, as srun would start them: here on pretended nodes, or by a real srun."""

import logging
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

from hpclm import config
from hpclm.base.errors import HpclmError
from hpclm.diagnostics import preflight
from hpclm.distributed import bootstrap, context
from hpclm.launch.schedulers import current_job
from tests.forks import Hpclm
from tests.runs import PATIENCE

ROOT = Path(__file__).parents[2]


def main(out, *words):
    import torch

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    torch.set_num_threads(1)
    settings = config.from_cli([f"out={out}", "data.source=synthetic", *words])
    try:
        with context.join(bootstrap.detect(), settings.cluster, current_job()) as ours:
            ours.init_process_group(torch.device("cpu"), 1)
            preflight.check_nodes(ours, torch.device("cpu"), settings.modules(), Path(out))
    except HpclmError as error:
        print(error)
        return error.exit_code
    except SystemExit as end:  # rank 0 speaks for this one
        return end.code
    return 0


def variables(nodes, rank):
    """What srun would tell a rank; ``nodes`` names the node of each rank."""
    names = list(dict.fromkeys(nodes))
    return {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(len(nodes)),
        "SLURM_LOCALID": str(nodes[:rank].count(nodes[rank])),
        "SLURM_NODEID": str(names.index(nodes[rank])),
        "SLURM_STEP_NODELIST": ",".join([socket.gethostname()] * len(names)),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(str(nodes.count(name)) for name in names),
        "SLURMD_NODENAME": nodes[rank],
    }


def hold(out, nodes, *words, before=None, **env):
    """Hold the check with a process for each entry of ``nodes``: what each printed, and its exit code.

    ``before`` is, for some nodes, a command that starts the processes there.
    """
    calm = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    calm |= {"SLURM_JOB_ID": str(secrets.randbelow(10**9)), "OMP_NUM_THREADS": "1"}

    def start(rank, node):
        own = calm | variables(nodes, rank) | env
        if node not in (before or {}):
            return Hpclm(out, *words, env=own, before=peer)
        command = [*before[node], sys.executable, "-m", "tests.diagnostics.peers", str(out), *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=own, cwd=ROOT, text=True, **pipes)

    processes = [start(rank, node) for rank, node in enumerate(nodes)]
    try:
        return [(process.communicate(timeout=PATIENCE)[0], process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()


def peer():
    """Be a rank, whose words are this process's."""
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # as training does: what an exception holds of the process group would abort the way out


if __name__ == "__main__":
    peer()

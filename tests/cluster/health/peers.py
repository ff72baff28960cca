"""Ranks that meet through gloo and hold the preflight check: started as processes here, or by srun.

A stand-in for hpclm.cluster.team with nothing but what the check needs.
"""

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hpclm import config
from hpclm.cluster import preflight
from hpclm.errors import HpclmError

ROOT = Path(__file__).parents[3]


class Peers:
    def __init__(self, launcher, rank, size):
        self.launcher, self.rank, self.size = launcher, rank, size

    def gather(self, value):
        values = [None] * self.size
        dist.all_gather_object(values, json.dumps(value))
        return [json.loads(each) for each in values]

    def first(self, act):
        box = [None, None]
        if self.rank == 0:
            try:
                box[0] = json.dumps(act())
            except HpclmError as error:
                box[1] = str(error)
        dist.broadcast_object_list(box)
        if box[1]:
            raise HpclmError(box[1])
        return json.loads(box[0])

    def barrier(self):
        dist.barrier()


def main(out, *words):
    import logging

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    torch.set_num_threads(1)
    env = os.environ
    rank, size = int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"])
    host, port = env["MEET"].split(":")
    if "SLURM_LAUNCH_NODE_IPADDR" in env and "INTERFACE" in env:
        env["GLOO_SOCKET_IFNAME"] = env["INTERFACE"]
    store = dist.TCPStore(host, int(port), size, rank == 0, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    settings = config.from_cli([f"out={out}", "data.source=synthetic", *words])
    try:
        preflight.check(Peers("Slurm", rank, size), torch.device("cpu"), settings, out)
    except HpclmError as error:
        if rank == 0:
            print(error)
        return 1
    finally:
        dist.barrier()
        dist.destroy_process_group()
    return 0


def start(out, nodes, *words, port, **env):
    """A process for each entry of ``nodes``, the name of the node it is to be on."""
    found = []
    for rank, node in enumerate(nodes):
        own = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(len(nodes)), "SLURMD_NODENAME": node}
        own |= {"MEET": f"127.0.0.1:{port}", "OMP_NUM_THREADS": "1"}
        found.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.cluster.health.peers", str(out), *words],
                env=os.environ | own | env,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return found


def finish(processes):
    """What each printed, and its exit code."""
    return [(process.communicate(timeout=120)[0], process.returncode) for process in processes]


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))

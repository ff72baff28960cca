"""One rank of a layout on GPUs that nothing computes on: some steps and an evaluation; run by torch.distributed.run."""

import os
import sys

import torch
import torch.distributed as dist

from tests import parity

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("cpu:gloo,cuda:nccl")
parity.train(["engine.device=cuda", "engine.precision=bf16", *sys.argv[1:]], 3, device=f"cuda:{rank}")
print(f"rank {rank} is through", flush=True)
os._exit(0)  # vendors' threads may not survive the end of the interpreter

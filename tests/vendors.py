"""Loads, once for all ranks of the tests, what DeepSpeed would load in each of them: it takes seconds."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

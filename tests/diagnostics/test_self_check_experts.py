"""The self-check at the start of runs with experts: every layout passes as it is set, and a fault in what experts add is found."""

import json
import os
import re

import pytest
import torch
import torch.nn.functional as F

from hpclm import config
from hpclm.base.errors import HpclmError
from hpclm.diagnostics import self_check
from hpclm.engine import router_state
from hpclm.model import expert_mlp
from hpclm.parallel.mesh import Compute, Mesh
from tests import ranks
from tests.engine import sharded
from tests.engine.test_experts import BALANCE, EXPERTS
from tests.parity import TINY, TYPES

BF16, EXPERT = "engine.precision=bf16", "parallel.expert=2"
LAYOUTS = {
    "native": (2, [EXPERT, "optim.name=muon"]),
    "bf16": (2, [EXPERT, BF16]),
    "replicas of parts": (4, [EXPERT]),
    "zero1": (4, [EXPERT, "engine.zero_stage=1", "optim.name=muon", BF16]),
    "zero1 in groups": (4, [EXPERT, "engine.zero_stage=1", "parallel.shard=2"]),
    "fsdp2": (4, [EXPERT, "engine.name=fsdp2", "optim.name=muon"]),
    "fsdp2 in groups": (4, [EXPERT, "engine.name=fsdp2", "parallel.shard=2", BF16]),
    "tensor": (4, [EXPERT, "parallel.tensor=2", "optim.name=muon"]),
    "whole experts": (4, [EXPERT, "parallel.tensor=2", "parallel.split_experts=false"]),
    "context": (2, [EXPERT, "parallel.context=2"]),
    "pipelining": (4, [EXPERT, "parallel.pipeline=2", "engine.name=pipelining"]),
    "deepspeed": (2, ["engine.name=deepspeed"]),
    "deepspeed 3": (2, ["engine.name=deepspeed", "engine.zero_stage=3", BF16]),
    "fairscale": (2, ["engine.name=fairscale"]),
}
IN_CI = ("native", "zero1")


def scaled(patches):
    """Gradients of experts that are twice as large."""
    right = expert_mlp.Experts.forward

    def forward(self, *given):
        y = right(self, *given)
        return y if self.loops else y + (y - y.detach())

    patches.setattr(expert_mlp.Experts, "forward", forward)


def lost(patches):
    """The counts of the last rank are lost, which has experts in every layout: of pipelines, it has the last stage."""
    right = router_state.all_reduce
    size = torch.distributed.get_world_size()
    last = torch.distributed.get_rank() == size - 1
    patches.setattr(router_state, "all_reduce", lambda x, axis: right(x * (axis.size < size or not last), axis))


def grouped_wrongly(patches):
    """A product of experts that is a little off."""
    right = F.grouped_mm
    patches.setattr(F, "grouped_mm", lambda x, weights, offs: 1.2 * right(x, weights, offs=offs))


FAULTS = {
    "scaled": (scaled, "(gradient|grad_norm) of .* is off by"),
    "lost": (lost, r"experts counted \d+ tokens in a step with \d+ tokens for them"),
    "grouped": (grouped_wrongly, "is off by"),
}


def checked(folder, words):
    """What the check says on this rank, as it is and with each fault."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    words = [*TINY, *EXPERTS, *BALANCE["sequence and bias"], *words]
    run = config.load(None, [*words, "cluster.self_check=true", f"out={folder}"])
    *_, context = sharded.made(words[len(TINY) :])
    rank = torch.distributed.get_rank()
    compute = Compute(torch.device("cpu"), TYPES[run.engine.precision], Mesh.build(rank, context.size, run.parallel))
    self_check.check_computation(run, context, compute)
    said = json.loads((folder / "self-check.json").read_text())
    problems = {}
    for seed, (name, (fault, _)) in enumerate(FAULTS.items(), 10):
        with pytest.MonkeyPatch.context() as patches, pytest.raises(HpclmError) as error:
            fault(patches)
            run = config.load(None, [*words, "cluster.self_check=true", f"out={folder}", f"seed={seed}"])
            self_check.check_computation(run, context, compute)
        problems[name] = str(error.value)
    return said["way"], said["problems"], problems


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.whole) for name in LAYOUTS]
)
def test_every_layout_of_experts_is_checked_and_faults_are_found(layout, tmp_path):
    size, words = LAYOUTS[layout]
    for way, problems, faulty in ranks.run(size, checked, tmp_path, words):
        assert (way, problems) == ("as set", [])
        for name, (_, message) in FAULTS.items():
            assert re.search(f"(?s)self-check failed in every mode.*{message}", faulty[name]), faulty[name]

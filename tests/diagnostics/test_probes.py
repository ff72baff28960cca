import torch
import torch.distributed as dist

from hpclm.diagnostics import probes
from tests import ranks


def ring():
    """What each of two ranks says of messages of the other one: as they are sent, and with a last value that rank 1 has changed."""
    cpu, rank = torch.device("cpu"), dist.get_rank()
    whole = probes.receive(1 - rank, 1 - rank, cpu) > 0
    if rank == 0:
        try:
            return whole, probes.receive(1, 1, cpu)
        except RuntimeError as error:
            return whole, str(error)
    for size in (4, probes.LARGE):
        sent = torch.ones(size // 4)
        sent[-1] += size == probes.LARGE
        works = [dist.isend(sent, 0), dist.irecv(torch.empty_like(sent), 0)]
        for work in works:
            work.wait()
    return whole, None


def test_a_message_of_which_one_value_is_changed_is_noticed():
    assert ranks.run(2, ring) == [(True, "a message arrives changed"), (True, None)]

"""What balances experts, on a process that has only some of them."""

import torch

from hpclm.config import ModelConfig
from hpclm.engine.router_state import RouterState, bias_name
from hpclm.parallel.mesh import Compute
from tests.states import Kept


def test_a_stage_loads_the_biases_of_all_blocks():
    """All processes move all biases by the same counts, and are compared: a stage that had zeros for blocks of others looked corrupt."""
    config = ModelConfig.of(
        {"layers": 2, "experts.count": 4, "experts.router_choice_bias": True, "experts.balance_bias": 0.1}
    )
    saved = Kept({bias_name(f"block{layer}"): torch.full((4,), 1.0 + layer) for layer in range(2)})
    state = RouterState([], config, Compute(torch.device("cpu"), torch.float32))
    state.load_saved(saved, {})
    assert state.bias.tolist() == [[1.0] * 4, [2.0] * 4]

"""Networks drawn at random: what is exported has the same logits in transformers, and what is not is refused by a setting."""

import os

import pytest
import torch

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.config import ModelConfig
from hpclm.config.section import leaves
from hpclm.interop.huggingface import families
from tests.interop import made
from tests.interop.test_huggingface import trusted  # noqa: F401 - a fixture
from tests.networks import exportable

convert = cli.function("convert")

SEED = int(os.environ.get("TEST_SEED", "1"))
OFTEN, ALL = 6, 200
TOKENS = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(3))


def exported(seed, folder):
    """The run of the network of a seed, or of the next one that is exported; refusals name a setting."""
    while True:
        network = exportable(seed)
        run = folder / f"run{seed}"
        made.run(run, network)
        try:
            convert([str(run), str(folder / "hf")])
        except ConfigError as error:
            defaults = dict(leaves(ModelConfig()))
            settings = {f"model.{key}=" for key, value in leaves(ModelConfig.of(network)) if value != defaults[key]}
            assert any(
                setting in str(error) for setting in (*settings, "rope_type=", "the other format has no such weight")
            ), error
            seed += ALL
        else:
            return run


@pytest.mark.parametrize("seed", [pytest.param(SEED + n, marks=[pytest.mark.whole] * (n >= OFTEN)) for n in range(ALL)])
@pytest.mark.usefixtures("trusted")
def test_transformers_computes_what_a_random_network_does(seed, trusted, tmp_path):  # noqa: F811
    run = exported(seed, tmp_path)
    ours = made.logits(run, TOKENS)
    for length in (7, 24):  # scaled positions may depend on it
        ours = made.logits(run, TOKENS[:, :length])
        with torch.no_grad():
            theirs = trusted(tmp_path / "hf")(TOKENS[:, :length]).logits
        assert ours.std() > 0.01 and (ours - theirs).abs().max() < 3e-5 * theirs.abs().max().clamp(min=1)
    convert([str(tmp_path / "hf"), str(tmp_path / "back")])
    assert (made.logits(tmp_path / "back", TOKENS) - ours).abs().max() < 1e-5 * ours.abs().max().clamp(min=1)


def test_what_cannot_be_described_exactly_is_refused():
    gemma = {
        **made.LLAMA,
        "norm_order": "sandwich",
        "activation": "geglu_tanh",
        "embed_scale": True,
        "attention.qk_norm": True,
    }
    with pytest.raises(ConfigError, match=r"model\.attention\.score_scale=0\.3, but it needs 0\.3015"):
        families.of_network(ModelConfig.of({**gemma, "attention.score_scale": 0.3}))

"""State that an optimizer declares, whatever its shape, is saved once and goes to any other layout."""

import json
from math import prod

import pytest

from hpclm.parallel.placement import Placement
from tests import ranks
from tests.optim import declared

WORDS = ["engine.precision=fp32", "batch.global_size=12", "batch.micro_size=1", "model.layers=3", "optim.name=muon"]
WORDS += ["optim.groups=[{match: mlp, lr: 0.5}]"]
PIPELINE = ["engine.name=pipelining", "parallel.pipeline=2"]
CHAIN = [
    (4, ["engine.zero_stage=1", "parallel.tensor=2"]),
    (4, [*PIPELINE, "parallel.tensor=2"]),
    (3, ["engine.name=fsdp2"]),
    (2, PIPELINE),
    (1, []),
]


def test_state_of_every_declared_kind_is_saved_once_and_goes_to_any_layout(tmp_path):
    found = [ranks.run(1, declared.goes_on, tmp_path / "alone", 2 * len(CHAIN), WORDS)[0], []]
    for number, (size, words) in enumerate(CHAIN, start=1):
        losses = ranks.run(size, declared.goes_on, tmp_path / "moved", 2 * number, [*WORDS, *words])
        assert all(other == losses[0] for other in losses)
        found[1] += losses[0]
    assert found[1] == pytest.approx(found[0], abs=1e-5) and found[1][-1] < found[1][0] - 0.05
    manifests = [json.loads(path.read_text()) for path in (tmp_path / "moved").glob("step-*/MANIFEST.json")]
    assert len(manifests) == len(CHAIN)
    for tensors in (manifest["tensors"] for manifest in manifests):
        shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items()}
        wanted = {
            f"optim.{tensor}.{name.removeprefix('model.')}": it.shape
            for name, shape in shapes.items()
            if name.startswith("model.")
            for tensor, it in declared.state(Placement(shape), None).items()
        }
        assert wanted == {name: shape for name, shape in shapes.items() if name.startswith("optim.")}
        saved = {name: sum(prod(part["size"]) for part in entry["parts"]) for name, entry in tensors.items()}
        assert saved == {name: prod(shape) for name, shape in shapes.items()}

"""Documents that training leaves out (data.without)."""

import numpy as np
import pytest
import torch

from hpclm.base.errors import ConfigError
from hpclm.config import BatchConfig, BudgetConfig, DataConfig, ModelConfig, RunConfig
from hpclm.data.batches import Batches
from hpclm.data.corpus import corpus
from hpclm.data.sources import excluded
from hpclm.parallel.mesh import Compute
from tests.data.test_pieces import LENGTHS, written

ENDS = np.cumsum(LENGTHS)
EOD = 256
KINDS = {
    "mcore": dict(),
    "packed": dict(order="packed"),
    "lines": dict(break_mode="complete"),
    "masked": dict(eod_mask_loss=True, reset_attention_mask=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_listed_documents_become_ends_of_documents_that_count_in_no_loss(kind, tmp_path):
    one = written(tmp_path / "one", 0)
    two = written(tmp_path / "two", 100)
    chosen = tmp_path / "list.txt"
    chosen.write_text(f"# opted out\n{one} 3\n\ntwo 0\n{tmp_path}/two\t8\n{two} 8\n")
    gone = {*range(6, 46), *range(100, 105), *range(100 + ENDS[7], 100 + ENDS[8])}
    made = {}
    for without in (None, str(chosen)):
        data = DataConfig(blend=["0.4", one, "0.6", two], split="1", workers=0, without=without, **KINDS[kind])
        model = ModelConfig.of({"vocab_size": 300, "layers": 1, "hidden": 8, "attention.heads": 2, "context": 40})
        run = RunConfig(
            model=model, data=data, batch=BatchConfig(global_size=8, micro_size=4), budget=BudgetConfig(steps=3)
        )
        source = corpus(data, 40, 1, 300)
        samples = source.samples("train", 24)
        compute = Compute(torch.device("cpu"), torch.float32)
        batches = Batches(samples, run.plan(), data, model, source.eod, compute, excluded(source, data))
        steps = [[batches.step(8 * step), batches.hash] for step in range(3)]
        made[bool(without)] = steps
        assert data.all_tokens_count == (kind == "mcore" and not without)
    removed = 0
    for (whole, hash_before), (left, hash_after) in zip(made[False], made[True], strict=True):
        for before, after in zip(whole, left, strict=True):
            rows, others = (torch.cat([batch.tokens, batch.labels[:, -1:]], 1) for batch in (before, after))
            expected = torch.tensor([[token in gone for token in row] for row in rows.tolist()])
            assert torch.equal(others, torch.where(expected, EOD, rows))
            kept = before.mask().bool() & ~expected[:, 1:] & ~expected[:, :-1]
            if kind == "masked":
                kept &= after.tokens != EOD
            assert torch.equal(after.mask().bool(), kept)
            removed += int(expected.sum())
        same = all(torch.equal(one.tokens, other.tokens) for one, other in zip(whole, left, strict=True))
        assert (hash_before == hash_after) == same
    assert removed > 40


def test_lists_that_name_no_document_are_refused_with_each_line(tmp_path):
    one = written(tmp_path / "one", 0)
    chosen = tmp_path / "list.txt"
    chosen.write_text("3\n11\nother 2\nfour\n-1\n")
    with pytest.raises(ConfigError) as caught:
        corpus(DataConfig(prefix=one, split="1", without=str(chosen)), 8, 1, 300)
    assert [problem.removeprefix(f"{chosen}, ") for problem in caught.value.problems] == [
        f"line 2: {one} has documents 0 to 10; it has no document 11",
        f"line 3: 'other 2' must name one dataset of {one}",
        "line 4: 'four' must be a document's number from 0 on, or the prefix of its dataset and the number",
        "line 5: '-1' must be a document's number from 0 on, or the prefix of its dataset and the number",
    ]
    with pytest.raises(ConfigError, match=r"data.without=.*/nix cannot be read"):
        corpus(DataConfig(prefix=one, split="1", without=str(tmp_path / "nix")), 8, 1, 300)

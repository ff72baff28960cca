"""The files of a run's data are read by one rank of a node; the others open only what they train on."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from hpclm.preprocess.writer import Writer
from tests import ranks
from tests.training.node_data import reads, refusal

WORDS = [
    *(
        "model={vocab_size: 64, layers: 1, hidden: 16, context: 8, attention: {heads: 2}}",
        "batch={global_size: 4, micro_size: 1}",
        "budget.steps=5",
    ),
    *("data={prefix: x, index_cache: index, split: '8,2', tokenizer: fairseq, tokenizer_files: [dict.txt]}",),
    *("evaluate.every=2", "evaluate.batches=1"),
]
MAPPED = ["documents.npy", "samples.npy", "shuffle.npy", "x.bin", "x.idx"]


@pytest.fixture
def node(tmp_path):
    """The folder of a node, with a dataset and its tokenizer."""
    folder = tmp_path / "first"
    folder.mkdir()
    (folder / "dict.txt").write_text("".join(f"word{number} 1\n" for number in range(50)))
    draw = np.random.default_rng(1)
    with Writer(folder / "x", "u2") as writer:
        for _ in range(40):
            writer.add_document(draw.integers(0, 50, 20))
    return folder


def copied(node):
    """The folder of another node, with copies of other dates."""
    other = node.parent / "second"
    shutil.copytree(node, other, copy_function=shutil.copyfile)
    return other


@pytest.mark.parametrize("own", [False, True], ids=["one file system", "copies on every node"])
def test_one_rank_of_a_node_reads_the_files_and_the_others_map_what_they_train_on(own, node):
    folders = [node, node, copied(node), node.parent / "second"] if own else [node] * 4
    found = ranks.run(4, reads, list(map(str, folders)), WORDS)
    first = {"x.json", "dict.txt", "about.json"}
    for rank, (opened, hashed, *_) in enumerate(found):
        if folders.index(folders[rank]) == rank:
            assert first < set(opened) and hashed
        else:
            assert opened == MAPPED and hashed == 0, f"rank {rank} read again what rank {rank - 1} had passed on"
    assert all(each[2:] == found[0][2:] for each in found)


def refusals(folders):
    """What all ranks raise alike about the second node."""
    told = ranks.run(4, refusal, list(map(str, folders)), WORDS)
    assert len(set(told)) == 1 and told[0][1], "they raise the same, and one of them reports it"
    first, *others = told[0][0].splitlines()
    assert first == "the data on second cannot be used:"
    return others


def test_a_node_with_other_data_is_refused_by_name_on_every_rank(node):
    other = copied(node)
    tokens = np.fromfile(other / "x.bin", "<u2")
    tokens[100] = 49 - tokens[100]
    tokens.tofile(other / "x.bin")
    head, what = refusals([node, node, other, other])
    assert head.startswith("they are not those of rank 0's node") and "has other tokens" in what


def test_an_error_of_the_rank_that_reads_for_another_node_ends_every_rank(node):
    other = copied(node)
    (other / "x.idx").write_bytes((other / "x.idx").read_bytes()[:-1])
    [wrong] = refusals([node, node, other, other])
    assert "is corrupt" in wrong


def test_an_index_that_is_gone_when_the_others_come_is_made_again(node, tmp_path):
    from hpclm.data.index_cache import kept
    from hpclm.data.scan import SharedFacts

    facts = SharedFacts()
    kept(tmp_path / "index", {"seed": 1}, lambda: {"a": np.arange(3)}, facts)
    shutil.rmtree(tmp_path / "index")
    again = kept(tmp_path / "index", {"seed": 1}, lambda: {"a": np.arange(3)}, SharedFacts(facts.values))
    assert again["a"].tolist() == [0, 1, 2] and list(Path(tmp_path / "index").glob("*/a.npy"))

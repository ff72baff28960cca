"""data.split_by: a dataset of few documents is divided inside them; runs that divided documents keep that."""

from itertools import pairwise

import numpy as np
import pytest

from hpclm import cli, config
from hpclm.base.errors import ConfigError
from hpclm.checkpoint.fingerprint import differences
from hpclm.config import DataConfig
from hpclm.data import split_by
from hpclm.data.corpus import corpus
from hpclm.inference import evaluation
from hpclm.preprocess.writer import Writer

CONTEXT = 4
LENGTHS = {
    "one": [103],
    "many": [7, 0, 30, 1, 0, 2, 25, 0, 0, 38],
    "bounds between documents": [90, 10],
    "empty ends": [0, 0, 60, 40, 0],
}


@pytest.fixture
def make(tmp_path):
    """A dataset of documents of these lengths; its tokens count up."""

    def make(lengths, name="x"):
        with Writer(tmp_path / name, "i4") as writer:
            for begin, end in pairwise(np.cumsum([0, *lengths])):
                writer.add_document(np.arange(begin, end))
        return str(tmp_path / name)

    return make


def rows(samples):
    found = np.empty((len(samples), CONTEXT + 1), np.int64)
    for i, row in enumerate(found):
        samples.read(i, row)
    return found


def read(prefix, part, **data):
    """The tokens that samples of a part predict, and how many samples there are."""
    made = corpus(DataConfig(prefix=prefix, split_by="tokens", **data), CONTEXT, 1, 10_000)
    found = rows(made.samples(part, None))
    return found, set(found[found >= 0].tolist())


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("order", ["mcore", "bigscience", "dse", "packed"])
def test_the_first_tokens_train_and_the_last_are_validated_on(order, lengths, make):
    prefix, total = make(lengths), sum(lengths)
    cut = round(0.9 * total)
    train, seen = read(prefix, "train", split="90,10", order=order)
    held_out = read(
        prefix, "valid", split="90,10", order=order, **({} if order == "packed" else {"keep_partial": True})
    )[1]
    assert seen <= set(range(cut)) and held_out <= set(range(cut, total))
    if (
        order == "packed"
    ):  # whole documents, and pieces of the one that the split divides; a single token teaches nothing
        assert len(set(range(total)) - seen - held_out) <= sum(length == 1 for length in lengths)
    else:
        assert len(train) == (cut - 1) // CONTEXT and len(seen) >= cut - CONTEXT
        assert held_out == set(range(cut, total))
    if len(lengths) == 1 and order != "packed":
        assert sorted(train.tolist()) == [list(range(i, i + CONTEXT + 1)) for i in range(0, cut - CONTEXT, CONTEXT)]


def test_several_passes_and_three_parts_stay_inside_their_tokens(make):
    prefix = make(LENGTHS["many"])
    made = corpus(DataConfig(prefix=prefix, split="8,1,1", split_by="tokens"), CONTEXT, 1, 10_000)
    bounds = {"train": (0, 82), "valid": (82, 93), "test": (93, 103)}
    for part, (begin, end) in bounds.items():
        samples = made.samples(part, 50)
        found = rows(samples)
        assert len(samples) >= 50 and begin <= found.min() and found.max() < end


@pytest.mark.parametrize("lengths", [[103], [7, 0, 30, 1, 0, 2], [0, 90, 10]], ids=str)
def test_bounds_that_are_those_of_documents_give_the_samples_of_documents(lengths, make):
    prefix = make([40, 0, *lengths])
    sources = [
        corpus(DataConfig(prefix=prefix, split="1", split_by=by), CONTEXT, 3, 10_000) for by in ("documents", "tokens")
    ]
    for requested in (None, 100):
        one, other = (rows(source.samples("train", requested)) for source in sources)
        assert np.array_equal(one, other)


def test_parts_of_a_blend_are_divided_each(make):
    blend = [make([103], "a"), make([50, 50], "b")]
    made = corpus(DataConfig(blend=blend, split="90,10", split_by="tokens"), CONTEXT, 1, 10_000)
    assert [part.tokens for part in made.splits["valid"].slices] == [10, 10]
    assert made.per_epoch("valid") == 4


def test_another_division_of_the_data_of_a_checkpoint_is_named_and_that_of_documents_is_as_before(make):
    prefix = make(LENGTHS["many"])

    def fingerprint(**data):
        return {"data": corpus(DataConfig(prefix=prefix, split="1", **data), CONTEXT, 1, 10_000).fingerprint}

    before = fingerprint()
    assert fingerprint(split_by="documents") == before
    assert before["data"]["datasets"][0].keys() == {
        *("bin_bytes", "idx_bytes", "layout", "dtype", "bin", "idx", "span", "content")
    }
    [difference] = differences(before, fingerprint(split_by="tokens"))
    assert difference == "the training dataset has another part in use (data.split, data.split_by)"


CHOSEN = {
    "one document": ([900], [], "tokens"),
    "a document for training, none for validation": ([400, 400], [], "tokens"),
    "enough documents": ([33] * 100, [], "documents"),
    "a short last document": ([33] * 32 + [5], [], "tokens"),
    "a short last document, kept": ([33] * 32 + [5], ["data.keep_partial=true"], "documents"),
    "a short last document, repeated": ([33] * 32 + [5], ["data.short_part=repeat"], "documents"),
    "nothing to repeat": ([900], ["data.short_part=repeat"], "tokens"),
    "packed": ([33] * 32 + [5], ["data.order=packed"], "documents"),
    "packed, one document": ([900], ["data.order=packed"], "tokens"),
    "no validation asked for": ([900], ["data.split=1"], "documents"),
    "no evaluations": ([900], ["evaluate.every=0"], "documents"),
    "nothing to train on": ([900], ["data.split=49,51", "evaluate.every=0"], "tokens"),
    "blocks of lines": ([900], ["data.break_mode=none"], "documents"),
    "what a person says": ([900], ["data.split_by=documents"], "documents"),
    "what a person says, too": ([33] * 100, ["data.split_by=tokens"], "tokens"),
}


@pytest.mark.parametrize("lengths, words, by", CHOSEN.values(), ids=CHOSEN.keys())
def test_tokens_are_divided_where_documents_would_leave_less_than_one_sample(lengths, words, by, make, tmp_path):
    words = [f"data.prefix={make(lengths)}", "model.context=16", f"out={tmp_path / 'run'}", *words]
    assert split_by.resolved(config.load(None, words)).data.split_by == by


@pytest.mark.parametrize("lengths, by", [(([900], [33] * 100), "tokens"), (([33] * 100, [33] * 50), "documents")])
def test_one_dataset_of_a_blend_that_documents_leave_short_decides_wherever_it_is_listed(lengths, by, make):
    one, other = (make(each, name) for each, name in zip(lengths, "ab", strict=True))
    for blend in ([one, other], [other, one]):
        words = [f"data.blend=[{','.join(blend)}]", "model.context=16", "out=nowhere"]
        assert split_by.resolved(config.load(None, words)).data.split_by == by


@pytest.mark.parametrize("words", [["data.source=synthetic"], ["data.train=[PREFIX]"], []], ids=str)
def test_what_data_split_does_not_divide_needs_no_decision(words, make):
    run = config.load(None, [word.replace("PREFIX", make([9])) for word in words])
    assert split_by.resolved(run) == run


REFUSED = {
    "data.train=[x]": "data.split_by=tokens has no effect with data.train",
    "data.source=synthetic": "data.split_by=tokens has no effect with data.source=synthetic",
    "data.break_mode=eos": "data.split_by=tokens divides inside lines, which data.break_mode=eos reads whole",
    "data.split_by=lines": "data.split_by",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_divided_by_tokens_is_refused_by_name(word):
    with pytest.raises(ConfigError, match=REFUSED[word]):
        config.load(None, ["data.split_by=tokens", word])


def test_conversations_are_not_divided(make):
    prefix = make([30, 30])
    with Writer(f"{prefix}_loss", "u1") as mask:
        for _ in range(2):
            mask.add_document(np.ones(30))
    data = DataConfig(prefix=prefix, order="packed", split_by="tokens")
    with pytest.raises(ConfigError, match=r"data\.split_by=tokens would divide inside the conversations of .*/x"):
        corpus(data, CONTEXT, 1, 10_000)
    run = config.load(None, [f"data.prefix={prefix}", "data.order=packed", "out=nowhere"])
    assert split_by.resolved(run).data.split_by == "documents"


def test_a_part_with_too_few_tokens_says_so(make):
    made = corpus(DataConfig(prefix=make([103]), split="99,1", split_by="tokens"), CONTEXT, 1, 10_000)
    with pytest.raises(ConfigError) as error:
        made.samples("valid", 1)
    for said in ("has 1 tokens (of 103, which data.split_by=tokens divides, data.split=99,1)", "model.context + 1 = 5"):
        assert said in str(error.value)


def test_a_run_keeps_how_it_divides_its_data_and_every_verb_follows(make, tiny, tmp_path, capsys):
    prefix = make([60] * 20)
    words = tiny(
        "run",
        "data.source=indexed",
        f"data.prefix={prefix}",
        "model.vocab_size=1200",
        "data.split=94,6",
        "evaluate.every=4",
    )
    out, text = tmp_path / "run", lambda: (tmp_path / "run/config.yaml").read_text()
    assert cli.main(["train", *words, "model.context=64", "stop_at=4"]) == 0  # a document has less than a sample
    assert "  split_by: tokens\n" in text() and "splits inside documents" in capsys.readouterr().err
    measured = evaluation.on_part(out, [], "valid", None)
    assert measured["samples"] == 1 == evaluation.on_part(out, ["data.split_by=tokens"], "valid", None)["samples"]
    assert cli.main(["train", *words, "model.context=64", "stop_at=5", "data.split_by=documents"]) == 64
    assert "one sample needs" in capsys.readouterr().err
    assert (
        cli.main(["train", *words, "model.context=64", "stop_at=5", "data.split=90,10", "data.split_by=documents"])
        == 64
    )
    assert "another part in use (data.split, data.split_by)" in capsys.readouterr().err
    assert cli.main(["train", *words, "model.context=64", "evaluate.every=0", "stop_at=6"]) == 0  # enough by documents
    assert "  split_by: tokens\n" in text() and (out / "checkpoints/step-00000006").is_dir()

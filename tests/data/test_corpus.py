import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from hpclm.base.errors import ConfigError
from hpclm.checkpoint import Progress
from hpclm.config import DataConfig
from hpclm.data import sources
from hpclm.data.corpus import corpus
from hpclm.data.tokenizers import build_tokenizer
from hpclm.preprocess.writer import Writer

CONTEXT = 4


@pytest.fixture
def make(tmp_path):
    """A dataset of documents of these lengths; its tokens count up from ``start``."""

    def make(name, lengths, start=0, note=None):
        with Writer(tmp_path / name, "i4") as writer:
            writer.note = note
            for begin, end in pairwise(np.cumsum([start, *lengths])):
                writer.add_document(np.arange(begin, end))
        return str(tmp_path / name)

    return make


def source(seed=1, vocab_size=10_000, **data):
    return corpus(DataConfig(**data), CONTEXT, seed, vocab_size)


def rows(samples, count=None):
    found = np.empty((count or len(samples), CONTEXT + 1), np.int64)
    for i, row in enumerate(found):
        samples.read(i, row)
    return found


def origins(samples, count=None):
    """Thousands of each sample's first token: which dataset it is from."""
    return (rows(samples, count)[:, 0] // 1000).tolist()


def test_weights_say_how_often_each_dataset_is_read(make):
    blend = ["3", make("a", [40] * 10), "1", make("b", [40] * 10, 1000)]
    found = origins(source(blend=blend, split="1").samples("train", 80), 80)
    assert (found.count(0), found.count(1)) == (60, 20)
    assert all(3 * found[:n].count(1) <= found[:n].count(0) + 3 for n in range(80))


def test_a_dataset_that_is_wanted_more_than_it_has_comes_again(make):
    blend = ["1", make("small", [40]), "1", make("large", [40] * 10, 1000)]
    made = source(blend=blend, split="1")
    assert made.per_epoch("train") == 18  # until the small one has been read
    found = origins(made.samples("train", 100), 100)
    assert found.count(0) == found.count(1) == 50


def test_without_weights_every_sample_occurs_once_per_epoch(make):
    made = source(blend=[make("a", [41]), make("b", [81], 1000)], split="1")
    assert made.per_epoch("train") == 30
    found = rows(made.samples("train", None))
    assert sorted(found[:, 0].tolist()) == [*range(0, 40, 4), *range(1000, 1080, 4)]
    assert len(made.samples("train", 75)) >= 75  # more than a pass: in proportion to the sizes
    assert abs(origins(made.samples("train", 75), 75).count(0) - 25) <= 1


def test_every_dataset_of_a_blend_is_split(make):
    made = source(blend=[make("a", [20] * 10), make("b", [20] * 10, 1000)], split="8,1,1")
    assert made.held_out == ["valid"]
    seen = {part: set(rows(made.samples(part, None)).ravel().tolist()) for part in ("train", "valid", "test")}
    assert max(t for t in seen["train"] if t < 1000) < 160 <= min(t for t in seen["valid"] if t < 1000)
    assert not seen["train"] & seen["valid"] | seen["valid"] & seen["test"]


def test_training_validation_and_test_can_be_datasets_of_their_own(make):
    made = source(train=[make("a", [50])], valid=["2", make("b", [50], 1000), "1", make("c", [50], 2000)])
    assert made.held_out == ["valid"] and made.per_epoch("test") == 0
    assert set(origins(made.samples("train", None))) == {0}
    assert origins(made.samples("valid", 9), 9).count(1) == 6
    with pytest.raises(ConfigError, match="define no data for 'test', only for train, valid"):
        made.samples("test", 1)
    assert source(train=[make("a", [50])]).held_out == []


def test_validation_sets_have_names(make):
    law, code, more = make("l", [50], 1000), make("c", [50], 2000), make("m", [50], 3000)
    made = source(prefix=make("a", [50] * 10), split="9,1,0", validation=[f"law={law}", f"code={code}", f"law={more}"])
    assert made.held_out == ["valid", "valid/law", "valid/code"]
    assert set(origins(made.samples("valid/law", None))) == {1, 3}
    assert set(origins(made.samples("valid/code", None))) == {2}
    assert source(prefix=make("a", [50]), split="1", validation=[f"law={law}"]).held_out == ["valid/law"]


def test_lines_are_read_in_blocks_as_fairseq_reads_them(make):
    note = {"tokenizer": build_tokenizer("bytes", []).fingerprint}  # 256 ends a document here
    prefix = make("a", [3, 1, 2, 4], note=note)
    made = source(prefix=prefix, split="1", break_mode="complete")
    found = rows(made.samples("train", None))
    low = np.iinfo(np.int64).min
    assert sorted(found.tolist()) == [[256, 0, 1, 2, 3], [256, 4, 5, low, low], [256, 6, 7, 8, 9]]
    assert len(made.samples("train", 7)) >= 7
    later = source(prefix=prefix, split="1,1,0", break_mode="complete").samples("valid", None)
    assert sorted(rows(later).tolist()) == [[256, 4, 5, low, low], [256, 6, 7, 8, 9]]
    with pytest.raises(ConfigError, match=r"line of 9 tokens.*model.context is 4; set model.context=9 or"):
        source(prefix=make("b", [9], note=note), split="1", break_mode="eos").samples("train", 1)
    with pytest.raises(ConfigError, match=r"data\.break_mode needs the end-of-line token"):
        source(prefix=make("c", [3]), split="1", break_mode="eos")


def test_the_end_of_a_held_out_part_can_be_kept(make):
    prefix = make("a", [23])
    assert len(source(train=[prefix], valid=[prefix]).samples("valid", None)) == 5
    kept = source(train=[prefix], valid=[prefix], keep_partial=True)
    assert (len(kept.samples("valid", None)), len(kept.samples("train", None))) == (6, 5)


def test_a_runs_own_evaluation_reads_the_kept_end_and_nothing_twice(make):
    from hpclm.config import BatchConfig, ModelConfig, RunConfig
    from hpclm.parallel.mesh import Compute
    from hpclm.training.run_data import build_data

    prefix = make("a", [23])
    model = ModelConfig.of({"layers": 1, "hidden": 8, "attention.heads": 2, "context": CONTEXT, "vocab_size": 64})
    data = DataConfig(train=[prefix], valid=[prefix], keep_partial=True)
    config = RunConfig(model=model, data=data, batch=BatchConfig(global_size=2, micro_size=2))
    source, compute = sources.build_source(data, model, config.seed), Compute(torch.device("cpu"), torch.float32)
    [part] = build_data(config, config.plan(), compute, source, Progress()).held_out
    seen = list(part.batches.take(0, part.size))
    first = sorted(token for batch in seen for token in batch.tokens[:, 0].tolist())
    assert first == [0, 4, 8, 12, 16, 20]
    assert sum(int(batch.labels.numel() if batch.loss_mask is None else batch.loss_mask.sum()) for batch in seen) == 22


@pytest.mark.parametrize("break_mode", [None, "none", "complete", "complete_doc", "eos"])
def test_a_large_dataset_that_is_corrupt_in_the_middle_is_not_read(break_mode, tmp_path, monkeypatch):
    from hpclm.data import indexed

    note = {"tokenizer": build_tokenizer("bytes", []).fingerprint}
    with Writer(tmp_path / "x", "u2") as writer:
        writer.note = note
        writer.extend(np.arange(300), np.full(100, 3), np.full(100, 1))
    raw = bytearray((tmp_path / "x.idx").read_bytes())
    raw[34 + 4 * 50 : 34 + 4 * 52] = np.array([-1, 7], "<i4").tobytes()
    (tmp_path / "x.idx").write_bytes(raw)
    monkeypatch.setattr(indexed, "SCANNED", 10)  # as if there were more than opening looks at
    made = source(prefix=str(tmp_path / "x"), split="1", break_mode=break_mode, vocab_size=300)
    with pytest.raises(ConfigError, match="sequence 50 has a negative size"):
        made.samples("train", 10)


def test_datasets_of_two_tokenizers_are_not_read_as_one(make):
    notes = [
        {"tokenizer": build_tokenizer("bytes", []).fingerprint},
        {"tokenizer": {**build_tokenizer("bytes", []).fingerprint, "size": 300}},
    ]
    one, other = (make(str(i), [50], note=note) for i, note in enumerate(notes))
    for data in (
        dict(blend=[one, other]),
        dict(train=[one], valid=[other]),
        dict(prefix=one, validation=[f"x={other}"]),
    ):
        with pytest.raises(
            ConfigError, match=r"dataset .*1 and dataset .*0 do not have the same tokenizer: .*300.*257"
        ):
            source(**data)
    assert source(blend=[one, make("2", [50])]).eod == 256  # what has no note is taken at its word


def test_the_fingerprint_is_the_training_datas(make):
    a, b = make("a", [50] * 9), make("b", [50] * 9, 1000)
    first = source(blend=["1", a, "2", b], split="1").fingerprint
    assert source(blend=["1", a, "2", b], split="1", validation=[f"x={a}"]).fingerprint == first
    changed = [dict(blend=["2", a, "1", b]), dict(blend=["1", b, "2", a]), dict(blend=[a, b]), dict(prefix=a)]
    fingerprints = [first, *(source(split="1", **data).fingerprint for data in changed)]
    fingerprints.append(source(blend=["1", a, "2", b], split="1,1,1").fingerprint)
    assert all(x != y for i, x in enumerate(fingerprints) for y in fingerprints[:i])


def test_a_blend_with_a_dataset_that_is_too_small_names_it(make):
    with pytest.raises(ConfigError, match=r"the train split of .*/small has 3 tokens \(1 of 1 sequences\)"):
        source(blend=[make("large", [50]), make("small", [3])], split="1").samples("train", 5)


WRONG = {
    ("blend=[0.3,a,b]",): "must be alternating weights and paths",
    ("blend=[a,0.3]",): "0.3 is a weight, but the first dataset has none",
    ("blend=[0.3,a,0,b]",): "weights must be more than 0",
    ("blend=[1,a,1,a]",): "contains a dataset twice",
    ("blend=[1,a,nan,b]",): "must be alternating weights and paths",
    ("blend=[a]", "prefix=b"): "data.prefix=b and data.blend=[a] cannot be combined",
    ("train=[a]", "prefix=b"): "data.prefix=b has no effect with data.train",
    ("train=[a]", "split=1"): "data.split=1 has no effect with data.train",
    ("prefix=a", "valid=[b]"): "data.valid=[b] has no effect without data.train",
    ("prefix=a", "validation=[b]"): "'b' must be name=path",
    ("prefix=a", "validation=[x/y=b]"): "'x/y=b' must be name=path",
    ("source=synthetic", "blend=[a]"): "data.blend=[a] has no effect with data.source=synthetic",
    ("prefix=a", "break_mode=eos", "order=dse"): "data.order=dse has no effect with data.break_mode=eos",
    ("prefix=a", "workers=-1"): "data.workers=-1 must be at least 0",
}


@pytest.mark.parametrize("words, message", WRONG.items(), ids=map(" ".join, WRONG))
def test_lists_that_cannot_be_read_are_refused_with_the_settings(words, message):
    from hpclm import config

    with pytest.raises(ConfigError) as error:
        config.from_cli([f"data.{word}" for word in words])
    assert message in str(error.value)


def test_a_budget_of_millions_of_passes_is_refused_with_the_arithmetic_before_memory_is_taken(make):
    made = source(prefix=make("a", [40] * 200), split="1")
    with pytest.raises(ConfigError) as told:
        made.samples("train", 500_000_000)
    said = str(told.value)
    assert "500,000,000 samples of model.context=4 tokens are 250,001 passes over the train split of" in said
    assert "which has 8,000 tokens, and their index would take 5.8 GiB of memory" in said
    assert "set budget.epochs=10 (at most budget.epochs=" in said
    fits = int(said.partition("at most budget.epochs=")[2].split()[0])
    made.check("train", fits * made.per_epoch("train"))  # what it says fits is not refused
    made.check("train", 90 * made.per_epoch("train"))
    with pytest.raises(ConfigError, match="passes over"):
        made.check("train", (fits + 1000) * made.per_epoch("train"))


def test_a_small_dataset_of_a_blend_is_not_read_millions_of_times(make):
    small, large = make("small", [40]), make("large", [400] * 20, 1000)
    made = source(blend=["1", small, "1", large], split="1")
    with pytest.raises(ConfigError, match=r"are 12,\d+,\d+ passes over the train split of \S*small"):
        made.samples("train", 250_000_000)


def test_blocks_of_lines_are_not_repeated_millions_of_times(make):
    note = {"tokenizer": build_tokenizer("bytes", []).fingerprint}
    made = source(prefix=make("a", [3, 1, 2, 4], note=note), split="1", break_mode="complete")
    with pytest.raises(ConfigError, match=r"200,000,000 samples .* are 66,666,667 passes"):
        made.samples("train", 200_000_000)


def test_a_part_shorter_than_a_sample_is_refused_or_repeated(make):
    short, valid = make("a", [3]), make("v", [2, 1], 1000)
    with pytest.raises(
        ConfigError, match=r"has 3 tokens .* needs model.context \+ 1 = 5; .*set data.short_part=repeat"
    ):
        source(train=[short]).samples("train", 7)
    ways = {
        "refuse": "; set another data.split or data.split_by=tokens, or give more data$",
        "repeat": "data.short_part=repeat has nothing to repeat",
    }
    for name, (short_part, way) in zip(("one", "two"), ways.items()):
        empty = source(prefix=make(name, [20]), split="50,50,0", short_part=short_part)
        [part] = [part.name for part in empty.splits.values() if not part.slices[0].tokens]
        with pytest.raises(ConfigError, match=f"has 0 tokens .*{way}"):
            empty.samples(part, 7)
    made = source(train=[short], valid=[valid], short_part="repeat")
    assert made.per_epoch("train") == made.per_epoch("valid") == 1
    found = rows(made.samples("train", 7))
    assert len(found) >= 7 and all(np.array_equal(row, np.arange(row[0], row[0] + 5) % 3) for row in found)
    assert set(rows(made.samples("valid", None))[0].tolist()) == {1000, 1001, 1002}
    blend = source(train=["1", short, "1", make("b", [400], 1000)], short_part="repeat")
    assert origins(blend.samples("train", 60), 60).count(0) == 30
    whole = source(train=[short, make("c", [9], 1000)], short_part="repeat")
    assert sorted(origins(whole.samples("train", None))) == [0, 1, 1]


def test_what_is_verified_of_the_data_is_told_in_blocks_and_datasets_without_hashes_are_named(make, tmp_path):
    blend = [make(name, [40]) for name in "abcde"]
    for name in "bcde":
        note = tmp_path / f"{name}.json"
        note.unlink(missing_ok=True)
    blend = [blend[0], make("f", [1 << 18, 1]), *blend[1:]]
    intact, unknown = source(blend=blend, split="1", vocab_size=1 << 19).check_content()
    assert intact == "data: verified 3 random blocks of 3, each of 1 MiB; hpclm data verify reads all"
    b, c, d, e = blend[2:]
    assert f"index of {b}, {c}, {d} and 1 more are valid" in unknown and unknown.endswith(
        f"hpclm data verify --record {b} {c} {d} {e}"
    )
    [unknown] = source(blend=blend[2:5], split="1").check_content()
    assert f"index of {b}, {c}, {d} are valid" in unknown
    assert len(source(prefix=blend[0]).check_content()) == 1


def test_blocks_of_another_number_of_tokens_are_not_those_that_were_hashed(make, tmp_path):
    from hpclm.data.content import check_some, noted
    from hpclm.data.indexed import IndexedDataset

    content = noted(make("a", [40]))
    large = IndexedDataset(make("b", [1 << 18, 1]))
    with pytest.raises(ConfigError, match=r"b.bin does not have the length that was hashed: it was replaced"):
        check_some(large, content, 1, random.Random())
    assert check_some(large, noted(tmp_path / "b"), 9, random.Random()) == 2


def test_the_first_tokens_of_a_dataset_without_a_note_are_in_the_vocabulary(make):
    prefix = make("a", [40])
    source(prefix=prefix, vocab_size=40)
    with pytest.raises(
        ConfigError, match=r"a holds token 39, outside model.vocab_size=39; set model.vocab_size to the size"
    ):
        source(prefix=prefix, vocab_size=39)


def test_a_vocabulary_is_as_large_as_its_tokenizer_and_not_much_larger(make, caplog):
    prefix = make("a", [40], note={"tokenizer": {**build_tokenizer("bytes", []).fingerprint, "size": 600}})
    said = r"model.vocab_size=599 is smaller than the 600 entries of the bytes tokenizer of dataset .*a; set model.vocab_size=600"
    with pytest.raises(ConfigError, match=said):
        source(prefix=prefix, vocab_size=599)
    for size in (600, 1200):
        source(prefix=prefix, vocab_size=size)
    assert not caplog.messages
    source(prefix=prefix, vocab_size=1201)
    assert caplog.messages[0].startswith("model.vocab_size=1201, but the tokenizer of dataset")
    assert caplog.messages[0].endswith("has 600 entries; with model.vocab_size=600 the model is smaller and faster")


def test_a_dataset_that_is_not_named_or_has_no_tokens_is_refused(make):
    with pytest.raises(ConfigError, match=r"data.prefix is not set; give the path of a dataset"):
        source(source="indexed")
    with pytest.raises(ConfigError, match=r"a has no tokens \(0 sequences\)"):
        source(prefix=make("a", []))

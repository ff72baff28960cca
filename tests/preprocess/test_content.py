"""Content hashes of datasets: what holds other bytes than were written is found, wherever and by whatever verb."""

import dataclasses
import json
import os
import random
import shutil

import numpy as np
import pytest
import xxhash

from hpclm import cli
from hpclm.base.errors import ConfigError
from hpclm.checkpoint.fingerprint import differences, fingerprint
from hpclm.config import from_cli
from hpclm.data import content, sources, tokenizer_folder
from hpclm.data.content import DIGEST, HASH_BLOCK_BYTES
from hpclm.data.corpus import SAMPLED
from hpclm.data.indexed import IndexedDataset, sidecar
from hpclm.distributed.context import single
from hpclm.preprocess.hashing import Hasher
from hpclm.preprocess.verify import verify
from hpclm.preprocess.writer import Writer
from hpclm.training import loop
from hpclm.training.start import RunStart
from tests.preprocess.test_merge import TOKENIZER, write


def by_hand(path):
    """What the module's first lines say, word for word."""
    data = path.read_bytes()
    digests = [xxhash.xxh3_64_digest(data[at : at + HASH_BLOCK_BYTES]) for at in range(0, len(data), HASH_BLOCK_BYTES)]
    return xxhash.xxh3_128_hexdigest(b"".join(digests)), b"".join(digests).hex()


@pytest.fixture
def large(tmp_path):
    """A dataset of 80 blocks and a bit, of bytes."""
    with Writer(tmp_path / "x", "u2") as writer:
        draw = np.random.default_rng(0)
        for _ in range(40):
            tokens = draw.integers(0, 257, HASH_BLOCK_BYTES + 77, dtype="u2")
            writer.extend(tokens, np.array([1000, len(tokens) - 1000]), np.array([1, 1]))
        writer.note = {"tokenizer": TOKENIZER}
    return tmp_path / "x"


def zero(path, begin, end):
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(bytes(end - begin))


@pytest.mark.parametrize(
    "size", [0, 1, HASH_BLOCK_BYTES - 1, HASH_BLOCK_BYTES, HASH_BLOCK_BYTES + 1, 3 * HASH_BLOCK_BYTES + 5]
)
def test_the_hash_does_not_depend_on_the_pieces(size, tmp_path):
    data = random.Random(size).randbytes(size)
    (tmp_path / "x").write_bytes(data)
    for largest in (17_000, 300_000, 5 * HASH_BLOCK_BYTES):
        hasher, draw, at = Hasher(), random.Random(largest), 0
        while at < size:
            piece = data[at : at + draw.randrange(1, largest)]
            hasher.update(piece)
            at += len(piece)
        assert hasher.end() == by_hand(tmp_path / "x")


def test_a_dataset_stores_the_hashes_of_its_files(large):
    found = content.noted(large)
    assert (found.bin, found.blocks) == by_hand(large.with_suffix(".bin"))
    assert found.idx == by_hand(large.with_suffix(".idx"))[0]
    assert verify(IndexedDataset(large))["content"] == found.bin


def test_zeros_are_found_and_where_they_begin(large, capsys):
    """Zeros are tokens like others: nothing but the hash tells."""
    zero(large.with_suffix(".bin"), 3 * HASH_BLOCK_BYTES + 10, 50 * HASH_BLOCK_BYTES)
    assert cli.main(["data", "verify", str(large)]) == 64
    said = capsys.readouterr().err
    assert "x.bin is corrupt: 47 of 81 blocks of 1 MiB do not match" in said
    assert f"the first one at byte {3 * HASH_BLOCK_BYTES} (document 3, sequence 3, offset" in said


def test_a_hash_that_is_added_later_vouches_for_nothing_before_it(large, capsys):
    large.with_suffix(".json").unlink()
    assert cli.main(["data", "verify", "--record", str(large)]) == 0
    assert "it cannot detect earlier damage" in capsys.readouterr().out
    zero(large.with_suffix(".bin"), 3 * HASH_BLOCK_BYTES + 10, 50 * HASH_BLOCK_BYTES)
    large.with_suffix(".json").unlink()
    assert cli.main(["data", "verify", "--record", str(large)]) == 0
    assert cli.main(["data", "verify", str(large)]) == 0
    assert "has not changed since its hash was recorded at 20" in capsys.readouterr().out


@pytest.mark.parametrize("place", [0, 1, -1])
def test_one_bit_is_found(large, place):
    size = large.with_suffix(".bin").stat().st_size
    with large.with_suffix(".bin").open("r+b") as file:
        file.seek(place % size)
        old = file.read(1)[0]
        file.seek(place % size)
        file.write(bytes([old ^ 1]))
    with pytest.raises(ConfigError, match="1 of 81 blocks"):
        verify(IndexedDataset(large), 400)


def test_an_index_that_is_sound_but_not_the_one_that_was_written_is_found(tmp_path):
    write(tmp_path / "x", [[[1, 2]], [[3]]])
    write(tmp_path / "y", [[[1]], [[2, 3]]])
    shutil.copy(tmp_path / "y.idx", tmp_path / "x.idx")
    with pytest.raises(ConfigError, match=r"x\.idx is corrupt"):
        verify(IndexedDataset(tmp_path / "x"))


def test_a_corrupt_dataset_is_neither_merged_nor_converted(large, tmp_path, capsys):
    zero(large.with_suffix(".bin"), HASH_BLOCK_BYTES, 2 * HASH_BLOCK_BYTES)
    for words in (["merge", tmp_path / "m", large, large], ["convert", large, tmp_path / "m", "--layout", "fairseq"]):
        assert cli.main(["data", *map(str, words)]) == 64
        assert "x.bin is corrupt" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx", "x.json"]


def test_merged_and_converted_datasets_get_new_hashes(large, tmp_path):
    assert cli.main(["data", "merge", str(tmp_path / "m"), str(large), str(large), "--dtype", "int32"]) == 0
    assert cli.main(["data", "convert", str(large), str(tmp_path / "c"), "--layout", "fairseq"]) == 0
    for name in ("m", "c"):
        assert cli.main(["data", "verify", str(tmp_path / name)]) == 0
    assert content.noted(tmp_path / "c").bin == content.noted(large).bin != content.noted(tmp_path / "m").bin


def test_hashes_are_added_to_datasets_of_other_projects(tmp_path, capsys):
    write(tmp_path / "x", [[[1, 2]], [[3]]])
    (tmp_path / "x.json").unlink()
    assert cli.main(["data", "verify", str(tmp_path / "x")]) == 0
    assert "it has no content hash, so a change to other valid tokens goes undetected" in capsys.readouterr().out
    assert cli.main(["data", "verify", "--record", str(tmp_path / "x.bin")]) == 0
    note = sidecar(tmp_path / "x")
    assert (note["documents"], note["tokens"]) == (2, 3) and "tokenizer" not in note
    assert cli.main(["data", "verify", str(tmp_path / "x")]) == 0
    assert "the content has not changed since its hash was recorded at 20" in capsys.readouterr().out
    zero(tmp_path / "x.bin", 0, 2)
    before = (tmp_path / "x.json").read_bytes()
    assert cli.main(["data", "verify", str(tmp_path / "x")]) == 64
    assert (tmp_path / "x.json").read_bytes() == before
    assert cli.main(["data", "verify", "--record", str(tmp_path / "x")]) == 0
    assert cli.main(["data", "verify", str(tmp_path / "x")]) == 0


def test_adding_hashes_keeps_everything_else_in_the_json_file(large):
    note = sidecar(large)
    del note["content"]
    (large.with_suffix(".json")).write_text(json.dumps(note))
    assert cli.main(["data", "verify", "--record", str(large)]) == 0
    assert {key: value for key, value in sidecar(large).items() if key != "content"} == note


@pytest.mark.parametrize(
    "spoil", [{"bin": "0"}, {"blocks": "xyz"}, {"block_bytes": 5}, {"idx": 7}, {"blocks": "00" * 8}]
)
def test_invalid_hashes_are_refused_and_can_be_overwritten(spoil, tmp_path, capsys):
    write(tmp_path / "x", [[[1, 2]]])
    note = sidecar(tmp_path / "x")
    (tmp_path / "x.json").write_text(json.dumps(note | {"content": note["content"] | spoil}))
    assert cli.main(["data", "verify", str(tmp_path / "x")]) == 64
    assert (
        "is corrupt, or from another version of hpclm; restore that file, or record the hash" in capsys.readouterr().err
    )
    assert cli.main(["data", "verify", "--record", str(tmp_path / "x")]) == 0
    again = sidecar(tmp_path / "x")
    assert again["content"].pop("added") and again == note


def test_a_json_file_of_another_program_is_refused_and_not_changed(tmp_path, capsys):
    write(tmp_path / "x", [[[1, 2]]])
    (tmp_path / "x.json").write_text('{"text": "the corpus itself"}')
    assert cli.main(["data", "verify", "--record", str(tmp_path / "x")]) == 64
    assert "was not written by hpclm" in capsys.readouterr().err
    assert (tmp_path / "x.json").read_text() == '{"text": "the corpus itself"}'


def opened(config):
    return sources.build_source(config.data, config.model, config.seed)


def words(prefix, *more):
    return [f"data.prefix={prefix}", "model.vocab_size=300", "model.context=64", *more]


def test_a_start_verifies_random_blocks_and_logs_it(large, caplog):
    source = opened(from_cli(words(large)))
    [said] = sources.check_content(source)
    assert said.startswith(f"data: verified {SAMPLED} random blocks of 81, each of 1 MiB")
    fingerprint = IndexedDataset(large).fingerprint
    with large.with_suffix(".bin").open("r+b") as file:  # only what lies between the 64 blocks of the fingerprint
        size = os.fstat(file.fileno()).st_size
        for k in range(63):
            begin, end = (size - (1 << 18)) * k // 63 + (1 << 18), (size - (1 << 18)) * (k + 1) // 63
            file.seek(begin)
            file.write(bytes(end - begin))
    assert IndexedDataset(large).fingerprint == fingerprint
    with pytest.raises(ConfigError, match=r"[3-6]\d of 64 blocks of 1 MiB do not match"):
        sources.check_content(opened(from_cli(words(large))))


def test_any_block_may_be_the_one_that_is_verified(tmp_path):
    with Writer(tmp_path / "x", "u1") as writer:
        writer.add_document(np.ones(3 * HASH_BLOCK_BYTES, np.uint8))
    zero(tmp_path / "x.bin", 0, 3 * HASH_BLOCK_BYTES)
    dataset, hashes, found = IndexedDataset(tmp_path / "x"), content.noted(tmp_path / "x"), set()
    for seed in range(30):
        with pytest.raises(ConfigError, match="1 of 1 blocks of 1 MiB do not match") as told:
            content.check_some(dataset, hashes, 1, random.Random(seed))
        found.add(int(str(told.value).partition("the first one at byte ")[2].split()[0]))
    assert found == {0, HASH_BLOCK_BYTES, 2 * HASH_BLOCK_BYTES}


def test_a_start_names_datasets_without_hashes_and_divides_the_blocks_over_the_others(large, tmp_path):
    shutil.copy(large.with_suffix(".bin"), tmp_path / "y.bin")
    shutil.copy(large.with_suffix(".idx"), tmp_path / "y.idx")
    several = [f"data.blend=[{large},{tmp_path / 'y'}]", *words("", "data.prefix=null")[1:]]
    first, second = sources.check_content(opened(from_cli(several)))
    assert first.startswith("data: verified 32 random blocks of 81, each of 1 MiB")
    assert second.startswith(
        f"data: lengths and index of {tmp_path / 'y'} are valid; their tokens cannot be verified without hashes"
    )


def test_a_run_does_not_resume_with_other_content_if_both_hashes_are_known(large):
    config = from_cli(words(large))
    saved = json.loads(json.dumps(fingerprint(config.model, config.seed, opened(config).fingerprint)))
    [dataset] = saved["data"]["datasets"]
    assert dataset["content"] == content.noted(large).bin
    note = sidecar(large)
    changed = Hasher()
    changed.update(b"something else")
    bin, blocks = changed.end()
    large.with_suffix(".json").write_text(
        json.dumps(note | {"content": note["content"] | {"bin": bin, "blocks": blocks}})
    )
    [said] = differences(saved, fingerprint(config.model, config.seed, opened(config).fingerprint))
    assert said == "the training dataset has other tokens"
    for one, other in (
        (note | {"content": None}, saved),
        (note, {**saved, "data": {**saved["data"], "datasets": [{}]}}),
    ):
        large.with_suffix(".json").write_text(json.dumps({k: v for k, v in one.items() if v is not None}))
        assert not [
            said
            for said in differences(other, fingerprint(config.model, config.seed, opened(config).fingerprint))
            if "content" in said
        ]


def test_a_dataset_with_hashes_but_no_tokenizer_can_be_read(tmp_path):
    write(tmp_path / "x", [[[1, 2, 3] * 300]])
    (tmp_path / "x.json").unlink()
    verify(IndexedDataset(tmp_path / "x"), record=True)
    config = from_cli(words(tmp_path / "x", "data.split=100,0,0"))
    assert opened(config).fingerprint["tokenizer"] is None
    with pytest.raises(ConfigError, match="nor its dataset names a tokenizer"):
        tokenizer_folder.of_data(config.data)
    assert cli.main(["data", "inspect", str(tmp_path / "x")]) == 0
    assert len(content.noted(tmp_path / "x").blocks) == DIGEST


def test_a_run_logs_its_checks_and_does_not_train_on_corrupt_data(large, tiny, tmp_path, caplog):
    quiet = ["cluster.preflight=false", "budget.steps=2"]
    config = from_cli([*tiny("run", *quiet), "data.source=indexed", *words(large)])
    with caplog.at_level("INFO"):
        assert loop.run(RunStart(config), single()) == 0
    assert "data: verified 64 random blocks of 81, each of 1 MiB" in caplog.text
    zero(large.with_suffix(".bin"), HASH_BLOCK_BYTES, 60 * HASH_BLOCK_BYTES)
    with pytest.raises(ConfigError, match="is corrupt"):
        loop.run(RunStart(dataclasses.replace(config, out=str(tmp_path / "other"))), single())
    assert not (tmp_path / "other").exists()

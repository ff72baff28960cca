"""Megatron-core's torch_dist checkpoints: read without running a pickle, and a Megatron run continues here."""

import io
import json
import pickle
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hpclm import cli
from hpclm import engine as engines
from hpclm.base.errors import ConfigError
from hpclm.checkpoint import CheckpointStore, Retention, directory
from hpclm.checkpoint.tensors import CheckpointTensors
from hpclm.config import ModelConfig, load
from hpclm.parallel.mesh import Compute, Mesh
from hpclm.parallel.micro_batch import MicroBatch
from tests.interop import made, mcore_run
from tests.interop.test_megatron import ARGS, CORE, FUSED_NORMS, LLAMA, LLAMA_ARGS, SHAPE, Code, same_weights
from tests.runs import PATIENCE, ROOT

main = cli.function("convert")

TRAINED = dict(
    bf16=True, global_batch_size=8, micro_batch_size=2, consumed_train_samples=56, train_iters=20, seed=5, lr=1e-3, min_lr=1e-4,
    lr_decay_style="cosine", lr_warmup_iters=3, lr_warmup_init=0.0, adam_beta1=0.9, adam_beta2=0.98, adam_eps=1e-7, clip_grad=0.5,
    weight_decay=0.01, split="90,5,5", reset_position_ids=True,
)  # fmt: skip
OUTSIDE = {"tokens.weight": "embedding.word_embeddings.weight", "entry.table": "embedding.position_embeddings.weight"}
OUTSIDE |= {
    "output.weight": "output_layer.weight",
    **{f"norm.{kind}": f"decoder.final_layernorm.{kind}" for kind in ("weight", "bias")},
}


def convert(*words):
    return main([str(word) for word in words])


def stacked(weights):
    """Weights by Megatron-core's keys, those of all layers in one."""
    found = {OUTSIDE[name]: whole for name, whole in weights.items() if name in OUTSIDE}
    for name in [name for name in weights if name.startswith("block0.")]:
        inner = name.removeprefix("block0.")
        for ours, theirs in FUSED_NORMS.items():
            inner = inner.replace(ours, theirs) if inner.startswith(ours) else inner
        for ours, theirs in CORE.items():
            inner = inner.replace(f"{ours}.", f"{theirs}.") if inner.startswith(f"{ours}.") else inner
        layers = [weights[name.replace("block0.", f"block{n}.")] for n in range(4)]
        found[f"decoder.layers.{inner}"] = torch.stack(layers)
    return found


def blocks(whole, cuts):
    """The blocks of a tensor that is cut in up to ``cuts`` along its first two dimensions."""
    if whole.ndim < 2:
        yield from zip(([at] for at in range(0, len(whole), -(-len(whole) // cuts))), whole.chunk(cuts), strict=True)
        return
    down = 0
    for rows in whole.chunk(cuts):
        across = 0
        for piece in rows.chunk(cuts, 1):
            yield [down, across, *[0] * (whole.ndim - 2)], piece
            across += piece.shape[1]
        down += len(rows)


def write(folder, tensors, common, cuts=2):
    """A checkpoint in PyTorch's distributed format, in two files."""
    folder.mkdir(parents=True)
    described, places = {"rng_state/shard_0_1": BytesStorageMetadata()}, {}
    files = [io.BytesIO(), io.BytesIO()]
    for name, whole in tensors.items():
        chunks = []
        for number, (start, piece) in enumerate(blocks(whole, cuts)):
            file = files[number % 2]
            begin = file.tell()
            saved = io.BytesIO()
            torch.save(piece.clone(), saved)
            file.write(saved.getvalue())
            chunks.append(ChunkStorageMetadata(torch.Size(start), piece.shape))
            index = MetadataIndex(name, torch.Size(start))
            places[index] = filesystem._StorageInfo(f"__{number % 2}_0.distcp", begin, file.tell() - begin)
        described[name] = TensorStorageMetadata(TensorProperties(dtype=whole.dtype), whole.shape, chunks)
    for number, file in enumerate(files):
        (folder / f"__{number}_0.distcp").write_bytes(file.getvalue())
    metadata = Metadata(described, planner_data={"a": ("a",)}, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    torch.save(common, folder / "common.pt")


def flattened(whole, tp=2):
    """As the distributed optimizer of older versions kept a tensor that ``tp`` ranks share: its layers and ranks, then values."""
    at = 0 if whole.shape[0] != 4 else 1  # layers are stacked before the dimension that ranks share
    pieces = whole.chunk(tp, at) if whole.ndim > at else [whole]
    inner = [1] * (whole.ndim - at - 1)
    if at:
        return torch.stack([piece.reshape(4, -1) for piece in pieces], 1).reshape(4, len(pieces), *inner, -1)
    return torch.stack([piece.reshape(-1) for piece in pieces]).reshape(len(pieces), *inner, -1)


def checkpoint(folder, network, args, form=lambda whole: whole, **more):
    """A checkpoint of drawn weights, in bf16 with fp32 ones in the optimizer, and the weights."""
    drawn = made.Drawn(ModelConfig.of(network)).weights
    weights = stacked(drawn)
    tensors = {name: whole.bfloat16() for name, whole in weights.items()}
    for number, kind in enumerate(("fp32_param", "exp_avg", "exp_avg_sq"), 1):
        tensors |= {f"optimizer.state.{kind}.{name}": form(whole * number) for name, whole in weights.items()}
    optimizer = {"optimizer": {"state": {"common_step": torch.tensor(6.0)}, "param_groups": []}}
    write(folder, tensors, {"args": Namespace(**args), "iteration": 7, "optimizer": optimizer, **more})
    return drawn


def weights_of(run):
    """The weights in a run's newest checkpoint."""
    _, found = saved(run)
    return {name.removeprefix("model."): whole for name, whole in found.items() if name.startswith("model.")}


def saved(run):
    folder, manifest = directory.newest(run / "checkpoints")
    with CheckpointTensors(folder, manifest) as found:
        return manifest, {name: found.whole(name) for name in found.shapes()}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("form", [lambda whole: whole, flattened], ids=["whole", "flattened"])
def test_weights_and_optimizer_come_back_bit_for_bit_however_they_were_cut(kind, form, tmp_path):
    network, args = (SHAPE, ARGS) if kind == "gpt2" else (LLAMA, LLAMA_ARGS)
    drawn = checkpoint(tmp_path / "megatron/iter_0000007", network, {**args, **TRAINED}, form)
    (tmp_path / "megatron/latest_checkpointed_iteration.txt").write_text("7")
    convert(tmp_path / "megatron", tmp_path / "run", "model.vocab_size=96", "model.vocab_multiple=8")
    manifest, found = saved(tmp_path / "run")
    assert manifest.progress["step"] == 7 and manifest.progress["samples"] == 56 and manifest.progress["planned"] == 160
    assert manifest.scalars["optimizer_steps"] == 6
    for name, whole in drawn.items():
        assert torch.equal(found[f"model.{name}"], whole), name
        assert torch.equal(found[f"optim.exp_avg.{name}"], whole * 2), name
        assert torch.equal(found[f"optim.exp_avg_sq.{name}"], whole * 3), name
    config = load(tmp_path / "run/config.yaml")
    assert (config.optim.lr, config.optim.warmup, config.optim.betas, config.optim.clip) == (1e-3, 3, (0.9, 0.98), 0.5)
    assert (config.seed, config.budget.steps, config.batch.global_size, config.engine.precision) == (5, 20, 8, "bf16")
    assert config.data.split == "90,5,5"
    assert config.data.reset_position_ids == (kind == "gpt2")  # Megatron's rotary positions do not restart


def test_the_imported_run_trains_on_with_its_own_settings(tmp_path, capsys):
    checkpoint(tmp_path / "iter", SHAPE, {**ARGS, **TRAINED, "bf16": False, "fp16": False, "reset_position_ids": False})
    convert(tmp_path / "iter", tmp_path / "run", "model.vocab_size=96")
    words = [
        "data.source=synthetic",
        "data.split=969,30,1",
        "engine.device=cpu",
        "stop_at=9",
        "log.tensorboard=false",
        "evaluate.every=0",
    ]
    assert cli.main(["train", str(tmp_path / "run/config.yaml"), *words]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["samples"]) for row in rows] == [(8, 64), (9, 72)]


def refused(tmp_path, match):
    with pytest.raises(ConfigError, match=match):
        convert(tmp_path / "iter", tmp_path / "run", "model.vocab_size=96")
    assert not (tmp_path / "run").exists()


def test_pickles_that_are_not_data_are_refused_and_do_not_run(tmp_path):
    checkpoint(tmp_path / "iter", SHAPE, ARGS)
    proof = tmp_path / "proof"
    metadata = tmp_path / "iter/.metadata"
    held = metadata.read_bytes()
    for code in (f"cos\nsystem\n(S'touch {proof}'\ntR.", f"c__builtin__\nexec\n(S'open({str(proof)!r}, \"w\")'\ntR."):
        metadata.write_bytes(code.encode())
        refused(tmp_path, r"\.metadata is refused: it names (os\.system|__builtin__\.exec), which is not data")
    metadata.write_bytes(held[: len(held) // 2])
    refused(tmp_path, r"\.metadata is (refused|not the metadata of a checkpoint)")
    metadata.write_bytes(held)
    torch.save({"args": Code()}, tmp_path / "iter/common.pt")
    refused(tmp_path, r"common\.pt is refused: it names (os|posix)\.system, which is not data")
    torch.save({"args": Namespace(**ARGS)}, tmp_path / "iter/common.pt")
    for file in (tmp_path / "iter").glob("*.distcp"):
        saved = io.BytesIO()
        torch.save(Code(), saved)
        content = file.read_bytes()
        file.write_bytes(saved.getvalue().ljust(len(content), b"\0"))
    refused(tmp_path, r"distcp is (refused|not a torch\.save file)")
    assert not proof.exists()


def test_what_is_incomplete_is_refused_by_name(tmp_path):
    checkpoint(tmp_path / "iter", SHAPE, ARGS)
    file = tmp_path / "iter/__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])
    refused(tmp_path, r"__1_0\.distcp is too short, .*: it was not copied completely")
    file.unlink()
    refused(tmp_path, r"__1_0\.distcp cannot be read: No such file")
    metadata = pickle.loads((tmp_path / "iter/.metadata").read_bytes())
    index = next(iter(metadata.storage_data))
    metadata.storage_data[index].relative_path = "../../secret"
    (tmp_path / "iter/.metadata").write_bytes(pickle.dumps(metadata))
    refused(tmp_path, r"is not the metadata of a checkpoint: .* is in another folder")


def change_metadata(folder, change):
    """Write the .metadata again, after ``change`` of its tensors."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata.state_dict_metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_chunk_that_is_not_there_is_refused(tmp_path):
    name = "optimizer.state.fp32_param.decoder.layers.mlp.linear_fc1.bias"
    checkpoint(tmp_path / "iter", SHAPE, ARGS)
    held = (tmp_path / "iter/.metadata").read_bytes()
    metadata = pickle.loads(held)
    metadata.storage_data.pop(next(index for index in metadata.storage_data if index.fqn == name))
    (tmp_path / "iter/.metadata").write_bytes(pickle.dumps(metadata))
    refused(tmp_path, r"iter/\*\.distcp is not a torch\.save file")
    (tmp_path / "iter/.metadata").write_bytes(held)
    change_metadata(tmp_path / "iter", lambda tensors: tensors[name].chunks.pop())
    refused(tmp_path, r"block\d+\.mlp\.up\.bias: values are not finite")


def test_a_small_index_of_something_huge_is_refused_at_once(tmp_path):
    key = "decoder.layers.mlp.linear_fc1.weight"

    def deeper(tensors):
        tensors[key].size = torch.Size((1 << 30, *tensors[key].size[1:]))

    def wider(tensors):
        old = tensors[key].chunks[-1]
        size = torch.Size((*old.sizes[:-1], 1 << 40))
        tensors[key].chunks[-1] = ChunkStorageMetadata(old.offsets, size)
        tensors[key].size = torch.Size((*tensors[key].size[:-1], 1 << 41))

    def hollow(tensors):
        tensors[key].chunks[:] = [ChunkStorageMetadata(torch.Size((0, 0, 0)), torch.Size((1 << 30, 0, 0)))]
        tensors[key].size = torch.Size((1 << 30, 0, 0))

    for name, change, answer in (
        ("deep", deeper, r"describes \d+ bytes of tensors, but the files have \d+"),
        ("wide", wider, r"describes \d+ bytes of tensors, but the files have \d+"),
        ("hollow", hollow, "describes 10737418"),
    ):
        checkpoint(tmp_path / name / "iter", SHAPE, ARGS)
        change_metadata(tmp_path / name / "iter", change)
        refused(tmp_path / name, answer)


def test_without_an_optimizer_that_fits_the_weights_are_imported_at_step_0(tmp_path, caplog):
    drawn = made.Drawn(ModelConfig.of(SHAPE)).weights
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0.param"
    write(tmp_path / "iter", {**stacked(drawn), bucket: torch.zeros(9)}, {"args": Namespace(**ARGS), "iteration": 7})
    convert(tmp_path / "iter", tmp_path / "run", "model.vocab_size=96")
    manifest, found = saved(tmp_path / "run")
    assert manifest.progress["step"] == 0 and len(found) == len(drawn)
    assert "only the weights are imported" in caplog.text and "--dist-ckpt-optim-fully-reshardable" in caplog.text


@pytest.mark.whole
@pytest.mark.parametrize(
    "options",
    [[], ["--distributed"], ["--masked"], *(["--experts", kind, "--distributed"] for kind in mcore_run.KINDS)],
    ids=["adam", "distributed optimizer", "masked ends", *(f"experts, {kind}" for kind in mcore_run.KINDS)],
)
def test_a_run_of_megatron_core_goes_on_with_the_losses_that_it_has_there(options, tmp_path):
    if find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    there = tmp_path / "megatron"
    words = [sys.executable, "-W", "ignore", "-m", "tests.interop.mcore_run", str(there), *options]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    convert(there, tmp_path / "run", "model.vocab_size=128")
    convert(there / "rank", tmp_path / "same", "model.vocab_size=128")
    same_weights(tmp_path / "same", weights_of(tmp_path / "run"))
    config = load(tmp_path / "run/config.yaml", ["data.source=synthetic", "engine.device=cpu"])
    alone = Mesh.build(0, 1, config.parallel, timedelta(minutes=1))
    settings = replace(config.for_engine(), all_tokens_count=False)
    engine = engines.build(settings, Compute(torch.device("cpu"), torch.float32, alone))
    progress = CheckpointStore(Path(config.out) / "checkpoints", Retention(), {}).resume(engine, "require")
    assert progress.step == 4 and progress.samples == 16
    for number, (loss, norm) in enumerate(json.loads((there / "losses.json").read_text())[4:], 5):
        size = config.batch.micro_size
        halves = mcore_run.batch(number).split(size)
        masks = (mcore_run.mask(number) if "--masked" in options else torch.ones(4, 16, dtype=torch.bool)).split(size)
        result = engine.train_step(
            [MicroBatch(ids[:, :-1], ids[:, 1:], mask) for ids, mask in zip(halves, masks)],
            *(config.optim.lr, number),
        )
        assert result.loss == pytest.approx(loss, abs=1e-5) and result.grad_norm == pytest.approx(norm, abs=1e-4)


UNTRAINED = dict(
    optimizer="muon", decoupled_lr=1e-4, weight_decay_incr_style="cosine", lr_decay_style="exponential", dataloader_type="cyclic",
    skipped_train_samples=8, fim_data=True, use_checkpoint_opt_param_scheduler=True, decoupled_weight_decay=False,
    iterations_to_skip=[3], fp8="hybrid", exp_avg_dtype=torch.bfloat16, loss_scale=128.0, seq_length=8, min_lr=1.0,
)  # fmt: skip


@pytest.mark.parametrize("name", UNTRAINED)
def test_a_run_with_other_arithmetic_is_refused_by_name_and_its_weights_can_be_imported(name, tmp_path, capsys):
    checkpoint(tmp_path / "iter", SHAPE, {**ARGS, **TRAINED, name: UNTRAINED[name]})
    words = ["convert", str(tmp_path / "iter"), str(tmp_path / "run"), "model.vocab_size=96"]
    assert cli.main(words) == 64
    answer = capsys.readouterr().err
    assert "the run cannot continue here: " in answer and "--weights-only" in answer
    assert (f"{name}={UNTRAINED[name]}" if name != "min_lr" else "optim.min_lr=1.0 must") in answer
    assert not (tmp_path / "run").exists()
    assert cli.main([*words, "--weights-only"]) == 0
    assert saved(tmp_path / "run")[0].progress["step"] == 0


@pytest.mark.parametrize(
    "args, norm",
    [
        ({}, "token"),
        (dict(calculate_per_token_loss=False), "token"),
        (dict(eod_mask_loss=True), "microbatch"),
        (dict(eod_mask_loss=True, calculate_per_token_loss=False), "microbatch"),
        (dict(eod_mask_loss=True, calculate_per_token_loss=True), "token"),
    ],
)
def test_losses_with_masked_ends_are_averaged_as_megatron_does(args, norm, tmp_path):
    checkpoint(tmp_path / "iter", SHAPE, {**ARGS, **TRAINED, **args})
    convert(tmp_path / "iter", tmp_path / "run", "model.vocab_size=96")
    assert load(tmp_path / "run/config.yaml").batch.loss_norm == norm


@pytest.mark.parametrize("masks", [None, True, False])
def test_documents_are_masked_where_megatron_makes_a_mask(masks, tmp_path):
    more = {} if masks is None else dict(create_attention_mask_in_dataloader=masks)
    checkpoint(tmp_path / "iter", SHAPE, {**ARGS, **TRAINED, "reset_attention_mask": True, **more})
    convert(tmp_path / "iter", tmp_path / "run", "model.vocab_size=96")
    assert load(tmp_path / "run/config.yaml").data.reset_attention_mask == (masks is not False)


def test_datasets_that_were_read_whole_are_not_split(tmp_path, caplog):
    checkpoint(tmp_path / "iter", SHAPE, {**ARGS, **TRAINED, "train_data_path": ["a", "b"], "split": "90,10"})
    convert(tmp_path / "iter", tmp_path / "run", "model.vocab_size=96")
    assert "train_data_path=['a', 'b']" in caplog.text and "data.train" in caplog.text
    assert load(tmp_path / "run/config.yaml").data.split == "969,30,1"


def test_fp16s_scaling_is_taken_over(tmp_path):
    fp16 = dict(bf16=False, fp16=True, loss_scale_window=200, min_loss_scale=2.0, hysteresis=3)
    checkpoint(tmp_path / "iter", SHAPE, {**ARGS, **TRAINED, **fp16})
    convert(tmp_path / "iter", tmp_path / "run", "model.vocab_size=96")
    scaler = load(tmp_path / "run/config.yaml").scaler
    assert (scaler.window, scaler.minimum, scaler.hysteresis) == (200, 2.0, 3)

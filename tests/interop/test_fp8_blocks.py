"""Weights in fp8 with scales for blocks are read as their products."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpclm.base.errors import ConfigError
from hpclm.interop.huggingface import expert_weights, fp8_blocks
from hpclm.interop.run import OnDemand
from tests.interop import made
from tests.interop.test_experts import NETWORKS, Watched
from tests.interop.test_huggingface import convert, weights

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
TREE = {"quantization_config": FP8}


class Source:
    """Tensors in memory."""

    def __init__(self, tensors):
        self.tensors = tensors

    def names(self):
        return set(self.tensors)

    def read(self, name):
        return self.tensors[name]


def drawn(rows, columns, block=128):
    """A matrix in fp8, its scales, and their product, computed element by element."""
    draw = torch.Generator().manual_seed(rows + columns)
    matrix = (torch.randn(rows, columns, generator=draw) * 50).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // block), -(-columns // block), generator=draw) + 0.01
    at_row = torch.arange(rows)[:, None] // block
    at_column = torch.arange(columns)[None] // block
    return matrix, scales, matrix.float() * scales[at_row, at_column]


@pytest.mark.parametrize("shape", [(256, 128), (130, 300), (1, 129), (127, 5), (384, 257)])
def test_each_block_is_multiplied_by_its_scale_at_edges_too(shape):
    matrix, scales, product = drawn(*shape)
    norm = torch.rand(7).bfloat16()
    source = fp8_blocks.dequantized(Source({"w": matrix, "w_scale_inv": scales, "norm": norm}), TREE)
    assert source.names() == {"w", "norm"}
    assert torch.equal(source.read("w"), product) and torch.equal(source.read("norm"), norm)


MATRIX, SCALES, _ = drawn(130, 300)
WRONG = {
    "no scales": ({"w": MATRIX}, "w is torch.float8_e4m3fn, but fp8 weights, and only these, need scales"),
    "not fp8": (
        {"w": MATRIX.float(), "w_scale_inv": SCALES},
        "w is torch.float32, but fp8 weights, and only these, need scales",
    ),
    "fewer": (
        {"w": MATRIX, "w_scale_inv": SCALES[:, :2]},
        r"w_scale_inv has shape \(2, 2\), which does not fit \(130, 300\) in blocks of 128 x 128",
    ),
    "one": ({"w": MATRIX, "w_scale_inv": SCALES[0, 0]}, r"w_scale_inv has shape \(\), which does not fit"),
    "a vector": ({"w": MATRIX[0], "w_scale_inv": SCALES[0]}, r"has shape \(3,\), which does not fit \(300,\)"),
}


@pytest.mark.parametrize("tensors, answer", WRONG.values(), ids=WRONG)
def test_scales_that_do_not_fit_are_refused_by_name(tensors, answer):
    with pytest.raises(ConfigError, match=answer):
        fp8_blocks.dequantized(Source(tensors), TREE).read("w")


def test_experts_are_read_with_one_of_them_in_memory():
    source = Watched((2, 3))
    tensors = fp8_blocks.Dequantized(FromWatched(source, 16), (128, 128))
    rule = expert_weights.per_expert("up", [str(number) for number in range(16)], 8)
    whole = rule.join(OnDemand(tensors, rule.theirs))
    assert whole[3].unique().tolist() == [12, 14] and source.most <= 2


class FromWatched:
    """Weights 0, 1, ... in fp8, with scales of 2."""

    def __init__(self, source, count):
        self.source = source
        self.all = {str(number) for number in range(count)}

    def names(self):
        return self.all | {f"{name}_scale_inv" for name in self.all}

    def read(self, name):
        return torch.full((1, 1), 2.0) if name.endswith("_inv") else self.source.read(name).to(torch.float8_e4m3fn)


def quantized(folder, block, config):
    """Round the matrices of the layers of a folder to fp8 in blocks; returns all tensors as they are to be read."""
    path = folder / "model.safetensors"
    stored, values = {}, {}
    for name, whole in load_file(path).items():
        if whole.ndim == 2 and ".layers." in name and "gate.weight" not in name:
            matrix, scales, values[name] = drawn(*whole.shape, block)
            stored |= {name: matrix, f"{name}_scale_inv": scales}
        else:
            stored[name] = values[name] = whole.clone()
    save_file(stored, path, {"format": "pt"})
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**tree, "quantization_config": config}))
    return values


def test_a_folder_in_fp8_becomes_the_run_of_its_products(tmp_path, caplog):
    made.run(tmp_path / "run", NETWORKS["DeepSeek V3"][1])
    convert(tmp_path / "run", tmp_path / "hf")
    values = quantized(tmp_path / "hf", 32, {**FP8, "weight_block_size": [32, 32]})
    add_prediction_layer(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "back")
    assert "is left out: model.layers.3.eh_proj.weight\n" in caplog.text
    plain = tmp_path / "plain"
    convert(tmp_path / "run", plain)
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    convert(plain, tmp_path / "plain_back")
    ours, theirs = weights(tmp_path / "back"), weights(tmp_path / "plain_back")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and ours.keys() == theirs.keys()


def add_prediction_layer(folder):
    """Add a layer for multi-token prediction, which is in fp8 too."""
    path = folder / "model.safetensors"
    matrix, scales, _ = drawn(48, 96, 32)
    more = {"model.layers.3.eh_proj.weight": matrix, "model.layers.3.eh_proj.weight_scale_inv": scales}
    save_file({**{name: x.clone() for name, x in load_file(path).items()}, **more}, path, {"format": "pt"})
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**tree, "num_nextn_predict_layers": 1}))


OTHERS = {
    "bitsandbytes": {"quant_method": "bitsandbytes"},
    "one scale for each tensor": {**FP8, "weight_block_size": None},
    "blocks of rows": {**FP8, "weight_block_size": [128]},
    "no blocks": {**FP8, "weight_block_size": [0, 128]},
    "e5m2": {**FP8, "fmt": "e5m2"},
    "scales of inputs": {**FP8, "activation_scheme": "static"},
    "not a mapping": ["fp8"],
}


@pytest.mark.parametrize("config", OTHERS.values(), ids=OTHERS)
def test_any_other_quantization_is_refused_by_name(config, tmp_path):
    made.run(tmp_path / "run", made.NETWORKS["llama"][1])
    convert(tmp_path / "run", tmp_path / "hf")
    quantized(tmp_path / "hf", 128, config)
    with pytest.raises(ConfigError, match="its weights are quantized, but hpclm reads only fp32, bf16, fp16, and fp8"):
        convert(tmp_path / "hf", tmp_path / "back")
    assert not (tmp_path / "back").exists()

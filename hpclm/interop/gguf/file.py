"""Write a run's checkpoint as one GGUF file; the only file that imports the gguf library."""

from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpclm import __version__
from hpclm.base.errors import ConfigError
from hpclm.interop.exported import Exported, cast
from hpclm.interop.gguf import networks, vocabulary
from hpclm.interop.huggingface.shape import canonical
from hpclm.interop.run import RunCheckpoint, fresh
from hpclm.node.hardware import TYPES

STORED = {
    torch.float32: gguf.GGMLQuantizationType.F32,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
    torch.float16: gguf.GGMLQuantizationType.F16,
}
KINDS = {
    "fp32": gguf.LlamaFileType.ALL_F32,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "fp16": gguf.LlamaFileType.MOSTLY_F16,
}


def export_run(checkpoint: RunCheckpoint, target: Path, dtype: str = "fp32", allow_nan: bool = False) -> str:
    """Export to the file ``target``, with matrices in ``dtype`` and other tensors in fp32; returns the network's name in llama.cpp.

    ConfigError if llama.cpp would compute other logits or encode text differently, if weights are too large for fp16, or if they are not
    finite without ``allow_nan``.
    """
    config = canonical(checkpoint.config.model)
    network = networks.of_network(config)
    text = checkpoint.text()
    if text is None:
        raise ConfigError(
            "a GGUF file contains the tokenizer, but this run names none; give data.tokenizer and data.tokenizer_files"
        )
    words = vocabulary.keys(text, vocabulary.sentencepiece_of(text))
    with fresh(target, folder=False) as staging, closing(gguf.GGUFWriter(staging, network.name)) as writer:
        writer.add_name(checkpoint.run.absolute().name)
        writer.add_description(f"step {checkpoint.step} of a run of hpclm {__version__}")
        writer.add_file_type(KINDS[dtype])
        for key, value in network.metadata(config).items():
            _add(writer, f"{network.name}.{key}", value)
        for key, value in words.items():
            _add(writer, f"tokenizer.{key}", value)
        extra = network.extra(config)
        rules = list(network.rules(config))
        with Exported(checkpoint, rules, allow_nan) as weights:
            for name, tensor in (*extra.items(), *weights.planned()):
                kind = _kind(tensor, dtype)
                writer.add_tensor_info(
                    name, tensor.shape, np.dtype(np.float32), tensor.numel() * kind.itemsize, STORED[kind]
                )
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for name, tensor in chain(extra.items(), weights.tensors(rules)):
                writer.write_tensor_data(_array(cast(name, tensor, _kind(tensor, dtype))))
    return network.name


def _kind(tensor: Tensor, dtype: str) -> torch.dtype:
    """The type that a tensor is written in; llama.cpp computes with vectors in fp32."""
    return TYPES[dtype] if tensor.ndim > 1 else torch.float32


def _array(tensor: Tensor) -> NDArray[Any]:
    """The bits of a tensor, viewed as int16 for bf16, which NumPy lacks."""
    whole = tensor.contiguous()
    if whole.dtype == torch.bfloat16:
        whole = whole.view(torch.int16)
    return whole.numpy()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add metadata with the type of ``value``; llama.cpp reads whole numbers as unsigned."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)

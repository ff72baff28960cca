"""GPU models by their vendors' data sheets, and the number of GPUs of this machine; nothing here loads PyTorch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpclm.base.errors import ArgumentError, HpclmError
from hpclm.base.registry import hint
from hpclm.node import python


@dataclass(frozen=True)
class Kind:
    """A GPU model, and the links it usually has."""

    peak: float
    """Dense FLOP/s of 16-bit matrix products (not the sparse figure, which is double)."""
    memory: float
    """GiB that programs can use, less than the name says."""
    bandwidth: float
    """Bytes/s between its memory and its processors."""
    link: float
    """Bytes/s in one direction to the other GPUs of a node: NVLink or PCI Express."""
    network: float
    """Bytes/s per GPU in one direction to other nodes, on a typical cluster."""
    family: str
    """Name of the architecture."""
    bf16: bool = True
    """Whether it has matrix products in bf16."""

    @property
    def fp8(self) -> bool:
        """Whether it has matrix products in FP8, twice as fast as in bf16."""
        return self.family in ("Ada", "Hopper", "Blackwell")


KINDS = {
    "B200": Kind(2250e12, 179, 8.0e12, 900e9, 50e9, "Blackwell"),
    "H200": Kind(989e12, 140, 4.8e12, 450e9, 50e9, "Hopper"),
    "GH200": Kind(989e12, 94, 4.0e12, 450e9, 25e9, "Hopper"),
    "H100 PCIe": Kind(756e12, 79, 2.0e12, 64e9, 25e9, "Hopper"),
    "H100 NVL": Kind(835e12, 93, 3.9e12, 300e9, 25e9, "Hopper"),
    "H100": Kind(989e12, 79, 3.35e12, 450e9, 50e9, "Hopper"),
    "H800": Kind(989e12, 79, 3.35e12, 200e9, 50e9, "Hopper"),
    "A100": Kind(312e12, 79, 2.04e12, 300e9, 25e9, "Ampere"),
    "A100-40GB": Kind(312e12, 39, 1.56e12, 300e9, 25e9, "Ampere"),
    "A800": Kind(312e12, 79, 2.04e12, 200e9, 25e9, "Ampere"),
    "L40S": Kind(362e12, 44, 0.86e12, 32e9, 12.5e9, "Ada"),
    "L40": Kind(181e12, 44, 0.86e12, 32e9, 12.5e9, "Ada"),
    "L4": Kind(121e12, 22, 0.30e12, 32e9, 12.5e9, "Ada"),
    "A10": Kind(125e12, 22, 0.60e12, 32e9, 12.5e9, "Ampere"),
    "V100": Kind(125e12, 31, 0.90e12, 150e9, 12.5e9, "Volta", bf16=False),
}


def kind_named(name: str) -> Kind:
    """The GPU model ``name``, in upper or lower case; ArgumentError if it is unknown."""
    kind = {key.lower(): kind for key, kind in KINDS.items()}.get(name.lower())
    if kind is None:
        rule = f"is an unknown kind of GPU; choose one of {', '.join(KINDS)}.{hint(name, list(KINDS))}"
        raise ArgumentError([("gpus_kind", name, rule)])
    return kind


def with_fp8() -> list[str]:
    """The names of the GPU models with FP8."""
    return [name for name, kind in KINDS.items() if kind.fp8]


SLICE = re.compile(r"\bMIG\b|-\d+[ABCQ]\b")
"""Matches the names of parts of a GPU: NVIDIA's MIG slices, and virtual GPUs such as GRID A100-10C."""


def kind_of_device(name: str) -> Kind | None:
    """The GPU model that PyTorch reports as ``name``; None if it is unknown, or only a part of a GPU."""
    models = [model for model in KINDS if re.search(rf"\b{model}\b", name)]
    if SLICE.search(name) or not models:
        return None
    return KINDS[max(models, key=len)]


DEVICE_FILES = ("dev/nvidia[0-9]*", "dev/kfd", "dev/dxg")
"""Device files of GPUs that PyTorch supports: of NVIDIA, of AMD, and of the Windows Subsystem for Linux."""
COUNT = "import json, torch; print(json.dumps({'gpus': torch.cuda.device_count() if torch.cuda.is_available() else 0}))"


def count(env: Mapping[str, str], root: Path = Path("/")) -> int:
    """The number of GPUs that PyTorch sees in the environment ``env``.

    PyTorch counts them in a separate process, which takes seconds, and only if a GPU's device file exists below ``root``.
    """
    if not any(next(root.glob(pattern), None) for pattern in DEVICE_FILES):
        return 0
    answer = python.ask(COUNT, env, seconds=120)
    if "error" in answer:
        raise HpclmError(f"PyTorch cannot count the GPUs here: {answer['error']}; hpclm doctor shows more")
    return int(answer["gpus"])

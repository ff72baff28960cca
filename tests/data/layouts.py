"""Datasets in every layout, packed from the layouts' description and not by the code under test."""

import struct
from pathlib import Path

import numpy as np

CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "u2": 8, "u4": 9, "u8": 10}


def longs(*values):
    return struct.pack(f"<{len(values)}q", *values)


def pack(prefix, layout, sequences, documents=None, dtype="i4", modes=None):
    """Write the files of ``sequences``, lists of tokens; documents: bounds. Returns the prefix."""
    index = mmap_index(layout, [len(sequence) for sequence in sequences], documents, dtype, modes)
    flat = [token for sequence in sequences for token in sequence]
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(np.array(flat, f"<{dtype}").tobytes())
    return prefix


def append(writer, documents, modes=None):
    """Append documents, lists of sequences, to a Writer."""
    sequences = [sequence for document in documents for sequence in document]
    flat = np.array([token for sequence in sequences for token in sequence], np.int64)
    sizes = np.array([len(sequence) for sequence in sequences], np.int64)
    writer.extend(flat, sizes, np.array([len(document) for document in documents], np.int64), modes)


def mmap_index(layout, sizes, documents, dtype, modes):
    width = np.dtype(dtype).itemsize
    pointers = [width * sum(sizes[:k]) for k in range(len(sizes))]
    index = b"MMIDIDX\0\0" + struct.pack("<QBQ", 1, CODES[dtype], len(sizes))
    if layout == "megatron":
        index += struct.pack("<Q", len(documents))
    index += struct.pack(f"<{len(sizes)}i", *sizes) + longs(*pointers)
    if layout == "megatron":
        index += longs(*documents) + struct.pack(f"<{len(sizes)}b", *modes or []) if modes else longs(*documents)
    return index

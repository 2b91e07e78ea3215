"""Safetensors files for the tests, and what is in them by safetensors' own reader."""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import safetensors
import torch

Written = tuple[str, str, tuple[int, ...], bytes]
"""A tensor of a file: name, dtype as safetensors writes it, shape, bytes."""

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "C64": torch.complex64, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""Every dtype of whole bytes that all the streamers know."""


class Value(NamedTuple):
    """What a tensor is: to be compared."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: bytes


def noise(size: int, seed: int) -> bytes:
    """Bytes that tell their place."""
    return (
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        .numpy()
        .tobytes()
    )


def value(tensor: torch.Tensor) -> Value:
    """What the memory of a tensor holds now; nothing is waited for."""
    assert tensor.is_contiguous()
    content = ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""
    return Value(tensor.dtype, tuple(tensor.shape), content)


def values(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Value]:
    """The same of many. No name may come twice."""
    found: dict[str, Value] = {}
    for name, tensor in named:
        assert name not in found, f"{name} came twice"
        found[name] = value(tensor)
    return found


def write(path: Path, tensors: Iterable[Written]) -> Path:
    """Write a file: the tensors in that order, without gaps, wherever that puts them."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, dtype, shape, content in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    return write_raw(path, header, bytes(data))


def write_raw(path: Path, header: object, data: bytes) -> Path:
    """Write a file with this header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def contents(files: Iterable[str]) -> dict[str, Value]:
    """What is in the files by safetensors' own reader."""
    found: dict[str, Value] = {}
    for path in files:
        for name, one in safetensors.deserialize(Path(path).read_bytes()):
            found[name] = Value(DTYPES[one["dtype"]], tuple(one["shape"]), bytes(one["data"]))
    return found


def mixed(number: int, seed: int) -> Iterator[Written]:
    """Tensors of many dtypes and of sizes from none to 90 KB."""
    for index in range(number):
        dtype = list(DTYPES)[index % len(DTYPES)]
        rows = (1, 3, 17, 90, 0, 700)[index % 6]
        shape = () if index % 11 == 0 else (rows, 4) if index % 3 else (rows, 1, 16)
        size = torch.Size(shape).numel() * DTYPES[dtype].itemsize
        content = noise(size, seed * 1000 + index)
        if dtype == "BOOL":
            content = bytes(byte & 1 for byte in content)
        yield f"s{seed}.t{index}", dtype, shape, content


def shards(folder: Path) -> list[str]:
    """Three files, 3 MB, of 66 mixed tensors and one of 150 KB each."""
    paths = []
    for seed in range(1, 4):
        tensors = [*mixed(66, seed), (f"s{seed}.large", "U8", (150_001,), noise(150_001, seed))]
        tensors += [(f"s{seed}.matrix{i}", "BF16", (120, 128), noise(120 * 256, seed + 40 + i)) for i in range(20)]
        paths.append(str(write(folder / f"model-{seed}.safetensors", tensors)))
    return paths

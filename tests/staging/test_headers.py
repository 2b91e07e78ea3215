"""A file that is not as it should be: what stock gives, the same error or the same tensors, and never others."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import Value, contents, noise, values, write, write_raw
from vllm.model_executor.model_loader import weight_utils

from vllm_hotfix._record import RECORD

DATA = noise(4096, 9)


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    """A tensor in a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


A = entry("F32", [4, 8], 0, 128)
HEADERS: dict[str, tuple[object, bytes]] = {
    "gap": ({"a": A, "b": entry("U8", [10], 130, 140)}, DATA[:140]),
    "gap at the start": ({"a": entry("F32", [4, 8], 8, 136)}, DATA[:136]),
    "overlap": ({"a": A, "b": entry("U8", [10], 120, 130)}, DATA[:130]),
    "the same bytes twice": ({"a": A, "b": A}, DATA[:128]),
    "more bytes than the shape": ({"a": entry("F32", [4, 8], 0, 132)}, DATA[:132]),
    "fewer bytes than the shape": ({"a": entry("F32", [4, 8], 0, 124)}, DATA[:124]),
    "wrong size before others": ({"a": entry("F32", [4, 8], 0, 124), "b": entry("U8", [4], 124, 128)}, DATA[:128]),
    "unknown dtype": ({"a": entry("F7", [4, 8], 0, 128)}, DATA[:128]),
    "backwards": ({"a": entry("F32", [4, 8], 128, 0)}, DATA[:128]),
    "negative shape": ({"a": entry("F32", [-4, -8], 0, 128)}, DATA[:128]),
    "trailing bytes": ({"a": A}, DATA[:200]),
    "truncated data": ({"a": A, "b": entry("U8", [500], 128, 628)}, DATA[:300]),
    "no data": ({"a": A}, b""),
    "no offsets": ({"a": {"dtype": "F32", "shape": [4, 8]}}, DATA[:128]),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 128]}}, DATA[:128]),
    "no dtype": ({"a": {"shape": [4, 8], "data_offsets": [0, 128]}}, DATA[:128]),
    "one offset": ({"a": {"dtype": "F32", "shape": [4, 8], "data_offsets": [128]}}, DATA[:128]),
    "an offset too many": ({"a": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128, 3]}}, DATA[:128]),
    "offsets as text": ({"a": {"dtype": "F32", "shape": [4, 8], "data_offsets": ["0", "128"]}}, DATA[:128]),
    "a list": ([1, 2, 3], DATA[:128]),
    "a number": (7, DATA[:128]),
    "an entry that is a list": ({"a": [1]}, DATA[:128]),
    "not json": (b'{"a": ', DATA[:128]),
    "not text": (b'{"\xff": 1}', DATA[:128]),
    "no header": (b"", DATA[:128]),
    "empty within": ({"a": A, "e": entry("F32", [0], 128, 128), "b": entry("U8", [4], 128, 132)}, DATA[:132]),
    "empty, key last": ({"a": A, "b": entry("U8", [4], 128, 132), "e": entry("F32", [0], 128, 128)}, DATA[:132]),
    "keys in another order": ({"b": entry("U8", [4], 128, 132), "a": A}, DATA[:132]),
    "spaces": (json.dumps({"a": A}).encode() + b"     ", DATA[:128]),
    "half a packed element": ({"a": entry("F4", [2, 3], 0, 3)}, DATA[:3]),
    "the same name twice": (
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}',
        DATA[:8],
    ),
}

RAW: dict[str, bytes] = {
    "nothing": b"",
    "five bytes": b"\x01\x02\x03\x04\x05",
    "eight bytes": struct.pack("<Q", 100),
    "header larger than the file": struct.pack("<Q", 5000) + b'{"a": 1}',
    "header larger than allowed": struct.pack("<Q", (100 << 20) + 1) + b"{}" * 100,
    "header of all bits": b"\xff" * 64,
}

Outcome = type[BaseException] | dict[str, Value]


def outcome(iterator: Iterator[tuple[str, torch.Tensor]], finish: Callable[[], None]) -> tuple[Outcome, str]:
    """What comes of it: the tensors, or the kind of error and its words."""
    try:
        kept = list(iterator)
    except Exception as error:
        return type(error), str(error)
    finish()
    return values(kept), ""


@pytest.mark.parametrize("place", ["only", "first", "last"])
@pytest.mark.parametrize("kind", [*HEADERS, *RAW])
def test_as_stock(small, load, device, tmp_path: Path, kind, place) -> None:
    """The outcome is that of the plain streamer, and nothing stays page-locked."""
    path = tmp_path / "odd.safetensors"
    if kind in RAW:
        path.write_bytes(RAW[kind])
    else:
        write_raw(path, *HEADERS[kind])
    good = str(write(tmp_path / "good.safetensors", [(f"g{i}", "U8", (30,), noise(30, i)) for i in range(50)]))
    files = {"only": [str(path)], "first": [str(path), good], "last": [good, str(path)]}[place]
    stock, words = outcome(weight_utils.runai_safetensors_weights_iterator(files, False), device.finish)
    found, own_words = outcome(load(files), device.finish)
    if kind == "empty, key last" and "overlaps" in words:
        stock = contents(files)  # the older streamers refuse a good file
    assert found == stock, (words, own_words)
    assert not device.registered and not device.broken and not device.allocated


def test_odd_files_are_said(small, load, device, tmp_path, files, lines) -> None:
    """A checkpoint that is left to stock by its files is one warning that says why; the tensors arrive on the host."""
    path = write(tmp_path / "odd.safetensors", [("a", "U8", (9,), DATA[:9])])
    path.write_bytes(path.read_bytes() + b"more")
    stock, _ = outcome(weight_utils.runai_safetensors_weights_iterator([*files, str(path)], False), device.finish)
    found, _ = outcome(load([*files, str(path)]), device.finish)
    assert found == stock
    (line,) = lines.warnings
    assert "stock loads these weights" in line and "does not end where its header says" in line
    assert not device.calls("copy")


def test_odd_files_are_counted(small, load, device, tmp_path, files, lines) -> None:
    """Such a load, of a header that stock does understand, counts as a load of stock's; the second warns no more."""
    path = str(write_raw(tmp_path / "odd.safetensors", *HEADERS["an offset too many"]))
    expected = contents(files) | {"a": Value(torch.float32, (4, 8), DATA[:128])}
    for _ in range(2):
        assert values(load([*files, path])) == expected
    counters = RECORD.counters["pinned_staging"]
    assert counters["stock_loads"] == 2 and "loads" not in counters
    assert counters["tensors"] == 2 * len(expected)
    assert counters["host_bytes"] == counters["bytes"] == 2 * sum(len(one.bytes) for one in expected.values())
    (warning,) = lines.warnings
    assert "stock loads these weights" in warning and "a header that is not understood" in warning


def test_same_file_twice(small, load, device, files) -> None:
    """A file that is named twice is delivered twice, as by stock."""
    twice = [files[0], files[0]]
    stock = [(name, tensor.nbytes) for name, tensor in weight_utils.runai_safetensors_weights_iterator(twice, False)]
    found = [(name, tensor.nbytes) for name, tensor in load(twice)]
    assert sorted(found) == sorted(stock)

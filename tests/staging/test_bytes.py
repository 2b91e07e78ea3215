"""Every tensor arrives, once, with its name, dtype, shape and bytes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from checkpoint import DTYPES, Value, contents, noise, value, values, write
from fake_cuda import DeviceTensor
from safetensors.torch import save_file

from vllm_hotfix._patches.pinned_staging import _load


def test_shards(small, load, device, files, contents, lines) -> None:
    """Files of mixed tensors come out as safetensors' own reader has them, all on the device."""
    kept = list(load(files))
    device.finish()
    assert values(kept) == contents
    assert all(type(tensor) is DeviceTensor for _, tensor in kept if tensor.nbytes)
    assert device.calls("copy") > 40 and device.ever == 2
    assert not lines.warnings


@pytest.mark.parametrize("extent", [4096, 100_000, 16 << 20])
@pytest.mark.parametrize("block", [8192, 150_000, 32 << 20])
def test_sizes(monkeypatch, load, device, files, contents, extent, block) -> None:
    """No size of extent and block changes what arrives: tensors larger than either, than both blocks, or all in one."""
    monkeypatch.setattr(_load, "EXTENT", extent)
    monkeypatch.setattr(_load, "BLOCK", block)
    if block == 8192:
        monkeypatch.setattr(_load, "DEFAULT_LIMIT", 200_000)
    kept = list(load(files))
    device.finish()
    assert values(kept) == contents
    assert not device.broken


def test_torch_dtypes(small, load, device, tmp_path) -> None:
    """Every dtype that safetensors writes from torch: with none, one and many elements, and with no dimension."""
    tensors = {}
    for name, dtype in DTYPES.items():
        for shape in ((), (0,), (3, 0, 2), (1,), (7,), (5, 3, 11)):
            data = bytearray(noise(max(1, math.prod(shape)) * dtype.itemsize, len(tensors)))
            if dtype is torch.bool:
                data = bytearray(byte & 1 for byte in data)
            tensor = torch.frombuffer(data, dtype=dtype, count=max(1, math.prod(shape)))[: math.prod(shape)]
            tensors[f"{name}{shape}"] = tensor.clone().reshape(shape)
    path = str(tmp_path / "a.safetensors")
    save_file(tensors, path)
    expected = {name: value(tensor) for name, tensor in tensors.items()}
    assert contents([path]) == expected
    kept = list(load([path]))
    device.finish()
    assert values(kept) == expected


def test_packed(small, load, device, tmp_path, request) -> None:
    """F4, two values in a byte, has torch's shape where the streamer knows it and is refused as by stock elsewhere."""
    from runai_model_streamer.safetensors_streamer import safetensors_pytorch

    data = noise(48, 1)
    path = write(tmp_path / "a.safetensors", [("a", "F4", (8, 12), data), ("b", "U8", (3,), b"abc")])
    if not hasattr(safetensors_pytorch, "PACKED_VALUES_PER_ELEMENT"):
        with pytest.raises(ValueError, match="Corrupted Tensor 'a'"):
            list(load([str(path)]))
        return
    kept = list(load([str(path)]))
    device.finish()
    expected = {"a": Value(torch.float4_e2m1fn_x2, (8, 6), data), "b": Value(torch.uint8, (3,), b"abc")}
    assert values(kept) == expected


@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_empty_shard(small, load, device, files, contents, tmp_path, position) -> None:
    """A file without tensors takes nothing with it, wherever it is."""
    empty = str(write(tmp_path / "empty.safetensors", []))
    kept = list(load([*files[:position], empty, *files[position:]]))
    device.finish()
    assert values(kept) == contents


def test_only_empty(small, load, device, tmp_path, lines) -> None:
    """Files with no bytes at all: no tensors, or tensors with no elements."""
    one = str(write(tmp_path / "1.safetensors", []))
    two = str(write(tmp_path / "2.safetensors", [("a", "F32", (0, 3), b""), ("b", "BF16", (2, 0), b"")]))
    assert list(load([one])) == []
    expected = {"a": Value(torch.float32, (0, 3), b""), "b": Value(torch.bfloat16, (2, 0), b"")}
    assert values(load([one, two])) == expected
    assert not device.registered and not lines.warnings


@pytest.mark.parametrize("lead", [1, 2, 3, 5])
@pytest.mark.parametrize("refuse", [False, True])
def test_alignment(small, load, device, tmp_path, lead, refuse) -> None:
    """A tensor whose place in the file its dtype cannot use arrives where it can, on the device and on the host."""
    if refuse:
        device.fail("allocate")
    tensors = [("odd", "U8", (lead,), noise(lead, 0))]
    for index, (name, dtype) in enumerate(DTYPES.items()):
        if name != "BOOL":
            tensors.append((f"t{index}", name, (5, 2), noise(10 * dtype.itemsize, index)))
            tensors.append((f"odd{index}", "I8", (lead,), noise(lead, index)))
    path = write(tmp_path / "a.safetensors", tensors)
    kept = list(load([str(path)]))
    device.finish()
    assert {name: value(tensor).bytes for name, tensor in kept} == {name: data for name, *_, data in tensors}
    for name, tensor in kept:
        assert tensor.data_ptr() % tensor.dtype.itemsize == 0, name
        assert (type(tensor) is DeviceTensor) is not refuse


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 65_536, 65_537, 400_001])
def test_single(small, load, device, tmp_path, size) -> None:
    """A file of one tensor, of a size around those of pages and extents."""
    data = noise(size, size)
    path = write(tmp_path / "a.safetensors", [("only", "U8", (size,), data)])
    ((name, tensor),) = load([str(path)])
    device.finish()
    assert (name, value(tensor)) == ("only", Value(torch.uint8, (size,), data))


def test_names(small, load, device, tmp_path) -> None:
    """Names and paths are text of any kind."""
    folder = tmp_path / "模型 ü"
    folder.mkdir()
    names = ["слой.0", "层.\N{SNOWMAN}", 'quote"d', "a\\b\nc", "\N{GRINNING FACE}", " ", ""]
    path = write(folder / "gewichte-é.safetensors", [(name, "U8", (4,), noise(4, i)) for i, name in enumerate(names)])
    kept = list(load([str(path)]))
    device.finish()
    assert values(kept) == contents([str(path)])
    assert [name for name, _ in kept] == names


def test_first_read(small, load, device, files, contents) -> None:
    """Each tensor, taken at once and dropped, is right when the loader's stream has come to it."""
    found = {}
    for name, tensor in load(files):
        found[name] = device.read(tensor) if tensor.nbytes else bytearray()
        del tensor
    device.finish()
    assert {name: bytes(data) for name, data in found.items()} == {name: one.bytes for name, one in contents.items()}
    assert not device.broken
    assert not device.allocated


def test_missing_file(small, load, device, tmp_path, files) -> None:
    """A file that is not there is the streamer's error, and nothing is left."""
    with pytest.raises(Exception, match=r"(?i)libstreamer|file|read"):
        list(load([files[0], str(Path(tmp_path, "none.safetensors"))]))
    assert not device.registered and not device.allocated

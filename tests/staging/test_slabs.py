"""Device memory of a load: no more than it needs, all of it in its own slabs, given back as soon as it is idle."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import noise, values, write
from fake_cuda import Device, DeviceTensor

from vllm_hotfix._patches.pinned_staging import _load, _slabs

IDLE = 4
"""Slabs that may wait for the next extent."""
SLAB = (64 << 10) + 256
"""Bytes of a slab with the fixture `small`."""


def save(folder: Path, **sizes: int) -> list[str]:
    """A file of uint8 tensors of these sizes."""
    tensors = [(name, "U8", (size,), noise(size, index)) for index, (name, size) in enumerate(sizes.items())]
    return [str(write(folder / "a.safetensors", tensors))]


def rows(number: int) -> dict[str, int]:
    """So many tensors, each an extent of its own."""
    return {f"row{index:03}": 60_000 for index in range(number)}


def places(iterator: Iterator[tuple[str, torch.Tensor]]) -> dict[str, bool]:
    """Whether each tensor came on the device, to a consumer that holds one until it has the next."""
    return {name: type(tensor) is DeviceTensor for name, tensor in iterator}


# Idle memory.


def test_held_tensors_go_back(small, load, device: Device, tmp_path) -> None:
    """After 50 held tensors were dropped no more than four slabs are idle, one being in use."""
    iterator = load(save(tmp_path, **rows(80)))
    kept = list(itertools.islice(iterator, 50))
    assert device.used() == 50 * SLAB
    kept.clear()
    for number, (_name, tensor) in enumerate(iterator):
        assert type(tensor) is DeviceTensor
        assert device.used() <= (IDLE + 1) * SLAB, number
        del tensor
    assert device.calls("allocate") == 50, "idle slabs are not used again"


@pytest.mark.parametrize("held", [1, 2])
def test_large_tensor_goes_back(small, load, device: Device, tmp_path, held) -> None:
    """After a large tensor was dropped its memory is free again: it does not go on as a slab for small ones."""
    last: list[Any] = []
    used = []
    for named in load(save(tmp_path, large=1_900_000, **rows(20))):
        last = [*last, named][-held + 1 :] if held > 1 else []
        used.append(device.used())
        del named
    assert used[0] >= 1_900_000
    assert used[-1] <= (IDLE + 2) * SLAB


@pytest.mark.parametrize("rest", [2 * SLAB, 2 * SLAB - 2])
def test_leaves_half_of_what_is_free(small, load, device: Device, tmp_path, lines, rest) -> None:
    """A slab is allocated where twice its size is free; where less is, tensors come on the host, and one line says so.

    What is free is asked for each slab: others take memory while a load lasts.
    """
    files = save(tmp_path, **rows(12))
    iterator = load(files)
    kept = [next(iterator)]
    device.free_bytes = device.used() + rest
    kept += [next(iterator)]
    assert (type(kept[-1][1]) is DeviceTensor) is (rest >= 2 * SLAB)
    kept += list(iterator)
    device.finish()
    assert [type(tensor) is DeviceTensor for _, tensor in kept[2:]] == [False] * 10
    assert {name: one.bytes for name, one in values(kept).items()} == {
        name: noise(60_000, index) for index, name in enumerate(rows(12))
    }
    (line,) = [line for line in lines.infos if "host tensors for now" in line]
    assert "less than twice an extent's device memory is free" in line
    assert not lines.warnings


def test_memory_that_is_free_again(small, load, device: Device, tmp_path) -> None:
    """Too little free memory is no verdict for the rest of the load."""
    iterator, before = load(save(tmp_path, **rows(12))), device.free_bytes
    kept, on_device = [next(iterator)], []
    device.free_bytes = 0
    for number, (_name, tensor) in enumerate(iterator):
        on_device.append(type(tensor) is DeviceTensor)
        if number == 4:
            device.free_bytes = before
        del tensor
    assert on_device == [False] * 5 + [True] * 6
    assert type(kept[0][1]) is DeviceTensor


# Tensors that are moved.


def odd(folder: Path, number: int = 60, size: int = 40_000) -> tuple[list[str], dict[str, bytes]]:
    """A file of float32 tensors at odd places, and their bytes."""
    tensors = [("flag", "U8", (1,), b"\1")]
    tensors += [(f"t{index:03}", "F32", (size // 4,), noise(size, index)) for index in range(number)]
    return [str(write(folder / "odd.safetensors", tensors))], {name: data for name, *_, data in tensors}


@pytest.mark.parametrize("size", [40_000, 4000, 36])
@pytest.mark.parametrize("held", [300_000, 16 << 30])
def test_moved_tensors_are_bounded(monkeypatch, small, load, device: Device, tmp_path, lines, size, held) -> None:
    """Tensors at odd places are aligned, are counted in the bound as others are, and never are PyTorch's."""
    monkeypatch.setattr(_slabs, "HELD", held)
    files, expected = odd(tmp_path, size=size)
    kept = list(load(files))
    device.finish()
    assert {name: one.bytes for name, one in values(kept).items()} == expected
    on_device = [tensor for _, tensor in kept if type(tensor) is DeviceTensor]
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for _, tensor in kept)
    assert sum(tensor.nbytes for tensor in on_device) <= device.used() <= held
    assert on_device and all(map(device.owns, on_device)) and not device.foreign
    assert device.calls("move") and not device.broken and not lines.warnings
    if held > 60 * 2 * SLAB:
        assert len(on_device) == len(expected)


@pytest.mark.parametrize("early", [True, False])
def test_moved_tensors_on_another_stream(small, load, device: Device, tmp_path, early) -> None:
    """A consumer that changes to another stream, which is early or late, reads moved tensors right."""
    files, expected = odd(tmp_path, size=4000)
    side, home, found = device.new_stream("side"), device.current, {}
    iterator = load(files)
    for number in itertools.count():
        with device.on(side if number % 2 else home):
            named = next(iterator, None)
            if named is None:
                break
            found[named[0]] = device.read(named[1])
            del named
        if early:
            side.run()
    device.finish(home)
    assert {name: bytes(data) for name, data in found.items()} == expected
    assert not device.broken and not device.foreign


@pytest.mark.parametrize("number", [1, 2, 5, 40, 60])
@pytest.mark.parametrize("size", [40_000, 4000, 100_000])
def test_move_fails(small, load, device: Device, tmp_path, lines, number, size) -> None:
    """A tensor that cannot be moved, for want of memory say, costs one warning: from its extent on all are on the host.

    That is also so where the extent came in several pieces.
    """
    files, expected = odd(tmp_path, size=size)
    device.fail("move", number, error=torch.OutOfMemoryError, text="CUDA out of memory")
    kept = list(load(files))
    device.finish()
    assert {name: one.bytes for name, one in values(kept).items()} == expected
    (warning,) = lines.warnings
    assert "host tensors from here on" in warning and "CUDA out of memory" in warning
    on_device = [type(tensor) is DeviceTensor for _, tensor in kept]
    assert on_device == sorted(on_device, reverse=True) and not all(on_device)
    assert not device.broken
    kept.clear()
    assert not device.allocated and not device.registered


# Large tensors.


@pytest.mark.parametrize("sizes", [(600_000, 600_000), (100_000, 1_100_000), (1_100_000, 100_000)])
@pytest.mark.parametrize("share", [2, 3])
def test_neighbours_fit(monkeypatch, small, load, device: Device, tmp_path, sizes, share) -> None:
    """Two neighbours that together are within half of the free memory are both on the device, though one is held."""
    monkeypatch.setattr(_slabs, "HELD", 1000)
    device.free_bytes = share * (sum(sizes) + 1024)
    found = places(load(save(tmp_path, embed=sizes[0], head=sizes[1])))
    assert found == {"embed": True, "head": True}


def test_neighbour_of_a_small_one_fits(monkeypatch, small, load, device: Device, tmp_path) -> None:
    """So are a large tensor and the small ones around it, which take a whole slab."""
    monkeypatch.setattr(_slabs, "HELD", 1000)
    found = places(load(save(tmp_path, before=30_000, large=300_000, after=30_000)))
    assert found == {"before": True, "large": True, "after": True}


def test_neighbours_do_not_fit(monkeypatch, small, load, device: Device, tmp_path) -> None:
    """Beyond half of the free memory the second of two large neighbours is on the host while the first is held."""
    device.free_bytes = 2 * 1_200_000 - 1024
    found = places(load(save(tmp_path, embed=500_000, head=700_000)))
    assert found == {"embed": True, "head": False}


@pytest.mark.parametrize("size", [70_000, 400_001])
def test_pieces_are_copied_once(monkeypatch, small, load, device: Device, tmp_path, size) -> None:
    """A tensor on the host that came in pieces is what these were put together in; one of one piece is a copy."""
    device.fail("allocate")
    made: list[int] = []
    clone, empty = torch.Tensor.clone, torch.empty
    clones: list[int] = []

    def cloned(tensor: torch.Tensor, **more: Any) -> torch.Tensor:
        clones.append(tensor.nbytes)
        return clone(tensor, **more)

    def emptied(*args: Any, **more: Any) -> torch.Tensor:
        tensor = empty(*args, **more)
        made.append(tensor.data_ptr())
        return tensor

    files = save(tmp_path, before=20, large=size, after=20)
    monkeypatch.setattr(torch.Tensor, "clone", cloned)
    monkeypatch.setattr(_load.torch, "empty", emptied)
    kept = dict(load(files))
    monkeypatch.undo()
    large = kept["large"]
    assert clones == [20, 20]
    assert large.data_ptr() in made and large.untyped_storage().nbytes() == size
    assert ctypes.string_at(large.data_ptr(), size) == noise(size, 1)
    assert len({tensor.untyped_storage().data_ptr() for tensor in kept.values()}) == 3

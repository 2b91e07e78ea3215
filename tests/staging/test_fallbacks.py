"""What cannot be had is done without: the tensors arrive all the same, and one warning names the cause."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint import values
from fake_cuda import DeviceTensor
from vllm.model_executor.model_loader import weight_utils

from vllm_hotfix._patches.pinned_staging import _cuda, _slabs, _staging
from vllm_hotfix._patches.pinned_staging._cuda import CudaError, Unavailable
from vllm_hotfix._record import RECORD

POPULATE = 23


class Libc:
    """The C library, but for the calls that are replaced."""

    def __init__(self, **replaced: Callable[..., Any]) -> None:
        self.real = _staging._libc
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def failing(code: int, *, advice: int | None = None) -> Callable[..., int | None]:
    """A call that fails with that error; of madvise only with that advice."""
    real = _staging._libc

    def call(*arguments: Any) -> int | None:
        if advice is not None and arguments[2] != advice:
            return real.madvise(*arguments)
        ctypes.set_errno(code)
        return -1 if advice is not None else ctypes.c_void_p(-1).value

    return call


def no_device(monkeypatch, device, platform) -> None:
    """No device."""

    def closed() -> None:
        raise Unavailable("no CUDA device")

    monkeypatch.setattr(_cuda, "open_device", closed)


def other_platform(monkeypatch, device, platform) -> None:
    """Another platform than CUDA."""
    platform.is_cuda = lambda: False
    platform.device_name = "abacus"


def not_registered(monkeypatch, device, platform) -> None:
    """Registration is refused."""
    device.fail("register", text="cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2)")


def no_pages(monkeypatch, device, platform) -> None:
    """There are no pages."""
    monkeypatch.setattr(_staging, "_libc", Libc(madvise=failing(errno.ENOMEM, advice=POPULATE)))


def no_mapping(monkeypatch, device, platform) -> None:
    """There is no address space."""
    monkeypatch.setattr(_staging, "_libc", Libc(mmap=failing(errno.ENOMEM)))


def kept_by_children(monkeypatch, device, platform) -> None:
    """The memory cannot be kept from children."""
    monkeypatch.setattr(_staging, "_libc", Libc(madvise=failing(errno.EINVAL, advice=10)))


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (no_device, "no CUDA device"),
        (other_platform, "abacus, not CUDA"),
        (not_registered, "CUDA_ERROR_OUT_OF_MEMORY"),
        (no_pages, "MADV_POPULATE_WRITE: Cannot allocate memory"),
        (no_mapping, "mmap: Cannot allocate memory"),
        (kept_by_children, "MADV_DONTFORK"),
    ],
)
def test_stock(monkeypatch, small, load, device, platform, files, contents, lines, cause, words) -> None:
    """Stock loads the weights, whole, after one warning; the second load warns no more."""
    cause(monkeypatch, device, platform)
    for _ in range(2):
        kept = list(load(files))
        assert values(kept) == contents
        assert not any(type(tensor) is DeviceTensor for _, tensor in kept)
    (warning,) = lines.warnings
    assert "stock loads these weights" in warning and words in warning
    assert RECORD.counters["pinned_staging"] == {"stock_loads": 2}
    assert not device.registered and not device.allocated and not device.calls("copy")


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_other_device(small, load, device, files, contents, lines, place) -> None:
    """Weights that are loaded on another device than CUDA are stock's."""
    assert values(load(files, device=place)) == contents
    (warning,) = lines.warnings
    assert place in warning and not device.log


def test_load_device_cuda(small, load, device, files, contents, lines) -> None:
    """A CUDA device that was named is no reason for stock."""
    kept = list(load(files, device="cuda"))
    device.finish()
    assert values(kept) == contents
    assert device.calls("copy") and not lines.warnings


def test_mapping_goes(monkeypatch, small, load, device, files) -> None:
    """Memory that could not be page-locked is given back before stock takes its own."""
    device.fail("register")
    blocks = []
    made = _staging.Block.__init__
    monkeypatch.setattr(
        _staging.Block, "__init__", lambda self, size: (made(self, size), blocks.append(self.address))[0]
    )
    iterator = load(files)
    next(iterator)
    (address,) = blocks
    maps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    assert not any(int(start, 16) <= address < int(end, 16) for start, end in maps)


def test_stock_errors_are_its_own(small, load, device, files, tmp_path) -> None:
    """What stock raises does not come as the second error of ours."""
    device.fail("register")
    with pytest.raises(Exception, match=r"(?i)libstreamer|file") as raised:
        list(load([str(tmp_path / "none.safetensors")]))
    chain, error = [], raised.value
    while error is not None:
        chain.append(error)
        error = error.__context__
    assert not any(isinstance(error, CudaError) for error in chain)


def test_kernels_before_5_14(monkeypatch, small, load, device, files, contents, lines) -> None:
    """Where the kernel does not know the advice the pages are touched before they are registered."""
    touched: list[tuple[int, int]] = []
    memset = ctypes.memset
    monkeypatch.setattr(_staging, "_libc", Libc(madvise=failing(errno.EINVAL, advice=POPULATE)))
    monkeypatch.setattr(
        _staging.ctypes, "memset", lambda at, byte, size: (touched.append((at, size)), memset(at, byte, size))[1]
    )
    register = device.register

    def resident(address: int, size: int) -> None:
        assert sum(length for at, length in touched if address <= at < address + size) == size
        register(address, size)

    monkeypatch.setattr(device, "register", resident)
    kept = list(load(files))
    device.finish()
    assert values(kept) == contents
    assert device.ever == 2 and not lines.warnings


@pytest.mark.parametrize("size", [4096, 2 << 20, (2 << 20) + 4096, 33 << 20])
def test_populate(size) -> None:
    """All pages are there when it returns, and no other is touched."""
    block = _staging.Block(size)
    _staging.populate(block.address, block.size)
    libc = ctypes.CDLL(None)
    pages = (ctypes.c_ubyte * (size // 4096))()
    assert libc.mincore(ctypes.c_void_p(block.address), ctypes.c_size_t(size), pages) == 0
    assert all(page & 1 for page in pages)


def test_pieces_are_undone(monkeypatch, device) -> None:
    """A block is registered in pieces; if one is refused none stays."""
    monkeypatch.setattr(_staging, "_PIECE", 8192)
    block = _staging.Block(40_000)
    device.fail("register", 4)
    with pytest.raises(CudaError):
        block.pin(device)
    assert device.calls("register") == 4 and device.calls("unregister") == 3
    assert not device.registered and not block.pinned
    device.heal("register")
    block.pin(device)
    assert sum(device.registered.values()) == block.size
    block.unpin()
    assert not device.registered


def test_second_block(small, load, device, files, contents, lines) -> None:
    """Where only one block can be page-locked it is used alone; that is a line, once, and no warning."""
    device.fail("register", 2)
    kept = list(load(files))
    device.finish()
    assert values(kept) == contents
    assert device.ever == 1 and device.calls("register") == 2
    assert all(type(tensor) is DeviceTensor for _, tensor in kept if tensor.nbytes)
    assert not device.broken and not lines.warnings
    assert len([line for line in lines.infos if "no more memory can be page-locked" in line]) == 1


def test_no_device_memory(small, load, device, files, contents, lines) -> None:
    """Where no device memory can be had the tensors are on the host, and one line says so."""
    device.fail("allocate", text="CUDA_ERROR_OUT_OF_MEMORY")
    kept = list(load(files))
    assert values(kept) == contents
    assert not any(type(tensor) is DeviceTensor for _, tensor in kept)
    assert not lines.warnings and device.calls("allocate") == 1
    (line,) = [line for line in lines.infos if "host tensors for now" in line]
    assert "CUDA_ERROR_OUT_OF_MEMORY" in line


def test_little_device_memory(small, load, device, files, contents, lines) -> None:
    """A quarter of the free device memory is what a load may hold."""
    device.free_bytes = 4 * 200_000
    kept = list(load(files))
    device.finish()
    assert values(kept) == contents
    assert sum(map(len, device.allocated.values())) <= 200_000
    assert len([line for line in lines.infos if "host tensors for now" in line]) == 1


def test_held(monkeypatch, small, load, device, files, contents, lines) -> None:
    """Over the bound tensors come on the host, and on the device again as soon as some have been dropped."""
    monkeypatch.setattr(_slabs, "HELD", 250_000)
    kept, found, phases = [], {}, []
    for name, tensor in load(files):
        on_device = type(tensor) is DeviceTensor
        if tensor.nbytes and (not phases or phases[-1] != on_device):
            phases.append(on_device)
        assert sum(map(len, device.allocated.values())) <= 250_000
        kept.append((name, tensor))
        if phases[-1:] == [False] and len(kept) > 60:
            device.finish()
            found |= values(kept)
            kept.clear()
        del tensor
    device.finish()
    assert found | values(kept) == contents
    assert phases[:3] == [True, False, True]
    assert not lines.warnings
    assert len([line for line in lines.infos if "host tensors for now" in line]) == 1
    assert 0 < RECORD.counters["pinned_staging"]["host_bytes"] < RECORD.counters["pinned_staging"]["bytes"]


@pytest.mark.parametrize("call", ["copy", "mark", "follow_stream"])
@pytest.mark.parametrize("number", [1, 2, 3, 5, 14, 15, 33, 40])
@pytest.mark.parametrize("keep", [True, False])
def test_copy_fails(small, load, device, files, contents, lines, call, number, keep) -> None:
    """A copy that fails, also one within a tensor of several pieces: from that extent on tensors are on the host."""
    device.fail(call, number)
    other = device.new_stream("other")
    kept, found, host = [], {}, None
    iterator = load(files)
    for index in range(10_000):
        with device.on(other if call == "follow_stream" and index % 2 else device.streams[0]):
            named = next(iterator, None)
            if named is None:
                break
            name, tensor = named
            if tensor.nbytes and host is not None:
                assert type(tensor) is not DeviceTensor
            if tensor.nbytes and type(tensor) is not DeviceTensor:
                host = name
            if keep:
                kept.append(named)
            else:
                found[name] = device.read(tensor) if tensor.nbytes else b""
            del named, tensor
    device.finish()
    if keep:
        assert values(kept) == contents
    else:
        assert {name: bytes(data) for name, data in found.items()} == {
            name: one.bytes for name, one in contents.items()
        }
    assert not device.broken
    if device.calls(call) >= number:
        assert host is not None
        (warning,) = lines.warnings
        assert f"no {call} today" in warning and "host tensors" in warning
    else:
        assert call == "follow_stream" and host is None and not lines.warnings
    kept.clear()
    assert not device.registered and not device.allocated


@pytest.mark.parametrize("piece", [1, 2, 3, 5])
def test_copy_fails_within_a_tensor(monkeypatch, load, device, lines, tmp_path, piece) -> None:
    """The pieces that were copied before are fetched back, the others follow them on the host."""
    from checkpoint import noise, write

    from vllm_hotfix._patches.pinned_staging import _load

    monkeypatch.setattr(_load, "BLOCK", 16_384)
    monkeypatch.setattr(_load, "EXTENT", 65_536)
    data = [("before", "U8", (11,), noise(11, 1)), ("long", "U8", (70_000,), noise(70_000, 2)),
            ("after", "U8", (12,), noise(12, 3))]  # fmt: skip
    path = str(write(tmp_path / "a.safetensors", data))
    device.fail("copy", 1 + piece)
    kept = list(load([path]))
    device.finish()
    assert {name: one.bytes for name, one in values(kept).items()} == {name: content for name, *_, content in data}
    assert [type(tensor) is DeviceTensor for _, tensor in kept] == [True, False, False]
    assert len(lines.warnings) == 1 and not device.broken


def test_free_fails(small, load, device, files, contents, lines) -> None:
    """Device memory that cannot be freed is said, and breaks neither load nor consumer."""
    device.fail("free")
    kept = list(load(files))
    device.finish()
    assert values(kept) == contents
    kept.clear()
    assert all("device memory is not freed" in line for line in lines.warnings) and lines.warnings
    device.heal("free")


def test_unknown_error_keeps_going(small, load, device, files, contents, lines, monkeypatch) -> None:
    """Whatever opening the device raises, stock loads."""

    def closed() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(_cuda, "open_device", closed)
    assert values(load(files)) == contents
    (warning,) = lines.warnings
    assert "ZeroDivisionError" in warning or "a bug" in warning


def test_stock_module(files) -> None:
    """What these tests call stock is vLLM's own iterator with the real streamer."""
    assert weight_utils.SafetensorsStreamer.__module__.startswith("runai_model_streamer.")
    assert Path(os.environ["PYTHONPATH"].split(os.pathsep)[0], "runai_model_streamer").is_dir()

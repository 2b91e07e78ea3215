"""What only a GPU can show of pinned_staging: real bytes, real waits, and a real driver that refuses.

    python -m pytest tests/gpu/test_pinned_staging.py

The repository's root is on PYTHONPATH; vLLM is not needed. A missing wait shows only under load, so copies and readers
are queued behind a sleep; each wait is then taken out of the code, which the same check must notice. Where that would
have the device use memory that is gone, the check looks at the order instead, and the memory is kept until it is idle.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import gc
import importlib
import itertools
import json
import logging
import math
import os
import re
import resource
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
streamer = pytest.importorskip("runai_model_streamer", reason="the Run:ai streamer is not installed")
safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")
if not torch.cuda.is_available() or torch.version.hip is not None:
    pytest.skip("no CUDA device", allow_module_level=True)

from vllm_hotfix._patches.pinned_staging import _cuda, _load, _slabs, _staging
from vllm_hotfix._record import RECORD, logger

DEVICE = torch.device("cuda", torch.cuda.current_device())
SLEEP = 500_000_000  # clock cycles, about a quarter of a second
ROW = 64 << 10  # bytes of a tensor
ROWS = 4  # tensors of an extent
EXTENTS = 16
SLOW = 4  # the extent that is copied behind a sleep: by then all memory has been allocated and registered
# fmt: off
DTYPES = ["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "C64",
          "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"]
# fmt: on

Named = tuple[str, Any]
Written = dict[str, tuple[str, tuple[int, ...], bytes]]


# What the tests are made of.


def sleep() -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(SLEEP)


def read(target: Any, tensor: Any) -> None:
    """Queue what a loader does with a tensor."""
    target.copy_(tensor, non_blocking=True)


def bar(items: Iterator[Named], **options: Any) -> Iterator[Named]:
    """Hold on to an item until the next is there, as tqdm does."""
    for item in items:  # noqa: UP028  that would hold none
        yield item


def drain(weights: Iterator[Named]) -> None:
    """Take every tensor and keep none."""
    collections.deque(weights, maxlen=0)


class Platform:
    """Stands for vLLM's."""

    device_name = "cuda"

    @staticmethod
    def is_cuda() -> bool:
        """Say yes."""
        return True


STOCK: Any = SimpleNamespace(
    current_platform=Platform,
    SafetensorsStreamer=streamer.SafetensorsStreamer,
    tqdm=bar,
    _BAR_FORMAT="{l_bar}",
    enable_tqdm=bool,
)


def no_stock() -> Iterator[Named]:
    """Stand for the stock path where it must not be taken."""
    raise AssertionError("the stock path was taken")


def load(*files: Path, stock: Callable[[], Iterator[Named]] = no_stock) -> Iterator[Named]:
    """The load under test."""
    weights: Iterator[Named] = _load.tensors(
        STOCK, stock, [str(file) for file in files], use_tqdm=False, distributed=False
    )
    return weights


def write(path: Path, tensors: Written, begin: int = 0) -> Path:
    """Write a safetensors file by hand; its data begin at an offset that is ``begin`` modulo 4096."""
    header, position = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header).encode()
    text += b" " * ((begin - 8 - len(text)) % 4096)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for *_, data in tensors.values()))
    return path


def noise(size: int, seed: int) -> bytes:
    """Bytes of which no two tensors have the same."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).numpy().tobytes()


def rows(path: Path, number: int = EXTENTS * ROWS, size: int = ROW) -> tuple[Path, Any]:
    """A file of tensors of the same size, which are named by their number, and their bytes."""
    data = noise(number * size, number)
    write(path, {str(row): ("U8", (size,), data[row * size : (row + 1) * size]) for row in range(number)})
    return path, torch.frombuffer(bytearray(data), dtype=torch.uint8).view(number, size)


def raw(tensor: Any) -> Any:
    """The bytes of a tensor, where it is."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def state() -> dict[str, int]:
    """What must be after a load as it was before."""
    gc.collect()
    torch.cuda.synchronize()
    status = Path("/proc/self/status").read_text()
    return {
        "free device memory": torch.cuda.mem_get_info()[0],
        "reserved by PyTorch": torch.cuda.memory_reserved(),
        "files": len(os.listdir("/proc/self/fd")),
        **{name: int(re.search(rf"^{name}:\s+(\d+)", status, re.M)[1]) for name in ("VmLck", "VmPin")},
    }


def mappings() -> int:
    """The number of this process's mappings."""
    return len(Path("/proc/self/maps").read_text().splitlines())


def resident() -> int:
    """Bytes of anonymous memory in use."""
    return int(re.search(r"^RssAnon:\s+(\d+)", Path("/proc/self/status").read_text(), re.M)[1]) << 10


def device_works() -> bool:
    """Whether a kernel can be launched and gives what it should."""
    result = torch.ones(1000, device=DEVICE).sum()
    torch.cuda.synchronize()
    return result.item() == 1000.0


class Watch:
    """Sees what a load asks of its device, and delays some of it.

    Attributes:
        slow: the number of the copy before which the current stream sleeps.
        slow_after: the number of the copy behind which the current stream sleeps.
        copies: the number of copies so far.
        slept: whether it was told to.
        marks: the events behind copies.
        readers: events behind what the consumer does with tensors.
        unregistered: for every unregistration, whether all copies had been done.
        freed: for every piece of device memory that was freed, whether all readers had been done.
        allocated: the device memory that has not been freed.
        most: the most bytes of it there were.
        lowest: the fewest bytes of device memory that were free after an allocation.
        mapped: the staging blocks that there were.
        unmapped: the mappings that were undone.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.slow = self.slow_after = -1
        self.slept = False
        self.marks: list[Any] = []
        self.readers: list[Any] = []
        self.unregistered: list[bool] = []
        self.freed: list[bool] = []
        self.allocated: dict[int, int] = {}
        self.most = self.mapped = self.unmapped = 0
        self.copies = 0
        self.lowest: int = torch.cuda.mem_get_info()[0]
        for name in ("copy", "mark", "unregister", "allocate", "free"):
            self._around(patch, name)
        make, unmap = _staging.Block.__init__, _staging._unmap

        def init(block: Any, size: int) -> None:
            make(block, size)
            self.mapped += 1

        def undone(*arguments: Any) -> None:
            unmap(*arguments)
            self.unmapped += 1

        patch.setattr(_staging.Block, "__init__", init)
        patch.setattr(_staging, "_unmap", undone)

    def _around(self, patch: pytest.MonkeyPatch, name: str) -> None:
        original, around = getattr(_cuda.Device, name), getattr(self, f"_{name}")

        def method(device: Any, *arguments: Any) -> Any:
            return around(functools.partial(original, device), *arguments)

        patch.setattr(_cuda.Device, name, method)

    def _sleep(self) -> None:
        self.slept = True
        sleep()

    def _copy(self, original: Callable[..., Any], *arguments: Any) -> None:
        if self.copies == self.slow:
            self._sleep()
        self.copies += 1
        original(*arguments)

    def _mark(self, original: Callable[[], Any]) -> Any:
        mark = original()
        self.marks.append(mark)
        if self.copies - 1 == self.slow_after:
            self._sleep()
        return mark

    def _unregister(self, original: Callable[..., Any], address: int) -> None:
        self.unregistered.append(all(mark.query() for mark in self.marks))
        torch.cuda.synchronize()
        original(address)

    def _allocate(self, original: Callable[..., Any], size: int) -> int:
        address: int = original(size)
        self.allocated[address] = size
        self.most = max(self.most, sum(self.allocated.values()))
        self.lowest = min(self.lowest, torch.cuda.mem_get_info()[0])
        return address

    def _free(self, original: Callable[..., Any], address: int) -> None:
        self.freed.append(all(reader.query() for reader in self.readers))
        torch.cuda.synchronize()
        original(address)
        del self.allocated[address]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No setting of whoever runs the tests is seen, every warning is a first one, and the device is idle."""
    for name in list(os.environ):
        if name.startswith(("RUNAI_STREAMER_", "VLLM_HOTFIX_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(RECORD, "_warned", set())
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """What is logged, whatever vLLM has made of its loggers."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """What the loads of a test ask of the device."""
    return Watch(monkeypatch)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks that never grow, with room for one extent each."""
    monkeypatch.setattr(_load, "EXTENT", ROWS * ROW)
    monkeypatch.setattr(_load, "BLOCK", ROWS * ROW)
    monkeypatch.setenv(_load.LIMIT, str(2 * ROWS * ROW))


@pytest.fixture(scope="module")
def side() -> Any:
    """A stream that goes on while the current one sleeps; streams can share a queue of the device."""
    source, target = torch.zeros(2, ROW, dtype=torch.uint8, device=DEVICE)
    for _ in range(8):
        stream = torch.cuda.Stream(priority=-1)
        torch.cuda.synchronize()
        sleep()
        with torch.cuda.stream(stream):
            read(target, source)
            event = torch.cuda.Event()
            event.record(stream)
        slow = torch.cuda.Event()
        slow.record(torch.cuda.current_stream())
        event.synchronize()
        free = not slow.query()
        torch.cuda.synchronize()
        if free:
            return stream
    pytest.skip("no stream of this device goes on while another sleeps")


# Bytes.


def shapes(dtype: str) -> list[tuple[int, ...]]:
    """Shapes of tensors of a type that differ in what a copy could get wrong."""
    if dtype == "F4":
        return [(2,), (0,), (4, 6), (3, 0, 2), (33, 34), (2, 300_002)]
    return [(), (1,), (0,), (7,), (5, 3), (3, 0, 2), (), (33, 17), (2, 1, 1, 3), (2, 150_001), (1,)]


def content(dtype: str, shape: tuple[int, ...], itemsize: int, seed: int) -> bytes:
    """Bytes of a tensor of these."""
    size = math.prod(shape) // 2 if dtype == "F4" else math.prod(shape) * itemsize
    data = noise(size, seed)
    return bytes(byte & 1 for byte in data) if dtype == "BOOL" else data


def torch_type(name: str) -> Any:
    """The type that the streamer has for a name; skips where it has none."""
    module = importlib.import_module("runai_model_streamer.safetensors_streamer.safetensors_pytorch")
    if name not in module.safetensors_to_torch_dtype:
        pytest.skip(f"this PyTorch or streamer does not have {name}")
    if name == "F4" and not hasattr(module, "PACKED_VALUES_PER_ELEMENT"):
        pytest.skip("this streamer cannot deliver packed tensors")
    return module.safetensors_to_torch_dtype[name]


@pytest.mark.parametrize("odd", [0, 3], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("extent", "block"), [(16 << 20, 32 << 20), (64 << 10, 64 << 10), (64 << 10, 12 << 10), (20_000, 400_000)]
)
def test_every_tensor_has_the_bytes_of_its_file(
    extent: int, block: int, dtype: str, odd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: Watch
) -> None:
    """Every type and shape arrives on the device as the safetensors reader reads it, at an address it can use.

    Also where the file's data begin at an odd offset, where tensors lie at odd offsets in the data, and where a
    tensor is larger than an extent or a block; a shard without tensors between others changes nothing.
    """
    kind = torch_type(dtype)
    monkeypatch.setattr(_load, "EXTENT", extent)
    monkeypatch.setattr(_load, "BLOCK", block)
    files, written = [], {}
    for number in range(2):
        tensors: Written = {f"{number}.first": ("U8", (odd,), noise(odd, 99))}
        for index, shape in enumerate(shapes(dtype)):
            tensors[f"{number}.{index}"] = dtype, shape, content(dtype, shape, kind.itemsize, 100 * number + index)
        files += [write(tmp_path / f"{number}.safetensors", tensors, odd), write(tmp_path / f"{number}.none", {}, odd)]
        written |= tensors
    found = {}
    for name, tensor in load(*files):
        found[name] = tensor
    assert found.keys() == written.keys()
    reference = {}
    for file in files[::2]:
        with (
            contextlib.suppress(safetensors.SafetensorError),  # a type that this reader does not know
            safetensors.safe_open(str(file), framework="pt", device=str(DEVICE)) as reader,
        ):
            reference |= {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118  no mapping
    assert not reference or reference.keys() == written.keys()
    for name, tensor in found.items():
        data = written[name][2]
        assert tensor.device == DEVICE and tensor.is_contiguous() and not tensor.requires_grad, name
        assert tensor.data_ptr() % tensor.dtype.itemsize == 0, name
        assert raw(tensor).cpu().numpy().tobytes() == data, name
        if name in reference:
            assert (tensor.dtype, tensor.shape) == (reference[name].dtype, reference[name].shape), name
            assert torch.equal(raw(tensor), raw(reference[name])), name
        elif not name.endswith("first"):
            assert tensor.dtype == kind, name
    assert watch.marks
    del found, tensor
    assert not watch.allocated


def test_tensors_that_are_kept_are_not_written_again(tmp_path: Path, tiny: None) -> None:
    """A consumer that keeps every tensor has all of them as they were, after the load and another one."""
    path, expected = rows(tmp_path / "a")
    other, _ = rows(tmp_path / "b", EXTENTS * ROWS + 1)
    kept = dict(load(path))
    drain(load(other))
    assert torch.equal(torch.stack([kept[str(row)] for row in range(len(expected))]).cpu(), expected)


# Waits.


class Scene(NamedTuple):
    """What a check has to work with: a file of tensors, their bytes, and where they are to go on the device."""

    watch: Watch
    side: Any
    path: Path
    expected: Any
    out: Any

    def take(self, weights: Iterator[Named], number: int | None = None) -> None:
        """Read the next tensors on the current stream, and keep none."""
        for name, tensor in itertools.islice(weights, number):
            read(self.out[int(name)], tensor)

    def wrong(self) -> list[int]:
        """The tensors whose bytes are wrong."""
        torch.cuda.synchronize()
        return [row for row in range(len(self.expected)) if not torch.equal(self.out[row].cpu(), self.expected[row])]


def refill(scene: Scene) -> list[int]:
    """Copies lag: which tensors have the bytes of what was read after them?"""
    scene.watch.slow = SLOW
    scene.take(load(scene.path))
    assert scene.watch.slept
    return scene.wrong()


def switch(scene: Scene) -> list[int]:
    """A copy lags, and the rest of its extent is used on another stream: which tensors were read before it?"""
    scene.watch.slow = SLOW
    weights = load(scene.path)
    scene.take(weights, SLOW * ROWS + 1)
    assert scene.watch.slept and not scene.watch.marks[-1].query()
    with torch.cuda.stream(scene.side):
        scene.take(weights, ROWS - 1)
    torch.cuda.synchronize()
    scene.take(weights)
    return scene.wrong()


def reuse(scene: Scene) -> list[int]:
    """A reader on another stream lags: which tensors have bytes of an extent that came later?"""
    weights = load(scene.path)
    scene.take(weights, 1)
    with torch.cuda.stream(scene.side):
        name, tensor = next(weights)
        sleep()
        read(scene.out[int(name)], tensor)
    del tensor
    scene.take(weights, SLOW * ROWS)
    torch.cuda.synchronize()
    scene.take(weights)
    assert scene.watch.most < EXTENTS * ROWS * ROW // 2  # memory has been used again
    return scene.wrong()


def end(how: str, scene: Scene) -> list[int]:
    """A load ends while copies lag: which unregistrations came before them?"""
    scene.watch.slow = EXTENTS - 1 if how == "exhausted" else SLOW
    weights = load(scene.path)
    scene.take(weights, None if how == "exhausted" else SLOW * ROWS + 1)
    assert scene.watch.slept
    if how != "exhausted":
        assert not scene.watch.marks[-1].query() and not scene.watch.unregistered
    if how == "closed":
        weights.close()  # type: ignore[attr-defined]
    del weights
    assert len(scene.watch.unregistered) == 2
    return [number for number, passed in enumerate(scene.watch.unregistered) if not passed]


def free(stream: str, scene: Scene) -> list[int]:
    """The last tensor of a load dies while its reader lags: which memory was freed before that was done?"""
    weights = load(scene.path)
    scene.take(weights, EXTENTS * ROWS - 2)
    with torch.cuda.stream(scene.side if stream == "second" else torch.cuda.current_stream()):
        _, kept = next(weights)
        scene.take(weights)
        assert len(scene.watch.allocated) == 1
        sleep()
        read(scene.out[0], kept)
        reader = torch.cuda.Event()
        reader.record(torch.cuda.current_stream())
    scene.watch.readers.append(reader)
    assert not reader.query()
    del kept
    assert not scene.watch.allocated
    return [number for number, passed in enumerate(scene.watch.freed) if not passed]


def no_wait_before_refill(patch: pytest.MonkeyPatch) -> None:
    """Blocks are read into at once."""
    patch.setattr(_staging.Block, "wait", lambda block: block.copies.clear())


def no_follow(patch: pytest.MonkeyPatch) -> None:
    """A consumer's other stream does not wait for the copy."""
    patch.setattr(_cuda.Device, "follow", lambda device, event: None)


def no_follow_stream(patch: pytest.MonkeyPatch) -> None:
    """A copy does not wait for the other streams that used the memory."""
    patch.setattr(_cuda.Device, "follow_stream", lambda device, stream: None)


def no_wait_before_release(patch: pytest.MonkeyPatch) -> None:
    """Blocks are unregistered at once."""
    release = _staging.Staging.release

    def at_once(staging: Any) -> None:
        with patch.context() as within:
            no_wait_before_refill(within)
            release(staging)

    patch.setattr(_staging.Staging, "release", at_once)


def no_wait_before_free(patch: pytest.MonkeyPatch) -> None:
    """Device memory is freed at once."""
    patch.setattr(torch.cuda.Stream, "synchronize", lambda stream: None)


class Case(NamedTuple):
    """A check that names what a missing wait breaks, and what takes the wait out."""

    check: Callable[[Scene], list[int]]
    without: Callable[[pytest.MonkeyPatch], None]


CASES = {
    "refill": Case(refill, no_wait_before_refill),
    "switch": Case(switch, no_follow),
    "reuse": Case(reuse, no_follow_stream),
    **{how: Case(functools.partial(end, how), no_wait_before_release) for how in ("closed", "dropped", "exhausted")},
    **{f"free, {on} stream": Case(functools.partial(free, on), no_wait_before_free) for on in ("first", "second")},
}


@pytest.fixture
def scene(watch: Watch, side: Any, tmp_path: Path, tiny: None) -> Scene:
    """A file of many extents, through two tiny blocks."""
    path, expected = rows(tmp_path / "rows")
    out = torch.zeros(expected.shape, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    return Scene(watch, side, path, expected, out)


@pytest.mark.parametrize("name", CASES)
def test_it_waits_where_it_must(name: str, scene: Scene) -> None:
    """However late copies and readers are, no tensor has wrong bytes and no memory goes before they are done."""
    assert CASES[name].check(scene) == []


@pytest.mark.parametrize("name", CASES)
def test_each_wait_is_needed(name: str, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one wait taken out the same check finds fault: it does show what it is there for."""
    CASES[name].without(monkeypatch)
    assert CASES[name].check(scene) != []


def test_an_aligned_copy_is_waited_for_too(scene: Scene, tmp_path: Path) -> None:
    """A tensor that had to be aligned is complete on whichever stream the consumer takes it."""
    number = ROWS * EXTENTS
    tensors: Written = {"odd": ("U8", (1,), b"x")}
    for row in range(number):
        tensors[str(row)] = "F32", (ROW // 8,), scene.expected[row, : ROW // 2].numpy().tobytes()
    path = write(tmp_path / "misaligned", tensors)
    scene.out.copy_(scene.expected)
    scene.out[:, : ROW // 2] = 0
    # PyTorch's allocator need not ask the driver for more from here on, and has no memory with the right bytes.
    del [torch.zeros(ROW // 2, dtype=torch.uint8, device=DEVICE) for _ in range(4 * number)][:]
    torch.cuda.synchronize()
    scene.watch.slow_after = SLOW
    weights = (one for one in load(path) if one[0] != "odd")

    def take(limit: int | None = None) -> None:
        for name, tensor in itertools.islice(weights, limit):
            read(scene.out[int(name), : ROW // 2], raw(tensor))

    for _ in range(number):
        if not scene.watch.slept:
            take(1)
    assert scene.watch.slept
    with torch.cuda.stream(scene.side):
        take(2)
    torch.cuda.synchronize()
    take()
    assert scene.wrong() == []


# Refusals.


def runtime() -> Any:
    """The CUDA runtime that PyTorch uses, or None where it cannot be found."""
    found = re.search(r"\S*/libcudart[^/\s]*\.so[^/\s]*", Path("/proc/self/maps").read_text())
    return ctypes.CDLL(found[0]) if found else None


def last_error() -> int:
    """The error that the next check of a kernel launch would find."""
    library = runtime()
    return int(library.cudaPeekAtLastError()) if library is not None else 0


@pytest.mark.parametrize("refused", ["registered already", "unmapped", "unregistered twice"])
def test_after_a_refused_registration_the_device_works(refused: str) -> None:
    """The error has the driver's name for it, and neither the runtime nor a kernel launch knows of it."""
    device = _cuda.open_device()
    block = _staging.Block(1 << 20)
    address, size = block.address, block.size
    block.pin(device)
    if refused == "registered already":
        with pytest.raises(_cuda.CudaError, match=r"HOST_MEMORY_ALREADY_REGISTERED \(712\)"):
            device.register(address, size)
        assert block.pinned
        block.unpin()
    elif refused == "unregistered twice":
        block.unpin()
        with pytest.raises(_cuda.CudaError, match="cuMemHostUnregister"):
            device.unregister(address)
    else:
        block.unpin()
        del block
        gc.collect()
        with pytest.raises(_cuda.CudaError, match="cuMemHostRegister"):
            device.register(address, size)
    assert last_error() == 0
    assert device_works()
    assert last_error() == 0


def test_a_refusal_by_the_runtime_would_be_seen() -> None:
    """The runtime's own registration leaves its error for others to find, so the test above can see one."""
    library = runtime()
    if library is None:
        pytest.skip("the CUDA runtime is not a library of its own here")
    block = _staging.Block(1 << 20)
    block.pin(_cuda.open_device())
    try:
        arguments = ctypes.c_void_p(block.address), ctypes.c_size_t(block.size), ctypes.c_uint(0)
        assert library.cudaHostRegister(*arguments) == 712
        assert last_error() == 712
        library.cudaGetLastError()
        assert last_error() == 0
    finally:
        block.unpin()


def test_a_refused_load_is_stocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[logging.LogRecord], watch: Watch
) -> None:
    """Where registration is refused stock loads, with one warning that says why, and nothing is left over."""
    path, expected = rows(tmp_path / "rows")
    reason = "cuMemHostRegister_v2: CUDA_ERROR_NOT_PERMITTED (800)"

    def refuse(device: Any, address: int, size: int) -> None:
        raise _cuda.CudaError(reason)

    monkeypatch.setattr(_cuda.Device, "register", refuse)
    before: dict[str, int] = {}
    for _ in range(3):
        found = dict(load(path, stock=lambda: stock_load(path)))
        assert all(torch.equal(found[str(row)], expected[row]) for row in range(len(expected)))
        before = before or state()
    warnings = [record.getMessage() for record in log if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and reason in warnings[0] and "stock" in warnings[0]
    assert watch.mapped == watch.unmapped and not watch.marks and not watch.allocated
    assert state() == before
    assert device_works()


def stock_load(path: Path) -> Iterator[Named]:
    """Stand for the stock path."""
    with safetensors.safe_open(str(path), framework="pt") as reader:
        for name in reader.keys():  # noqa: SIM118  no mapping
            yield name, reader.get_tensor(name)


def lock_nothing(path: Path) -> None:
    """In a process of its own: load where no memory may be locked, and print what came of it."""
    device_works()
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    sets = (ctypes.c_uint32 * 6)()
    dropped = libc.capget(header, sets) == 0
    for index in range(3):
        sets[index] &= ~(1 << 14)  # CAP_IPC_LOCK
    dropped = dropped and libc.capset(header, sets) == 0
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    _, expected = rows(path)
    taken = []

    def stock() -> Iterator[Named]:
        taken.append(True)
        return stock_load(path)

    found = dict(load(path, stock=stock))
    right = all(torch.equal(found[str(row)].cpu(), expected[row]) for row in range(len(expected)))
    warnings = [record.getMessage() for record in records if record.levelno >= logging.WARNING]
    outcome = {"dropped": dropped, "stock": bool(taken), "right": right, "works": device_works(), "warnings": warnings}
    print(json.dumps(outcome | {"error": last_error()}))


def test_a_load_that_may_lock_nothing_is_stocks(tmp_path: Path) -> None:
    """Under a memlock limit of 0 the weights are right: stock loads them with one warning, if the driver minds."""
    here = Path(__file__)
    program = (
        "import sys, pathlib, importlib; importlib.import_module(sys.argv[1]).lock_nothing(pathlib.Path(sys.argv[2]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, here.stem, str(tmp_path / "rows")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["right"] and outcome["works"] and outcome["error"] == 0
    if not outcome["dropped"]:
        pytest.skip("CAP_IPC_LOCK cannot be dropped here")
    if not outcome["stock"]:
        assert outcome["warnings"] == []
        pytest.skip("this driver registers memory whatever the memlock limit says")
    assert len(outcome["warnings"]) == 1


# Nothing is left over.


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_an_abandoned_load_leaves_nothing_locked(how: str, tmp_path: Path, tiny: None, watch: Watch) -> None:
    """Half way through a load, the memory that was locked is not any more, and is given back."""
    path, _ = rows(tmp_path / "rows")

    def abandon() -> None:
        weights = load(path)
        for _ in itertools.islice(weights, EXTENTS * ROWS // 2):
            pass
        if how == "closed":
            weights.close()  # type: ignore[attr-defined]
            assert next(weights, None) is None

    for _ in range(3):
        abandon()
    before, maps = state(), mappings()
    for _ in range(10):
        abandon()
        assert watch.mapped == watch.unmapped and not watch.allocated
    assert state() == before
    assert mappings() - maps < 5  # the allocator of the C library may have made some
    assert device_works()


def test_twenty_loads_leak_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    """Device memory, PyTorch's pools, locked memory, mappings and files are after twenty loads as after the first."""
    monkeypatch.setattr(_load, "EXTENT", 1 << 20)
    monkeypatch.setattr(_load, "BLOCK", 4 << 20)
    path, expected = rows(tmp_path / "rows", 256)
    out = torch.zeros(expected.shape, dtype=torch.uint8, device=DEVICE)
    reserved = torch.cuda.memory_reserved()

    def once() -> None:
        out.zero_()
        for name, tensor in load(path):
            read(out[int(name)], tensor)
        assert torch.equal(out.cpu(), expected)

    for _ in range(3):
        once()
    before, maps, memory, blocks = state(), mappings(), resident(), watch.mapped
    for _ in range(20):
        once()
    assert torch.cuda.memory_reserved() == reserved
    assert state() == before
    assert watch.mapped == watch.unmapped > blocks and not watch.allocated
    assert mappings() - maps < 10
    assert resident() - memory < (watch.mapped - blocks) * (4 << 20) // 4


def test_what_a_consumer_holds_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: Watch, log: list[logging.LogRecord]
) -> None:
    """Over the bound, tensors stay on the host: the bytes are right, a line says so, and all of it is freed."""
    bound = 16 << 20
    monkeypatch.setattr(_slabs, "HELD", bound)
    monkeypatch.setattr(_load, "EXTENT", (2 << 20) - _load._ALIGN)  # slabs of the driver's granularity
    monkeypatch.setattr(_load, "BLOCK", 4 << 20)
    path, expected = rows(tmp_path / "rows", 768)  # 48 MiB
    drain(load(path))
    before = state()
    watch.lowest = before["free device memory"]
    held = list(load(path))
    on_device = sum(tensor.nbytes for _, tensor in held if tensor.is_cuda)
    on_host = sum(tensor.nbytes for _, tensor in held if not tensor.is_cuda)
    assert on_device + on_host == expected.nbytes and on_host
    assert bound // 2 < on_device <= watch.most <= bound
    assert before["free device memory"] - watch.lowest <= bound + (4 << 20)
    assert all(torch.equal(tensor.cpu(), expected[int(name)]) for name, tensor in held)
    said = [record.getMessage() for record in log if "yields host tensors" in record.getMessage()]
    assert len(said) == 1 and log[-1].levelno == logging.INFO and "as host tensors" in log[-1].getMessage()
    del held
    assert not watch.allocated
    assert state() == before


# PyTorch's pools and graphs.


def test_a_pool_that_is_in_use_gets_no_extents(tmp_path: Path, tiny: None) -> None:
    """A load inside a memory pool, as of a server that can sleep, takes no memory for extents from it."""
    path, expected = rows(tmp_path / "rows")
    pool = torch.cuda.MemPool()

    def size() -> int:
        return sum(segment["total_size"] for segment in pool.snapshot())

    with torch.cuda.use_mem_pool(pool):
        held = dict(load(path))
    assert size() == 0
    assert all(torch.equal(held[str(row)].cpu(), expected[row]) for row in range(len(expected)))
    with torch.cuda.use_mem_pool(pool):
        mine = torch.zeros(ROWS * ROW, dtype=torch.uint8, device=DEVICE)
    assert size() >= mine.nbytes
    del mine  # before its pool


def test_a_tensor_that_dies_in_a_capture_does_not_break_it(tmp_path: Path, tiny: None, watch: Watch) -> None:
    """Its memory is freed by the next load, as nothing can be freed while a CUDA graph is being captured."""
    path, _ = rows(tmp_path / "rows")
    held = [tensor for _, tensor in load(path)][-1]
    number = torch.full((1000,), 21.0, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    (number * 2).sum()  # its kernels are loaded
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        double = number * 2
        del held
    assert len(watch.allocated) == 1
    graph.replay()
    assert double.cpu().tolist() == [42.0] * 1000
    drain(load(path))
    assert not watch.allocated and not _slabs._late


# Two at once, and speed.


def test_two_loads_at_once(tmp_path: Path, tiny: None) -> None:
    """Loads in two threads do not mix up their bytes."""
    files = [rows(tmp_path / str(number), EXTENTS * ROWS + number) for number in range(2)]
    wrong: list[Any] = []
    start = threading.Barrier(2, timeout=30)

    def run(path: Path, expected: Any) -> None:
        try:
            out = torch.zeros(expected.shape, dtype=torch.uint8, device=DEVICE)
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                start.wait()
                for _ in range(3):
                    out.zero_()
                    for name, tensor in load(path):
                        read(out[int(name)], tensor)
                    torch.cuda.current_stream().synchronize()
                    if not torch.equal(out.cpu(), expected):
                        wrong.append(path)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=file) for file in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == [] and not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_copies_out_of_pinned_memory_are_asynchronous(pinned: bool) -> None:
    """A copy out of a block is queued in a fraction of its time; if it is pageable, the call does the copying."""
    size = 64 << 20
    device = _cuda.open_device()
    block = _staging.Block(size)
    slabs = _slabs.Slabs(device, size)
    try:
        if pinned:
            block.pin(device)
        else:
            _staging.populate(block.address, block.size)
        slab = slabs.take(size)
        assert slab is not None
        target = slab.tensor()
        ratios = []
        for _ in range(6):
            begin, finish = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin.record()
            called = time.perf_counter()
            device.copy(target, block.bytes)
            called = time.perf_counter() - called
            finish.record()
            torch.cuda.synchronize()
            ratios.append(called * 1000 / begin.elapsed_time(finish))
        best = min(ratios[1:])  # the first one may have something to set up
        assert (best < 0.25) == pinned, ratios
        del target
    finally:
        torch.cuda.synchronize()
        block.unpin()
        slabs.close()

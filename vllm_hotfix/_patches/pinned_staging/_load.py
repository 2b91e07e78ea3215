"""One load: the tensors of safetensors files, on the device.

Consecutive tensors are read as one extent, copied to the device in one go, and yielded as views of it: what is left
per tensor is one view. The copies run on the stream that the loaders use.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import json
import math
import operator
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch

from _vllm_hotfix import describe

from ..._record import RECORD, logger
from . import _cuda
from ._reader import Place, Range, Reader
from ._slabs import Slab, Slabs
from ._staging import Staging

NAME = "pinned_staging"
LIMIT = "RUNAI_STREAMER_MEMORY_LIMIT"
DEFAULT_LIMIT = 1_000_000_000  # bytes of staging memory where the user sets no limit
CAP = 16_000_000_000  # bytes of staging memory where the user sets "unlimited"
BLOCK = 32 << 20  # bytes read in one submission, to begin with
EXTENT = 16 << 20  # bytes of consecutive tensors that are copied together
_ALIGN = 256  # bytes: up to this, a tensor is aligned on the device as it is in its file
_PROBE = 2 << 20  # bytes pinned before it is known how many are needed
_LARGEST_HEADER = 100 << 20

Named = tuple[str, torch.Tensor]
#: A tensor of a file: name, dtype, shape, stride, start and size; these in bytes, from the start of the file's data.
#: A plain tuple: there are hundreds of thousands, and the garbage collector need not look at these.
Tensor = tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...], int, int]


class Odd(Exception):
    """The checkpoint, or a setting, is one for stock to judge."""


class Extent(NamedTuple):
    """Consecutive tensors of a file, ``size`` bytes; the file's data begin at ``data``."""

    path: str
    data: int
    start: int
    size: int
    tensors: list[Tensor]

    def pieces(self, largest: int) -> Iterator[Range]:
        """What of it is read at once, in order."""
        for start in range(0, self.size, largest):
            yield Range((self, start), self.path, self.data + self.start + start, min(largest, self.size - start))


def tensors(
    stock: ModuleType, stock_iterator: Callable[[], Iterator[Named]], files: list[str], *, use_tqdm: bool,
    distributed: bool, device: str | None = None,
) -> Iterator[Named]:  # fmt: skip
    """Yield the name and the tensor, on the current CUDA device, for every tensor of the files.

    A tensor is the caller's: its memory is not written again while it or a view of it lives. It is to be used on the
    stream that is current when it is asked for; who uses it on another makes that one wait, and the first wait for it
    before the tensor is dropped: ``record_stream`` has no effect on memory that PyTorch did not allocate.

    Args:
        stock: vLLM's ``weight_utils``.
        stock_iterator: the stock path.
        files: paths or object storage addresses of safetensors files.
        use_tqdm: whether there is a progress bar.
        distributed: whether the ranks share the reading.
        device: where vLLM was told to load the weights, if it was.

    Raises:
        ValueError: a file is damaged or cannot be read; as the streamer says it.
    """
    begin, finalizing = time.perf_counter(), sys.is_finalizing
    load = None
    try:
        load = _prepare(stock, files, use_tqdm, device)
    except Exception as error:
        why = str(error) if isinstance(error, _cuda.Unavailable) else describe(error)
        RECORD.warn(f"{NAME}: stock loads these weights: {why}")
        RECORD.count(NAME, "stock_loads")
        RECORD.save()
    if load is None:  # not within the except clause, which would keep what has been refused
        yield from stock_iterator()
        return
    try:
        shared = distributed and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        # The streamer's threads write into the staging memory until it has been left.
        with stock.SafetensorsStreamer() as streamer:
            yield from load.shared(streamer, files) if shared else load.alone(streamer, files)
        load.finished = True
    finally:
        if not finalizing():  # then modules are going, and the process will be gone
            load.end()
            load.report(time.perf_counter() - begin)


def _prepare(stock: ModuleType, files: list[str], use_tqdm: bool, device: str | None) -> Load:
    """What can be refused, before there is a streamer: the older ones make the ranks meet when they are used first."""
    platform = stock.current_platform
    if not platform.is_cuda():
        raise _cuda.Unavailable(f"vLLM's platform is {platform.device_name or type(platform).__name__}, not CUDA")
    if device is not None and torch.device(device).type != "cuda":
        raise _cuda.Unavailable(f"the weights are loaded on {device!r}")
    load = Load(stock, _cuda.open_device(), use_tqdm)
    try:
        load.staging = Staging(load.device, load.first_block(files), load.limit)
        load.staging.grow()
    except BaseException:
        load.end()
        raise
    return load


class Load:
    """The state of one load.

    Args:
        stock: vLLM's ``weight_utils``.
        device: where the tensors go.
        use_tqdm: whether there is a progress bar.

    Raises:
        ValueError: the memory limit is not a number.
    """

    def __init__(self, stock: ModuleType, device: Any, use_tqdm: bool) -> None:
        self.device, self.finished = device, False
        self._stock_reads = False
        self.staging: Staging | None = None
        limit = int(os.environ.get(LIMIT, DEFAULT_LIMIT))
        self._unlimited = limit == -1 or LIMIT not in os.environ
        self.limit = CAP if limit == -1 else limit
        self._stock, self._use_tqdm = stock, use_tqdm
        self._slabs = Slabs(device, EXTENT + _ALIGN)
        self._number = self._bytes = self._host = self._peak = 0
        self._pinning = 0.0

    def first_block(self, files: list[str]) -> int:
        """Bytes of the first block: what the limit and the files, where their size is known, make of it."""
        block = min(BLOCK, self.limit // 2) if self.limit > 1 else _PROBE
        with contextlib.suppress(OSError):
            block = min(block, -(-sum(map(os.path.getsize, files)) // 2))
        return max(1, block)

    def _arrange(self, block: int, limit: int) -> None:
        """Blocks of another size. This late a block that cannot be pinned is one that is not."""
        self._release()
        self.staging = Staging(self.device, block, limit)
        try:
            self.staging.grow()
        except Exception as error:
            RECORD.warn(f"{NAME}: goes on with pageable staging memory: {describe(error)}")
            self.staging.pageable()

    def _release(self) -> None:
        if self.staging is not None:
            staging, self.staging = self.staging, None
            self._peak = max(self._peak, staging.peak)
            self._pinning += staging.seconds
            staging.release()

    def end(self) -> None:
        """Give back what the load has taken; tensors that are still in use keep their own memory."""
        try:
            self._release()
        finally:
            self._slabs.close()

    def report(self, seconds: float) -> None:
        """Log what was done and keep it in the record."""
        for counter, number in {
            "stock_loads" if self._stock_reads else "loads": 1,
            "tensors": self._number,
            "bytes": self._bytes,
            "host_bytes": self._host,
            "milliseconds": round(seconds * 1000),
            "pinning_milliseconds": round(self._pinning * 1000),
        }.items():
            RECORD.count(NAME, counter, number)
        RECORD.save()
        logger.info(
            "vllm-hotfix: %s%s %.2f GiB in %d tensors in %.2f s (%.1f GB/s) through %.0f MiB of staging memory, "
            "%.2f s to pin%s",
            NAME,
            "" if self.finished else " ended early:",
            self._bytes / 2**30,
            self._number,
            seconds,
            self._bytes / seconds / 1e9,
            self._peak / 2**20,
            self._pinning,
            f"; {self._host / 2**30:.2f} GiB of it as host tensors" if self._host else "",
        )

    def _progress(self, items: Iterator[Named], total: int) -> Iterator[Named]:
        bar: Iterator[Named] = self._stock.tqdm(
            items,
            total=total,
            desc="Loading safetensors using Runai Model Streamer",
            bar_format=self._stock._BAR_FORMAT,
            disable=not self._stock.enable_tqdm(self._use_tqdm),
            mininterval=2,
        )
        return bar

    # This rank reads everything.

    def alone(self, streamer: Any, files: list[str]) -> Iterator[Named]:
        """Yield the tensors of files that this rank reads by itself."""
        try:
            with _uncollected():
                extents, empty = _extents(files, read_headers(streamer, files))
            sizes = [size for extent in extents for *_, size in extent.tensors]
            if self.limit < max(sizes, default=0) and self.limit != 0 and not self._unlimited:
                raise Odd(f"{LIMIT} is {self.limit}, less than the largest tensor")
        except ValueError:  # the streamer cannot read a file
            raise
        except Exception as error:
            why = str(error) if isinstance(error, Odd) else describe(error)
            RECORD.warn(f"{NAME}: stock loads these weights: {why}")
            self._stock_reads = True
            self._release()
            yield from self._as_stock(streamer, files)
            return
        self._slabs.fit([_OnDevice.bytes_for(extent) for extent in extents])
        inner = streamer.file_streamer.file_streamer
        if hasattr(inner, "total_size"):  # what the older streamers log at their end
            inner.total_size, inner.device_str = sum(sizes), str(self.device.name)
        if self.limit == 0 and sizes:
            self._arrange(max(1, max(sizes) // 2), max(sizes))
        yield from self._progress(self._views(inner, extents, empty), len(sizes) + len(empty))

    def _as_stock(self, streamer: Any, files: list[str]) -> Iterator[Named]:
        # With this streamer, not with a new one: that would make the ranks meet once more.
        streamer.stream_files(files, device="cpu", is_distributed=False)
        for name, tensor in self._progress(streamer.get_tensors(), _number_of_tensors(streamer)):
            self._add(tensor.nbytes)
            self._host += tensor.nbytes
            yield name, tensor.clone()

    def _views(self, streamer: Any, extents: list[Extent], empty: list[Tensor]) -> Iterator[Named]:
        for name, dtype, shape, *_ in empty:
            self._add(0)
            yield name, torch.empty(shape, dtype=dtype, device=self.device.name)
        staging = self.staging
        assert staging is not None
        largest = min(EXTENT, staging.block)
        ranges = [piece for extent in extents for piece in extent.pieces(largest)]
        whole: _OnDevice | _OnHost | None = None
        for place in Reader(streamer, staging).read(ranges):
            extent, start = place.range.item
            if start == 0:
                whole = self._target(extent)
            assert whole is not None
            complete = start + place.range.size == extent.size
            try:
                whole.take(place, start)
                if complete:
                    whole.finish()
            except Exception as error:
                whole = self._instead(whole, error)
                whole.take(place, start)
            if complete:
                yield from whole
                whole = None  # not while the next extent is looked for memory

    def _target(self, extent: Extent) -> _OnDevice | _OnHost:
        self._add(extent.size, len(extent.tensors))
        try:
            slab = self._slabs.take(_OnDevice.bytes_for(extent))
            if slab is not None:
                return _OnDevice(self.device, slab, extent)
        except Exception as error:
            self._refuse(error)
        self._host += extent.size
        return _OnHost(extent)

    def _instead(self, whole: _OnDevice | _OnHost, error: Exception) -> _OnHost:
        """What was to be on the device goes on on the host."""
        if isinstance(whole, _OnHost):
            raise error
        self._refuse(error)
        self._host += whole.extent.size
        return _OnHost(whole.extent, whole.so_far())

    def _refuse(self, error: Exception) -> None:
        self._slabs.refuse()
        RECORD.warn(f"{NAME}: yields host tensors from here on: {describe(error)}")

    def _add(self, size: int, number: int = 1) -> None:
        self._bytes += size
        self._number += number

    # The ranks share the reading.

    def shared(self, streamer: Any, files: list[str]) -> Iterator[Named]:
        """Yield the tensors of files that the ranks read together and broadcast, as the streamer does it."""
        streamer.file_streamer.distributed_streamer.file_streamer = _Share(self, streamer.file_streamer.file_streamer)
        streamer.stream_files(files, device=str(self.device.name), is_distributed=True)
        owned = "owned" in inspect.signature(streamer.stream_files).parameters
        for name, tensor in self._progress(streamer.get_tensors(), _number_of_tensors(streamer)):
            self._add(tensor.nbytes)
            # A view of the buffer that the next broadcast goes to.
            yield name, tensor if owned else tensor.clone()

    def share(self, sizes: list[int], limit: int | None) -> None:
        """Arrange the staging memory for this rank's share, each chunk of which must be in one block."""
        largest = max(sizes, default=0)
        limit = self.limit if limit is None else limit
        bound = max(self.limit, largest) if self._unlimited else limit or largest
        if bound < largest:
            requests = importlib.import_module("runai_model_streamer.file_streamer.requests_iterator")
            raise requests.RunaiStreamerMemoryLimitException(
                f"{LIMIT} is {bound}, less than the largest tensor: {largest} bytes"
            )
        assert self.staging is not None
        self.staging.bound = bound
        if not largest <= self.staging.block <= bound:
            self._arrange(max(1, largest), bound)


class _Share:
    """Stands for the streamer's ``FileStreamer`` where a rank reads its share of the chunks."""

    def __init__(self, load: Load, streamer: Any) -> None:
        self._load, self._streamer = load, streamer
        self._ranges: list[Range] = []
        self._empty: list[tuple[int, int]] = []

    def stream_files(
        self, chunks: list[Any], credentials: Any, device: str, memory_limit: int | None = None, owned: bool = False
    ) -> None:
        """Take the rank's chunks; ``memory_limit`` in bytes, where the streamer divides a node's."""
        for file in chunks:
            offset = getattr(file, "offset", 0)
            for index, size in enumerate(file.sizes if hasattr(file, "sizes") else file.chunks):
                start = file.offsets[index] if hasattr(file, "offsets") else offset
                if size:
                    self._ranges.append(Range((file.id, index), file.path, start, size))
                else:
                    self._empty.append((file.id, index))
                offset += size
        # The ring that the headers went through: newer streamers would report it as the load's.
        self._streamer.requests_iterator = None
        self._load.share([one.size for one in self._ranges], memory_limit)

    def get_chunks(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield the file's number, the chunk's index in it, and its bytes on the host, shape ``(1, size)``.

        Whoever takes them copies them before it asks for the next, and waits for the copy.
        """
        for file, index in self._empty:
            yield file, index, torch.empty((1, 0), dtype=torch.uint8, device="cpu")
        assert self._load.staging is not None
        for place in Reader(self._streamer, self._load.staging).read(self._ranges):
            yield *place.range.item, place.bytes.view(1, -1)


def _whole(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class _OnDevice:
    """An extent on the device: its bytes, aligned as they are in the file, then those of them that must be moved."""

    def __init__(self, device: Any, slab: Slab, extent: Extent) -> None:
        self.extent = extent
        self._device, self._slab = device, slab
        self._lead = extent.start % _ALIGN
        self._bytes = slab.tensor()
        self._taken = 0
        self._copied: Any = None
        self._views: list[Named] = []

    @staticmethod
    def bytes_for(extent: Extent) -> int:
        """What an extent needs: room for itself, and again for tensors at an address that their type cannot use."""
        moved = sum(_whole(size) for _, dtype, _, _, start, size in extent.tensors if start % dtype.itemsize)
        return _whole(extent.start % _ALIGN + extent.size) + moved

    def take(self, place: Place, start: int) -> None:
        """Copy a piece, which begins ``start`` bytes into the extent."""
        begin = self._lead + start
        try:
            self._device.copy(self._bytes[begin : begin + place.range.size], place.bytes)
            self._copied = self._device.mark()
            place.block.copies.append(self._copied)
        except BaseException:
            self._device.stream().synchronize()  # the block may be unregistered by whoever sees this
            raise
        self._taken = start + place.range.size

    def so_far(self) -> torch.Tensor:
        """The pieces that have been copied, on the host."""
        return self._bytes[self._lead : self._lead + self._taken].cpu()

    def finish(self) -> None:
        """Make every tensor a view, the last one first, and leave the memory to them."""
        typed: dict[torch.dtype, torch.Tensor] = {}
        shift = self._lead - self.extent.start
        end = _whole(self._lead + self.extent.size)
        views: list[Named] = []
        for name, dtype, shape, stride, start, size in reversed(self.extent.tensors):
            place = start + shift
            if start % dtype.itemsize:
                self._bytes[end : end + size].copy_(self._bytes[place : place + size])
                place, end = end, end + _whole(size)
            base = typed.get(dtype)
            if base is None:
                base = typed[dtype] = self._bytes.view(dtype)
            views.append((name, base.as_strided(shape, stride, place // dtype.itemsize)))
        if end > _whole(self._lead + self.extent.size):
            self._copied = self._device.mark()
        self._views = views
        del self._bytes

    def __iter__(self) -> Iterator[Named]:
        home = self._device.stream_id()
        while self._views:
            if self._device.stream_id() != home:
                home = self._device.stream_id()
                self._slab.used()
                self._device.follow(self._copied)
            yield self._views.pop()


class _OnHost:
    """An extent of which every tensor becomes one of its own on the host; ``so_far`` is the begin of it."""

    def __init__(self, extent: Extent, so_far: torch.Tensor | None = None) -> None:
        self.extent = extent
        self._bytes: torch.Tensor | None = None
        self._own = False
        if so_far is not None and len(so_far):
            self._assemble(so_far, 0)

    def take(self, place: Place, start: int) -> None:
        """Copy a piece; if it is all there is, when its tensors are asked for."""
        if place.range.size == self.extent.size:
            self._bytes, self._own = place.bytes, False
        else:
            self._assemble(place.bytes, start)

    def _assemble(self, piece: torch.Tensor, start: int) -> None:
        if self._bytes is None:
            self._bytes, self._own = torch.empty(self.extent.size, dtype=torch.uint8, device="cpu"), True
        self._bytes[start : start + len(piece)].copy_(piece)

    def finish(self) -> None:
        """Nothing is left to do."""

    def __iter__(self) -> Iterator[Named]:
        assert self._bytes is not None
        alone = self._own and len(self.extent.tensors) == 1
        for name, dtype, shape, _, start, size in self.extent.tensors:
            start -= self.extent.start
            part = self._bytes[start : start + size]
            yield name, (part if alone else part.clone()).view(dtype).view(shape)


# Headers.


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the garbage collector: what headers are parsed into would have it go through all of vLLM's objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Header(NamedTuple):
    """What a safetensors file says of itself: its data begin at ``data``, in bytes."""

    data: int
    tensors: list[Tensor]


def read_headers(streamer: Any, files: list[str]) -> list[Header]:
    """Read the files' headers through the streamer, which reaches object storage as well.

    Raises:
        Odd: a header is not as it should be.
        ValueError: the streamer cannot read one.
    """
    sizes: dict[int, int] = {}
    for index, data in list(_read(streamer, [(index, path, 0, 8) for index, path in enumerate(files)])):
        if len(data) != 8 or not 0 < (size := struct.unpack("<Q", data)[0]) <= _LARGEST_HEADER:
            raise Odd(f"{files[index]} does not begin with a header's size")
        sizes[index] = size
    texts = dict(_read(streamer, [(index, files[index], 8, size) for index, size in sizes.items()]))
    if texts.keys() != {*range(len(files))}:
        raise Odd("a file has no header")
    headers = [parse_header(files[index], texts[index]) for index in range(len(files))]
    for path, header in zip(files, headers, strict=True):
        *_, start, size = header.tensors[-1] if header.tensors else (0, 0)
        with contextlib.suppress(OSError):
            if os.path.getsize(path) != header.data + start + size:
                raise Odd(f"{path} does not end where its header says")
    return headers


def _read(streamer: Any, ranges: list[tuple[int, str, int, int]]) -> Iterator[tuple[int, bytes]]:
    """Read small ranges through the streamer's own, pageable, buffers."""
    package = importlib.import_module("runai_model_streamer.file_streamer")
    make = getattr(package.FileChunks, "contiguous", package.FileChunks)
    chunks = [make(index, path, offset, [size]) for index, path, offset, size in ranges]
    stream = streamer.file_streamer.stream_files
    alone = {"discover_ranks": False} if "discover_ranks" in inspect.signature(stream).parameters else {}
    stream(chunks, None, "cpu", False, **alone)
    for index, _, data in streamer.file_streamer.get_chunks():
        yield index, data.numpy().tobytes()


def parse_header(path: str, text: bytes) -> Header:
    """Parse a header. Raises Odd."""
    package = importlib.import_module("runai_model_streamer.safetensors_streamer.safetensors_pytorch")
    dtypes: dict[str, torch.dtype] = package.safetensors_to_torch_dtype
    packed: dict[str, int] = getattr(package, "PACKED_VALUES_PER_ELEMENT", {})
    kinds: dict[tuple[str, tuple[int, ...]], tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]] = {}
    found: list[Tensor] = []
    try:
        for name, one in json.loads(text).items():
            if name == "__metadata__":
                continue
            start, end = one["data_offsets"]
            key = one["dtype"], tuple(one["shape"])
            kind = kinds.get(key)
            if kind is None:
                dtype, shape = dtypes[key[0]], key[1]
                if values := packed.get(key[0]):
                    if shape[-1] % values:
                        raise Odd(f"{path}: {name} has half an element")
                    shape = (*shape[:-1], shape[-1] // values)
                if min(shape, default=0) < 0:
                    raise Odd(f"{path}: {name} has the shape {shape}")
                stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
                kind = kinds[key] = dtype, shape, stride, math.prod(shape) * dtype.itemsize
            if kind[3] != end - start:
                raise Odd(f"{path}: {name} has other bytes than its shape says")
            found.append((name, *kind[:3], start, end - start))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise Odd(f"{path} has a header that is not understood: {describe(error)}") from error
    found.sort(key=operator.itemgetter(4, 5))
    position = 0
    for name, *_, start, size in found:
        if start != position:
            raise Odd(f"{path}: {name} does not follow the tensor before it")
        position += size
    return Header(8 + len(text), found)


def _extents(files: list[str], headers: list[Header]) -> tuple[list[Extent], list[Tensor]]:
    """What to read, and the tensors without elements."""
    extents: list[Extent] = []
    empty: list[Tensor] = []
    for path, header in zip(files, headers, strict=True):
        group: list[Tensor] = []
        begin = end = 0
        for tensor in header.tensors:
            start, size = tensor[4:]
            if not size:
                empty.append(tensor)
                continue
            if group and start + size - begin > EXTENT:
                extents.append(Extent(path, header.data, begin, end - begin, group))
                group = []
            if not group:
                begin = start
            group.append(tensor)
            end = start + size
        if group:
            extents.append(Extent(path, header.data, begin, end - begin, group))
    return extents, empty


def _number_of_tensors(streamer: Any) -> int:
    return sum(map(len, streamer.files_to_tensors_metadata.values()))

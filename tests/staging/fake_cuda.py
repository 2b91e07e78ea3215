"""A CUDA device that is none: what `_cuda.Device` can do, on the host, recorded, late, and able to fail.

What is queued on a stream runs only when something waits for it. So a wait that is missing is seen: as wrong bytes, or
as an entry in `Device.broken`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from vllm_hotfix._patches.pinned_staging._cuda import CudaError

NEW, FREED = 0xCC, 0xDD
"""What device memory reads as before it is written, and after it was freed."""

# What looks at a tensor without reading its bytes. Everything else runs the current stream first.
_VIEWS = {"view", "as_strided", "__getitem__", "__get__", "data_ptr", "numel", "dim", "size", "stride", "is_contiguous",
          "storage_offset", "element_size", "__len__", "untyped_storage", "__hash__", "nelement"}  # fmt: skip


class Span(NamedTuple):
    """Bytes of memory."""

    address: int
    size: int

    def meets(self, other: Span) -> bool:
        """Whether they share a byte."""
        return self.address < other.address + other.size and other.address < self.address + self.size


class Work:
    """Something queued on a stream, and the memory it touches."""

    def __init__(self, run: Callable[[], None], *spans: Span) -> None:
        self.run, self.spans = run, spans


class Stream:
    """Runs what is queued on it, in order, as far as something waits for it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: list[Work | None] = []
        self.done = 0

    def __repr__(self) -> str:
        return f"Stream({self.name})"

    def add(self, run: Callable[[], None], *spans: Span) -> None:
        """Queue it."""
        self.queue.append(Work(run, *spans))

    def run(self, end: int | None = None) -> None:
        """Run what is queued, up to the first `end` of all that ever was."""
        end = len(self.queue) if end is None else end
        while self.done < end:
            work, self.queue[self.done] = self.queue[self.done], None
            self.done += 1
            if work is not None:
                work.run()

    def synchronize(self) -> None:
        """Wait for all that is queued."""
        self.run()

    def cancel(self, span: Span) -> int:
        """Take away what would touch that memory, so that a fault is a report and no crash; how much it was."""
        found = [i for i, work in enumerate(self.queue) if work and any(one.meets(span) for one in work.spans)]
        for index in found:
            self.queue[index] = None
        return len(found)


class Event:
    """Behind the first `end` things of a stream."""

    def __init__(self, stream: Stream, end: int) -> None:
        self._stream, self._end = stream, end

    def synchronize(self) -> None:
        """Wait for it."""
        self._stream.run(self._end)


class DeviceTensor(torch.Tensor):
    """Over device memory: an operation sees what is queued before it on the current stream, as on a device."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # CUDA does not wait for anything where there is nothing to copy.
        device = Device.latest
        if function.__name__ in ("copy_", "clone") and all(isinstance(one, DeviceTensor) for one in args):
            device.called("move", args[0].data_ptr())
        if function.__name__ == "copy_" and all(isinstance(one, DeviceTensor) for one in args):
            device.move(*args)
            return args[0]
        if function.__name__ not in _VIEWS and not (args and isinstance(args[0], DeviceTensor) and not args[0].numel()):
            device.current.run()
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function.__name__ == "cpu":
            return torch.Tensor.clone(result.as_subclass(torch.Tensor))
        if isinstance(result, DeviceTensor) and result.numel() and not device.owns(result):
            device.foreign.append(function.__name__)
        return result


class Device:
    """The interface of `_cuda.Device`.

    Attributes:
        log: the calls, in order: what was called and its first argument.
        broken: what a real device would have crashed or corrupted by.
        registered: host memory that is page-locked, address to size.
        allocated: device memory, address to the ctypes array.
        foreign: operations whose result is in device memory of PyTorch's allocator.
        peak: most bytes that were page-locked at once.
        free_bytes: device memory that is free while nothing is allocated.
    """

    name = torch.device("cpu")
    index = 0
    latest: Device

    def __init__(self, free: int = 64 << 30) -> None:
        self.free_bytes = free
        self.log: list[tuple[str, Any]] = []
        self.broken: list[str] = []
        self.registered: dict[int, int] = {}
        self.allocated: dict[int, Any] = {}
        self.peak = self.ever = 0
        self.foreign: list[str] = []
        self.graph = False
        self.streams: list[Stream] = []
        self.current = self.new_stream("loader")
        self._faults: dict[str, Callable[[int], BaseException | None]] = {}
        self._calls: dict[str, int] = {}
        self._graveyard: list[Any] = []
        Device.latest = self

    # For tests.

    def fail(self, call: str, *numbers: int, error: Callable[[str], BaseException] = CudaError, text: str = "") -> None:
        """Let the calls with these numbers, counted from 1, fail; all of them if none is given."""
        # A new one each time: an error holds the frames it went through.
        self._faults[call] = lambda number: (
            error(text or f"no {call} today") if not numbers or number in numbers else None
        )

    def heal(self, call: str) -> None:
        """Undo `fail`."""
        self._faults.pop(call, None)

    def calls(self, call: str) -> int:
        """How often it was called."""
        return self._calls.get(call, 0)

    def new_stream(self, name: str) -> Stream:
        """One more stream."""
        stream = Stream(name)
        self.streams.append(stream)
        return stream

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def read(self, tensor: torch.Tensor) -> bytearray:
        """Queue a consumer's read on the current stream. What it read comes later.

        It does not hold the tensor, unless that is on the host.
        """
        span = Span(tensor.data_ptr(), tensor.nbytes)
        found = bytearray(span.size)
        held = None if type(tensor) is DeviceTensor else tensor

        def work(held: torch.Tensor | None = held) -> None:
            found[:] = ctypes.string_at(*span)

        self.current.add(work, span)
        return found

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether it is in memory that was allocated here, be it freed since."""
        span = Span(tensor.data_ptr(), tensor.nbytes)
        memories = [*self.allocated.values(), *self._graveyard]
        return any(Span(ctypes.addressof(memory), len(memory)).meets(span) for memory in memories)

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy within device memory on the current stream."""
        to, origin = Span(target.data_ptr(), target.nbytes), Span(source.data_ptr(), source.nbytes)
        assert to.size == origin.size and target.is_contiguous() and source.is_contiguous()
        self.current.add(lambda: ctypes.memmove(to.address, origin.address, to.size), to, origin)  # type: ignore[func-returns-value]

    def used(self) -> int:
        """How many bytes of device memory are allocated."""
        return sum(map(len, self.allocated.values()))

    def finish(self, *first: Stream) -> None:
        """Run everything, of these streams first."""
        for stream in (*first, *self.streams):
            stream.run()

    def pending(self) -> int:
        """How much is queued and has not run."""
        return sum(work is not None for stream in self.streams for work in stream.queue)

    # What `_cuda.Device` has.

    def register(self, address: int, size: int) -> None:
        self.called("register", address)
        assert address % mmap.PAGESIZE == 0 and size > 0
        assert not any(Span(address, size).meets(Span(*one)) for one in self.registered.items()), "registered twice"
        self.registered[address] = size
        self.ever += 1
        self.peak = max(self.peak, sum(self.registered.values()))

    def unregister(self, address: int) -> None:
        self.called("unregister", address)
        if address not in self.registered:
            raise CudaError("cuMemHostUnregister: CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED (713)")
        self._unused(Span(address, self.registered[address]), "unregistered")
        del self.registered[address]

    def allocate(self, size: int) -> int:
        self.called("allocate", size)
        memory = (ctypes.c_ubyte * size)()
        address = ctypes.addressof(memory)
        ctypes.memset(address, NEW, size)
        self.allocated[address] = memory
        return address

    def free(self, address: int) -> None:
        self.called("free", address)
        memory = self.allocated.pop(address)
        self._unused(Span(address, len(memory)), "freed")
        ctypes.memset(address, FREED, len(memory))
        self._graveyard.append(memory)

    def memory(self) -> int:
        return self.free_bytes - self.used()

    def tensor(self, owner: Any, address: int, size: int) -> torch.Tensor:
        memory = (ctypes.c_ubyte * size).from_address(address)
        memory.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8).as_subclass(DeviceTensor)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.called("copy", source.data_ptr())
        to, origin = Span(target.data_ptr(), target.numel()), Span(source.data_ptr(), source.numel())
        assert to.size == origin.size and target.dtype == source.dtype == torch.uint8
        assert any(Span(at, len(memory)).meets(to) for at, memory in self.allocated.items()), "copy to freed memory"
        self.current.add(lambda: ctypes.memmove(to.address, origin.address, to.size), to, origin)  # type: ignore[func-returns-value]
        # CUDA has read pageable memory when the call returns.
        if not any(at <= origin.address and origin.address + origin.size <= at + size
                   for at, size in self.registered.items()):  # fmt: skip
            self.current.run()

    def mark(self) -> Event:
        self.called("mark", None)
        return Event(self.current, len(self.current.queue))

    def stream(self) -> Stream:
        return self.current

    def stream_id(self) -> int:
        return id(self.current)

    def follow(self, event: Event) -> None:
        self.called("follow", event)
        self.current.add(event.synchronize)

    def follow_stream(self, stream: Stream) -> None:
        self.called("follow_stream", stream)
        end = len(stream.queue)
        self.current.add(lambda: stream.run(end))

    def synchronize(self) -> None:
        self.called("synchronize", None)
        self.finish()

    def capturing(self) -> bool:
        return self.graph

    def called(self, call: str, argument: Any) -> None:
        """Log a call, and let it fail if it is to."""
        self.log.append((call, argument))
        self._calls[call] = self._calls.get(call, 0) + 1
        fault = self._faults.get(call)
        error = None if fault is None else fault(self._calls[call])
        if error is not None:
            try:
                raise error
            finally:
                del error  # a frame that an error holds must not hold it

    def _unused(self, span: Span, what: str) -> None:
        if number := sum(stream.cancel(span) for stream in self.streams):
            self.broken.append(f"{what} while {number} things that use it were queued")

"""What a load asks of CUDA: page-lock host memory, device memory of its own, copies, and waits.

Host registration and device memory go through the driver: a refused registration then leaves no error behind in
the runtime, where the next kernel launch would find it, and memory that does not come from PyTorch's allocator
cannot stay in a pool that sleeps, or change how many KV blocks fit.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import torch

_DRIVER = "libcuda.so.1"
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class CudaError(RuntimeError):
    """The driver refused something; the message has its name for the error."""


class Unavailable(RuntimeError):
    """This process cannot stage in page-locked memory; the message says why."""


def open_device() -> Device:
    """The current CUDA device of this thread. Raises Unavailable."""
    return Device()


class Device:
    """The current CUDA device of this thread.

    Raises:
        Unavailable: there is none, or its driver cannot be called.
    """

    def __init__(self) -> None:
        if torch.version.hip is not None or not torch.cuda.is_available():
            raise Unavailable("no CUDA device")
        self.index: int = torch.cuda.current_device()
        torch.cuda.synchronize(self.index)  # makes the device's context the current one
        try:
            self._driver = ctypes.CDLL(_DRIVER)
        except OSError as error:
            raise Unavailable(f"the CUDA driver cannot be called: {error}") from error
        self._context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(self._context))
        if not self._context.value:
            raise Unavailable("the device has no current CUDA context")
        self.name = torch.device("cuda", self.index)

    def register(self, address: int, size: int) -> None:
        """Page-lock ``size`` bytes of host memory at a page's ``address``. Raises CudaError."""
        with self._current():
            self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(0))

    def unregister(self, address: int) -> None:
        """Undo :meth:`register`. Raises CudaError."""
        with self._current():
            self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def allocate(self, size: int) -> int:
        """The address of ``size`` bytes of device memory. Raises CudaError."""
        address = ctypes.c_uint64()
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        """Undo :meth:`allocate`. Raises CudaError."""
        with self._current():
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def memory(self) -> int:
        """Bytes of device memory that are free."""
        free: int = torch.cuda.mem_get_info(self.index)[0]
        return free

    def tensor(self, owner: Any, address: int, size: int) -> torch.Tensor:
        """A uint8 tensor of shape ``(size,)`` over device memory; its storage keeps ``owner`` alive."""
        owner.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
        tensor: torch.Tensor = torch.as_tensor(owner, device=self.name)
        return tensor

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of host bytes to device bytes on the current stream."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> Any:
        """An event behind all that is queued on the current stream; ``synchronize()`` waits for it."""
        event = torch.cuda.Event()
        event.record(self.stream())
        return event

    def stream(self) -> Any:
        """The current stream."""
        return torch.cuda.current_stream(self.index)

    def stream_id(self) -> int:
        """What tells the current stream from others, at a tenth of the cost of :meth:`stream`."""
        stream: int = torch._C._cuda_getCurrentRawStream(self.index)
        return stream

    def follow(self, event: Any) -> None:
        """Let the current stream wait for an event."""
        self.stream().wait_event(event)

    def follow_stream(self, stream: Any) -> None:
        """Let the current stream wait for all that is queued on another."""
        self.stream().wait_stream(stream)

    def synchronize(self) -> None:
        """Wait for all that is queued on the device, on any stream. Raises RuntimeError."""
        torch.cuda.synchronize(self.index)

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured, during which device memory cannot be freed."""
        capturing: bool = torch.cuda.is_current_stream_capturing()
        return capturing

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """The device's context: memory may be given back by whichever thread drops the last reference.

        In relaxed mode, so that a CUDA graph which another thread captures meanwhile is not spoilt.
        """
        self._call("cuCtxPushCurrent_v2", self._context)
        mode = ctypes.c_int(_RELAXED)
        self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            yield
        finally:
            self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._driver, function)(*arguments)
        if code:
            name = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(name))
            raise CudaError(f"{function}: {(name.value or b'unknown error').decode()} ({code})")

"""What `pinned_staging` asks of CUDA, played by host memory: everything is done at once, and counted."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform


class Cuda(CpuPlatform):
    """The CPU under another name: the platform to show to code that asks whether this is CUDA."""

    device_name = "fake"

    def is_cuda(self) -> bool:
        """Say that it is."""
        return True


class FakeDevice:
    """Stands for `_cuda.Device`.

    Attributes:
        registered: bytes that are page-locked, by address.
        allocated: device memory that is not freed, by address; what is freed reads as 0xdd.
        copies: number of copies to the device.
        opened: number of loads that asked for the device.
    """

    name = torch.device("cpu")
    index = 0

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.allocated: dict[int, Any] = {}
        self.copies = self.opened = 0
        self._graveyard: list[Any] = []

    def open(self) -> FakeDevice:
        """Replace `_cuda.open_device`."""
        self.opened += 1
        return self

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor is in memory of this device."""
        address = tensor.data_ptr()
        return any(start <= address < start + len(memory) for start, memory in list(self.allocated.items()))

    def register(self, address: int, size: int) -> None:
        """Page-lock whole pages."""
        assert address % 4096 == size % 4096 == 0
        assert address not in self.registered
        self.registered[address] = size

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        del self.registered[address]

    def allocate(self, size: int) -> int:
        """Return the address of device memory."""
        memory = (ctypes.c_ubyte * size)()
        self.allocated[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free(self, address: int) -> None:
        """Undo `allocate`; a tensor that still looks there sees that it must not."""
        memory = self.allocated.pop(address)
        ctypes.memset(address, 0xDD, len(memory))
        self._graveyard.append(memory)

    def memory(self) -> int:
        """Return the bytes that are free."""
        return 1 << 34

    def tensor(self, owner: Any, address: int, size: int) -> torch.Tensor:
        """Return a tensor over device memory that keeps its owner alive."""
        memory = (ctypes.c_ubyte * size).from_address(address)
        memory.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy out of page-locked memory."""
        start = source.data_ptr()
        assert any(a <= start and start + source.numel() <= a + size for a, size in list(self.registered.items()))
        target.copy_(source)
        self.copies += 1

    def synchronize(self) -> None:
        """Do nothing, as a stream or an event."""

    def mark(self) -> FakeDevice:
        """Return an event."""
        return self

    def stream(self) -> FakeDevice:
        """Return the one stream."""
        return self

    def stream_id(self) -> int:
        """Return its number."""
        return 0

    def follow(self, event: Any) -> None:
        """Do nothing."""

    def follow_stream(self, stream: Any) -> None:
        """Do nothing."""

    def capturing(self) -> bool:
        """Say no."""
        return False

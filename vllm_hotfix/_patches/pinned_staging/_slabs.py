"""Device memory for extents: outside of PyTorch's pools, used again as soon as no tensor needs it, and bounded."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import deque
from typing import Any

import torch

from _vllm_hotfix import describe

from ..._record import RECORD, logger

HELD = 16 << 30  # bytes that the loaders may keep in use, as a reload does until a layer is complete
_IDLE = 4  # slabs that may wait for the next extent
#: Slabs that could not be freed when their last tensor died.
_late: deque[Slab] = deque()


class Slab:
    """Device memory of ``size`` bytes. ``streams`` are those that may still be using it."""

    def __init__(self, slabs: Slabs, address: int, size: int) -> None:
        self.address, self.size = address, size
        self.slabs = slabs
        self.streams: set[Any] = set()

    def tensor(self) -> torch.Tensor:
        """All of it, uint8; as long as a view of this tensor lives, the slab is in use."""
        return self.slabs.device.tensor(_Lease(self.slabs, self), self.address, self.size)

    def used(self) -> None:
        """The current stream uses it too."""
        self.streams.add(self.slabs.device.stream())


class _Lease:
    """Owned by the tensor's storage."""

    def __init__(self, slabs: Slabs, slab: Slab) -> None:
        self._slabs, self._slab = slabs, slab

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be at its end
            self._slabs.give_back(self._slab)


class Slabs:
    """Slabs of one load.

    Args:
        device: where they are.
        size: bytes of a slab; an extent that needs more gets one of its own size.
    """

    def __init__(self, device: Any, size: int) -> None:
        self.device = device
        self._size = size
        self._free_memory = device.memory()
        self._bound = min(HELD, self._free_memory // 4)
        self._pid = os.getpid()
        self._total = 0
        self._idle: list[Slab] = []
        self._returned: deque[Slab] = deque()
        self._closed = self._refused = self._said = False
        with contextlib.suppress(IndexError):  # another thread was faster
            for _ in range(len(_late)):
                late = _late.popleft()
                late.slabs._free(late)

    def fit(self, sizes: list[int]) -> None:
        """Let a large extent and its neighbour be on the device together, if half of the free memory is enough.

        The one that the loaders have just had is still theirs when the next is copied.
        """
        slabs = [0, *(max(size, self._size) for size in sizes)]
        for one, other in itertools.pairwise(slabs):
            if max(one, other) > self._size and one + other <= self._free_memory // 2:
                self._bound = max(self._bound, one + other)

    def take(self, size: int) -> Slab | None:
        """A slab of at least ``size`` bytes that the current stream may write, or None: too much is in use."""
        if self._refused:
            return None
        stream = self.device.stream()
        while self._returned:
            self._idle.append(self._returned.popleft())
        self._idle.sort(key=lambda one: one.size)
        # A large one is not for a small extent, it would never be idle.
        slab = next((one for one in self._idle if size <= one.size <= max(2 * size, self._size)), None)
        if slab is not None:
            self._idle.remove(slab)
        # What many held tensors or a large one needed goes back as soon as it is idle.
        while sum(one.size for one in self._idle) > _IDLE * self._size:
            self._free(self._idle.pop())
        if slab is None:
            slab = self._allocate(max(size, self._size))
            if slab is None:
                return None
        try:
            for other in slab.streams - {stream}:
                self.device.follow_stream(other)
        except BaseException:
            self._idle.append(slab)
            raise
        slab.streams = {stream}
        return slab

    def _allocate(self, size: int) -> Slab | None:
        while self._idle and self._total + size > self._bound:
            self._free(self._idle.pop())
        why = f"tensors that are still in use hold {self._total / 2**20:.0f} MiB of device memory"
        if self._total + size <= self._bound:
            try:
                if size > self.device.memory() // 2:
                    why = "less than twice an extent's device memory is free"
                else:
                    slab = Slab(self, self.device.allocate(size), size)
                    self._total += size
                    return slab
            except Exception as error:
                self._bound = self._total
                why = describe(error)
        if not self._said:
            self._said = True
            logger.info("vllm-hotfix: pinned_staging: yields host tensors for now: %s", why)
        return None

    def refuse(self) -> None:
        """Hand out none from here on."""
        self._refused = True

    def give_back(self, slab: Slab) -> None:
        """No tensor uses the slab any more. From any thread."""
        self._returned.append(slab)
        if self._closed:
            self._free_returned()

    def close(self) -> None:
        """Free what is not in use; the rest is freed when its last tensor dies."""
        self._closed = True
        while self._idle:
            self._free(self._idle.pop())
        self._free_returned()

    def _free_returned(self) -> None:
        while self._returned:
            with contextlib.suppress(IndexError):  # another thread was faster
                self._free(self._returned.popleft())

    def _free(self, slab: Slab) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has no part in it
        try:
            if self.device.capturing():
                _late.append(slab)
                return
            for stream in slab.streams:
                stream.synchronize()
            self.device.free(slab.address)
            self._total -= slab.size
        except Exception as error:
            RECORD.warn(f"pinned_staging: device memory is not freed: {describe(error)}")

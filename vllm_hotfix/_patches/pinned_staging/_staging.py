"""Staging memory: mappings of our own, page-locked block by block, no more than the load needs."""

from __future__ import annotations

import concurrent.futures
import ctypes
import errno
import mmap
import os
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from _vllm_hotfix import describe

from ..._record import RECORD, logger

_PAGE = mmap.PAGESIZE
_HUGE = 2 << 20
_MADV_DONTNEED, _MADV_DONTFORK, _MADV_DOFORK, _MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 4, 10, 11, 14, 23
_THREADS = 8  # that populate; more were no faster
_PIECE = 64 << 30  # bytes registered in one call at most

#: Memory that could not be unlocked.
_stuck: list[torch.Tensor] = []

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Block:
    """Page-aligned, private, anonymous memory that forked children do not get.

    Args:
        size: bytes, rounded up to whole pages.

    Attributes:
        bytes: the memory as a uint8 tensor of shape ``(size,)`` on the host. The mapping lives as long as it or a
            view of it does.
        buffer: the same memory for ctypes.
        pinned: whether it is page-locked.
        copies: events behind the copies out of it; it must not be written before all of them have passed.

    Raises:
        OSError: there is no memory.
    """

    def __init__(self, size: int) -> None:
        self.size = -(-size // _PAGE) * _PAGE
        # Huge pages populate and register faster, and need an address of their kind.
        slack = _HUGE if self.size >= _HUGE else 0
        base = _libc.mmap(
            None, self.size + slack, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
        )
        if base in (None, ctypes.c_void_p(-1).value):
            raise _os_error("mmap")
        self.address: int = base + (-base % _HUGE if slack else 0)
        memory = (ctypes.c_ubyte * self.size).from_address(self.address)
        weakref.finalize(memory, _unmap, base, self.size + slack, os.getpid()).atexit = False
        self.buffer = memoryview(memory).cast("B")
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.copies: list[Any] = []
        self._registered: list[int] = []
        self._unregister: Callable[[int], None] | None = None
        if slack:
            _libc.madvise(self.address, self.size, _MADV_HUGEPAGE)  # advice: it may be refused
        if _libc.madvise(self.address, self.size, _MADV_DONTFORK):
            raise _os_error("MADV_DONTFORK")

    @property
    def pinned(self) -> bool:
        return bool(self._registered)

    def pin(self, device: Any) -> None:
        """Populate and page-lock it; all of it or, after an error, nothing.

        Raises:
            OSError: the pages cannot be had.
            CudaError: the registration is refused.
        """
        populate(self.address, self.size)
        self._unregister = device.unregister
        try:
            for start in range(0, self.size, _PIECE):
                # Before the call: an interrupt comes when it has returned.
                self._registered.append(self.address + start)
                try:
                    device.register(self.address + start, min(_PIECE, self.size - start))
                except Exception:
                    self._registered.pop()
                    raise
        except BaseException:
            self.unpin()
            raise

    def wait(self) -> None:
        """Wait until every copy out of it is done."""
        while self.copies:
            self.copies[0].synchronize()
            del self.copies[0]

    def unpin(self) -> None:
        """Undo :meth:`pin`, and let children have the memory again. What cannot be undone ends with the process."""
        while self._registered:
            try:
                assert self._unregister is not None
                self._unregister(self._registered[-1])
            except Exception as error:
                if "NOT_REGISTERED" not in describe(error):  # as it is after an interrupt
                    _stuck.append(self.bytes)  # locked memory must not be unmapped
                    RECORD.warn(f"pinned_staging: staging memory stays page-locked: {describe(error)}")
            self._registered.pop()
        _libc.madvise(self.address, self.size, _MADV_DOFORK)


class Staging:
    """Two blocks, or one where the bound has no room for two.

    Args:
        device: where to copies go.
        block: bytes of a block.
        bound: bytes of all blocks; one there is in any case.

    Attributes:
        blocks: the blocks.
        seconds: time spent mapping, populating and registering.
        peak: most bytes there were.
    """

    def __init__(self, device: Any, block: int, bound: int) -> None:
        self.device, self.block, self.bound = device, block, bound
        self.blocks: list[Block] = []
        self.seconds = 0.0
        self.peak = 0
        self._pid = os.getpid()
        self._pinned = 0
        self._refused = False

    def grow(self) -> Block:
        """Add a pinned block. Raises what :class:`Block` and its ``pin`` raise."""
        begin = time.perf_counter()
        block = self.pageable()  # in the list before it is pinned: an interrupt leaves it to release()
        try:
            block.pin(self.device)
        except Exception:
            self.blocks.remove(block)
            raise
        self._pinned += block.size
        self.seconds += time.perf_counter() - begin
        return block

    def pageable(self) -> Block:
        """Add a block that is not pinned. Raises OSError."""
        block = Block(self.block)
        self.blocks.append(block)
        self.peak = max(self.peak, sum(one.size for one in self.blocks))
        return block

    def second(self, needed: int) -> list[Block]:
        """The second block, if the bound and the ``needed`` bytes of the load want one and the system allows it."""
        if self._refused or self.bound < 2 * self.block or needed <= self.block:
            return []
        try:
            return [self.grow()]
        except Exception as error:
            self._refuse(error)
            return []

    def enlarge(self, block: Block, seconds: float, needed: int) -> Block:
        """A block to go on with in place of this one: four times as large, if reading took longer than pinning that.

        Args:
            block: a block that no one reads or writes any more, once the copies out of it are done.
            seconds: how long the reading of a block took.
            needed: bytes that are still to be read.
        """
        if seconds * self._pinned > 4 * self.seconds * self.block:
            self.block = max(self.block, min(4 * self.block, self.bound // 2, needed // 2))
        if block.size >= self.block or self._refused:
            return block
        self.wait(block)
        self._drop(block)
        try:
            return self.grow()
        except Exception as error:
            self._refuse(error)
            self.block = block.size
            return self.pageable()

    def wait(self, block: Block) -> None:
        """Wait until every copy out of a block is done; if its events cannot say so, until the device is idle.

        Raises:
            RuntimeError: the device cannot be waited for either, it is lost.
        """
        try:
            block.wait()
        except Exception as error:
            RECORD.warn(f"pinned_staging: waits for all of the device instead of an event: {describe(error)}")
            self.device.synchronize()
            block.copies.clear()

    def _drop(self, block: Block) -> None:
        block.unpin()
        self.blocks.remove(block)
        _libc.madvise(block.address, block.size, _MADV_DONTNEED)  # someone may still refer to it

    def _refuse(self, error: Exception) -> None:
        self._refused = True
        logger.info("vllm-hotfix: pinned_staging: no more memory can be page-locked: %s", describe(error))

    def release(self) -> None:
        """Wait for the copies, unregister, free: in this order, whatever fails; nothing in a forked child.

        An interrupt is raised when all of it is done.
        """
        if os.getpid() != self._pid:
            return
        blocks, self.blocks = self.blocks, []
        interrupt: BaseException | None = None
        for step in [partial(self.wait, block) for block in blocks] + [block.unpin for block in blocks]:
            done = False
            while not done:
                try:
                    step()
                    done = True
                except Exception as error:  # the context is lost: nothing reads the memory any more
                    logger.warning("vllm-hotfix: pinned_staging: %s", describe(error))
                    done = True
                except BaseException as error:
                    interrupt = interrupt or error
        if interrupt is not None:
            raise interrupt


def populate(address: int, size: int) -> None:
    """Fault in whole pages for writing, from several threads. Raises OSError."""
    step = max(_HUGE, -(-size // _THREADS // _HUGE) * _HUGE)
    parts = [(address + start, min(step, size - start)) for start in range(0, size, step)]
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(_populate, parts):
            pass


def _populate(part: tuple[int, int]) -> None:
    address, size = part
    if _libc.madvise(address, size, _MADV_POPULATE_WRITE):
        error = _os_error("MADV_POPULATE_WRITE")
        if error.errno != errno.EINVAL:
            raise error
        ctypes.memset(address, 0, size)  # kernels before 5.14


def _unmap(address: int, size: int, pid: int) -> None:
    if os.getpid() == pid:  # a child has nothing there, or something of its own
        _libc.munmap(address, size)


def _os_error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")

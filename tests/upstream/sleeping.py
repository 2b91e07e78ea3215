"""A GPU's memory as sleep mode sees it, played by host memory: pools, what a sleep discards, what a wake-up maps.

The allocator, the worker and the runner are the release's own. Stood in for are what they ask of CUDA: a memory pool,
mapping and unmapping, copies between host and device, streams and events, page-locked memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import vllm.platforms
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from vllm.device_allocator import cumem
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.gpu import buffer_utils

#: A device of its own for what would be on the GPU: the CPU with an index, which plain host tensors do not have.
DEVICE = torch.device("cpu", 0)
UNMAPPED, MAPPED = 0xDD, 0x00


class Gpu(CpuPlatform):
    """The CPU as a platform that has sleep mode."""

    def is_cuda_alike(self) -> bool:
        """Say that it is."""
        return True

    def is_cpu(self) -> bool:
        """Say that it is not."""
        return False

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Say that it is not."""
        return False

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """Return a number of multiprocessors."""
        return 4


class Xpu(Gpu):
    """The CPU as an Intel GPU."""

    def is_cuda_alike(self) -> bool:
        """Say that it is not."""
        return False

    def is_xpu(self) -> bool:
        """Say that it is."""
        return True


class Runtime:
    """CUDA's runtime library."""

    def cudaMemcpy(self, target: int, source: int, size: int) -> None:
        """Copy."""
        ctypes.memmove(target, source, size)


class Nothing:
    """A stream or an event: takes everything and does nothing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.device = DEVICE

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


class Memory(TorchFunctionMode):
    """Sees which tensors are made on the device, and in which pool.

    Attributes:
        pools: the pools that were entered, by the tag that the allocator had; each a list of storages, all kept.
        allocator: the allocator that knows what lies in a pool.
    """

    def __init__(self, allocator: Any, data: Any) -> None:
        super().__init__()
        self.allocator, self._data = allocator, data
        self.pools: dict[str, list[torch.UntypedStorage]] = {}
        self.entered: list[str] = []
        self._inside: list[str] = []
        self._outside: dict[int, torch.UntypedStorage] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        result = func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        named = [one for one in leaves if isinstance(one, (torch.device, str)) and str(one).startswith("cpu")]
        if named:
            on_device = any(torch.device(one) == DEVICE for one in named)
        else:
            on_device = any(self.holds(one) for one in leaves if isinstance(one, torch.Tensor))
        if on_device:
            before = {one.untyped_storage().data_ptr() for one in leaves if isinstance(one, torch.Tensor)}
            for one in tree_leaves(result):
                if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in before:
                    self._allocate(one.untyped_storage())
        return result

    def _allocate(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        if not storage.nbytes() or address in self.allocator.pointer_to_data or address in self._outside:
            return
        if self._inside:
            self.pools.setdefault(self.allocator.current_tag, []).append(storage)
            handle = (0, storage.nbytes(), address, 0)
            self.allocator.pointer_to_data[address] = self._data(handle, self.allocator.current_tag)
        else:
            self._outside[address] = storage

    @property
    def storages(self) -> list[torch.UntypedStorage]:
        """All memory of the device that was ever allocated."""
        return [*self._outside.values(), *(one for pool in self.pools.values() for one in pool)]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device."""
        address = tensor.untyped_storage().data_ptr()
        return address in self.allocator.pointer_to_data or address in self._outside

    def tag(self, tensor: torch.Tensor) -> str | None:
        """Return the tag of the pool that a device tensor lies in, None for one that lies in no pool."""
        assert self.holds(tensor)
        found = self.allocator.pointer_to_data.get(tensor.untyped_storage().data_ptr())
        return None if found is None else found.tag

    @contextlib.contextmanager
    def pool(self, *callbacks: Any) -> Iterator[tuple[Any, None]]:
        """Stand for `use_memory_pool_with_allocator`."""
        self._inside.append(self.allocator.current_tag)
        self.entered.append(self.allocator.current_tag)
        try:
            yield type("Pool", (), {"snapshot": lambda self: []})(), None
        finally:
            self._inside.pop()


def _fill(byte: int) -> Any:
    return lambda handle: ctypes.memset(handle[2], byte, handle[1])


@contextlib.contextmanager
def gpu(patch: pytest.MonkeyPatch, allocator: Any = cumem) -> Iterator[Memory]:
    """Let a release's worker, runners and allocator find the memory of a GPU.

    Args:
        patch: undoes it.
        allocator: vLLM's module of an allocator, for CUDA or for XPU; a sleep can only be played with the first.
    """
    for name in ("torch.Event", "torch.cuda.Event", "torch.cuda.Stream"):
        patch.setattr(name, Nothing)
    for owner, name in ((torch.cuda, "mem_get_info"), (torch.accelerator, "get_memory_info")):
        patch.setattr(owner, name, lambda *args: (0, 0), raising=False)
    for owner, names in ((torch.cuda, ("empty_cache",)), (torch.accelerator, ("empty_cache", "synchronize"))):
        for name in names:
            patch.setattr(owner, name, lambda *args: None, raising=False)
    platform = Gpu() if allocator is cumem else Xpu()
    patch.setattr(vllm.platforms, "_current_platform", platform)
    for module in [module for name, module in sys.modules.items() if name.startswith("vllm.")]:
        found = vars(module)
        if isinstance(found.get("current_platform"), CpuPlatform):
            patch.setitem(found, "current_platform", platform)
        if "is_uva_available" in found:
            patch.setitem(found, "is_uva_available", lambda: True)
    for name in ("get_accelerator_view_from_cpu_tensor", "get_cuda_view_from_cpu_tensor"):
        patch.setattr(buffer_utils, name, lambda tensor: tensor, raising=False)
    (owner,) = (value for name, value in vars(allocator).items() if name in ("CuMemAllocator", "XpuMemAllocator"))
    patch.setattr(allocator, "cumem_available" if allocator is cumem else "xpumem_available", True)
    patch.setattr(allocator, "unmap_and_release", _fill(UNMAPPED))
    patch.setattr(allocator, "create_and_map", _fill(MAPPED), raising=False)
    patch.setattr(allocator, "libcudart", Runtime(), raising=False)
    patch.setattr(owner, "instance", None)
    memory = Memory(owner.get_instance(), allocator.AllocationData)
    patch.setattr(allocator, "use_memory_pool_with_allocator", memory.pool)
    with memory:
        yield memory

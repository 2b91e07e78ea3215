"""A captured CUDA graph, or on the CPU what one is: operations that ran once, to be run again on the same memory.

A graph knows addresses, not modules or attributes. What was read from a tensor is read from that tensor's memory again,
whoever has dropped the tensor since and whatever stands in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class Graph(TorchDispatchMode):
    """Operations in the order in which they ran, with the very tensors that they read and wrote."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        """Capture what a function does. It must not look at a tensor's values, as under CUDA's capture.

        For a result on a CUDA device it runs once more, and a real graph is captured.
        """
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._cuda: Any = None
        with self:
            self.output = run()
        if self.output.is_cuda:
            self._cuda = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._cuda):
                self.output = run()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a value is read on the host while a graph is captured")
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, result))
        return result

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors that were read or written and that no captured operation made."""
        made: set[int] = set()
        found: dict[int, torch.Tensor] = {}
        for _, args, kwargs, result in self._calls:
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, torch.Tensor) and id(one) not in made:
                    found[id(one)] = one
            made |= {id(one) for one in tree_leaves(result)} - found.keys()
        return list(found.values())

    def replay(self) -> torch.Tensor:
        """Run it all again, and return what comes out this time."""
        if self._cuda is not None:
            self._cuda.replay()
            return self.output.clone()
        made: dict[int, Any] = {}
        for func, args, kwargs, result in self._calls:
            args, kwargs = tree_map_only(torch.Tensor, lambda one: made.get(id(one), one), (args, kwargs))
            again = func(*args, **kwargs)
            made.update(zip(map(id, tree_leaves(result)), tree_leaves(again), strict=True))
        return made[id(self.output)].clone()


def discard(tensors: Iterable[torch.Tensor]) -> None:
    """Let the memory of tensors read as zero, as that of weights does after ``sleep(level=2)`` and ``wake_up``."""
    for one in tensors:
        one.untyped_storage().fill_(0)

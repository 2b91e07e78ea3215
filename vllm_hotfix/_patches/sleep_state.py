"""Sleep mode's KV cache pool holds the KV cache, and not what is made beside it while that is initialized.

What is wrong upstream: the worker enters the memory pool of the tag ``kv_cache`` around all of
``initialize_kv_cache``. In it the runner makes the KV cache's tensors, but also the attention metadata builders and
their constants, block tables, tables of pointers, workspaces and state of drafters. ``sleep``, of any level, discards
what lies in that pool, and ``wake_up`` maps memory without content to the same addresses. What is written before each
use does not mind; what is written once is lost. The second model runner makes some of it anew after a wake-up from
0.21.0 on, at other addresses, which the graphs that 0.28.0 captures of drafters do not know.

Upstream: from 0.29.0 on the pool is entered for the KV cache's tensors only; vllm-project/vllm#59158, released with
0.32.0, moves the rest into a pool of its own that a sleep offloads.

How it is fixed: while ``Worker.initialize_from_config`` runs, the pool that it asks for is not entered but kept until
the runner makes the KV cache's tensors, and entered around that. All else is made where other state of the runner is,
and stays there over a sleep. Where block tables make their pointers anew, the new values go into the old tensors.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from _vllm_hotfix import describe

from .._patch import Patch, Target
from .._record import RECORD

if TYPE_CHECKING:
    from torch import Tensor

_WORKER = "vllm.v1.worker"
_RUNNER, _RUNNER2, _ATTENTION2 = (
    f"{_WORKER}.gpu_model_runner",
    f"{_WORKER}.gpu.model_runner",
    f"{_WORKER}.gpu.attn_utils",
)

PATCH = Patch(
    name="sleep_state",
    env="VLLM_HOTFIX_SLEEP_STATE",
    fault="a sleep discards what was made beside the KV cache, such as attention metadata, and it comes back empty",
    upstream="vllm-project/vllm#59158",
    targets=(
        Target(f"{_WORKER}.gpu_worker:Worker.initialize_from_config", "initialize"),
        # Imported at an engine's start: the allocator for sleep mode, of the two runners the one that is used.
        Target("vllm.device_allocator.cumem:CuMemAllocator.use_memory_pool", "use_pool", optional=True),
        Target("vllm.device_allocator.xpumem:XpuMemAllocator.use_memory_pool", "use_pool", optional=True),
        Target(f"{_RUNNER}:GPUModelRunner.initialize_kv_cache_tensors", "make_kv_cache", optional=True),
        Target(f"{_ATTENTION2}:init_kv_cache", "make_kv_cache", optional=True),
        Target(
            f"{_WORKER}.gpu.block_table:BlockTables.init_block_table_layout_tensors", "renew_pointers", optional=True
        ),
    ),
    relies=(f"{_RUNNER}:GPUModelRunner.initialize_kv_cache", f"{_RUNNER2}:GPUModelRunner.initialize_kv_cache"),
    fixed_in="0.29.0",
)

_TAG: Final = "kv_cache"


class _Scope:
    """One call of ``initialize_from_config``.

    Attributes:
        worker: whose call it is.
        pool: enters stock's pool, while the worker believes to be in it; else None.
        asked: whether the worker asked for the pool and did not get it at once.
        used: whether the pool was entered for the KV cache's tensors.
    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.pool: Callable[[], AbstractContextManager[Any]] | None = None
        self.asked = self.used = False


_SCOPE: ContextVar[_Scope | None] = ContextVar("sleep_state", default=None)


class _Later:
    """Stands for stock's pool: what is made in it is made outside of that, but for the KV cache's tensors."""

    def __init__(self, scope: _Scope, pool: Callable[[], AbstractContextManager[Any]]) -> None:
        self._scope, self._pool = scope, pool

    def __enter__(self) -> None:
        self._scope.asked, self._scope.pool = True, self._pool

    def __exit__(self, *error: object) -> None:
        self._scope.pool = None


def initialize(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Initialize a worker's KV cache, with ``use_pool`` and ``make_kv_cache`` knowing of it. Returns stock's result."""
    scope = _Scope(instance)
    token = _SCOPE.set(scope)
    try:
        result = wrapped(*args, **kwargs)
    finally:
        _SCOPE.reset(token)
    if scope.used:
        RECORD.count(PATCH.name, "pools_narrowed")
        RECORD.save()
    elif scope.asked:
        RECORD.warn(f"{PATCH.name}: no KV cache was made where this release makes it; a sleep will not free it")
    return result


def use_pool(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a context manager for a memory pool.

    Returns:
        Stock's, which enters the pool; for the KV cache's pool of a worker that initializes it, one that lets
        ``make_kv_cache`` enter it.
    """
    scope = _SCOPE.get()
    if scope is None or (args[0] if args else kwargs.get("tag")) != _TAG:
        return wrapped(*args, **kwargs)
    try:
        stock = _stock_runner(scope.worker.model_runner)
        why = f"{type(scope.worker.model_runner).__name__} makes its KV cache in another way than vLLM's runners"
    except Exception as error:
        stock, why = False, describe(error)
    if not stock:
        RECORD.warn(f"{PATCH.name}: all that is made with the KV cache is lost in a sleep, as with stock: {why}")
        return wrapped(*args, **kwargs)
    return _Later(scope, lambda: wrapped(*args, **kwargs))


def make_kv_cache(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Allocate the KV cache's tensors, in the pool that its worker asked for. Returns stock's result."""
    scope = _SCOPE.get()
    if scope is None or scope.pool is None:
        return wrapped(*args, **kwargs)
    with scope.pool():
        scope.used = True
        return wrapped(*args, **kwargs)


def renew_pointers(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the block tables' tensors of pointers, strides and sizes; after a wake-up, in the ones that are there.

    Stock makes new ones: int64, uint64 and int32 tensors of one element for each KV cache group, on the device.
    """
    try:
        old = _tensors(instance)
    except Exception as error:
        old = {}
        RECORD.warn(f"{PATCH.name}: block tables move in a wake-up, as with stock: {describe(error)}")
    result = wrapped(*args, **kwargs)
    try:
        kept = 0
        for name, new in _tensors(instance).items():
            first = old.get(name)
            if first is not None and first is not new:
                with sys.modules["torch"].inference_mode():  # else torch refuses what was made in it
                    first.copy_(new)
                setattr(instance, name, first)
                kept += 1
        if kept:
            RECORD.count(PATCH.name, "tables_kept", kept)
            RECORD.save()
    except Exception as error:
        RECORD.warn(f"{PATCH.name}: block tables have moved in a wake-up, as with stock: {describe(error)}")
    return result


def _stock_runner(runner: Any) -> bool:
    """Whether a runner makes its KV cache by vLLM's own functions, which are wrapped: in a subclass they may differ."""
    for module, names in (
        (_RUNNER, ("initialize_kv_cache", "initialize_kv_cache_tensors")),
        (_RUNNER2, ("initialize_kv_cache",)),
    ):
        stock = getattr(sys.modules.get(module), "GPUModelRunner", None)
        if stock is None or not isinstance(runner, stock):
            continue
        if not all(inspect.getattr_static(runner, name) is vars(stock)[name] for name in names):
            return False
        # The second runner took the function by name.
        return module == _RUNNER or sys.modules[_RUNNER2].init_kv_cache is sys.modules[_ATTENTION2].init_kv_cache
    return False


def _tensors(holder: Any) -> dict[str, Tensor]:
    tensor = sys.modules["torch"].Tensor
    return {name: one for name, one in vars(holder).items() if isinstance(one, tensor)}

"""A level-2 sleep keeps the tensors that no reload brings back.

What is wrong upstream: all that is made while a model is loaded lies in the weights' memory pool, which a level-2 sleep
discards. ``wake_up`` brings back the target model's registered buffers, and a reload its parameters. The rest is zeros
from then on: tensors that modules hold as plain attributes (Gemma 3n's embedding scales through 0.28.0, the weight of a
norm that has none), or their helpers do (ALiBi slopes in the attention's implementation, index tables of expert
kernels), the scales of attention layers where compressed-tensors' method makes parameters of them (through 0.31.0),
LoRA's stacks, the maps of the expert load balancer, and the draft model: its parameters in every release, its buffers
through 0.26.0. The server is healthy and its answers are wrong, or no draft is ever accepted. No upstream thread is
known; from 0.31.0 on ``--sleep-preserve-parameter-names`` keeps parameters that the user names, from 0.32.0 on the
draft model's too.

How it is fixed: before a level-2 sleep the model, the draft model, and what LoRA and the load balancer hold are walked.
Memory that lies in the weights' pool and is no parameter or buffer of the target model is saved on the host, the
smallest first; so are attention layers' own parameters, which a reload puts back as they are. As soon as the allocator
has mapped the pool again, it is copied back: before vLLM derives anything from it, and before a reload.

Not saved are tensors that MLA derives from its weights, 2 GB for a large model: each reload computes them anew.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from _vllm_hotfix import describe

from .._patch import Patch, Target
from .._record import RECORD, logger

if TYPE_CHECKING:
    from torch import Tensor

_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_CUDA = "vllm.device_allocator.cumem"
_XPU = "vllm.device_allocator.xpumem"

PATCH = Patch(
    name="sleep_tensors",
    env="VLLM_HOTFIX_SLEEP_TENSORS",
    fault="a level-2 sleep discards plain tensors and the draft model, and no reload brings them back",
    upstream="none known",
    symptoms=(r"^\w+: draft\b", r"\.alibi_slopes$", r"\._[kqv]_scale(_cpu)?$", r"\.[kqv]_range$", r"\.lora_\w+\b"),
    targets=(
        Target(f"{_WORKER}.sleep", "sleep"),
        Target(f"{_CUDA}:CuMemAllocator.wake_up", "wake_up", optional=True),
        Target(f"{_XPU}:XpuMemAllocator.wake_up", "wake_up", optional=True),
    ),
    relies=(
        f"{_CUDA}:CuMemAllocator.__init__",
        f"{_CUDA}:CuMemAllocator._python_malloc_callback",
        f"{_CUDA}:CuMemAllocator.sleep",
        f"{_XPU}:XpuMemAllocator.__init__",
        f"{_XPU}:XpuMemAllocator._python_malloc_callback",
        f"{_XPU}:XpuMemAllocator.sleep",
        f"{_WORKER}.load_model",
        f"{_WORKER}._maybe_get_memory_pool_context",
        "vllm.distributed.eplb.eplb_state:EplbState.__init__",
        "vllm.distributed.eplb.eplb_state:EplbModelState",
    ),
)

_ATTENTION: Final = "vllm.model_executor.layers.attention"
_POOL: Final = "weights"
#: What ``MLAAttention.process_weights_after_loading`` computes from the weights.
_DERIVED: Final = frozenset(("W_UV", "W_UK_T", "W_K", "W_K_scale", "W_V", "W_V_scale"))


class _Saved:
    """What one sleep has saved.

    Args:
        parts: bytes on the device, and their copy on the host. They keep the memory of a tensor that is replaced.
    """

    def __init__(self, parts: list[tuple[Tensor, Tensor]]) -> None:
        self.parts = parts
        #: Whether stock's sleep has ended well; if not, whether the memory is mapped is not known.
        self.asleep = False


#: By the allocator whose memory it is, of which a process has one.
_saved: WeakKeyDictionary[Any, _Saved] = WeakKeyDictionary()


def sleep(wrapped: Any, worker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Save what is lost in a level-2 sleep, then sleep as stock does.

    A second sleep in a row saves nothing: the memory cannot be read.
    """
    allocator = _allocator()
    if allocator is None:
        return wrapped(*args, **kwargs)
    before = _saved.get(allocator)
    if before is None or not before.asleep:
        _saved.pop(allocator, None)
        try:
            if (args[0] if args else kwargs.get("level", 1)) == 2:
                _saved[allocator] = _Saved(_save(worker.model_runner, allocator))
        except Exception as error:
            _warn("this sleep loses tensors that no reload brings back", error)
    result = wrapped(*args, **kwargs)
    if allocator in _saved:
        _saved[allocator].asleep = True
    RECORD.save()
    return result


def wake_up(wrapped: Any, allocator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Map memory as stock does; if the weights' is mapped now, copy back what was saved."""
    result = wrapped(*args, **kwargs)
    tags = args[0] if args else kwargs.get("tags")
    if tags is None or _POOL in tags:
        saved = _saved.pop(allocator, None)
        try:
            if saved is not None:
                for memory, copy in saved.parts:
                    memory.copy_(copy)
                RECORD.count(PATCH.name, "wakes")
                RECORD.save()
        except Exception as error:
            _warn("tensors that no reload brings back are lost", error)
    return result


def _allocator() -> Any:
    """The allocator of this process, None if nothing sleeps here (another backend, no sleep mode, a CPU)."""
    for module, name in ((_CUDA, "CuMemAllocator"), (_XPU, "XpuMemAllocator")):
        instance = getattr(getattr(sys.modules.get(module), name, None), "instance", None)
        if instance is not None:
            return instance
    return None


def _save(runner: Any, allocator: Any) -> list[tuple[Tensor, Tensor]]:
    """Copy what is to be kept to the host; what the host has no room for is lost, with a warning."""
    started = time.perf_counter()
    parts: list[tuple[Tensor, Tensor]] = []
    lost = _to_save(runner, allocator)
    number, size = len(lost), sum(map(len, lost))
    try:
        while lost:
            parts.append((lost[0], lost[0].to("cpu", copy=True)))
            del lost[0]
    except Exception as error:
        size -= sum(map(len, lost))
        _warn("some tensors that no reload brings back are lost in this sleep", error)
    RECORD.count(PATCH.name, "sleeps")
    RECORD.count(PATCH.name, "tensors_saved", number - len(lost))
    RECORD.count(PATCH.name, "bytes_saved", size)
    text = "vllm-hotfix: saved %d tensors, %.1f MiB, that this sleep would lose; it took %.2f s"
    logger.info(text, len(parts), size / (1 << 20), time.perf_counter() - started)
    return parts


def _to_save(runner: Any, allocator: Any) -> list[Tensor]:
    """Find the memory that no reload fills: views of bytes, none over another, the smallest first."""
    from .._tensors import walk

    torch = sys.modules["torch"]
    blocks = list(allocator.pointer_to_data.items())
    pool = _Ranges((start, start + data.handle[1]) for start, data in blocks if data.tag == _POOL)
    model = runner.get_model()
    own = {id(one) for layer in model.modules() if _is_attention(layer) for one in layer._parameters.values()}
    brought = [one for one in (*model.parameters(), *model.buffers()) if id(one) not in own]
    kept = _Ranges(_extent(one) for one in brought if _has_memory(one))
    found: dict[tuple[int, int], Tensor] = {}
    for path, tensor in walk(_roots(runner, model)):
        if path.rpartition(".")[2] not in _DERIVED and _has_memory(tensor):
            extent = _extent(tensor)
            if pool.hold(extent) and not kept.hold(extent):
                found[extent] = tensor
    views: list[Tensor] = []
    end = 0
    for (start, stop), tensor in sorted(found.items(), key=lambda item: (item[0][0], -item[0][1])):
        if stop > end:
            storage = tensor.untyped_storage()
            view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            views.append(view.set_(storage, start - storage.data_ptr(), (stop - start,)))
            end = stop
    return sorted(views, key=len)


def _roots(runner: Any, model: Any) -> Iterator[tuple[str, Any]]:
    """What was made with the model: names and objects to walk."""
    from .._tensors import draft_model

    yield "", model
    yield "drafter.model", draft_model(runner)
    yield "drafter", getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    yield "lora_manager", getattr(runner, "lora_manager", None)
    balancer = getattr(runner, "eplb_state", None) or getattr(getattr(runner, "eplb", None), "state", None)
    if balancer is not None:
        yield "eplb", vars(balancer)
        for name, state in balancer.model_states.items():
            yield f"eplb[{name}]", vars(state)


def _is_attention(layer: Any) -> bool:
    """Whether a reload puts a layer's own parameters back as they are, unless the checkpoint has such."""
    attention = sys.modules.get(_ATTENTION)
    return attention is not None and isinstance(layer, (attention.Attention, attention.MLAAttention))


class _Ranges:
    """Ranges of addresses, each of them within one allocation."""

    def __init__(self, ranges: Any) -> None:
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(ranges):
            if merged and start < merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], stop)
            else:
                merged.append((start, stop))
        self._ranges = merged
        self._starts = [start for start, _ in merged]

    def hold(self, extent: tuple[int, int]) -> bool:
        """Whether one of the ranges covers all of this one."""
        index = bisect_right(self._starts, extent[0]) - 1
        return index >= 0 and extent[1] <= self._ranges[index][1]


def _has_memory(tensor: Tensor) -> bool:
    if tensor.is_meta:
        return False
    try:
        return bool(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return False  # sparse, or a stand-in that tracing left


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first byte to behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _warn(what: str, error: Exception) -> None:
    RECORD.warn(f"{PATCH.name}: {what}: {describe(error)}")


def undo() -> None:
    """Forget what was saved; a model that is asleep then loses it."""
    _saved.clear()

"""What a layerwise load buffers of the Run:ai streamer's tensors keeps its values.

What is wrong upstream: the streamer yields views of memory that it reads into again, each of them good until the next
one is asked for, and ``runai_safetensors_weights_iterator`` yields them as they are. A plain load copies a tensor at
once. A layerwise one, which is a reload or a first load that quantizes online, keeps each tensor's loader call until
all of its layer have come, and by then some of them read as what was streamed later. Upstream: vllm-project/vllm#43163
and #43464, released with 0.22.0, which clones every tensor.

How it is fixed: while such a load goes on, the addresses of the streamer's tensors are known, and what a loader call
leaves in a layer's buffer is copied out if it lies there. Nothing else is copied: not the tensor that completes a
layer, which is processed at once; not tensors of other loaders; none at all in a plain load. A streamer from 0.17 on
gives its tensors away, and ``pinned_staging`` yields tensors that keep theirs: both are left alone.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import ref

from _vllm_hotfix import describe

from .._patch import Patch, Target
from .._proxy import Proxy
from .._record import RECORD

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHTS = "vllm.model_executor.model_loader.weight_utils"
_LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"

PATCH = Patch(
    name="runai_buffers",
    env="VLLM_HOTFIX_RUNAI_BUFFERS",
    fault="tensors of the Run:ai streamer are overwritten while a reload, or online quantization, buffers them",
    upstream="vllm-project/vllm#43163",
    targets=(
        Target(f"{_WEIGHTS}:runai_safetensors_weights_iterator", "weights_iterator"),
        Target(f"{_LAYERWISE}:make_online_process_loader", "make_online_process_loader"),
    ),
    relies=(
        "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo",
        f"{_LAYERWISE}:get_layerwise_info",
    ),
    fixed_in="0.22.0",
)


class _Stream:
    """One run of the streamer: where its tensors lie."""

    def __init__(self) -> None:
        #: Where the storages of the tensors that it has yielded begin.
        self.addresses: set[int] = set()
        #: What has been copied out of the tensor that it yielded last, by place and layout.
        self.copies: dict[Any, Tensor] = {}


#: The runs that are going on.
_streams: list[_Stream] = []


def weights_iterator(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield what stock yields, and know of it while a layerwise load goes on."""
    return _known(wrapped(*args, **kwargs))


def _known(iterator: Any) -> Iterator[Any]:
    # Not before the first tensor is asked for: a reload makes its iterator before it begins.
    if not _concerned():
        yield from iterator
        return
    stream = _Stream()
    _streams.append(stream)
    try:
        with contextlib.closing(iterator):
            for item in iterator:
                _note(stream, item)
                yield item
    finally:
        _streams.remove(stream)
        RECORD.save()


def _concerned() -> bool:
    """Whether there is a streamer that uses its memory again, and a layer that waits for its tensors."""
    try:
        owned = inspect.signature(sys.modules[_WEIGHTS].SafetensorsStreamer.stream_files).parameters.get("owned")
        if owned is not None and owned.default is True:
            return False
        return any(info.can_load() for info in sys.modules[_LAYERWISE].LAYERWISE_INFO.values())
    except Exception as error:
        _warn(error)
        return False


def _note(stream: _Stream, item: Any) -> None:
    try:
        stream.copies.clear()
        if address := item[1].untyped_storage().data_ptr():
            stream.addresses.add(address)
    except Exception as error:
        _warn(error)


def make_online_process_loader(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return stock's loader that buffers, with what it buffers copied out of the streamer's memory."""
    loader = wrapped(*args, **kwargs)
    # Stock keeps these loaders with the layer's metadata and uses them in later reloads too.
    layer_ref = ref(args[0] if args else kwargs["layer"])

    def buffer(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = layer_ref() if _streams else None
        if layer is None:
            return wrapped(*args, **kwargs)
        try:
            info = sys.modules[_LAYERWISE].get_layerwise_info(layer)
            before = len(info.loaded_weights)
        except Exception as error:
            _warn(error)
            return wrapped(*args, **kwargs)
        result = wrapped(*args, **kwargs)
        try:
            # Of a layer that is complete now, stock has dropped them all.
            for _, call in info.loaded_weights[before:]:
                for name, value in call.arguments.items():
                    call.arguments[name] = _safe(value)
        except Exception as error:
            _warn(error)
        return result

    # The proxy has stock's name and ``__wrapped__``, by which stock finds the original loader.
    return Proxy(loader, buffer)


def _safe(value: Any) -> Any:
    """A value that nobody overwrites: itself, or a copy of what it has of the streamer's."""
    if isinstance(value, sys.modules["torch"].Tensor):
        return _copied(value)
    if type(value) in (tuple, list):
        return type(value)(map(_safe, value))
    if type(value) is dict:
        return {name: _safe(one) for name, one in value.items()}
    return value


def _copied(tensor: Tensor) -> Tensor:
    address = tensor.untyped_storage().data_ptr()
    for stream in _streams:
        if address in stream.addresses:
            place = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            if place not in stream.copies:
                stream.copies[place] = tensor.clone()
                RECORD.count(PATCH.name, "tensors_copied")
                RECORD.count(PATCH.name, "bytes_copied", stream.copies[place].nbytes)
            return stream.copies[place]
    return tensor


def _warn(error: Exception) -> None:
    RECORD.warn(f"{PATCH.name}: tensors that are buffered may be overwritten, as in stock: {describe(error)}")

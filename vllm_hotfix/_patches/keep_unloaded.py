"""A reload keeps what the checkpoint does not have.

What is wrong upstream: a reload makes all tensors of a layer anew with ``torch.empty``, loads into them what the
checkpoint has, and copies all of them over those of the first load. What no loader has written is whatever the memory
held before:

- buffers that the checkpoint does not have: those that are not persistent in 0.20.0 to 0.25.1
  (``CLIPVisionEmbeddings.position_ids``, ``Gemma4Router.root_size``), the persistent ones in every release;
- buffers that are views of a parameter, in 0.20.0 to 0.21.0: the garbage is copied over that parameter, which has just
  been loaded (``MambaMixer2.conv_weights``);
- parameters that the checkpoint does not have, and padding, in every release. A fresh load has there what the layer's
  method filled them with when it made them: ones for the input scales of FP8 experts, of which the largest is taken
  for all, so that one expert without a scale spoils the layer.

Also, in 0.20.0 to 0.25.1 buffers that were not persistent are so after a reload, and those of a layer that has nothing
to load are left on the meta device, or out. Upstream: 0.22.0 leaves views of parameters out, and 0.26.0 the other
buffers that are not persistent; no release has a fix for the rest, and no thread is known.

How it is fixed: a layer keeps its buffers. Its loaders write into those of the first load, if they write at all.
Parameters begin as in the first load: when a model has been initialized and nothing is loaded yet, small ones are
saved, and of large ones a sample; if that is one number, the parameter begins filled with it, else with zeros.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from _vllm_hotfix import describe

from .._patch import Patch, Target
from .._record import RECORD

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

_RELOAD = "vllm.model_executor.model_loader.reload"
_LAYERWISE = f"{_RELOAD}.layerwise"

PATCH = Patch(
    name="keep_unloaded",
    env="VLLM_HOTFIX_KEEP_UNLOADED",
    fault="after a reload, buffers and padding that the checkpoint does not have are garbage",
    upstream="none known",
    targets=(
        Target(f"{_LAYERWISE}:record_metadata_for_reloading", "record_metadata_for_reloading"),
        Target(f"{_LAYERWISE}:initialize_layerwise_reload", "initialize_layerwise_reload"),
        Target(f"{_RELOAD}.meta:materialize_layer", "materialize_layer"),
        Target(f"{_LAYERWISE}:finalize_layerwise_reload", "finalize_layerwise_reload"),
    ),
    relies=(
        f"{_RELOAD}.types:LayerReloadingInfo",
        f"{_RELOAD}.meta:restore_layer_on_meta",
        f"{_LAYERWISE}:get_layerwise_info",
        f"{_LAYERWISE}:_layerwise_process",
        f"{_LAYERWISE}:_copy_and_restore_kernel_tensors",
        f"{_LAYERWISE}:_place_kernel_tensors",
    ),
)

#: Bytes up to which a tensor is saved whole; of a larger one, that many elements are looked at.
_SMALL: Final = 16 << 10
_SAMPLE: Final = 256
#: Bytes of samples that are brought to the host at once.
_BATCH: Final = 8 << 20

#: For each layer, what its tensors held before the first load, by name: the bytes of all elements, or of one that
#: all are like.
_initial: WeakKeyDictionary[Module, dict[str, Tensor]] = WeakKeyDictionary()
#: For each layer that is being reloaded, the buffers that are not persistent.
_not_persistent: WeakKeyDictionary[Module, set[str]] = WeakKeyDictionary()


# The first load.


def record_metadata_for_reloading(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record what stock does, and what the tensors of a model that was just initialized hold."""
    result = wrapped(*args, **kwargs)
    try:
        with sys.modules["torch"].no_grad():
            _save(args[0] if args else kwargs["model"])
    except Exception as error:
        _warn("what parameters hold before the first load is not known, in a reload they begin with zeros", error)
    return result


def _save(model: Module) -> None:
    batch: list[tuple[Module, str, int, Tensor]] = []
    rows: dict[tuple[int, torch.device], Tensor] = {}
    size = 0
    for layer in model.modules():
        _initial.pop(layer, None)
        for name, tensor in _tensors(layer).items():
            elements = _elements(tensor)
            if elements is None:
                continue
            number = len(elements)
            if elements.numel() > _SMALL:
                place = (number, elements.device)
                if place not in rows:
                    spread = [index * (number - 1) // (_SAMPLE - 1) for index in range(_SAMPLE)]
                    rows[place] = elements.new_tensor(spread, dtype=sys.modules["torch"].long)
                elements = elements.index_select(0, rows[place])
            batch.append((layer, name, number, elements))
            size += elements.numel()
            if size > _BATCH:
                _keep(batch)
                size = 0
    _keep(batch)


def _keep(batch: list[tuple[Module, str, int, Tensor]]) -> None:
    """Bring samples to the host, with one copy for each device, and keep what they tell."""
    torch = sys.modules["torch"]
    for device in {elements.device for *_, elements in batch}:
        some = [one for one in batch if one[-1].device == device]
        together = torch.cat([elements.reshape(-1) for *_, elements in some]).cpu()
        parts = together.split([elements.numel() for *_, elements in some])
        for (layer, name, number, elements), part in zip(some, parts, strict=True):
            values = part.view(elements.shape)
            if bool((values == values[0]).all()):
                values = values[:1]
            elif len(values) != number:
                continue
            # Not a view: the batch is freed.
            _initial.setdefault(layer, {})[name] = values.clone()
    batch.clear()


# A reload.


def initialize_layerwise_reload(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Begin a reload as stock does, and remember which buffers are not persistent."""
    try:
        model: Module = args[0] if args else kwargs["model"]
        for layer in model.modules():
            # A reload that raised has left what was so before it.
            _not_persistent.setdefault(layer, set(layer._non_persistent_buffers_set))
    except Exception as error:
        _warn("buffers that are not persistent may be so after this reload", error)
    return wrapped(*args, **kwargs)


def materialize_layer(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a layer's tensors as stock does; in a reload, give it its buffers back, and fill its parameters.

    In a first load (online quantization, dummy weights) everything is stock's.
    """
    info = args[1] if len(args) > 1 else kwargs["info"]
    if info.kernel_tensors is None:
        return wrapped(*args, **kwargs)
    layer: Module = args[0] if args else kwargs["layer"]
    with _or_warn("what this checkpoint does not have is garbage"):
        before = _tensors(layer)
    result = wrapped(*args, **kwargs)
    with _or_warn("what this checkpoint does not have is garbage"), sys.modules["torch"].no_grad():
        made = [name for name, tensor in _tensors(layer).items() if tensor is not before.get(name)]
        _restore(layer, made, info.kernel_tensors[1])
    return result


def _restore(layer: Module, names: list[str], buffers: dict[str, Tensor]) -> None:
    initial = _initial.get(layer, {})
    kept = filled = 0
    for name in names:
        tensor = layer._buffers.get(name)
        if tensor is not None and name in buffers and _layout(tensor) == _layout(buffers[name]):
            # Stock copies it to itself: nothing moves, and a view of a parameter stays one.
            layer._buffers[name] = buffers[name]
            kept += 1
        elif (elements := _elements(_tensors(layer)[name])) is not None:
            values = initial.get(name)
            if values is None or not values.any():
                elements.zero_()
            else:
                # On the device first: what is spread on the host would be as large there.
                elements.copy_(values.to(elements.device))
            filled += 1
    RECORD.count(PATCH.name, "buffers_kept", kept)
    RECORD.count(PATCH.name, "parameters_begun", filled)


def finalize_layerwise_reload(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """End a reload as stock does; layers that had nothing to load, and buffers, are as they were."""
    model: Module = args[0] if args else kwargs["model"]
    with _or_warn("layers without weights may lack their buffers"):
        layerwise = sys.modules[_LAYERWISE]
        for layer in model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.load_numel_total == 0 and info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
    result = wrapped(*args, **kwargs)
    with _or_warn("buffers that were not persistent may be so now"):
        for layer in model.modules():
            layer._non_persistent_buffers_set |= _not_persistent.pop(layer, set())
    RECORD.count(PATCH.name, "reloads")
    RECORD.save()
    return result


# Tensors.


def _tensors(layer: Module) -> dict[str, Tensor]:
    """A layer's own parameters and buffers, by name."""
    return {name: one for name, one in {**layer._parameters, **layer._buffers}.items() if one is not None}


def _elements(tensor: Tensor) -> Tensor | None:
    """A view of a tensor's elements in the order of memory, as rows of bytes.

    Returns:
        uint8 of shape [elements, bytes of one] on the tensor's device. None if it has no memory, or does not fill it.
    """
    torch = sys.modules["torch"]
    if tensor.is_meta or isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin) or not tensor.numel():
        return None
    data, step = tensor.data, 1
    for stride, size in sorted(zip(data.stride(), data.shape, strict=True)):
        if size > 1 and stride != step:
            return None
        step *= size
    flat = data.as_strided((data.numel(),), (1,))
    rows: Tensor = flat.view(torch.uint8).view(data.numel(), -1)
    return rows


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


@contextlib.contextmanager
def _or_warn(what: str) -> Iterator[None]:
    """Have one warning and stock's path where this patch's own work raises."""
    try:
        yield
    except Exception as error:
        _warn(what, error)


def _warn(what: str, error: Exception) -> None:
    RECORD.warn(f"{PATCH.name}: {what}: {describe(error)}")


def undo() -> None:
    """Forget what tensors held before the first load; a reload that is on its way ends as stock's."""
    _initial.clear()
    _not_persistent.clear()

"""Every tensor that a model holds, by path, and digests of them that are computed where they are.

Paths begin with the module's own: ``model.layers.0.mlp.experts.w13_weight``; what helper objects hold follows with
their attributes, keys and indices: ``...experts.quant_method.moe_quant_config._w1.alpha_or_gscale``.
"""

from __future__ import annotations

import collections
import enum
import functools
import hashlib
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module

#: Objects that belong to the engine and not to the weights, or cannot hold a tensor.
_SKIPPED: Final = (type(None), str, bytes, int, float, complex, type, types.ModuleType, enum.Enum, torch.dtype)
_ENGINE: Final = (
    *("vllm.config", "vllm.distributed", "vllm.compilation", "vllm.v1.worker", "vllm.v1.core", "vllm.v1.engine"),
    *("torch", "transformers"),
)
_OWN: Final = frozenset(("_parameters", "_buffers", "_modules", "__dict__", "__weakref__"))

#: Elements of a chunk: 16 MiB of a tensor, for which a digest takes four times as much memory.
_CHUNK: Final = 4 << 20
_ODD: Final = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
#: Two 4-bit numbers in a byte, none of them NaN.
_NO_NAN: Final = (getattr(torch, "float4_e2m1fn_x2", None),)


def walk(roots: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that some objects hold at any depth, with its path.

    A module's parameters and buffers come first, then its other attributes, then its submodules. What vLLM's and
    other packages' helper objects, containers, partial functions and closures hold is found too, each object by the
    first path that leads to it; the engine's own (configuration, process groups) is not entered.

    Args:
        roots: names and objects, such as a model. A root's own path is its name, which may be empty.
    """
    roots = list(roots)
    modules: dict[int, str] = {}
    for name, root in roots:
        for path, module in root.named_modules() if isinstance(root, Module) else ():
            modules.setdefault(id(module), _join(name, path))
    seen: set[int] = set()
    #: Objects that an attribute makes anew: kept, or the next one could have the identity of one seen.
    keep: list[Any] = []

    def enter(path: str, one: Any) -> Iterator[tuple[str, Tensor]]:
        if isinstance(one, Tensor):
            yield path, one
        if isinstance(one, _SKIPPED) or id(one) in seen:
            return
        if modules.get(id(one), path) != path:
            return  # it comes by its own path
        seen.add(id(one))
        keep.append(one)
        for name, part in _parts(one):
            yield from enter(_join(path, name), part)

    for name, root in roots:
        yield from enter(name, root)


def draft_model(runner: Any) -> Any:
    """The draft model of a model runner of vLLM's, of the first kind or the second; None if it has none."""
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    draft: Any = getattr(drafter, "model", None)
    if draft is None and hasattr(runner, "get_draft_model"):
        draft = runner.get_draft_model()
    # A wrapper that captures graphs is the engine's, and the walk does not enter it.
    return draft.unwrap() if hasattr(type(draft), "unwrap") else draft


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name and not name.startswith("[") else path + name


def _parts(one: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds: names and objects."""
    if isinstance(one, Module):
        yield from [*one._parameters.items(), *one._buffers.items()]
        yield from _attributes(one)
        yield from one._modules.items()
    elif isinstance(one, dict):
        # Another thread of the engine may add to it. The keys 1 and "1" are two paths.
        names = [key if isinstance(key, str) and not key.isdigit() else repr(key) for key in list(one)]
        yield from [(f"[{name}]", value) for name, value in zip(names, list(one.values()), strict=False)]
    elif isinstance(one, (list, tuple, set, frozenset, collections.deque)):
        yield from [(f"[{number}]", value) for number, value in enumerate(list(one))]
    elif isinstance(one, functools.partial):
        yield from [("func", one.func), ("args", one.args), ("keywords", one.keywords), *vars(one).items()]
    elif isinstance(one, types.MethodType):
        yield from [("self", one.__self__), ("func", one.__func__)]
    elif isinstance(one, types.FunctionType):
        yield from [("defaults", one.__defaults__), ("keywords", one.__kwdefaults__), *vars(one).items()]
        for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not assigned yet
                continue
    elif isinstance(one, Tensor):
        parts = one.__tensor_flatten__()[0] if hasattr(one, "__tensor_flatten__") else ()
        yield from [(name, getattr(one, name)) for name in parts]
        yield from _attributes(one)
    elif isinstance(one, types.SimpleNamespace) or not _is_of_the_engine(one):
        yield from _attributes(one)


def _attributes(one: Any) -> list[tuple[str, Any]]:
    found = {}
    for cls in type(one).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            name = f"_{cls.__name__.lstrip('_')}{name}" if private else name
            if hasattr(one, name):
                found[name] = getattr(one, name)
    found |= getattr(one, "__dict__", {})
    return [(name, value) for name, value in found.items() if name not in _OWN]


def _is_of_the_engine(one: Any) -> bool:
    """Whether an object is of the engine, of torch or of Python itself, which hold no weights."""
    module = type(one).__module__
    return (
        module.startswith(tuple(f"{name}." for name in _ENGINE))
        or module in _ENGINE
        or module.partition(".")[0] in sys.stdlib_module_names
    )


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is its own memory: not sparse, not a wrapper of others, not yet to be initialized."""
    uninitialized = isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)
    return tensor.layout is torch.strided and not uninitialized and not hasattr(tensor, "__tensor_flatten__")


# Digests.


def digests(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[str, int, str]]:
    """Digest tensors on their devices: values, and not addresses.

    A chunk of 16 MiB at a time is taken as int32 numbers, and their sum with fixed random 64-bit weights is its
    value: any change of one number changes it. The values of a tensor, in the order of its memory, are then hashed on
    the host. Tensors that differ elsewhere have one digest by chance, once in 2**33 at worst (numbers that differ in
    their sign bits alone): against accidents, not against forgers.

    Args:
        tensors: paths and plain tensors of any shape, dtype, stride and device.

    Returns:
        By path: 16 hex digits; the address (0 on the meta device); and the layout: shape, dtype, device, stride.

    Raises:
        torch.OutOfMemoryError: the device has less than about 100 MiB free.
    """
    found: dict[str, tuple[int, str]] = {}
    sums: dict[tuple[int, str], list[Tensor]] = {}
    weights: dict[torch.device, Tensor] = {}
    with torch.no_grad():
        for path, tensor in tensors:
            key = (0 if tensor.is_meta else tensor.data_ptr(), layout(tensor))
            found[path] = key
            if key not in sums:
                sums[key] = [] if tensor.is_meta else [_sum(chunk, weights) for chunk in _chunks(tensor)]
        values = _to_host([one for some in sums.values() for one in some])
    known = {}
    for key, some in sums.items():
        text = ",".join(str(values.pop(id(one))) for one in some)
        known[key] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {path: (known[key], *key) for path, key in found.items()}


def layout(tensor: Tensor) -> str:
    """Shape, dtype, device and, where it is not the usual one, stride, in words."""
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    stride = "" if tensor.is_contiguous() else f", stride {tuple(tensor.stride())}"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}{stride}"


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor's memory as int32 numbers, a chunk at a time; the last is filled up with zeros."""
    flat = _bytes_of(tensor)
    for chunk in flat.split(4 * _CHUNK):
        if chunk.numel() % 4 or chunk.storage_offset() % 4 or chunk.data_ptr() % 4:
            filled = chunk.new_zeros(-(-chunk.numel() // 4) * 4)
            filled[: chunk.numel()] = chunk
            chunk = filled
        if chunk.numel():
            yield chunk.view(torch.int32)


def _bytes_of(tensor: Tensor) -> Tensor:
    """A tensor's memory, flat: a view, or a copy where elements overlap or lie apart."""
    tensor = tensor.detach()
    order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), tensor.size(dim) == 1))
    ordered = tensor.permute(order)
    return ordered.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def _sum(chunk: Tensor, weights: dict[torch.device, Tensor]) -> Tensor:
    """The sum of a chunk's numbers, each with the weight of its place, in 64 bits that wrap around."""
    known = weights.get(chunk.device)
    if known is None or known.numel() < chunk.numel():
        known = weights[chunk.device] = _random(chunk.numel(), chunk.device)
    return torch.sum(chunk * known[: chunk.numel()])


def _random(number: int, device: torch.device) -> Tensor:
    """Odd 64-bit numbers without pattern, the same on every device."""
    numbers = torch.arange(1, number + 1, device=device) * _ODD[0]
    for factor in _ODD[1:]:
        numbers ^= (numbers >> 29) & ((1 << 35) - 1)
        numbers *= factor
    return numbers ^ (numbers >> 32) | 1


def _to_host(sums: list[Tensor]) -> dict[int, int]:
    """The values of scalars on devices, by identity, with one copy for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for one in sums:
        by_device.setdefault(one.device, []).append(one)
    values: dict[int, int] = {}
    for some in by_device.values():
        values.update(zip(map(id, some), torch.stack(some).tolist(), strict=True))
    return values


# What a sleep does, and what is left of it.


def poison(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Overwrite tensors with what no checkpoint has: NaN, or another integer than all of it is.

    Integers become 0, or 1 where all were 0: as indices, both stay within bounds.

    Returns:
        The number of places in memory that were overwritten.
    """
    places = set()
    with torch.no_grad():
        for _, tensor in tensors:
            place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if tensor.is_meta or not tensor.numel() or place in places:
                continue
            places.add(place)
            data = _writable(tensor)
            if tensor.dtype.is_complex or (tensor.is_floating_point() and tensor.element_size() > 1):
                data.fill_(float("nan"))
            elif tensor.is_floating_point():
                # NaN in float8_e4m3fn, float8_e5m2 and float8_e8m0fnu; as good as any in the others.
                data.view(torch.uint8).fill_(0xFF if tensor.dtype is torch.float8_e8m0fnu else 0x7F)
            else:
                data.fill_(0 if _bytes_of(data).any() else 1)
    return len(places)


def _writable(tensor: Tensor) -> Tensor:
    """A view of a tensor in which each place in memory is there once."""
    data = tensor.detach()
    for dim, stride in enumerate(data.stride()):
        if stride == 0 and data.shape[dim] > 1:
            data = data.narrow(dim, 0, 1)
    return data


def describe(tensor: Tensor) -> str:
    """What is to be seen of a tensor's values: ``zeros``, ``NaN``, or ``other values``."""
    if tensor.is_meta:
        return "no memory"
    flat = _bytes_of(tensor)
    if not flat.any():
        return "zeros"
    floating = tensor.is_floating_point() and tensor.dtype not in _NO_NAN
    if floating or tensor.dtype.is_complex:
        for chunk in flat.view(tensor.dtype).split(_CHUNK):
            # float8 has no isnan of its own.
            if (chunk.float() if floating else chunk).isnan().any():
                return "NaN"
    return "other values"

"""A reload keeps the fused-MoE kernel that the CUDA graphs captured, and refreshes what it reads.

What is wrong upstream: at a reload the quantization methods of fused MoE build their kernel and its quant config anew,
as at the first load. vLLM copies the layer's parameters into the memory of the first load, where captured graphs read
them, but a kernel holds tensors that are no parameters: ``1 / input_scale`` of NVFP4 (``a1_gscale``, ``a2_gscale``),
fused alphas, stride tensors of the CUTLASS kernels, clamp limits. The graphs go on reading those of the first kernel,
with the values of the first load, or zeros after ``sleep(level=2)``: the server is healthy and talks garbage.
Upstream: vllm-project/vllm#61304, first cause, and #41670; no release has a fix.

How it is fixed: in a layerwise reload stock builds the new kernel and lets its experts convert the layer. Then the
first kernel and quant config are put back, and the tensors that they hold are overwritten, in place, with those of the
new ones, found by walking both side by side. Tensors in the memory of the layer's parameters are left to vLLM, which
copies them next. The new kernel's own code has computed every value, with what is fused into it: nothing is computed
here, and no function of the kept kernel is called (fusing twice is not what fusing once is).

Where the new kernel cannot stand for the first one (another class, another number of experts), it is used as stock
would, and the state becomes ``stale-graphs``: what the graphs captured is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, ref

from packaging.version import Version

from _vllm_hotfix import describe, strict

from .._judge import parse_version
from .._patch import STRICT, HotfixError, Patch, Target
from .._record import RECORD, logger

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    #: A module's parameters or buffers; it may have a name for one that it has not.
    _Tensors = Mapping[str, Tensor | None]

_LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"
_MOE = "vllm.model_executor.layers.fused_moe"
_QUANTIZATION = "vllm.model_executor.layers.quantization"
_COMPRESSED = f"{_QUANTIZATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe"
_NVFP4 = f"{_QUANTIZATION}.modelopt:ModelOptNvFp4FusedMoE"
_FP8 = f"{_QUANTIZATION}.fp8:Fp8MoEMethod"


def _target(name: str, wrapper: str = "keep", unless: str | None = None) -> Target:
    """A function that builds a kernel; vLLM imports the modules of the methods that a model has."""
    return Target(name, wrapper, unless=unless, optional=True)


PATCH = Patch(
    name="keep_moe_kernel",
    env="VLLM_HOTFIX_KEEP_MOE_KERNEL",
    aliases=("VLLM_RELOAD_KEEP_MOE_KERNEL",),
    fault="after a reload, CUDA graphs read tensors of the MoE kernel of the first load",
    upstream="vllm-project/vllm#61304",
    # For each method the innermost function that builds its kernel; from 0.30.0 on some have one for just that.
    targets=(
        _target(f"{_NVFP4}._build_moe_kernel"),
        _target(f"{_NVFP4}.process_weights_after_loading", unless=f"{_NVFP4}._build_moe_kernel"),
        _target(f"{_QUANTIZATION}.modelopt:ModelOptFp8MoEMethod._setup_kernel"),
        _target(f"{_FP8}._init_moe_kernel"),
        _target(f"{_FP8}._setup_kernel", unless=f"{_FP8}._init_moe_kernel"),
        _target(f"{_QUANTIZATION}.quark.quark_moe:QuarkW8A8Fp8MoEMethod._setup_kernel"),
        _target(f"{_QUANTIZATION}.online.fp8:_Fp8OnlineMoEBase._setup_kernel"),
        _target(f"{_QUANTIZATION}.online.nvfp4:Nvfp4OnlineMoEMethod._setup_kernel", wrapper="keep_made_anew"),
        _target(f"{_COMPRESSED}_w8a8_fp8:CompressedTensorsW8A8Fp8MoEMethod.process_weights_after_loading"),
        _target(f"{_COMPRESSED}_w4a4_nvfp4:CompressedTensorsW4A4Nvfp4MoEMethod.process_weights_after_loading"),
        _target(f"{_COMPRESSED}_w4a8_fp8:CompressedTensorsW4A8Fp8MoEMethod.process_weights_after_loading"),
        Target(f"{_LAYERWISE}:initialize_layerwise_reload", "initialize_layerwise_reload"),
        Target(f"{_LAYERWISE}:finalize_layerwise_reload", "finalize_layerwise_reload"),
    ),
    relies=(
        f"{_MOE}.config:FusedMoEQuantDesc",
        f"{_MOE}.fused_moe_method_base:FusedMoEMethodBase.__init__",
        f"{_MOE}.modular_kernel:FusedMoEKernel.__init__",
        "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo",
        "vllm.config.vllm:get_current_vllm_config_or_none",
        "vllm.config.vllm:set_current_vllm_config",
        f"{_LAYERWISE}:_layerwise_process",
        f"{_LAYERWISE}:_copy_and_restore_kernel_tensors",
        f"{_LAYERWISE}:_place_kernel_tensors",
    ),
    requires=("writable_scales",),
    symptoms=(r"\.(moe_kernel|moe_quant_config)\b", r"quant_method\.\w*strides"),
)

#: Where the classes are defined whose objects belong to the whole engine.
_ENGINE: Final = ("vllm.config", "vllm.distributed", "torch")
_FUNCTIONS: Final = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
_ABSENT: Final = object()
_KERNEL: Final = ("moe_kernel", "moe_quant_config")

#: For each layer, vLLM's configuration at its first load. The configuration refers to its layers: a strong reference
#: would keep them alive.
_configs: WeakKeyDictionary[Module, ref[Any]] = WeakKeyDictionary()
#: For each layer that is being reloaded, what its method had made before.
_before: WeakKeyDictionary[Module, dict[str, Any]] = WeakKeyDictionary()
#: For each layer whose kernel was kept in this reload, the number of its tensors that were refreshed.
_refreshed: WeakKeyDictionary[Module, int] = WeakKeyDictionary()
#: Layers of which captured graphs read what is gone, and why.
_stale: WeakKeyDictionary[Module, str] = WeakKeyDictionary()


class _Other(Exception):
    """The new kernel is not the first one with other values."""


def keep(wrapped: Any, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Build a layer's kernel; in a reload, refresh the first one with it and put that back.

    Args:
        wrapped: stock's function, which sets ``moe_kernel`` and ``moe_quant_config`` of the method.
        method: the quantization method, one object for each layer.
        args: the layer, and what else stock's function takes.
        kwargs: the same by name.

    Raises:
        Exception: what stock raises; the first kernel is in its place then.
    """
    layer: Module = args[0] if args else kwargs["layer"]
    info = _reloading(layer)
    if info is None:
        _remember_config(layer)
        return wrapped(*args, **kwargs)
    kept = _made(method)
    try:
        with _current_config(layer):
            result = wrapped(*args, **kwargs)
    except BaseException:
        vars(method).update(kept)
        raise
    fresh = _made(method)
    if fresh.keys() - kept.keys() or all(fresh.get(name) is one for name, one in kept.items()):
        return result  # made for the first time, or kept by stock
    try:
        if _keeps_memory(fresh.get("moe_kernel")):
            return result
        refresh = _Refresh(layer, *info.kernel_tensors)
        refresh.compare(kept, fresh)
        refresh.apply()
        vars(method).update(kept)
        RECORD.count(PATCH.name, "kernels_kept")
        _refreshed[layer] = len(refresh.copies)
    except Exception as error:
        RECORD.count(PATCH.name, "kernels_replaced")
        _give_up(layer, info, str(error) if isinstance(error, _Other) else describe(error))
    return result


def keep_made_anew(wrapped: Any, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do as ``keep`` does where stock keeps the kernel, and refreshes some of its tensors, but not all.

    From 0.28.0 on the online method for NVFP4 lets the first kernel's experts fuse again, with what they hold.
    """

    def build(*args: Any, **kwargs: Any) -> Any:
        reloading = _reloading(args[0] if args else kwargs["layer"]) is not None
        if reloading and not _keeps_memory(method.moe_kernel):
            method.moe_kernel = None
        return wrapped(*args, **kwargs)

    return keep(build, method, args, kwargs)


def _made(method: Any) -> dict[str, Any]:
    """What a method has made after loading: kernel, quant config, tensors of its own (strides of W4A8)."""
    tensor = sys.modules["torch"].Tensor
    made = {name: one for name, one in vars(method).items() if name in _KERNEL or isinstance(one, tensor)}
    return {name: one for name, one in made.items() if one is not None}


def _keeps_memory(kernel: Any) -> bool:
    """Whether the experts have a way of their own to use the first ones' memory again, as B12X's do."""
    return hasattr(getattr(kernel, "fused_experts", None), "_reuse_prepared_storage")


def _reloading(layer: Module) -> Any:
    """What vLLM knows of the reload that a layer is in, None if it is in none: a first load, a direct call."""
    layerwise = sys.modules.get(_LAYERWISE)
    info = layerwise.LAYERWISE_INFO.get(layer) if layerwise is not None else None
    return info if info is not None and info.kernel_tensors is not None else None


# The comparison.


class _Refresh:
    """Two kernels side by side: what to copy from the new one into the kept one.

    Nothing is changed before ``apply``.

    Args:
        layer: the layer, with its parameters as the new kernel has them.
        parameters: its parameters of the first load, by name, into which vLLM copies.
        buffers: its buffers, likewise.

    Attributes:
        copies: by the place in memory of a kept tensor, that tensor and the one to copy from.
        owned: paths of the kept tensors that are not memory of a parameter or buffer.

    Raises:
        _Other: a parameter has another shape or dtype than at the first load.
    """

    def __init__(self, layer: Module, parameters: _Tensors, buffers: _Tensors) -> None:
        if differs := _differs(layer, parameters):
            raise _Other(differs)
        self.layer = layer
        self.copies: dict[Any, tuple[Tensor, Tensor]] = {}
        self.owned: list[str] = []
        self._kept_names = _by_storage({**parameters, **buffers})
        self._fresh_names = _by_storage({**layer._parameters, **layer._buffers})
        #: Holders of kept tensors that cannot be copied to: holder, key, new tensor, path, reason.
        self._rebinds: list[tuple[Any, Any, Tensor, str, str]] = []
        self._seen: set[tuple[int, int]] = set()
        #: By the identity of each new object, the kept one that it was compared with.
        self._kept_by_fresh: dict[int, Any] = {}

    def compare(self, kept: Any, fresh: Any, path: str = "") -> None:
        """Find the tensors that two objects of one class hold, at any depth.

        Raises:
            _Other: something is there on one side only, or of another class, or is another number.
        """
        if (id(kept), id(fresh)) in self._seen:
            return
        self._seen.add((id(kept), id(fresh)))
        self._kept_by_fresh[id(fresh)] = kept
        ours, theirs = _parts(kept), _parts(fresh)
        for key in {**ours, **theirs}:
            name = f"{path}.{key}" if path else str(key)
            self._compare_part(kept, key, ours.get(key, _ABSENT), theirs.get(key, _ABSENT), name)

    def _compare_part(self, holder: Any, key: Any, kept: Any, fresh: Any, path: str) -> None:
        tensor = sys.modules["torch"].Tensor
        if kept is fresh:
            return
        if fresh is None or fresh is _ABSENT:
            # Made by a forward pass (scratch, handles): the first kernel has been at work, the new one not yet.
            if isinstance(kept, tensor) and dataclasses.is_dataclass(holder):
                raise _Other(f"{path} is no tensor any more")
        elif kept is None or kept is _ABSENT:
            if isinstance(fresh, (tensor, float)):
                raise _Other(f"{path} is there now and was not")
        elif isinstance(kept, tensor) and isinstance(fresh, tensor):
            self._compare_tensors(holder, key, kept, fresh, path)
        elif type(kept) is not type(fresh):
            raise _Other(f"{path} is of class {type(fresh).__name__} now and was of {type(kept).__name__}")
        elif isinstance(kept, float):
            if kept != fresh and kept == kept:
                raise _Other(f"{path} is {fresh} now and was {kept}")
        elif _is_of_the_kernel(kept):
            self.compare(kept, fresh, path)
        elif _is_of_others(kept) and kept != fresh:
            raise _Other(f"{path} is of {type(kept).__module__}, whose objects are not known")

    def _compare_tensors(self, holder: Any, key: Any, kept: Tensor, fresh: Tensor, path: str) -> None:
        names = self._kept_names.get(_storage(kept), set())
        if names & self._fresh_names.get(_storage(fresh), set()):
            return  # vLLM copies this parameter
        if not names:
            self.owned.append(path)
        place = (kept.data_ptr(), kept.shape, kept.stride(), kept.dtype)
        _, other = self.copies.get(place, (kept, fresh))
        if names:
            why = f"it was {' and '.join(sorted(names))} of the layer and is not now"
        elif _layout(kept) != _layout(fresh):
            why = f"it is {_form(fresh)} now and was {_form(kept)}"
        elif other.data_ptr() != fresh.data_ptr():
            why = "it was one tensor with another and is not now"
        else:
            self.copies[place] = kept, fresh
            return
        self._rebinds.append((holder, key, fresh, path, why))

    def apply(self) -> None:
        """Copy, and rebind what cannot be copied.

        Raises:
            _Other: something that can be neither; nothing is changed then.
        """
        torch = sys.modules["torch"]
        for holder, _, fresh, path, why in self._rebinds:
            if isinstance(holder, tuple) or fresh.is_meta:
                raise _Other(f"{path} cannot be refreshed: {why}")
        # Either kind of tensor can be written to in inference mode; those that it made, only there.
        with torch.inference_mode():
            for kept, fresh in self.copies.values():
                _copy(kept, fresh)
                self._kept_by_fresh[id(fresh)] = kept
        if self.copies:
            RECORD.count(PATCH.name, "tensors_refreshed", len(self.copies))
        for holder, key, fresh, path, why in self._rebinds:
            if isinstance(holder, (dict, list)):
                holder[key] = fresh
            else:
                object.__setattr__(holder, key, fresh)
            RECORD.count(PATCH.name, "tensors_rebound")
            _stale[self.layer] = f"{path} has other memory now: {why}"
            RECORD.warn(
                f"{PATCH.name}: {_name(self.layer)}: {_stale[self.layer]}; graphs captured with the old are stale"
            )
        # What the layer has besides parameters, and shares with the new kernel.
        for name, value in vars(self.layer).items():
            vars(self.layer)[name] = self._kept_by_fresh.get(id(value), value)


def _differs(layer: Module, parameters: _Tensors) -> str:
    """The first parameter that has another shape or dtype than at the first load; empty if there is none."""
    for name, first in parameters.items():
        now = layer._parameters.get(name)
        if now is not None and first is not None and (now.shape, now.dtype) != (first.shape, first.dtype):
            return f"{name} is {_form(now)} now and was {_form(first)}"
    return ""


def _parts(one: Any) -> Mapping[Any, Any]:
    """What an object holds, by key, index or attribute."""
    if isinstance(one, dict):
        return one
    if isinstance(one, (list, tuple)):
        return dict(enumerate(one))
    slots = [name for cls in type(one).__mro__ for name in vars(cls).get("__slots__", ()) if hasattr(one, name)]
    return {name: getattr(one, name) for name in slots} | getattr(one, "__dict__", {})


def _is_of_the_kernel(one: Any) -> bool:
    """Whether an object is a part of the kernel: a container, or of a class of vLLM's that is none of the engine's."""
    classes = [cls for cls in type(one).__mro__ if cls.__module__.partition(".")[0] == "vllm"]
    return isinstance(one, (dict, list, tuple)) or bool(classes and not _is_of_the_engine(one))


def _is_of_the_engine(one: Any) -> bool:
    """Whether an object belongs to others too: a module, a process group, vLLM's configuration, a function."""
    cls = type(one)
    return (
        isinstance(one, (*_FUNCTIONS, sys.modules["torch"].nn.Module))
        or cls.__module__.startswith(_ENGINE)
        or cls.__name__ in ("FusedMoEConfig", "FusedMoEParallelConfig")
    )


def _is_of_others(one: Any) -> bool:
    """Whether an object is of a package of which nothing is known here, neither vLLM's nor Python's."""
    return not _is_of_the_engine(one) and type(one).__module__.partition(".")[0] not in sys.stdlib_module_names


def _by_storage(tensors: _Tensors) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for name, one in tensors.items():
        if one is not None and _storage(one):
            found.setdefault(_storage(one), set()).add(name)
    return found


def _storage(tensor: Tensor) -> int:
    """The address of the memory that a tensor is a view of; 0 for none, as on the meta device."""
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


def _form(tensor: Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}, stride {tensor.stride()}"


def _copy(kept: Tensor, fresh: Tensor) -> None:
    """Copy between tensors of one layout, also where many elements are one place in memory."""
    for dim, stride in enumerate(kept.stride()):
        if stride == 0 and kept.shape[dim] > 1:
            kept, fresh = kept.narrow(dim, 0, 1), fresh.narrow(dim, 0, 1)
    kept.copy_(fresh)


# What vLLM lacks before 0.27.0: a current configuration in a reload, which some experts ask for when they are made.


def _remember_config(layer: Module) -> None:
    try:
        config = sys.modules["vllm.config"].get_current_vllm_config_or_none()
        if config is not None:
            _configs[layer] = ref(config)
    except Exception as error:
        RECORD.warn(f"{PATCH.name}: vLLM's configuration is not kept for a reload: {describe(error)}")


@contextlib.contextmanager
def _current_config(layer: Module) -> Iterator[None]:
    """Have the configuration of the first load where there is none."""
    with contextlib.ExitStack() as stack:
        try:
            config = sys.modules["vllm.config"]
            version = parse_version(RECORD.vllm)
            remembered = _configs.get(layer, lambda: None)()
            # Later releases have one, and threads that load: what is current is so for the whole process.
            late = version is not None and version >= Version("0.27.0.dev0")
            if not late and remembered is not None and config.get_current_vllm_config_or_none() is None:
                stack.enter_context(config.set_current_vllm_config(remembered))
        except Exception as error:
            RECORD.warn(f"{PATCH.name}: a reload has no current configuration, as with stock: {describe(error)}")
        yield


# A reload as a whole, and what cannot be refreshed.


def initialize_layerwise_reload(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Begin a reload as stock does, and remember the kernels of all layers."""
    model: Module = args[0] if args else kwargs["model"]
    try:
        for layer in model.modules():
            _refreshed.pop(layer, None)
            method = getattr(layer, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                _before[layer] = _made(method)
    except Exception as error:
        RECORD.warn(f"{PATCH.name}: kernels that it does not keep will not be noticed: {describe(error)}")
    return wrapped(*args, **kwargs)


def finalize_layerwise_reload(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """End a reload as stock does, and say what was kept, and what captured graphs read that is gone.

    Raises:
        HotfixError: under ``VLLM_HOTFIX_STRICT``, if captured graphs of this model read what is gone.
    """
    result = wrapped(*args, **kwargs)
    stale: list[str] = []
    try:
        model: Module = args[0] if args else kwargs["model"]
        model_config = args[1] if len(args) > 1 else kwargs.get("model_config")
        found = _look_at_all(list(model.modules()))
        stale = [] if getattr(model_config, "enforce_eager", False) else found
    except Exception as error:
        RECORD.warn(f"{PATCH.name}: whether captured graphs read what is gone is not known: {describe(error)}")
    if stale:
        more = f" (and {len(stale) - 1} more layers)" if len(stale) > 1 else ""
        reason = f"{stale[0]}{more}; CUDA graphs that were captured before no longer match, restart vLLM"
        RECORD.stale(PATCH.name, reason)
        if strict():
            RECORD.save()
            raise HotfixError(f"vllm-hotfix: {STRICT} is set and {PATCH.name}: {reason}")
    RECORD.save()
    return result


def _look_at_all(layers: list[Module]) -> list[str]:
    """Say what was kept, and return what is gone that graphs of these layers may have captured."""
    for layer in layers:
        _look_at(layer)
    kept = [_refreshed.pop(layer) for layer in layers if layer in _refreshed]
    if kept:
        text = "vllm-hotfix: the reload kept %d MoE kernels and refreshed %d of their tensors"
        logger.info(text, len(kept), sum(kept))
    return [f"{_name(layer)}: {_stale[layer]}" for layer in layers if layer in _stale]


def _look_at(layer: Module) -> None:
    """See whether another function than those that are wrapped has built a kernel with tensors of its own."""
    before = _before.pop(layer, None)
    method = getattr(layer, "quant_method", None)
    if before is None or layer in _refreshed or layer in _stale:
        return
    try:
        now = _made(method)
        kernel = now.get("moe_kernel")
        if kernel is before["moe_kernel"] or _keeps_memory(kernel):
            return
        refresh = _Refresh(layer, layer._parameters, layer._buffers)
        refresh.compare(before, now)
        differs = ", ".join(refresh.owned)
    except Exception as error:
        differs = str(error) if isinstance(error, _Other) else describe(error)
    if differs:
        _stale[layer] = f"{type(method).__name__} builds a kernel that this patch does not keep: {differs}"


def _give_up(layer: Module, info: Any, why: str) -> None:
    """Leave the new kernel in its place, with the parameters that it was made for."""
    parameters, buffers = info.kernel_tensors
    if _differs(layer, parameters):
        # vLLM would copy them into the first ones, which raises or, from one element to many, does not.
        info.kernel_tensors = ({name: one for name, one in layer._parameters.items() if one is not None}, buffers)
    _stale[layer] = f"the kernel of the reload is not the first one with other values: {why}"


def _name(layer: Module) -> str:
    return getattr(layer, "layer_name", "") or type(layer).__name__


def undo() -> None:
    """Forget; kernels that were kept stay until stock's next reload replaces them, and what is stale stays stale."""
    _configs.clear()
    _before.clear()
    _refreshed.clear()

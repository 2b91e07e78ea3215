"""The layerwise reload waits for every loader call that the first load measured.

What is wrong upstream: a reload (``reload_weights``, weight transfer from a trainer) buffers a layer's loader calls
and processes the layer once ``load_numel >= get_layer_size(layer)``. Some parameters are loaded more than once (the
``w13_input_scale`` of ModelOpt FP8 fused MoE twice an expert, as ``w1`` and ``w3``; that of NVFP4 through 0.22.1 into
both columns each time), so the count reaches the declared size before the last tensors are there, whenever a stream
delivers those late: the layer is processed with tensors that are missing, and what still comes is dropped as
excessive loading. ``get_numel_loaded`` caps each call at its parameter's size from 0.24.0 on, but not their sum.
Upstream: vllm-project/vllm#61304, second cause; no release has a fix.

How it is fixed: the first load counts the loader calls of every tensor. On a reload, a layer is processed when stock's
condition holds *and* those calls have come: the measure delays the trigger, it never makes it earlier. A layer that
is ready waits until a load for another layer arrives, or for the end of the reload, and takes what still comes for
it. A layer whose first load was not measured (dummy weights, a loader with a ``load_model`` of its own, layers that
online quantization wraps during the first load) keeps stock's trigger.

Calls are counted, not elements: ``get_numel_loaded`` needs a dispatch mode around every loader call, a count does not,
and the last call is the same one.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from _vllm_hotfix import describe

from .._patch import Patch, Target
from .._proxy import Proxy
from .._record import RECORD, logger

if TYPE_CHECKING:
    from torch.nn import Module

#: The name by which stock tells the loaders that buffer from the original ones.
_ONLINE_LOADER = "online_process_loader"
_LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"

PATCH = Patch(
    name="measured_totals",
    env="VLLM_HOTFIX_MEASURED_TOTALS",
    aliases=("VLLM_LAYERWISE_RELOAD_MEASURED_TOTALS",),
    fault="a layerwise reload processes a layer before its last scales have arrived",
    upstream="vllm-project/vllm#61304",
    targets=(
        Target("vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model", "load_model"),
        Target(f"{_LAYERWISE}:initialize_layerwise_reload", "initialize_layerwise_reload"),
        Target(f"{_LAYERWISE}:make_online_process_loader", "make_online_process_loader"),
        Target(f"{_LAYERWISE}:_layerwise_process", "layerwise_process"),
        Target(f"{_LAYERWISE}:finalize_layerwise_processing", "finalize_layerwise_processing"),
    ),
    relies=(
        "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo",
        "vllm.model_executor.model_loader.reload.utils:get_layer_tensors",
        f"{_LAYERWISE}:get_layerwise_info",
        f"{_LAYERWISE}:initialize_online_processing",
        f"{_LAYERWISE}:_get_original_loader",
        f"{_LAYERWISE}:_place_kernel_tensors",
        f"{_LAYERWISE}:_wrap_parameters_weight_loader",
    ),
    symptoms=(r"\.experts(\.routed_experts)?\.w(13|2)_\w+$",),
)

#: For each layer, the loader calls of its first load by tensor name; a measured model is a key too. Weak: a freed
#: model frees its measure.
_measured: WeakKeyDictionary[Module, dict[str, int]] = WeakKeyDictionary()
#: For each layer, the reload that it is in.
_reloads: WeakKeyDictionary[Module, _Reload] = WeakKeyDictionary()


# The first load: measure.


def load_model(wrapped: Any, loader: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record the loader calls made within ``self.load_weights(model, model_config)``."""
    stock = loader.load_weights

    def load_weights(*args: Any, **kwargs: Any) -> Any:
        with _recording(args[0] if args else kwargs["model"]):
            return stock(*args, **kwargs)

    try:
        # On the instance: only this call of load_model is recorded, whichever class defines load_weights.
        before = vars(loader).get("load_weights")
        loader.load_weights = load_weights
    except Exception as error:
        _warn("the first load is not measured", error)
        return wrapped(*args, **kwargs)
    try:
        return wrapped(*args, **kwargs)
    finally:
        if before is None:
            del loader.load_weights
        else:
            loader.load_weights = before
        RECORD.save()


@contextlib.contextmanager
def _recording(model: Module) -> Iterator[None]:
    """Count the loader calls of a model's tensors; the loaders are as before afterwards.

    The counts are kept if the load succeeds and called any loader.
    """
    counted: list[tuple[Module, str, _Calls]] = []
    replaced: list[tuple[Any, _Calls]] = []
    failed = False
    try:
        try:
            _attach(model, counted, replaced)
        except Exception as error:
            _warn("the first load is not measured", error)
            failed = True
        yield
    finally:
        for tensor, calls in replaced:
            try:
                # Whoever has set another one since meant it.
                if getattr(tensor, "weight_loader", None) is calls:
                    tensor.weight_loader = calls.__wrapped__
            except Exception as error:
                _warn("a loader that counts stays with its tensor, and does what it stands for", error)
    if failed:
        return
    measured: dict[Module, dict[str, int]] = {}
    for layer, name, calls in counted:
        if calls.number:
            measured.setdefault(layer, {})[name] = calls.number
    RECORD.count(PATCH.name, "layers_measured", len(measured))
    RECORD.count(PATCH.name, "loader_calls_measured", sum(calls.number for _, calls in replaced))
    # A load that called none of the loaders was a dummy.
    if measured or not replaced:
        _measured.update({model: {}, **measured})


def _attach(model: Module, counted: list[tuple[Module, str, _Calls]], replaced: list[tuple[Any, _Calls]]) -> None:
    """Put a counter in the place of every loader that is not the default one.

    A tensor with the default loader, or none, is loaded whole by one call. It is left alone: some models ask whether
    there is a loader, or whether it is the default one, and some have many such tensors.
    """
    default = sys.modules[_LAYERWISE].default_weight_loader
    known: dict[int, _Calls] = {}
    for layer in model.modules():
        found = []
        for tensors in (layer._parameters, layer._buffers):
            for name, tensor in tensors.items():
                loader = getattr(tensor, "weight_loader", None)
                if loader is not None and loader is not default:
                    found.append((name, tensor, loader))
        # Online quantization has wrapped such a layer's loaders itself, and replays them.
        if any(getattr(loader, "__name__", "") == _ONLINE_LOADER for _, _, loader in found):
            continue
        for name, tensor, loader in found:
            calls = known.get(id(tensor))
            if calls is None:
                calls = known[id(tensor)] = _Calls(loader)
                tensor.weight_loader = calls
                replaced.append((tensor, calls))
            # A tied parameter is loaded for all the layers that hold it.
            counted.append((layer, name, calls))


class _Calls:
    """Stands for a tensor's loader during the first load and counts its calls.

    Like wrapt's proxies it is equal to what it stands for and has its attributes; unlike them it costs half a
    microsecond a call, of which a load makes tens of thousands. A call that returns False has refused its tensor,
    that of an expert of another rank.
    """

    __slots__ = ("__wrapped__", "number")

    def __init__(self, loader: Callable[..., Any]) -> None:
        self.__wrapped__ = loader
        self.number = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.__wrapped__(*args, **kwargs)
        if result is not False:
            self.number += 1
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def __eq__(self, other: object) -> bool:
        return bool(self.__wrapped__ == other)

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __copy__(self) -> Any:
        return self.__wrapped__

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return operator.itemgetter(0), ((self.__wrapped__,),)


# A reload: hold a layer back until what was measured is there.


class _Reload:
    """One layerwise reload of one model.

    Args:
        measured: whether the model's first load was.
    """

    def __init__(self, measured: bool) -> None:
        self.measured = measured
        #: For each layer, the loader calls that have come by tensor name.
        self.calls: WeakKeyDictionary[Module, Counter[str]] = WeakKeyDictionary()
        #: Layers that stock would have processed, each with what it has of the layer and the stream on which it would.
        self.held: WeakKeyDictionary[Module, Any] = WeakKeyDictionary()
        #: The one among them for which everything has come.
        self.ready: ref[Module] | None = None
        #: While a layer is processed, or the reload ends, processing is not held back.
        self.processing = False

    def expected(self, layer: Module) -> dict[str, int]:
        """The calls to wait for, by the names of the tensors whose loaders buffer; empty for stock's trigger."""
        try:
            return self._expected(layer) if self.measured else {}
        except Exception as error:
            self.measured = False
            _warn("this reload has stock's trigger from here on", error)
            return {}

    def _expected(self, layer: Module) -> dict[str, int]:
        layerwise = sys.modules[_LAYERWISE]
        measured = _measured.get(layer, {})
        found = {}
        for name, tensor in layerwise.get_layer_tensors(layer).items():
            if getattr(getattr(tensor, "weight_loader", None), "__name__", "") != _ONLINE_LOADER:
                continue
            if name in measured:
                found[name] = measured[name]
            elif layerwise._get_original_loader(tensor) is layerwise.default_weight_loader:
                found[name] = 1
        return found

    def arrived(self, layer: Module) -> None:
        """Say that a layer that is held back is ready, if everything has come for it."""
        calls: Mapping[str, int] = self.calls.get(layer, {})
        if all(calls.get(name, 0) >= number for name, number in self.expected(layer).items()):
            self.ready = ref(layer)

    def is_ready(self, layer: Module) -> bool:
        """Whether everything has come for a layer that is held back."""
        return self.ready is not None and self.ready() is layer

    def settle(self, arriving: Module) -> None:
        """Process the layer that is ready, unless the load that arrives is for it."""
        ready = self.ready() if self.ready is not None else None
        if ready is not None and ready is not arriving:
            self.process(ready)

    def process(self, layer: Module) -> None:
        """Process a layer that was held back, on the stream on which stock would have: its tensors come there."""
        layerwise = sys.modules[_LAYERWISE]
        info, stream = self.held.pop(layer)
        self.ready = None
        if not info.can_load():
            return
        before, self.processing = self.processing, True
        try:
            with _on(stream):
                layerwise._layerwise_process(layer, info)
        finally:
            self.processing = before


def _stream() -> Any:
    """The current CUDA stream, None where CUDA is not in use."""
    cuda = sys.modules["torch"].cuda
    return cuda.current_stream() if cuda.is_initialized() else None


@contextlib.contextmanager
def _on(stream: Any) -> Iterator[None]:
    """Queue work on a stream, and what comes after on the current one behind it."""
    current = _stream()
    if stream is None or stream == current:
        yield
        return
    with sys.modules["torch"].cuda.stream(stream):
        yield
    current.wait_stream(stream)


def initialize_layerwise_reload(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Begin a reload: nothing is pending, and what an abandoned one left is put back."""
    model = args[0] if args else kwargs["model"]
    reload = _Reload(model in _measured)
    try:
        _put_back(model)
        for layer in model.modules():
            _reloads[layer] = reload
    except Exception as error:
        _forget(reload)
        _warn("this reload has stock's trigger", error)
    return wrapped(*args, **kwargs)


def _put_back(model: Module) -> None:
    """Undo what a reload that raised has left.

    Stock goes on with its half filled buffers: a retry then counts tensors twice, processes the layer early and
    drops the rest; and a layer whose processing raised is never processed again.
    """
    layerwise = sys.modules[_LAYERWISE]
    abandoned = 0
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
            info.reset()
            abandoned += 1
    if abandoned:
        if hasattr(model, "_original_do_torchao_reload"):
            model._do_torchao_reload = model._original_do_torchao_reload
        RECORD.count(PATCH.name, "reloads_abandoned")
        logger.warning("vllm-hotfix: an earlier reload did not finish; its %d layers are loaded anew", abandoned)


def make_online_process_loader(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let the arrival of a load for one layer process the other one that is ready."""
    loader = wrapped(*args, **kwargs)
    # Stock keeps these loaders with the layer's metadata and uses them in later reloads too.
    layer_ref = ref(args[0] if args else kwargs["layer"])
    name = args[1] if len(args) > 1 else kwargs["param_name"]

    def arrive(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = layer_ref()
        reload = _reloads.get(layer) if layer is not None else None
        if reload is None or not reload.measured:
            return wrapped(*args, **kwargs)
        reload.settle(layer)
        held = layer in reload.held
        result = wrapped(*args, **kwargs)
        if result is not False:
            reload.calls.setdefault(layer, Counter())[name] += 1
        if layer in reload.held and not reload.is_ready(layer):
            reload.arrived(layer)
            if not held:
                RECORD.count(PATCH.name, "layers_held")
                RECORD.count(PATCH.name, "layers_triggered_early", not reload.is_ready(layer))
        return result

    # The proxy has stock's name and ``__wrapped__``, by which stock finds the original loader.
    return Proxy(loader, arrive)


def layerwise_process(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hold a layer back that stock would process now, at a loader call with which its own condition holds."""
    layer = args[0] if args else kwargs["layer"]
    reload = _reloads.get(layer)
    if reload is None or reload.processing or not (layer in reload.held or reload.expected(layer)):
        return wrapped(*args, **kwargs)
    try:
        reload.held[layer] = args[1] if len(args) > 1 else kwargs["info"], _stream()
    except Exception as error:
        reload.measured = False
        _warn("this reload has stock's trigger from here on", error)
        return wrapped(*args, **kwargs)
    return None


def finalize_layerwise_processing(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """End a reload: process what is still held back, which stock's body would drop, then stock's body."""
    model = args[0] if args else kwargs["model"]
    reload = _reloads.get(model)
    if reload is None:
        return wrapped(*args, **kwargs)
    try:
        reload.processing = True
        held = list(reload.held)
        late = sum(not reload.is_ready(layer) for layer in held)
        if late:
            RECORD.count(PATCH.name, "layers_processed_at_the_end", late)
            text = "vllm-hotfix: %d layers waited for the end of the reload: not all calls of the first load came again"
            logger.info(text, late)
        for layer in held:
            reload.process(layer)
        result = wrapped(*args, **kwargs)
        RECORD.count(PATCH.name, "reloads")
        return result
    finally:
        _forget(reload)
        RECORD.save()


def undo() -> None:
    """Give back stock's trigger in the midst of reloads: process what is held back, forget what was measured."""
    try:
        for reload in set(_reloads.values()):
            for layer in list(reload.held):
                reload.process(layer)
    finally:
        _reloads.clear()
        _measured.clear()


def _forget(reload: _Reload) -> None:
    for layer in [layer for layer, one in _reloads.items() if one is reload]:
        _reloads.pop(layer, None)


def _warn(what: str, error: Exception) -> None:
    RECORD.warn(f"{PATCH.name}: {what}: {describe(error)}")

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
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, ref

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
)

#: For each layer, the loader calls of its first load by tensor name. Weak: a freed model frees its measure.
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
    """Count every loader call of a model's tensors; the loaders are as before afterwards.

    The counts are kept if the load succeeds and called any loader.
    """
    counted: list[tuple[Module, str, _Calls]] = []
    replaced: list[tuple[Any, Any, _Calls]] = []
    try:
        try:
            _attach(model, counted, replaced)
        except Exception as error:
            counted.clear()
            _warn("the first load is not measured", error)
        yield
    finally:
        for tensor, loader, calls in replaced:
            if getattr(tensor, "weight_loader", None) is not calls:
                continue  # whoever has set another one since meant it
            if loader is None:
                del tensor.weight_loader
            else:
                tensor.weight_loader = loader
    measured: dict[Module, dict[str, int]] = {}
    for layer, name, calls in counted:
        if calls.number:
            measured.setdefault(layer, {})[name] = calls.number
    _measured.update(measured)
    RECORD.count(PATCH.name, "layers_measured", len(measured))
    RECORD.count(PATCH.name, "loader_calls_measured", sum(calls.number for *_, calls in replaced))


def _attach(model: Module, counted: list[tuple[Module, str, _Calls]], replaced: list[tuple[Any, Any, _Calls]]) -> None:
    """Put a counter in the place of every tensor's loader. Some models have many small layers, so this is frugal."""
    default = sys.modules[_LAYERWISE].default_weight_loader
    known: dict[int, _Calls] = {}
    for layer in model.modules():
        found = []
        for tensors in (layer._parameters, layer._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    found.append((name, tensor, getattr(tensor, "weight_loader", None)))
        # Online quantization has wrapped such a layer's loaders itself, and replays them.
        if any(loader is not None and getattr(loader, "__name__", "") == _ONLINE_LOADER for _, _, loader in found):
            continue
        for name, tensor, loader in found:
            calls = known.get(id(tensor))
            if calls is None:
                # Models fall back to the default loader where a tensor has none.
                calls = known[id(tensor)] = _Calls(loader or default)
                tensor.weight_loader = calls
                replaced.append((tensor, loader, calls))
            # A tied parameter is loaded for all the layers that hold it.
            counted.append((layer, name, calls))


class _Calls:
    """Stands for a tensor's loader during the first load and counts its calls.

    Like wrapt's proxies it is equal to what it stands for (models ask whether a loader is the default one) and has its
    attributes; unlike them it costs half a microsecond a call, of which a load makes tens of thousands.
    """

    __slots__ = ("__wrapped__", "number")

    def __init__(self, loader: Callable[..., Any]) -> None:
        self.__wrapped__ = loader
        self.number = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.number += 1
        return self.__wrapped__(*args, **kwargs)

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
    """One layerwise reload of one model."""

    def __init__(self) -> None:
        #: Layers that stock would have processed and that are held back.
        self.held: WeakSet[Module] = WeakSet()
        #: The one among them for which everything has come.
        self.ready: ref[Module] | None = None
        #: While a layer is processed, or the reload ends, processing is not held back.
        self.processing = False

    def settle(self, arriving: Module) -> None:
        """Process the layer that is ready, unless the load that arrives is for it."""
        ready = self.ready() if self.ready is not None else None
        if ready is not None and ready is not arriving:
            self.process(ready)

    def process(self, layer: Module) -> None:
        """Process a layer that was held back."""
        layerwise = sys.modules[_LAYERWISE]
        self.held.discard(layer)
        self.ready = None
        info = layerwise.get_layerwise_info(layer)
        if not info.can_load():
            return
        before, self.processing = self.processing, True
        try:
            layerwise._layerwise_process(layer, info)
        finally:
            self.processing = before


def initialize_layerwise_reload(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Begin a reload: nothing is pending, and what an abandoned one left is put back."""
    model = args[0] if args else kwargs["model"]
    try:
        _put_back(model)
        reload = _Reload()
        for layer in model.modules():
            _reloads[layer] = reload
    except Exception as error:
        _forget(model)
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
    layer = ref(args[0] if args else kwargs["layer"])

    def arrive(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arriving = layer()
        reload = _reloads.get(arriving) if arriving is not None else None
        if reload is not None:
            reload.settle(arriving)
        return wrapped(*args, **kwargs)

    # The proxy has stock's name and ``__wrapped__``, by which stock finds the original loader.
    return Proxy(loader, arrive)


def layerwise_process(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hold a layer back that stock would process now; stock's own condition holds whenever this is called."""
    layer = args[0] if args else kwargs["layer"]
    info = args[1] if len(args) > 1 else kwargs["info"]
    reload = _reloads.get(layer)
    if reload is None or reload.processing or not (expected := _expected(layer)):
        return wrapped(*args, **kwargs)
    arrived = _arrived(info.loaded_weights, expected)
    if layer not in reload.held:
        reload.held.add(layer)
        RECORD.count(PATCH.name, "layers_held")
        RECORD.count(PATCH.name, "layers_triggered_early", not arrived)
    if arrived:
        reload.ready = ref(layer)
    return None


def _expected(layer: Module) -> dict[str, int]:
    """The calls to wait for, by tensor name: those measured, where the tensor's loader buffers in this reload."""
    measured = _measured.get(layer)
    if not measured:
        return {}
    return {
        name: measured[name]
        for name, tensor in sys.modules[_LAYERWISE].get_layer_tensors(layer).items()
        if name in measured and getattr(getattr(tensor, "weight_loader", None), "__name__", "") == _ONLINE_LOADER
    }


def _arrived(loaded: list[tuple[str, Any]], expected: dict[str, int]) -> bool:
    if len(loaded) < sum(expected.values()):
        return False
    calls = Counter(name for name, _ in loaded)
    return all(calls[name] >= number for name, number in expected.items())


def finalize_layerwise_processing(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """End a reload: process what is still held back, which stock's body would drop, then stock's body."""
    model = args[0] if args else kwargs["model"]
    reload = _reloads.get(model)
    if reload is None:
        return wrapped(*args, **kwargs)
    try:
        reload.processing = True
        for layer in [layer for layer in model.modules() if layer in reload.held]:
            if reload.ready is None or reload.ready() is not layer:
                RECORD.count(PATCH.name, "layers_processed_at_the_end")
            reload.process(layer)
        result = wrapped(*args, **kwargs)
        RECORD.count(PATCH.name, "reloads")
        return result
    finally:
        _forget(model)
        RECORD.save()


def undo() -> None:
    """Give back stock's trigger in the midst of reloads: process what is held back, forget what was measured."""
    for reload in set(_reloads.values()):
        for layer in list(reload.held):
            reload.process(layer)
    _reloads.clear()
    _measured.clear()


def _forget(model: Module) -> None:
    for layer in model.modules():
        _reloads.pop(layer, None)


def _warn(what: str, error: Exception) -> None:
    RECORD.warn(f"{PATCH.name}: {what}: {type(error).__name__}: {error}")

"""What keep_moe_kernel does with two kernels that it compares, on small ones made by hand for each case.

`test_keep_moe_kernel.py` and `test_keep_moe_kernel_fp8.py` show it on the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from patching import counters, state_of
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

from vllm_hotfix._patches import keep_moe_kernel
from vllm_hotfix._record import RECORD, Entry

NAME = "keep_moe_kernel"


class Kernel(SimpleNamespace):
    """A kernel that holds whatever it is given."""


@dataclass
class Descriptor:
    """What a quant config is made of: its fields are complete as soon as it is made."""

    scale: Any = None


class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("scale",)

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale


class Case:
    """A layer of the first load with its kernel, to be reloaded with another one.

    Args:
        build: makes the kernel of a layer, whose tensors are full of its `number`.
    """

    def __init__(self, build: Callable[[Any], Any]) -> None:
        self.build = build
        self.layer = self._layer(1)
        self.method = SimpleNamespace(moe_kernel=build(self.layer), moe_quant_config=None)

    @staticmethod
    def _layer(number: float) -> Any:
        layer: Any = nn.Module()
        layer.number = number
        layer.weight = nn.Parameter(torch.full((4, 3), float(number)), requires_grad=False)
        return layer

    def reload(self, number: float = 2, build: Callable[[Any], Any] | None = None) -> Any:
        """Do to the layer what a layerwise reload does, and return the kernel that stands in the method then."""
        info = layerwise.get_layerwise_info(self.layer)
        first = self.layer._parameters.copy()
        info.kernel_tensors = (first, {})
        new = self._layer(number)
        self.layer._parameters.update(new._parameters)
        self.layer.number = number

        def stock(layer: Any) -> None:
            self.method.moe_kernel = (build or self.build)(layer)

        keep_moe_kernel.keep(stock, self.method, (self.layer,), {})
        layerwise._copy_and_restore_kernel_tensors(self.layer, info)
        info.reset()
        return self.method.moe_kernel


def full(layer: Any, *shape: int) -> Tensor:
    """Return a tensor full of the layer's number."""
    return torch.full(shape or (4,), float(layer.number))


def is_full(tensor: Tensor, number: float = 2) -> bool:
    """Say whether all of a tensor is that number."""
    return bool((tensor == number).all())


@pytest.fixture(autouse=True)
def active(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the patch on, as far as these tests see."""
    monkeypatch.setattr(RECORD, "entries", {NAME: Entry("active")})
    monkeypatch.setattr(RECORD, "counters", {})
    monkeypatch.setattr(RECORD, "_warned", set())
    monkeypatch.setattr(RECORD, "save", lambda: None)
    yield
    keep_moe_kernel.undo()


def reason() -> str:
    """Return why graphs are stale."""
    state, why = state_of(NAME)
    return why if state == "stale-graphs" else ""


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "attribute": lambda one: Kernel(scale=one),
    "list": lambda one: [None, one],
    "dict": lambda one: {"a": {"b": one}},
    "tuple": lambda one: (1, (one,)),
    "dataclass": Descriptor,
    "slots": Slotted,
    "experts within experts": lambda one: Kernel(experts=Kernel(quant_config=Descriptor(one))),
}


def first_tensor(one: Any) -> Tensor:
    """Return the tensor that a holder holds."""
    while not isinstance(one, Tensor):
        one = next(part for part in keep_moe_kernel._parts(one).values() if not isinstance(part, (int, type(None))))
    return one


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_tensors_are_found_wherever_they_are(holder: Callable[[Tensor], Any]) -> None:
    """In every kind of holder a tensor is overwritten in place, and all objects of the first kernel stay."""
    case = Case(lambda layer: Kernel(holder=holder(full(layer))))
    kernel, inside = case.method.moe_kernel, case.method.moe_kernel.holder
    tensor = first_tensor(inside)
    assert case.reload() is kernel
    assert kernel.holder is inside
    assert first_tensor(inside) is tensor
    assert is_full(tensor)
    assert counters(NAME) == {"kernels_kept": 1, "tensors_refreshed": 1}
    assert case.reload(3) is kernel
    assert is_full(tensor, 3)


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_another_form_is_rebound_wherever_it_is(holder: Callable[[Tensor], Any], logged: list[str]) -> None:
    """The first kernel holds the new tensor, named in a warning; in a tuple it cannot, and the new kernel is used."""
    case = Case(lambda layer: Kernel(other=full(layer), holder=holder(full(layer, 3 + layer.number))))
    kernel, inside = case.method.moe_kernel, case.method.moe_kernel.holder
    first, other = first_tensor(inside), kernel.other
    now = case.reload()
    assert first.shape == (4,)
    assert is_full(first, 1)
    assert "5 float32 on cpu" in reason()
    if isinstance(inside, tuple):
        assert now is not kernel
        assert is_full(other, 1), "nothing is written to a kernel that is not kept"
        assert counters(NAME) == {"kernels_replaced": 1}
        return
    assert now is kernel
    assert kernel.holder is inside
    assert first_tensor(inside).shape == (5,)
    assert is_full(other)
    assert counters(NAME) == {"kernels_kept": 1, "tensors_refreshed": 1, "tensors_rebound": 1}
    (warning, error) = logged
    assert "moe_kernel.holder" in warning
    assert "moe_kernel.holder" in error


def test_memory_of_a_parameter_is_left_to_vllm() -> None:
    """The parameter itself, views of it in any form, and what vLLM copies there after the kernel was built."""
    case = Case(lambda layer: Kernel(same=layer.weight, view=layer.weight.data[1:].t(), own=full(layer)))
    kernel = case.method.moe_kernel
    weight, view = kernel.same, kernel.view
    assert case.reload() is kernel
    assert kernel.same is weight is case.layer.weight
    assert kernel.view is view
    assert is_full(weight)
    assert is_full(view)
    assert counters(NAME)["tensors_refreshed"] == 1


def test_what_was_a_parameter_and_is_none_now_is_rebound() -> None:
    """To copy into it would be in vain: vLLM copies into that memory next, and something else."""
    case = Case(lambda layer: Kernel(scale=layer.weight if layer.number == 1 else full(layer, 4, 3) + 5))
    kernel = case.method.moe_kernel
    assert case.reload() is kernel
    assert is_full(kernel.scale, 7)
    assert is_full(case.layer.weight, 2)
    assert "was weight of the layer" in reason()


def test_what_was_no_parameter_and_is_one_now_is_copied() -> None:
    """The first kernel's memory is what graphs read, whatever the new kernel has."""
    case = Case(lambda layer: Kernel(scale=full(layer, 4, 3) if layer.number == 1 else layer.weight))
    scale = case.method.moe_kernel.scale
    assert case.reload().scale is scale
    assert is_full(scale)
    assert reason() == ""


def test_aliases_are_copied_once_and_stay_aliases() -> None:
    """One tensor under two names, and another object for the same memory, are one copy."""

    def build(layer: Any) -> Any:
        stride = full(layer)
        return Kernel(ab_strides1=stride, c_strides2=stride, view=stride[:])

    case = Case(build)
    kernel = case.method.moe_kernel
    assert case.reload().c_strides2 is kernel.ab_strides1
    assert is_full(kernel.view)
    assert counters(NAME) == {"kernels_kept": 1, "tensors_refreshed": 1}


def test_what_is_no_alias_any_more_is_rebound() -> None:
    """One place in memory cannot hold two values: the second name gets memory of its own."""

    def build(layer: Any) -> Any:
        one = full(layer)
        return Kernel(a=one, b=one if layer.number == 1 else one * 2)

    case = Case(build)
    kernel = case.reload()
    assert sorted((kernel.a[0].item(), kernel.b[0].item())) == [2, 4]
    assert "one tensor with another" in reason()


def test_elements_in_one_place_are_copied_as_one() -> None:
    """Torch refuses to copy into a tensor that `expand` made; its one element is copied."""
    case = Case(lambda layer: Kernel(scale=full(layer, 1, 3).expand(4, 3)))
    scale = case.method.moe_kernel.scale
    assert case.reload().scale is scale
    assert scale.stride() == (0, 1)
    assert is_full(scale)


@pytest.mark.parametrize("inside", [False, True], ids=["load outside", "load in inference mode"])
@pytest.mark.parametrize("reload", [False, True], ids=["reload outside", "reload in inference mode"])
def test_inference_mode_makes_no_difference(inside: bool, reload: bool) -> None:
    """Tensors made in inference mode can be written to outside of it as well, and the other way round."""
    with torch.inference_mode(inside):
        case = Case(lambda layer: Kernel(scale=full(layer)))
    scale = case.method.moe_kernel.scale
    assert scale.is_inference() == inside
    with torch.inference_mode(reload or inside):  # vLLM's own copies need the latter
        assert case.reload().scale is scale
    assert is_full(scale)


LAZY: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda layer: Kernel(scratch=full(layer) if layer.number == 1 else None, own=full(layer)),
    "object": lambda layer: Kernel(scratch=Kernel(ids=full(layer)) if layer.number == 1 else None, own=full(layer)),
    "absent": lambda layer: Kernel(**({"scratch": full(layer)} if layer.number == 1 else {}), own=full(layer)),
    "cache": lambda layer: Kernel(cache={7: full(layer)} if layer.number == 1 else {}, own=full(layer)),
    "hook": lambda layer: Kernel(hook=None, own=full(layer)) if layer.number == 1 else Kernel(own=full(layer)),
}


@pytest.mark.parametrize("build", LAZY.values(), ids=LAZY)
def test_what_a_forward_pass_has_made_stays(build: Callable[[Any], Any]) -> None:
    """The new kernel has not been at work yet: what it lacks is neither taken away nor written to."""
    case = Case(build)
    kernel = case.method.moe_kernel
    before = {name: one for name, one in vars(kernel).items() if name != "own"}
    assert case.reload() is kernel
    assert is_full(kernel.own)
    assert all(vars(kernel)[name] is one for name, one in before.items())
    assert all(is_full(first_tensor(one), 1) for one in before.values() if one is not None)
    assert reason() == ""


OTHERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "class": (lambda layer: Kernel() if layer.number == 1 else SimpleNamespace(), "class SimpleNamespace now"),
    "experts": (lambda layer: Kernel(a=Kernel() if layer.number == 1 else Slotted(full(layer))), "class Slotted now"),
    "new tensor": (lambda layer: Kernel(a=None if layer.number == 1 else full(layer)), "is a tensor now"),
    "new attribute": (lambda layer: Kernel(**({} if layer.number == 1 else {"a": full(layer)})), "is a tensor now"),
    "tensor for a number": (lambda layer: Kernel(a=1 if layer.number == 1 else full(layer)), "of class Tensor now"),
    "no scale": (lambda layer: Kernel(a=Descriptor(full(layer) if layer.number == 1 else None)), "no tensor any more"),
    "number": (lambda layer: Kernel(limit=float(layer.number)), "limit is 2.0 now and was 1.0"),
}


@pytest.mark.parametrize(("build", "words"), OTHERS.values(), ids=OTHERS)
def test_another_kernel_is_used_as_stock_would(build: Callable[[Any], Any], words: str, logged: list[str]) -> None:
    """Nothing is written to the first one, one error says what is other, and a later reload keeps the new one."""
    case = Case(lambda layer: Kernel(own=full(layer), part=build(layer)))
    kernel = case.method.moe_kernel
    now = case.reload()
    assert now is not kernel
    assert is_full(kernel.own, 1)
    assert is_full(now.own, 2)
    assert words in reason()
    assert counters(NAME) == {"kernels_replaced": 1}
    (line,) = logged
    assert words in line
    assert case.reload(2) is now
    assert len(logged) == 1


def test_parameters_of_another_shape_come_with_their_kernel() -> None:
    """Copied into the first ones, as vLLM would, one element becomes many: they stay with their kernel instead."""
    case = Case(lambda layer: Kernel(own=full(layer)))
    first = case.layer.weight
    case._layer = lambda number: SimpleNamespace(  # type: ignore[method-assign, assignment]
        _parameters={"weight": nn.Parameter(torch.full((1, 3), float(number)), requires_grad=False)}
    )
    case.reload()
    assert case.layer.weight.shape == (1, 3)
    assert is_full(case.layer.weight)
    assert is_full(first, 1)
    assert "weight is 1x3" in reason()


def test_parts_of_the_engine_are_not_walked() -> None:
    """Modules, process groups, vLLM's configuration and functions are the engine's, and stay."""
    group = type("Group", (Kernel,), {"__module__": "torch.distributed.somewhere"})
    config = type("FusedMoEConfig", (Kernel,), {})

    class Module(nn.Module):
        def __init__(self, tensor: Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(tensor, requires_grad=False)
            self.plain = tensor.clone()

    def build(layer: Any) -> Any:
        parts = {"module": Module(full(layer)), "group": group(a=full(layer)), "config": config(a=full(layer))}
        return Kernel(**parts, function=lambda: layer, method=full(layer).sum, own=full(layer))

    case = Case(build)
    kernel = case.method.moe_kernel
    before = dict(vars(kernel))
    assert case.reload() is kernel
    assert vars(kernel) == before
    assert is_full(kernel.own)
    for one in (kernel.module.weight, kernel.module.plain, kernel.group.a, kernel.config.a):
        assert is_full(one, 1)
    assert counters(NAME)["tensors_refreshed"] == 1


def test_objects_that_hold_each_other() -> None:
    """The walk ends."""

    def build(layer: Any) -> Any:
        kernel = Kernel(own=full(layer), parts=[])
        kernel.parts += [kernel, Kernel(owner=kernel)]
        return kernel

    case = Case(build)
    assert is_full(case.reload().own)


def test_a_method_has_tensors_of_its_own() -> None:
    """What hangs on the method itself, as strides do, is refreshed and put back with the kernel."""
    case = Case(lambda layer: Kernel(own=full(layer)))
    case.method.strides = strides = full(case.layer)

    def build(layer: Any) -> Any:
        case.method.strides = full(layer)
        return Kernel(own=full(layer))

    case.reload(build=build)
    assert case.method.strides is strides
    assert is_full(strides)


def test_a_build_that_fails_leaves_the_first_kernel() -> None:
    """Stock's error passes; the next reload begins from what graphs know."""

    def fail(layer: Any) -> Any:
        case.method.moe_quant_config = "half done"
        raise ValueError("stock's own")

    case = Case(lambda layer: Kernel(own=full(layer)))
    case.method.moe_quant_config = config = Descriptor(full(case.layer))
    kernel, first = case.method.moe_kernel, dict(case.layer._parameters)
    with pytest.raises(ValueError, match="stock's own"):
        case.reload(build=fail)
    assert case.method.moe_kernel is kernel
    assert case.method.moe_quant_config is config
    assert counters(NAME) == {}
    case.layer._parameters.update(first)
    assert case.reload(3) is kernel
    assert is_full(kernel.own, 3)


def test_an_error_of_the_comparison_is_stale_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the patch's own work raises, stock's new kernel is used, and nobody is told that all is well."""

    def fail(*args: Any) -> None:
        raise LookupError("injected")

    monkeypatch.setattr(keep_moe_kernel._Refresh, "apply", fail)
    case = Case(lambda layer: Kernel(own=full(layer)))
    kernel = case.method.moe_kernel
    assert case.reload() is not kernel
    assert "LookupError: injected" in reason()


def test_a_kernel_that_stock_keeps_is_no_matter() -> None:
    """Nothing is compared or counted where the reload leaves the first kernel in its place."""
    case = Case(lambda layer: Kernel(own=full(layer)))
    kernel = case.method.moe_kernel
    assert case.reload(build=lambda layer: kernel) is kernel
    assert is_full(kernel.own, 1)
    assert counters(NAME) == {}


def test_outside_a_reload_it_is_stocks() -> None:
    """Without kernel tensors of a reload the new kernel stands, whether vLLM has looked at the layer or not."""
    case = Case(lambda layer: Kernel(own=full(layer)))
    for known in (False, True):
        if known:
            layerwise.LAYERWISE_INFO[case.layer] = LayerReloadingInfo(({}, {}), torch.device("cpu"))
        new = Kernel()
        wrapped = lambda layer, new=new: setattr(case.method, "moe_kernel", new)  # noqa: E731
        keep_moe_kernel.keep(wrapped, case.method, (), {"layer": case.layer})
        assert case.method.moe_kernel is new
        assert (case.layer in layerwise.LAYERWISE_INFO) == known
    assert counters(NAME) == {}


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings and errors that the package logs in a test."""
    import logging

    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("vllm.hotfix")
    monkeypatch.setattr(log, "handlers", [*log.handlers, handler])
    monkeypatch.setattr(log, "level", logging.WARNING)
    log.manager._clear_cache()  # type: ignore[attr-defined]
    return heard

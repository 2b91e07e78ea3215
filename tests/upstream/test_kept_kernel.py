"""What keep_moe_kernel does with two kernels that it compares, on small ones made by hand for each case.

`test_keep_moe_kernel.py` and `test_keep_moe_kernel_fp8.py` show it on the real ones.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from patching import counters, hearing, state_of
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.config.vllm import get_current_vllm_config_or_none
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

from vllm_hotfix import HotfixError
from vllm_hotfix._patches import keep_moe_kernel
from vllm_hotfix._record import RECORD, Entry

NAME = "keep_moe_kernel"


class Kernel(SimpleNamespace):
    """A kernel that holds whatever it is given; its class passes for one of vLLM's, as those below."""

    __module__ = layerwise.__name__


@dataclass
class Descriptor:
    """What a quant config is made of: its fields are complete as soon as it is made."""

    __module__ = Kernel.__module__
    scale: Any = None


@dataclass(frozen=True)
class Frozen:
    """A dataclass that refuses to be written to."""

    __module__ = Kernel.__module__
    scale: Any


class Slotted:
    """An object without a `__dict__`."""

    __module__ = Kernel.__module__
    __slots__ = ("scale",)

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale


@dataclass
class Foreign:
    """An object of a package of which nothing is known."""

    number: float


Foreign.__module__ = "elsewhere"


class Case:
    """A layer of the first load with its kernel, to be reloaded with another one.

    Args:
        build: makes the kernel of a layer, whose tensors are full of its `number`.
    """

    def __init__(self, build: Callable[[Any], Any]) -> None:
        self.build = build
        self.layer = self._layer(1)
        self.method = SimpleNamespace(moe_kernel=build(self.layer), moe_quant_config=None)
        self.layer.quant_method = self.method

    @staticmethod
    def _layer(number: float) -> Any:
        layer: Any = nn.Module()
        layer.number = number
        layer.weight = nn.Parameter(torch.full((4, 3), float(number)), requires_grad=False)
        layer.bias = nn.Parameter(torch.full((4, 3), number + 10.0), requires_grad=False)
        layer.register_buffer("table", torch.full((4,), float(number)))
        return layer

    def reload(
        self, number: float = 2, build: Callable[[Any], Any] | None = None, *, wrapped: bool = True, eager: bool = False
    ) -> Any:
        """Do to the layer what a layerwise reload does, and return the kernel that stands in the method then.

        Args:
            number: what its tensors are full of.
            build: makes the kernel in this reload.
            wrapped: whether the function that builds it is one that the patch wraps.
            eager: whether the engine has no CUDA graphs.
        """

        def stock(layer: Any) -> None:
            self.method.moe_kernel = (build or self.build)(layer)

        def begin(model: Any) -> None:
            info.kernel_tensors = (self.layer._parameters.copy(), self.layer._buffers.copy())

        info = layerwise.get_layerwise_info(self.layer)
        keep_moe_kernel.initialize_layerwise_reload(begin, None, (self.layer,), {})
        new = self._layer(number)
        self.layer._parameters.update(new._parameters)
        self.layer._buffers.update(new._buffers)
        self.layer.number = number
        if wrapped:
            keep_moe_kernel.keep(stock, self.method, (self.layer,), {})
        else:
            stock(self.layer)
        with torch.inference_mode():
            layerwise._copy_and_restore_kernel_tensors(self.layer, info)
        info.reset()
        config = SimpleNamespace(enforce_eager=eager)
        keep_moe_kernel.finalize_layerwise_reload(lambda *args: None, None, (self.layer, config), {})
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


def test_memory_of_a_buffer_is_left_to_vllm() -> None:
    """It copies buffers too, or keeps what they were."""
    case = Case(lambda layer: Kernel(table=layer.table, own=full(layer)))
    kernel = case.method.moe_kernel
    table = kernel.table
    assert case.reload().table is table
    assert counters(NAME) == {"kernels_kept": 1, "tensors_refreshed": 1}


def test_memory_of_another_parameter_is_not_that_of_this_one() -> None:
    """If the new kernel reads another parameter than the first one did, the first one is made to read it."""
    case = Case(lambda layer: Kernel(scale=layer.weight if layer.number == 1 else layer.bias))
    kernel = case.method.moe_kernel
    assert case.reload() is kernel
    assert is_full(kernel.scale, 12)
    assert is_full(case.layer.weight)
    assert "was weight of the layer" in reason()


def test_views_of_one_memory_are_all_copied() -> None:
    """Two shapes of it are two tensors, and each is as the new kernel has it."""

    def build(layer: Any) -> Any:
        one = torch.stack((full(layer), full(layer) + 1))
        return Kernel(first=one[0], both=one)

    case = Case(build)
    kernel = case.reload()
    assert kernel.both.tolist() == [[2] * 4, [3] * 4]
    assert is_full(kernel.first)
    assert counters(NAME)["tensors_refreshed"] == 2


def test_a_frozen_dataclass_can_be_rebound() -> None:
    """What is frozen for others is not for a kernel that would read what is gone."""
    case = Case(lambda layer: Kernel(part=Frozen(full(layer, 3 + layer.number))))
    kernel = case.method.moe_kernel
    part = kernel.part
    assert case.reload() is kernel
    assert kernel.part is part
    assert part.scale.shape == (5,)


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
    with torch.inference_mode(reload):
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
    "new tensor": (lambda layer: Kernel(a=None if layer.number == 1 else full(layer)), "is there now and was not"),
    "new attribute": (lambda layer: Kernel(**({} if layer.number == 1 else {"a": full(layer)})), "now and was not"),
    "tensor for a number": (lambda layer: Kernel(a=1 if layer.number == 1 else full(layer)), "of class Tensor now"),
    "no scale": (lambda layer: Kernel(a=Descriptor(full(layer) if layer.number == 1 else None)), "no tensor any more"),
    "number": (lambda layer: Kernel(limit=float(layer.number)), "limit is 2.0 now and was 1.0"),
    "new number": (lambda layer: Kernel(limit=None if layer.number == 1 else 7.0), "limit is there now and was not"),
    "object of others": (lambda layer: Kernel(handle=Foreign(layer.number)), "of elsewhere, whose objects are not"),
    "no memory": (lambda layer: Kernel(a=full(layer).to("cpu" if layer.number == 1 else "meta")), "now and was 4"),
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


@pytest.mark.parametrize("weight", [torch.full((1, 3), 2.0), torch.full((4, 3), 2.0).double()], ids=["shape", "dtype"])
def test_parameters_of_another_form_come_with_their_kernel(weight: Tensor) -> None:
    """Copied into the first ones, as vLLM would, one element becomes many: they stay with their kernel instead.

    Buffers are the first ones.
    """
    case = Case(lambda layer: Kernel(own=full(layer)))
    first, table = case.layer.weight, case.layer.table
    case._layer = lambda number: SimpleNamespace(  # type: ignore[method-assign, assignment]
        _parameters={"weight": nn.Parameter(weight, requires_grad=False)}, _buffers={"table": full(case.layer) + number}
    )
    case.reload()
    assert case.layer.weight.shape == weight.shape
    assert case.layer.weight.dtype == weight.dtype
    assert is_full(case.layer.weight)
    assert is_full(first, 1)
    assert case.layer.table is table
    assert "weight is " in reason()


def test_parameters_of_the_same_form_stay_where_they_are() -> None:
    """With a kernel of another class, vLLM copies the parameters into the first ones as ever."""
    case = Case(lambda layer: Kernel(own=full(layer)))
    first = case.layer.weight
    case.reload(build=lambda layer: SimpleNamespace())
    assert case.layer.weight is first
    assert is_full(first)


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
    kernel = case.method.moe_kernel
    assert case.reload() is kernel
    assert is_full(kernel.own)


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


def test_what_the_layer_shares_with_the_new_kernel() -> None:
    """A tensor or an object that hangs on the layer as well is the first one again, and the new kernel is freed."""

    def build(layer: Any) -> Any:
        kernel = Kernel(own=full(layer), experts=Kernel())
        layer.scale, layer.provider = kernel.own, kernel.experts
        made.append(ref(kernel.experts))
        return kernel

    made: list[Any] = []
    case = Case(build)
    kernel = case.reload()
    assert case.layer.scale is kernel.own
    assert case.layer.provider is kernel.experts
    assert [one() is None for one in made] == [False, True]


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
def logged() -> Iterator[list[str]]:
    """The warnings and errors that the package logs in a test."""
    with hearing() as heard:
        yield heard


# A reload as a whole


UNKNOWN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "tensor of its own": (lambda layer: Kernel(own=full(layer), weight=layer.weight), "moe_kernel.own"),
    "another form": (lambda layer: Kernel(own=full(layer, 3 + layer.number)), "moe_kernel.own"),
    "parameters only": (lambda layer: Kernel(weight=layer.weight, view=(layer.weight[1:],)), ""),
    "another class": (lambda layer: Kernel() if layer.number == 1 else SimpleNamespace(), "class SimpleNamespace now"),
}


@pytest.mark.parametrize(("build", "words"), UNKNOWN.values(), ids=UNKNOWN)
def test_a_kernel_that_is_built_elsewhere_is_noticed(build: Callable[[Any], Any], words: str) -> None:
    """Of a method that is not wrapped the new kernel stands; what graphs read of the first one alone is said."""
    case = Case(build)
    kernel = case.method.moe_kernel
    assert case.reload(wrapped=False) is not kernel
    assert words in reason()
    assert bool(reason()) == bool(words)
    assert ("SimpleNamespace builds a kernel that this patch does not keep" in reason()) == bool(words)
    assert counters(NAME) == {}


@pytest.mark.parametrize("wrapped", [False, True])
def test_experts_that_use_their_memory_again_are_left_alone(wrapped: bool) -> None:
    """B12X's have a way of their own; stock's kernel stands, and nothing is said against it."""
    case = Case(lambda layer: Kernel(fused_experts=Kernel(own=full(layer), _reuse_prepared_storage=None)))
    kernel = case.method.moe_kernel
    assert case.reload(wrapped=wrapped) is not kernel
    assert is_full(kernel.fused_experts.own, 1)
    assert counters(NAME) == {}
    assert reason() == ""


@pytest.mark.parametrize("reuses", [False, True])
def test_a_kernel_that_stock_would_keep_is_made_anew(reuses: bool) -> None:
    """So that the first one is refreshed with all that the new one has; one that reuses memory is stock's."""

    def stock(layer: Any) -> None:
        if case.method.moe_kernel is None:
            case.method.moe_kernel = build(layer)

    def build(layer: Any) -> Any:
        experts = {"_reuse_prepared_storage": None} if reuses else {}
        return Kernel(fused_experts=Kernel(own=full(layer), **experts))

    case = Case(build)
    kernel = case.method.moe_kernel
    info = layerwise.get_layerwise_info(case.layer)
    for reloading in (False, True):
        info.kernel_tensors = (dict(case.layer._parameters), dict(case.layer._buffers)) if reloading else None
        case.layer.number = 2
        keep_moe_kernel.keep_made_anew(stock, case.method, (case.layer,), {})
        assert case.method.moe_kernel is kernel
        assert is_full(kernel.fused_experts.own, 2 if reloading and not reuses else 1)
    info.reset()


def test_without_graphs_nothing_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `enforce_eager` another kernel is as good as the first one, under STRICT too."""
    monkeypatch.setenv("VLLM_HOTFIX_STRICT", "1")
    case = Case(lambda layer: Kernel(own=full(layer)))
    assert case.reload(build=lambda layer: SimpleNamespace(), eager=True) is not None
    assert reason() == ""
    assert counters(NAME) == {"kernels_replaced": 1}


def test_strict_names_the_models_own_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model whose graphs are stale has an error of its own, at every reload, and other models have none."""
    monkeypatch.setenv("VLLM_HOTFIX_STRICT", "1")
    cases = [Case(lambda layer: Kernel(own=full(layer))) for _ in range(3)]
    for case, name in zip(cases, ("one", "two", "three"), strict=True):
        case.layer.layer_name = name
    for case in cases[:2]:
        with pytest.raises(HotfixError, match=f"keep_moe_kernel: {case.layer.layer_name}: .* restart vLLM"):
            case.reload(build=lambda layer: SimpleNamespace())
        with pytest.raises(HotfixError, match=case.layer.layer_name):
            case.reload(build=lambda layer: SimpleNamespace())
    cases[2].reload()


def test_stale_graphs_outlive_the_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turned off and on again, the patch finds at the next reload that they are still stale."""
    case = Case(lambda layer: Kernel(own=full(layer)))
    now = case.reload(build=lambda layer: Kernel(other=full(layer)))
    assert reason()
    keep_moe_kernel.undo()
    monkeypatch.setattr(RECORD, "entries", {NAME: Entry("active")})
    assert case.reload(build=lambda layer: Kernel(other=full(layer))) is now
    assert "moe_kernel.other is there now" in reason()


def test_every_layer_that_is_rebound_is_named(logged: list[str]) -> None:
    """A warning for each layer and tensor, one error for all."""
    cases = [Case(lambda layer: Kernel(own=full(layer, 3 + layer.number))) for _ in range(2)]
    for case, name in zip(cases, ("one", "two"), strict=True):
        case.layer.layer_name = name
        case.reload()
    warnings = [line for line in logged if "is stale" in line or "are stale" in line]
    assert [any(name in line for line in warnings) for name in ("one", "two")] == [True, True]
    assert len(logged) == len(warnings) + 1


def test_the_line_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """It counts this reload alone, and of one that broke off nothing."""

    def broken(*args: Any) -> None:
        raise RuntimeError("broken off")

    caplog.set_level("INFO", "vllm.hotfix")
    case = Case(lambda layer: Kernel(own=full(layer)))
    first = dict(case.layer._parameters)
    with pytest.raises(RuntimeError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(layerwise, "_copy_and_restore_kernel_tensors", broken)
        case.reload()
    case.layer._parameters.update(first)
    for _ in range(2):
        case.reload()
    lines = [record.getMessage() for record in caplog.records if "reload kept" in record.getMessage()]
    assert lines == ["vllm-hotfix: the reload kept 1 MoE kernels and refreshed 1 of their tensors"] * 2


def test_the_state_file_is_written_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that `status --live` has the counters of the last reload."""
    saved: list[dict[str, int]] = []
    monkeypatch.setattr(RECORD, "save", lambda: saved.append(dict(counters(NAME))))
    Case(lambda layer: Kernel(own=full(layer))).reload()
    assert saved == [{"kernels_kept": 1, "tensors_refreshed": 1}]


def test_a_model_that_is_gone_is_freed() -> None:
    """Nothing that the patch remembers keeps a layer, its kernel or vLLM's configuration alive."""
    config: Any = type("Config", (), {})()
    case = Case(lambda layer: Kernel(own=full(layer)))
    config.layer = case.layer  # as its static_forward_context does
    with set_current_vllm_config(config):
        keep_moe_kernel.keep(lambda layer: None, case.method, (case.layer,), {})
    case.reload()
    gone = [ref(one) for one in (case.layer, case.method.moe_kernel, config)]
    del case, config
    gc.collect()
    assert [one() for one in gone] == [None] * 3


@pytest.mark.parametrize("release", ["0.26.0", "0.27.0", "0.33.0", "1.0.dev3+g12", None])
@pytest.mark.parametrize("current", [False, True], ids=["none", "another one"])
def test_the_current_configuration_in_a_reload(
    release: str | None, current: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 0.27.0 it is that of the layer's first load, if there is none; later ones are the worker's matter."""
    monkeypatch.setattr(RECORD, "vllm", release)
    first, other = (type("Config", (), {})() for _ in range(2))
    case = Case(lambda layer: Kernel(own=full(layer)))
    seen: list[Any] = []

    def build(layer: Any) -> Any:
        seen.append(get_current_vllm_config_or_none())
        return Kernel(own=full(layer))

    with no_current_config():
        with set_current_vllm_config(first):
            keep_moe_kernel.keep(lambda layer: None, case.method, (case.layer,), {})
        with set_current_vllm_config(other) if current else contextlib.nullcontext():
            case.reload(build=build)
        assert get_current_vllm_config_or_none() is None
    (found,) = seen
    assert found is (other if current else first if release in ("0.26.0", None) else None)


@contextlib.contextmanager
def no_current_config() -> Iterator[None]:
    """Have no current configuration, as a worker between its calls; the tests have one all the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[set_current_vllm_config.__module__], "_current_vllm_config", None)
        yield

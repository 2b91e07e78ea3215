"""measured_totals on a release's real loading and reloading code, beside stock vLLM.

Where stock is wrong the exact wrong value is asserted too: if a release stops being wrong, the patch can go.
"""

from __future__ import annotations

import gc
import os
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import wrapt
from layers import (
    Host,
    Layer,
    Online,
    Piece,
    Probe,
    Stream,
    StreamLoader,
    add_attention,
    add_moe,
    experts_of,
    load_prefix,
    load_row,
    load_slice,
    moe_stream,
    pieces,
    same,
    values,
)
from packaging.version import Version
from torch import nn
from vllm.config import LoadConfig, VllmConfig
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.parameter import BasevLLMParameter

import vllm_hotfix
from vllm_hotfix._patches import measured_totals

VERSION = Version(os.environ["HOTFIX_RELEASE"])

Build = Callable[[Probe, VllmConfig], None]

# Two checkpoints of `two_experts`: weights by row, one scale per expert.
FIRST = ([[1, 2], [3, 4]], [1, 1])
SECOND = ([[50, 61], [60, 61]], [2, 2])


def two_experts() -> Layer:
    """Return a layer of 6 elements whose loaders report 8: each expert's scale is loaded as w1 and as w3."""
    return Layer(
        {"weight": (2, 2), "scale": (2,)},
        {"weight": load_row, "scale": load_row},
        lambda layer: layer.weight.sum(dim=1) * layer.scale,
    )


def experts_stream(rows: list[list[float]], scales: list[float], layer: str = "layer") -> list[Piece]:
    """Return a checkpoint of `two_experts`, the over-counted scales last."""
    weights = [Piece(f"{layer}.weight", torch.tensor(row), (expert,)) for expert, row in enumerate(rows)]
    return weights + [
        Piece(f"{layer}.scale", torch.tensor(float(scale)), (expert, shard))
        for expert, scale in enumerate(scales)
        for shard in ("w1", "w3")
    ]


def with_layers(**makers: Callable[[], nn.Module]) -> Build:
    """Return a builder of a model with these layers, made anew for every model."""

    def build(model: Probe, config: VllmConfig) -> None:
        for name, make in makers.items():
            model.add_module(name, make())

    return build


def plain() -> Layer:
    """Return a layer of one parameter with vLLM's default loader; `derived` is its double."""
    return Layer({"weight": (2,)}, formula=lambda layer: layer.weight * 2)


ONE = with_layers(layer=two_experts)
NAMES = ("layer", "other")
ALL = slice(None)

PAIR = with_layers(layer=lambda: Layer({"weight": (2,), "extra": (2,)}), other=plain)
PAIR_STREAM = [*pieces("layer.weight", [1, 2]), *pieces("layer.extra", [1, 2]), *pieces("other.weight", [1, 2])]


# The fault


def test_scales_loaded_twice_per_expert(host: Host, side: str) -> None:
    """Stock processes the layer two loads early and never sees the last scale; measured, all of it counts."""
    model = host.load(ONE, experts_stream(*FIRST))
    assert model.layer.derived.tolist() == [3, 7]
    host.reload(model, experts_stream(*SECOND))
    assert model.layer.derived.tolist() == ([222, 0] if side == "stock" else [222, 242])


@pytest.mark.parametrize("quant_config", ["ModelOptNvFp4Config", "ModelOptFp8Config"])
def test_real_experts(host: Host, side: str, quant_config: str) -> None:
    """A real MoE layer's `w13_input_scale`, streamed last, is complete with the measure on every release.

    Stock is through after half of its calls where both of an expert's two calls fill all that the expert has: the
    two columns of NVFP4 before 0.23, the one value of FP8 in every release. The largest activation scale, which
    is the last expert's, is then missing from the scale that the kernel gets. Since 0.23 each NVFP4 call fills
    the column that is its own, so the count is exact and stock is right.
    """
    models: list[nn.Module] = []

    def build(model: Probe, config: VllmConfig) -> None:
        add_moe(model, quant_config, experts=8)
        models.append(model)

    def checkpoint(seed: int, scales: torch.Tensor) -> Iterator[Piece]:
        yield from moe_stream(models[-1], seed, scales)

    old, new = torch.arange(1, 9) / 32, torch.arange(1, 9) / 16
    model = host.load(build, checkpoint(1, old))
    nvfp4 = quant_config == "ModelOptNvFp4Config"
    # What the NVFP4 kernel gets is the inverse of the largest.
    assert experts_of(model)[1].w13_input_scale.item() == (4 if nvfp4 else 0.25)
    host.reload(model, checkpoint(2, new))
    wrong = side == "stock" and not (nvfp4 and VERSION >= Version("0.23"))
    whole, half = (2, 4) if nvfp4 else (0.5, 0.25)
    assert experts_of(model)[1].w13_input_scale.item() == (half if wrong else whole)
    fresh = host.load(build, checkpoint(2, new))
    assert same(values(model), values(fresh)) == (not wrong)


# Never earlier than stock


def test_a_parameter_that_the_first_load_lacked(host: Host, side: str) -> None:
    """A reload that brings a parameter the first checkpoint did not have waits for it, as stock does."""
    build = with_layers(layer=lambda: Layer({"weight": (2,), "extra": (2,)}), other=plain)
    other = pieces("other.weight", [1, 1])
    model = host.load(build, [*pieces("layer.weight", [1, 2]), *other])
    host.reload(model, [*pieces("layer.weight", [3, 4]), *other, *pieces("layer.extra", [5, 6])])
    assert model.layer.derived.tolist() == [3, 4, 5, 6]


def test_padding_that_is_never_loaded(host: Host, side: str) -> None:
    """A layer whose padding no checkpoint has is processed at the end, with all that it was given."""
    build = with_layers(layer=lambda: Layer({"weight": (4,)}, {"weight": load_slice}), other=plain)
    first = [Piece("layer.weight", torch.tensor([1.0, 2.0]), (0,)), *pieces("other.weight", [1, 1])]
    model = host.load(build, first)
    assert model.layer.derived.tolist() == [1, 2, 0, 0]
    host.reload(model, [Piece("layer.weight", torch.tensor([3.0, 4.0]), (0,)), *pieces("other.weight", [2, 2])])
    assert model.layer.derived.tolist() == [3, 4, 0, 0]


def test_a_reload_that_fills_what_was_padding(host: Host, side: str) -> None:
    """A reload with more of a parameter than the first load had is waited for, as stock does."""
    build = with_layers(layer=lambda: Layer({"weight": (4,)}, {"weight": load_slice}), other=plain)
    other = pieces("other.weight", [1, 1])
    model = host.load(build, [Piece("layer.weight", torch.tensor([1.0, 2.0]), (0,)), *other])
    front, back = (Piece("layer.weight", torch.tensor(v), (at,)) for v, at in (([3.0, 4.0], 0), ([5.0, 6.0], 2)))
    host.reload(model, [front, *other, back])
    assert model.layer.derived.tolist() == [3, 4, 5, 6]


# Other pieces than the first load's


def fused(rows: list[list[float]], scales: list[float]) -> list[Piece]:
    """Return a checkpoint of `two_experts` with all experts in one tensor, as a trainer sends it."""
    return [Piece("layer.weight", torch.tensor(rows), (ALL,)), Piece("layer.scale", torch.tensor(scales), (ALL,))]


def test_fused_after_per_expert(host: Host, side: str) -> None:
    """A reload with fewer calls than were measured is complete at finalize, which must not lose the layer."""
    model = host.load(ONE, experts_stream(*FIRST))
    before = model.layer.quant_method.calls
    host.begin(model)
    model.load_weights(fused([[50.0, 61.0], [60.0, 61.0]], [2.0, 2.0]))
    assert model.layer.quant_method.calls == before + (side == "stock")
    host.finish(model)
    assert model.layer.quant_method.calls == before + 1
    assert model.layer.derived.tolist() == [222, 242]


def test_per_expert_after_fused(host: Host, side: str) -> None:
    """A reload with more calls than were measured is complete: a ready layer still takes its own loads."""
    model = host.load(ONE, fused([[1.0, 2.0], [3.0, 4.0]], [1.0, 1.0]))
    assert model.layer.derived.tolist() == [3, 7]
    host.reload(model, experts_stream(*SECOND))
    assert model.layer.derived.tolist() == ([222, 0] if side == "stock" else [222, 242])


# Pending layers


TWO = with_layers(layer=two_experts, other=plain)


def test_a_ready_layer_waits_for_another_layers_load(host: Host, side: str) -> None:
    """A complete layer is processed by the first load of another layer, before that layer's own turn."""
    model = host.load(TWO, [*experts_stream(*FIRST), *pieces("other.weight", [1, 2])])
    method = model.layer.quant_method
    calls = method.calls
    host.begin(model)
    seen = []

    def watched() -> Iterator[Piece]:
        for piece in experts_stream(*SECOND):
            yield piece
            seen.append(method.calls - calls)
        yield from pieces("other.weight", [5, 6])
        seen.append(method.calls - calls)

    model.load_weights(watched())
    assert seen == ([0, 0, 0, 1, 1, 1, 1] if side == "stock" else [0, 0, 0, 0, 0, 0, 1])
    host.finish(model)
    assert method.calls == calls + 1
    assert model.layer.derived.tolist() == ([222, 0] if side == "stock" else [222, 242])
    assert model.other.derived.tolist() == [10, 12]


def test_finalize_processes_the_last_pending_layer(host: Host, patched: None) -> None:
    """The layer that nothing follows is processed by finalize, once, and what it holds is in the old storage."""
    model = host.load(TWO, [*experts_stream(*FIRST), *pieces("other.weight", [1, 2])])
    method, derived = model.layer.quant_method, model.layer.derived
    calls = method.calls
    host.begin(model)
    model.load_weights([*pieces("other.weight", [5, 6]), *experts_stream(*SECOND)])
    assert method.calls == calls
    host.finish(model)
    assert method.calls == calls + 1
    assert model.layer.derived is derived
    assert derived.tolist() == [222, 242]


def test_a_pending_layer_takes_its_own_loads(host: Host, side: str) -> None:
    """A value that arrives once more for a ready layer counts; stock drops it as excessive loading."""
    model = host.load(with_layers(layer=plain, other=plain), [Piece(f"{n}.weight", torch.ones(2)) for n in NAMES])
    host.reload(model, [*pieces("layer.weight", [1, 2], [3, 4]), *pieces("other.weight", [5, 6])])
    assert model.layer.derived.tolist() == ([2, 4] if side == "stock" else [6, 8])
    assert model.other.derived.tolist() == [10, 12]


# A reload that raised


class Interrupted(Exception):
    """What a test's stream or processing raises."""


def broken(stream: Stream) -> Iterator[Piece]:
    """Yield a stream and raise where it ends."""
    yield from stream
    raise Interrupted


def test_a_stream_that_broke_off(host: Host, side: str) -> None:
    """A reload after one that raised starts clean; stock counts the first attempt's tensors into it."""
    model = host.load(PAIR, PAIR_STREAM)
    host.begin(model)
    with pytest.raises(Interrupted):
        model.load_weights(broken(pieces("layer.weight", [9, 9])))
    retry = [*pieces("layer.weight", [3, 4]), *pieces("layer.extra", [5, 6]), *pieces("other.weight", [7, 8])]
    host.reload(model, retry)
    assert model.layer.derived.tolist() == ([3, 4, 0, 0] if side == "stock" else [3, 4, 5, 6])
    assert model.other.derived.tolist() == [14, 16]


def test_a_stream_that_broke_off_with_a_layer_pending(host: Host, side: str) -> None:
    """A layer that was ready when a reload raised is loaded anew by the next, in the storage it always had."""
    model = host.load(PAIR, PAIR_STREAM)
    kept = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    host.begin(model)
    with pytest.raises(Interrupted):
        model.load_weights(broken([*pieces("layer.weight", [9, 9]), *pieces("layer.extra", [9, 9])]))
    retry = [*pieces("other.weight", [7, 8]), *pieces("layer.extra", [5, 6]), *pieces("layer.weight", [3, 4])]
    host.reload(model, retry)
    assert model.layer.derived.tolist() == [3, 4, 5, 6]
    assert model.other.derived.tolist() == [14, 16]
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == kept


@pytest.mark.parametrize("last", [False, True])
def test_processing_that_raised(host: Host, side: str, last: bool) -> None:
    """A reload after one whose processing raised is right; stock leaves the layer without its derived tensor.

    With the measure the layer is processed when another one's load arrives, or at finalize if it comes last.
    """
    model = host.load(PAIR, PAIR_STREAM)
    kept = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    method = model.layer.quant_method
    formula, method.formula = method.formula, raise_interrupted
    host.begin(model)
    with pytest.raises(Interrupted):
        model.load_weights(PAIR_STREAM[2:] + PAIR_STREAM[:2] if last else PAIR_STREAM)
        host.finish(model)
    method.formula = formula
    retry = [*pieces("layer.weight", [3, 4]), *pieces("layer.extra", [5, 6]), *pieces("other.weight", [7, 8])]
    host.reload(model, retry)
    assert model.other.derived.tolist() == [14, 16]
    if side == "stock":
        assert not hasattr(model.layer, "derived")
    else:
        assert model.layer.derived.tolist() == [3, 4, 5, 6]
        assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == kept


def raise_interrupted(layer: nn.Module) -> torch.Tensor:
    """Stand for a formula that fails."""
    raise Interrupted


def test_deactivating_in_the_middle_of_a_reload(host: Host, patched: None) -> None:
    """What is held back is processed when the patch is undone; stock, which ends the reload, would drop it."""
    model = host.load(ONE, experts_stream(*FIRST))
    host.begin(model)
    model.load_weights(experts_stream(*SECOND))
    vllm_hotfix.deactivate()
    host.finish(model)
    assert model.layer.derived.tolist() == [222, 242]


def test_deactivating_where_a_held_layer_cannot_be_processed(host: Host, patched: None) -> None:
    """Its error is a warning, and everything is undone all the same: stock's functions are back."""
    model = host.load(ONE, experts_stream(*FIRST))
    host.begin(model)
    model.load_weights(experts_stream(*SECOND))

    def fail(layer: nn.Module) -> None:
        raise Interrupted

    model.layer.quant_method.process_weights_after_loading = fail
    vllm_hotfix.deactivate()
    assert not isinstance(layerwise._layerwise_process, wrapt.ObjectProxy)
    assert not isinstance(layerwise.finalize_layerwise_processing, wrapt.ObjectProxy)


def load_local_row(param: torch.Tensor, loaded: torch.Tensor, expert: int, shard: str = "") -> bool:
    """Refuse the experts of another rank, as vLLM's expert loaders do; this rank has the experts 2 and 3."""
    if expert < 2:
        return False
    load_row(param, loaded, expert - 2)
    return True


@pytest.mark.parametrize("filtered", [True, False])
def test_experts_of_other_ranks(host: Host, side: str, filtered: bool) -> None:
    """A refused tensor is not one that has come, whether the first load had the other ranks' experts or not."""

    def make() -> Layer:
        loaders = {"weight": load_local_row, "scale": load_local_row}
        return Layer({"weight": (2, 2), "scale": (2,)}, loaders, lambda layer: layer.weight.sum(dim=1) * layer.scale)

    def stream(rows: list[list[float]], scales: list[float]) -> list[Piece]:
        return experts_stream([[7, 7], [7, 7], *rows], [7, 7, *scales])

    first = stream(*FIRST)
    if filtered:
        first = [piece for piece in first if piece.args[0] >= 2]
    model = host.load(with_layers(layer=make, other=plain), [*first, *pieces("other.weight", [1, 2])])
    second = stream(*SECOND)
    host.reload(model, [*second[:-2], *pieces("other.weight", [5, 6]), *second[-2:]])
    assert model.layer.derived.tolist() == [222, 0 if side == "stock" else 242]
    assert model.other.derived.tolist() == [10, 12]


def test_a_rank_without_experts(host: Host, side: str) -> None:
    """A layer of no elements, every tensor of which is refused, is complete at once and does no harm."""

    def refuse(param: torch.Tensor, loaded: torch.Tensor, expert: int, shard: str = "") -> bool:
        return False

    def make() -> Layer:
        loaders = {"weight": refuse, "scale": refuse}
        tensors = {"weight": (0, 2), "scale": (0,), "extra": (0,)}  # the last one with the default loader
        return Layer(tensors, loaders, lambda layer: layer.weight.sum(dim=1) * layer.scale)

    def stream(rows: list[list[float]], scales: list[float]) -> list[Piece]:
        return [*experts_stream(rows, scales), *experts_stream(rows, scales, "other")]

    model = host.load(with_layers(layer=make, other=two_experts), stream(*FIRST))
    host.reload(model, stream(*SECOND))
    assert model.layer.derived.tolist() == []
    assert model.other.derived.tolist() == [222, 0 if side == "stock" else 242]


def test_an_error_in_the_measure_leaves_stock(host: Host, patched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with what was measured, the reload goes on with stock's trigger."""
    model = host.load(ONE, experts_stream(*FIRST))
    monkeypatch.setitem(measured_totals._measured, model.layer, None)
    host.reload(model, experts_stream(*SECOND))
    assert model.layer.derived.tolist() == [222, 0]


def test_tensors_with_the_default_loader_are_left_alone(host: Host, patched: None) -> None:
    """Some models ask whether a tensor has a loader; during the first load the answer is stock's."""
    seen: dict[str, Any] = {}

    def looking(stream: Stream) -> Iterator[Piece]:
        for name, layer in models[0].named_children():
            seen[name] = vars(layer.weight).get("weight_loader", "none")
        yield from stream

    models: list[nn.Module] = []

    def explicit() -> Layer:
        return Layer({"weight": (2,)}, {"weight": default_weight_loader})

    def build(model: Probe, config: VllmConfig) -> None:
        with_layers(layer=two_experts, none=plain, default=explicit)(model, config)
        models.append(model)

    ones = [Piece(f"{name}.weight", torch.ones(2)) for name in ("none", "default")]
    host.load(build, looking([*experts_stream(*FIRST), *ones]))
    assert seen["none"] == "none"
    assert seen["default"] is default_weight_loader
    assert seen["layer"] is not load_row
    assert seen["layer"] == load_row


def test_a_layer_that_a_reload_leaves_out(host: Host, side: str) -> None:
    """A layer for which nothing comes keeps what it has, in the same storage."""
    model = host.load(TWO, [*experts_stream(*FIRST), *pieces("other.weight", [1, 2])])
    derived = model.layer.derived
    host.reload(model, pieces("other.weight", [5, 6]))
    assert model.layer.derived is derived
    assert derived.tolist() == [3, 7]
    assert model.other.derived.tolist() == [10, 12]


# More than one of everything


def test_ten_reloads(host: Host, side: str) -> None:
    """Every reload is judged by the same measure and ends in the storage that the first load made."""
    model = host.load(ONE, experts_stream(*FIRST))
    storage = model.layer.derived.data_ptr()
    for turn in range(1, 11):
        host.reload(model, experts_stream([[turn, 1], [turn, 2]], [10, 10]))
        right = [10 * (turn + 1), 10 * (turn + 2)]
        assert model.layer.derived.tolist() == ([right[0], 0] if side == "stock" else right)
        assert model.layer.derived.data_ptr() == storage


def test_two_models_in_turns(host: Host, patched: None) -> None:
    """Two reloads that interleave keep their pending layers apart."""
    first, second = (host.load(TWO, [*experts_stream(*FIRST), *pieces("other.weight", [1, 2])]) for _ in range(2))
    calls = [model.layer.quant_method.calls for model in (first, second)]
    for model in (first, second):
        host.begin(model)
    first.load_weights(experts_stream(*SECOND))
    second.load_weights(experts_stream(*SECOND))
    second.load_weights(pieces("other.weight", [3, 4]))
    first.load_weights(experts_stream([[50, 50], [60, 60]], [1, 1]))
    assert [model.layer.quant_method.calls for model in (first, second)] == [calls[0], calls[1] + 1]
    first.load_weights(pieces("other.weight", [5, 6]))
    for model in (second, first):
        host.finish(model)
    assert first.layer.derived.tolist() == [100, 120]
    assert second.layer.derived.tolist() == [222, 242]
    assert (first.other.derived.tolist(), second.other.derived.tolist()) == ([10, 12], [6, 8])


def test_a_reload_of_one_model_leaves_anothers_alone(host: Host, patched: None) -> None:
    """A reload that begins clears what is pending in its own model only."""
    first, second = (host.load(ONE, experts_stream(*FIRST)) for _ in range(2))
    host.begin(first)
    first.load_weights(experts_stream(*SECOND))
    host.reload(second, experts_stream([[1, 1], [2, 2]], [1, 1]))
    host.finish(first)
    assert first.layer.derived.tolist() == [222, 242]
    assert second.layer.derived.tolist() == [2, 4]


def test_tied_parameters(host: Host, side: str) -> None:
    """A parameter that two layers share stays shared and has the reloaded value in both."""

    def build(model: Probe, config: VllmConfig) -> None:
        model.embedding, model.head, model.other = plain(), nn.Module(), plain()
        model.head.register_parameter("weight", model.embedding.weight)

    model = host.load(build, [*pieces("embedding.weight", [1, 2]), *pieces("other.weight", [1, 1])])
    host.reload(model, [*pieces("embedding.weight", [3, 4]), *pieces("other.weight", [2, 2])])
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.tolist() == [3, 4]
    assert model.embedding.derived.tolist() == [6, 8]


def scales(key: float, value: float) -> list[Piece]:
    """Return a checkpoint of `add_attention`."""
    return [*pieces("attention.k_scale", key), *pieces("attention.v_scale", value)]


def test_attention_waits_for_finalize(host: Host, side: str) -> None:
    """A real attention layer's scales are taken at finalize as in stock; their load ends the wait of the others."""

    def build(model: Probe, config: VllmConfig) -> None:
        model.layer = two_experts()
        add_attention(model, config)

    model = host.load(build, [*experts_stream(*FIRST), *scales(0.5, 0.25)])
    assert (model.attention._k_scale.item(), model.attention._v_scale.item()) == (0.5, 0.25)
    calls = model.layer.quant_method.calls
    host.begin(model)
    model.load_weights([*experts_stream(*SECOND), *scales(0.125, 0.75)])
    assert model.layer.quant_method.calls == calls + 1
    host.finish(model)
    assert (model.attention._k_scale.item(), model.attention._v_scale.item()) == (0.125, 0.75)
    assert model.layer.derived.tolist() == ([222, 0] if side == "stock" else [222, 242])


def test_attention_after_a_stream_that_broke_off(host: Host, side: str) -> None:
    """An attention layer that a broken reload had begun to fill gets the next one's scales."""
    model = host.load(add_attention, scales(0.5, 0.25))
    host.begin(model)
    with pytest.raises(Interrupted):
        model.load_weights(broken(scales(9, 9)))
    host.reload(model, scales(0.125, 0.75))
    assert (model.attention._k_scale.item(), model.attention._v_scale.item()) == (0.125, 0.75)


def test_a_bias(host: Host, side: str) -> None:
    """A layer's `bias`, which vLLM does not move to the meta device from 0.31 on, is counted and reloaded too."""

    def make() -> Layer:
        layer = two_experts()
        layer.bias = nn.Parameter(torch.zeros(2), requires_grad=False)
        return layer

    build = with_layers(layer=make, other=plain)
    other = pieces("other.weight", [1, 2])
    model = host.load(build, [*pieces("layer.bias", [1, 2]), *experts_stream(*FIRST), *other])
    host.reload(model, [*pieces("layer.bias", [3, 4]), *experts_stream(*SECOND), *other])
    assert model.layer.bias.tolist() == [3, 4]
    assert model.layer.derived.tolist() == ([222, 0] if side == "stock" else [222, 242])


class OnlineLayer(nn.Module):
    """A layer that its quantization method wraps at once, before `bias` is registered, as vLLM's linears are."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.empty(2, device="meta")  # materialized and processed during loading
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.quant_method = Online(lambda layer: layer.weight * 2)
        layerwise.initialize_online_processing(self)
        self.bias = nn.Parameter(torch.zeros(2), requires_grad=False)


def test_online_quantization(host: Host, side: str) -> None:
    """A layer that is quantized while it loads, its late `bias` too, loads and reloads as in stock."""
    build = with_layers(layer=OnlineLayer, other=two_experts)

    def stream(weight: list[float], bias: list[float], checkpoint: tuple[Any, Any]) -> list[Piece]:
        own = [*pieces("layer.weight", weight), *pieces("layer.bias", bias)]
        return [*own, *experts_stream(*checkpoint, layer="other")]

    model = host.load(build, stream([1, 2], [3, 4], FIRST))
    # In 0.20 a bias that follows the weight goes to a tensor that the layer has just let go of.
    late = [0, 0] if VERSION < Version("0.21") else [3, 4]
    assert (model.layer.derived.tolist(), model.layer.bias.tolist()) == ([2, 4], late)
    for weight, bias in (([5, 6], [7, 8]), ([9, 10], [11, 12])):
        host.reload(model, stream(weight, bias, SECOND))
        assert (model.layer.derived.tolist(), model.layer.bias.tolist()) == ([2 * w for w in weight], bias)
        assert model.other.derived.tolist() == ([222, 0] if side == "stock" else [222, 242])


def test_a_freed_model_is_gone(host: Host, side: str) -> None:
    """The measure does not keep a model or its layers alive."""
    model = host.load(ONE, experts_stream(*FIRST))
    references = [weakref.ref(model), weakref.ref(model.layer), weakref.ref(model.layer.scale)]
    del model
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]


# Loaders


class Keeper(nn.Module):
    """One tensor of every kind that a loader can hang on."""

    def __init__(self) -> None:
        super().__init__()
        self.bare = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.function = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.function.weight_loader = load_prefix
        self.method = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.method.weight_loader = self.load
        self.vllm = BasevLLMParameter(data=torch.zeros(2), weight_loader=load_prefix)
        self.register_buffer("buffer", torch.zeros(2))

    def load(self, param: torch.Tensor, loaded: torch.Tensor) -> None:
        """Load a parameter."""
        param.data.copy_(loaded)


KEEPER = [
    piece for name in ("bare", "function", "method", "vllm", "buffer") for piece in pieces(f"layer.{name}", [1, 2])
]


@pytest.mark.parametrize("fails", [False, True])
def test_loaders_are_as_before(host: Host, side: str, fails: bool) -> None:
    """After a first load, also one that raised, every tensor has the loader it had, or none."""
    built: list[Any] = []

    def build(model: Probe, config: VllmConfig) -> None:
        model.layer = Keeper()
        tensors = [*model.layer.named_parameters(), *model.layer.named_buffers()]
        built.extend((name, tensor, dict(tensor.__dict__)) for name, tensor in tensors)

    if fails:
        with pytest.raises(Interrupted):
            host.load(build, broken(KEEPER))
    else:
        host.load(build, KEEPER)
    assert len(built) == len(KEEPER)
    for _, tensor, before in built:
        assert tensor.tolist() == [1, 2]
        assert tensor.__dict__.keys() == before.keys()
        assert all(tensor.__dict__[key] is value for key, value in before.items())


def test_a_first_load_that_raised_leaves_stock(host: Host, side: str) -> None:
    """Half a measure is none: a model whose first load raised is reloaded by the stock trigger."""
    models: list[Any] = []

    def build(model: Probe, config: VllmConfig) -> None:
        ONE(model, config)
        models.append(model)

    with pytest.raises(Interrupted):
        host.load(build, broken(experts_stream(*FIRST)))
    host.reload(models[0], experts_stream(*SECOND))
    assert models[0].layer.quant_method.last.tolist() == [222, 0]


def dummy(load_config: LoadConfig, stream: Stream) -> DummyModelLoader:
    """Return vLLM's dummy loader, which fills parameters without their loaders."""
    return DummyModelLoader(LoadConfig(load_format="dummy", device="cpu"))


class OwnLoadModel(StreamLoader):
    """A loader with a `load_model` of its own, as the GGUF, Tensorizer and ModelExpress loaders have."""

    def load_model(self, vllm_config: VllmConfig, model_config: Any, prefix: str = "") -> nn.Module:
        """Load without the base class."""
        device = torch.device("cpu")
        with device:
            model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        self.load_weights(model, model_config)
        process_weights_after_loading(model, model_config, device)
        return model.eval()


@pytest.mark.parametrize("loader", [dummy, OwnLoadModel])
def test_a_load_that_measures_nothing_leaves_stock(host: Host, side: str, loader: Any) -> None:
    """After a dummy load, or one that does not pass through the base class, the stock trigger is in force."""
    model = host.load(ONE, experts_stream(*FIRST), loader)
    host.reload(model, experts_stream(*SECOND))
    assert model.layer.derived.tolist() == [222, 0]


# All of it at random


def random_model(rng: random.Random) -> tuple[Build, Callable[[random.Random], list[Piece]]]:
    """Return a builder of a model with random layers and what makes checkpoints for it.

    A tensor is loaded whole, by expert, twice by expert, three times over, or with padding behind it.
    """
    plans = []
    for index in range(rng.randint(2, 5)):
        kinds = rng.choices(["whole", "rows", "twice", "thrice", "padded"], k=rng.randint(1, 4))
        plans.append((f"layer{index}", [(f"p{i}", kind, rng.randint(2, 4)) for i, kind in enumerate(kinds)]))

    def make(plan: list[tuple[str, str, int]]) -> Layer:
        loaders = {"rows": load_row, "twice": load_row, "padded": load_prefix}
        return Layer(
            {name: (size, 2) if kind in ("rows", "twice") else (size,) for name, kind, size in plan},
            {name: loaders[kind] for name, kind, _ in plan if kind in loaders},
        )

    def stream(values: random.Random) -> list[Piece]:
        result = []
        for layer, plan in plans:
            for name, kind, size in plan:
                if kind in ("rows", "twice"):
                    for expert in range(size):
                        value = torch.tensor(values.random())
                        result += [Piece(f"{layer}.{name}", value, (expert,))] * (2 if kind == "twice" else 1)
                else:
                    value = torch.tensor([values.random() for _ in range(size - (kind == "padded"))])
                    result += [Piece(f"{layer}.{name}", value)] * (3 if kind == "thrice" else 1)
        return result

    return with_layers(**{layer: (lambda plan=plan: make(plan)) for layer, plan in plans}), stream


def test_a_reload_equals_a_fresh_load(host: Host, side: str) -> None:
    """Whatever the shapes and the order, a reload ends bit for bit as a fresh load; stock does not always."""
    wrong = []
    for seed in range(40):
        rng = random.Random(seed)
        build, checkpoint = random_model(rng)
        model = host.load(build, checkpoint(random.Random(-1)))
        for turn in range(3):
            stream = checkpoint(random.Random(turn))
            fresh = values(host.load(build, stream))
            # In file order; layer by layer with its tensors shuffled; and everything shuffled.
            order = list(stream)
            if turn:
                rng.shuffle(order)
            if turn == 1:
                order.sort(key=lambda piece: piece.name.partition(".")[0])
            host.reload(model, order)
            if not same(values(model), fresh):
                wrong.append((seed, turn))
    assert bool(wrong) == (side == "stock"), wrong

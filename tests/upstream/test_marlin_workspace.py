"""marlin_workspace on a release's real conversions to Marlin's format and its real reload, beside stock vLLM.

Stock moves what graphs captured in 0.20.0 to 0.26.0. From 0.27.0 on it has the fix, and the patch has nothing to do.
Stood in for: the compiled change of layout, the number of a GPU's processors, and Marlin's kernel itself, of which
there is only what it reads. That freed memory is used by others is played by writing to it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import Graph
from layers import Derive, Host, Layer, Piece, Probe, accepted, same, values
from packaging.version import Version
from patching import counters, hearing, state_of, switched_on
from torch import nn
from vllm import _custom_ops
from vllm.config import VllmConfig
from vllm.model_executor.kernels.linear.mixed_precision import marlin
from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4, marlin_utils_fp8
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter, RowvLLMParameter
from vllm.scalar_type import scalar_types

from vllm_hotfix._patches import marlin_workspace
from vllm_hotfix._record import RECORD

VERSION = Version(os.environ["HOTFIX_RELEASE"])
FIXED = Version("0.27") <= VERSION
NAME, GATE = "marlin_workspace", "VLLM_HOTFIX_MARLIN_WORKSPACE"
SIZE = 128
needs_fault = pytest.mark.skipif(FIXED, reason="from 0.27 on the release has the fix and nothing is wrapped")


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights be converted for Marlin without a GPU; their layout stays."""

    def repack(b_q_weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return b_q_weight.clone()

    monkeypatch.setattr(_custom_ops, "gptq_marlin_repack", repack)
    monkeypatch.setattr(marlin_utils, "num_compute_units", lambda index: 4)
    monkeypatch.setattr(marlin.MarlinLinearKernel, "can_implement", classmethod(lambda *args: (True, None)))


class Fp8(Derive):
    """FP8 weights where the GPU has no FP8: the release's own conversion."""

    def __init__(self) -> None:
        """Nothing is derived."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Convert the layer's weights."""
        marlin_utils_fp8.prepare_fp8_layer_for_marlin(layer, size_k_first=False)


class Fp4(Derive):
    """NVFP4 weights where the GPU has no FP4: the release's own conversion."""

    def __init__(self) -> None:
        """Nothing is derived."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Convert the layer's weights."""
        marlin_utils_fp4.prepare_fp4_layer_for_marlin(layer)


class Gptq(Derive):
    """4-bit weights: the release's own kernel, which belongs to the layer's method."""

    def __init__(self, has_g_idx: bool) -> None:
        """Make the kernel."""
        config = {
            "full_weight_shape": (SIZE, SIZE),
            "partition_weight_shape": (SIZE, SIZE),
            "weight_type": scalar_types.uint4b8,
            "act_type": torch.float16,
            "group_size": SIZE,
            "zero_points": False,
            "has_g_idx": has_g_idx,
        }
        names = {"w_q_param_name": "qweight", "w_s_param_name": "scales", "w_gidx_param_name": "g_idx"}
        make, kind = marlin.MPLinearLayerConfig, marlin.MarlinLinearKernel
        self.kernel = kind(make(**accepted(make, **config)), **accepted(kind, **names))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Convert the layer's weights."""
        self.kernel.process_weights_after_loading(layer)


def linear(tensors: dict[str, torch.Tensor], method: Derive) -> nn.Module:
    """Return a layer with what the conversions ask of one."""
    layer: Any = Layer({})
    for name, tensor in tensors.items():
        layer.register_parameter(name, nn.Parameter(torch.zeros_like(tensor), requires_grad=False))
    layer.output_size_per_partition = layer.input_size_per_partition = SIZE
    layer.orig_dtype = layer.params_dtype = torch.float16
    layer.logical_widths = [SIZE]
    layer.quant_method = method
    return layer


def packed(model: Probe, has_g_idx: bool) -> nn.Module:
    """Return a layer with the release's own parameters of 4-bit weights."""
    layer = linear({}, Gptq(has_g_idx))
    loader = {"weight_loader": lambda param, loaded: param.data.copy_(loaded)}
    layout = {"input_dim": 0, "output_dim": 1} | loader
    weight = torch.zeros(SIZE // 8, SIZE, dtype=torch.int32)
    layer.qweight = PackedvLLMParameter(data=weight, packed_dim=0, packed_factor=8, **layout)
    layer.scales = GroupQuantScaleParameter(data=torch.zeros(1, SIZE, dtype=torch.float16), **layout)
    if has_g_idx:
        layer.g_idx = RowvLLMParameter(data=torch.zeros(SIZE, dtype=torch.int32), input_dim=0, **loader)
    return layer


def checkpoint(kind: str, seed: int) -> dict[str, torch.Tensor]:
    """Return what a layer's checkpoint holds."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return (torch.rand(shape, generator=generator) + 0.5).to(dtype)

    if kind == "fp8":
        weight = numbers(SIZE, SIZE, dtype=torch.float8_e4m3fn)
        return {"weight": weight, "weight_scale": numbers(1, dtype=torch.float32)}
    bits = torch.randint(-(1 << 31), 1 << 31, (SIZE // 8, SIZE), generator=generator)
    if kind == "nvfp4":
        return {
            "weight": bits.to(torch.int32).view(torch.uint8).view(SIZE, SIZE // 2),
            "weight_scale": numbers(SIZE, SIZE // 16, dtype=torch.float8_e4m3fn),
            "weight_global_scale": numbers(1, dtype=torch.float32),
        }
    found = {"qweight": bits.to(torch.int32), "scales": numbers(1, SIZE, dtype=torch.float16)}
    if kind == "act order":
        found["g_idx"] = torch.randperm(SIZE, generator=generator).to(torch.int32)
    return found


#: Releases from 0.30 on have no activation order, and those from 0.31 on no workspace of a layer's own.
KINDS = ("fp8", "nvfp4", "4 bits", *(("act order",) if VERSION < Version("0.30") else ()))


def load(host: Host, kind: str, seed: int) -> Any:
    """Load a model of one layer cold."""

    def build(model: Probe, _: VllmConfig) -> None:
        if kind in ("fp8", "nvfp4"):
            model.layer = linear(checkpoint(kind, 0), {"fp8": Fp8, "nvfp4": Fp4}[kind]())
        else:
            model.layer = packed(model, kind == "act order")

    return host.load(build, stream(kind, seed))


def stream(kind: str, seed: int) -> list[Piece]:
    """Return a checkpoint as pieces."""
    return [Piece(f"layer.{name}", tensor) for name, tensor in checkpoint(kind, seed).items()]


def reads(model: Any) -> dict[str, torch.Tensor]:
    """Return what the layer's kernel reads when it is called: as the `apply` methods hand it over."""
    layer = model.layer
    holder = layer.quant_method.kernel if hasattr(layer.quant_method, "kernel") else layer
    found = {name: one for name, one in values(layer).items() if one.numel()}
    beside = {"workspace": getattr(holder, "workspace", None), "order": getattr(layer, "g_idx_sort_indices", None)}
    found = {name: getattr(layer, name) for name in found}
    return found | {name: one for name, one in beside.items() if one is not None and one.numel()}


def kernel(model: Any) -> torch.Tensor:
    """Stand for Marlin's kernel: it waits for ever if its locks do not read as zeros, here it returns NaN."""
    result = torch.zeros((), dtype=torch.float64)
    for number, (name, one) in enumerate(sorted(reads(model).items()), 1):
        if name == "workspace":
            result = result + torch.where(one.any(), torch.nan, 0.0)
        else:
            weights = torch.arange(1, one.numel() + 1, dtype=torch.float64) * number
            result = result + (one.to(torch.float64).flatten() * weights).sum()
    return result


def reuse(graph: Graph, model: Any) -> None:
    """Let others have the memory that a graph reads and that nothing of the model holds any more."""
    held = {one.untyped_storage().data_ptr() for one in reads(model).values()}
    for one in graph.inputs:
        if one.untyped_storage().data_ptr() not in held:
            one.untyped_storage().fill_(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_computes_what_was_reloaded(host: Host, kind: str, side: str) -> None:
    """A graph of the first load gives a cold load's result after each reload, with memory that was freed in use again.

    Stock's does not in 0.20.0 to 0.26.0: it locks in such memory. Parameters are where they were with both.
    """
    expected = {seed: kernel(load(host, kind, seed)) for seed in (1, 2)}
    assert not any(one.isnan() for one in expected.values())
    assert expected[1] != expected[2]
    model = load(host, kind, 1)
    graph = Graph(lambda: kernel(model))
    places = {name: one.data_ptr() for name, one in reads(model).items()}
    for seed in (2, 1, 2):
        for one in reads(model).values():
            one.untyped_storage().fill_(1)  # what a sleep has discarded, the workspace as well
        host.reload(model, stream(kind, seed))
        assert torch.equal(kernel(model), expected[seed])
        reuse(graph, model)
        right = torch.equal(graph.replay(), expected[seed])
        assert right is (FIXED or side == "patched")
        moved = {name for name, one in reads(model).items() if one.data_ptr() != places[name]}
        assert moved <= (set() if FIXED or side == "patched" else {"workspace", "order"})
    kept = 2 if kind == "act order" else 1
    assert counters(NAME) == ({} if FIXED or side == "stock" else {"tensors_kept": 3 * kept})


def test_what_replace_parameter_makes_anew_is_copied_back(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stock, in every release: a reload replaces parameters, and in the end the first ones hold the new values.

    So the fault of vllm-project/vllm#40390 needs more than a reload has: no graph is left with an old parameter.
    """
    replaced: list[str] = []
    stock = marlin_utils_fp8.replace_parameter

    def spy(layer: nn.Module, name: str, new: Any, *args: Any, **kwargs: Any) -> None:
        replaced.append(name)
        stock(layer, name, new, *args, **kwargs)

    expected = kernel(load(host, "fp8", 2))
    model = load(host, "fp8", 1)
    graph = Graph(lambda: kernel(model))
    first = dict(model.layer.named_parameters())
    monkeypatch.setattr(marlin_utils_fp8, "replace_parameter", spy)
    host.reload(model, stream("fp8", 2))
    assert replaced == ["weight", "weight_scale"]
    assert all(one is first[name] for name, one in model.layer.named_parameters())
    assert torch.equal(graph.replay(), expected)


def test_weights_in_the_kernels_format_are_copied(host: Host) -> None:
    """A reload with `is_checkpoint_format=False` processes nothing and writes to the parameters that are there."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    new = values(load(host, "fp8", 2))
    model = load(host, "fp8", 1)
    beside = getattr(model.layer, "workspace", None)
    first = dict(model.named_parameters())
    runner: Any = GPUModelRunner.__new__(GPUModelRunner)
    runner.vllm_config, runner.model_config = host.config, host.config.model_config
    runner.load_config, runner.lora_config = host.config.load_config, None
    for name in ("reset_encoder_cache", "reset_mm_cache", "reset_lora_state"):
        setattr(runner, name, lambda: None)
    runner.get_model = lambda: model
    with torch.no_grad():
        runner.reload_weights(iter(new.items()), is_checkpoint_format=False)
    assert same(values(model), new)
    assert all(one is first[name] for name, one in model.named_parameters())
    assert getattr(model.layer, "workspace", None) is beside


@needs_fault
@pytest.mark.parametrize("measured", ["measured_totals", ""])
def test_beside_measured_totals(
    host: Host, measured: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A layer that measured_totals holds back is put right when it is processed, after all."""
    monkeypatch.setenv("VLLM_HOTFIX_ENABLE", measured)
    request.getfixturevalue("patched")
    model = load(host, "fp8", 1)
    workspace = model.layer.workspace
    host.begin(model)
    model.load_weights(stream("fp8", 2))
    assert model.layer.workspace is workspace
    assert counters(NAME).get("tensors_kept", 0) == (0 if measured else 1)
    host.finish(model)
    assert model.layer.workspace is workspace
    assert counters(NAME) == {"tensors_kept": 1}
    assert same(values(model), values(load(host, "fp8", 2)))


@needs_fault
@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_what_cannot_be_put_back_is_said(
    host: Host, change: str, patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the new workspace is of another kind, stock's stays, and the state is stale-graphs."""
    model = load(host, "fp8", 1)
    other = torch.zeros(5, dtype=torch.int) if change == "shape" else torch.zeros(4, dtype=torch.int64)
    monkeypatch.setattr(marlin_utils_fp8, "marlin_make_workspace_new", lambda *args: other)
    with hearing() as heard:
        host.reload(model, stream("fp8", 2))
    assert model.layer.workspace is other
    state, reason = state_of(NAME)
    assert state == "stale-graphs"
    assert "workspace" in reason
    assert "restart vLLM" in reason
    assert heard == [f"vllm-hotfix: {NAME}: {reason}"]


@needs_fault
def test_an_error_is_one_warning_and_stock(host: Host, patched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the patch's own work raises, one warning says so and the layer has what stock made; stock's errors pass."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise LookupError("injected")

    model = load(host, "fp8", 1)
    workspace = model.layer.workspace
    with monkeypatch.context() as broken, hearing() as heard:
        broken.setattr(RECORD, "count", fail)
        broken.setattr(marlin_workspace, "setattr", fail, raising=False)
        for seed in (2, 1):
            host.reload(model, stream("fp8", seed))
    assert model.layer.workspace is not workspace
    assert len(heard) == 1
    assert all(word in heard[0] for word in (NAME, "as in stock", "LookupError: injected"))
    monkeypatch.setattr(marlin_utils_fp8, "marlin_make_workspace_new", fail)
    with pytest.raises(LookupError, match="injected"):
        host.reload(model, stream("fp8", 2))


def test_what_is_wrapped_and_given_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Active, both functions are wrapped; afterwards each is the identical object again; from 0.27 on neither is."""
    places = [(layerwise, "_layerwise_process"), (marlin.MarlinLinearKernel, "process_weights_after_loading")]
    stock = [vars(place)[name] for place, name in places]
    with switched_on(monkeypatch, tmp_path, NAME):
        live = [vars(place)[name] for place, name in places]
        state, reason = state_of(NAME)
        if FIXED:
            assert state == "not-needed"
            assert "0.27.0" in reason
            assert all(one is old for one, old in zip(live, stock, strict=True))
        else:
            assert (state, reason) == ("active", "2 functions wrapped")
            assert all(one.__wrapped__ is old for one, old in zip(live, stock, strict=True))
    assert all(vars(place)[name] is old for (place, name), old in zip(places, stock, strict=True))
    assert state_of(NAME)[0] == "off"

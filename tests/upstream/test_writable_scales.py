"""writable_scales on a release's real NVFP4 MoE layer, conversion and reload, beside stock vLLM.

Stock raises in 0.20.0 to 0.26.0. From 0.27.0 on it has the fix, and the patch has nothing to do. On the CPU these are
stood in for: the experts' answer that they run here, `Tensor.cuda`, and the one function of FlashInfer's.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import nvfp4_kernels
import pytest
import torch
from layers import Host, Piece, Probe, add_moe, choose, experts_of, moe_stream, same, values
from packaging.version import Version
from patching import counters, hearing, state_of
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.oracle import nvfp4
from vllm.model_executor.layers.quantization.utils import flashinfer_fp4_moe

import vllm_hotfix
from vllm_hotfix._patches import writable_scales
from vllm_hotfix._record import RECORD

RELEASE = os.environ["HOTFIX_RELEASE"]
FIXED = Version(RELEASE) >= Version("0.27")
NAME, GATE = "writable_scales", "VLLM_HOTFIX_WRITABLE_SCALES"
EXPERTS = 4
SCALES = ("w13_input_scale", "w2_input_scale")
FUNCTIONS = ("prepare_nvfp4_moe_layer_for_fi_or_cutlass", "prepare_nvfp4_moe_layer_for_flashinfer_cutedsl")
REFUSED = "more than one element of the written-to tensor refers to a single memory location"
#: Those of which the experts share their input scales.
SHARING = ("FLASHINFER_CUTLASS", "FLASHINFER_CUTEDSL")
OLD, NEW = torch.arange(1, EXPERTS + 1) / 32, torch.arange(1, EXPERTS + 1) / 16


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the conversion run without a GPU and without FlashInfer, whose change of layout is left out."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
    for name in ("flashinfer", "flashinfer.cute_dsl", "flashinfer.cute_dsl.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flashinfer.cute_dsl.utils"].convert_sf_to_mma_layout = lambda scale, **options: scale


@pytest.fixture(params=SHARING)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let vLLM's own choice of a backend fall on this one."""
    choose(monkeypatch, nvfp4_kernels.BACKENDS, request.param)
    return request.param


def made_writable() -> int:
    """Return the patch's counter."""
    return counters(NAME).get("scales_made_writable", 0)


def input_scales(model: nn.Module) -> list[torch.Tensor]:
    """Return the two parameters that the patch is about."""
    return [experts_of(model)[1].get_parameter(name) for name in SCALES]


class Engine:
    """A model of one real ModelOpt NVFP4 MoE layer, and checkpoints for it."""

    def __init__(self, host: Host, backend: str) -> None:
        self.host = host
        self.backend = backend
        self._built: list[nn.Module] = []

    def _build(self, model: Probe, config: VllmConfig) -> None:
        add_moe(model, "ModelOptNvFp4Config", experts=EXPERTS)
        self._built.append(model)

    def _stream(self, seed: int, scales: torch.Tensor, *, scales_last: bool = False) -> Iterator[Piece]:
        # Input scales first: the count that stock's trigger goes by is too high by them in 0.20.0 to 0.22.1, and a
        # weight that comes last is more than that.
        stream = moe_stream(self._built[-1], seed, scales)
        yield from stream if scales_last else reversed(stream)

    def load(self, seed: int, scales: torch.Tensor) -> Any:
        """Load cold."""
        model = self.host.load(self._build, self._stream(seed, scales))
        assert experts_of(model)[1].quant_method.nvfp4_backend.value == self.backend
        assert type(experts_of(model)[1].quant_method).__name__ == "ModelOptNvFp4FusedMoE"
        return model

    def reload(self, model: Any, seed: int, scales: torch.Tensor, *, scales_last: bool = False) -> None:
        """Reload as the worker does.

        With one thing added: the experts of FLASHINFER_CUTLASS are made anew and want a current configuration in
        0.20.0 to 0.22.1, where a worker has none while it reloads.
        """
        needs_config = self.backend == "FLASHINFER_CUTLASS" and Version(RELEASE) < Version("0.23")
        with set_current_vllm_config(self.host.config) if needs_config else contextlib.nullcontext():
            self.host.reload(model, self._stream(seed, scales, scales_last=scales_last))


@pytest.fixture
def engine(host: Host, backend: str) -> Engine:
    """What loads and reloads a model whose experts have that backend."""
    return Engine(host, backend)


def addresses(model: nn.Module) -> dict[str, tuple[int, torch.Size, tuple[int, ...]]]:
    """Return where each parameter lies, and how."""
    return {name: (one.data_ptr(), one.shape, one.stride()) for name, one in model.named_parameters()}


# The fault


def test_a_reload_ends_as_a_cold_load(engine: Engine, side: str) -> None:
    """Stock's reload raises in 0.20.0 to 0.26.0; patched, or from 0.27.0 on, it is a cold load of the new weights.

    Every parameter is equal bit for bit and stays where captured graphs read it, also when reloaded once more.
    """
    model = engine.load(1, OLD)
    old = values(model)
    if side == "stock" and not FIXED:
        with pytest.raises(RuntimeError, match=REFUSED):
            engine.reload(model, 2, NEW)
        return
    before = addresses(model)
    engine.reload(model, 2, NEW)
    new = values(engine.load(2, NEW))
    assert same(values(model), new)
    assert not same(new, old)
    assert input_scales(model)[0].tolist() == [NEW.max()] * EXPERTS
    engine.reload(model, 1, OLD)
    assert same(values(model), old)
    assert addresses(model) == before


def test_a_first_load_is_as_stock_has_it(engine: Engine, request: pytest.FixtureRequest) -> None:
    """Values, shapes, dtypes and devices after a first load are stock's; in 0.20.0 to 0.26.0 two strides are not.

    Those are the input scales: stride 0 with stock, memory for every expert with the patch. Two are counted a layer.
    """
    stock = experts_of(engine.load(1, OLD))[1]
    request.getfixturevalue("patched")
    patched = experts_of(engine.load(1, OLD))[1]
    assert same(values(stock), values(patched))
    for name, one in stock.named_parameters():
        other = patched.get_parameter(name)
        assert (one.dtype, one.device, type(one)) == (other.dtype, other.device, type(other))
        assert other.stride() == ((1,) if name in SCALES else one.stride())
        assert one.stride() == ((0,) if name in SCALES and not FIXED else other.stride())
    assert {name for name, _ in stock.named_parameters()} >= {*SCALES}
    assert made_writable() == (0 if FIXED else 2)


def test_with_measured_totals_the_scales_may_come_last(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Both patches at work: a reload that brings the input scales last is right too, in every release."""
    monkeypatch.setenv("VLLM_HOTFIX_MEASURED_TOTALS", "1")
    request.getfixturevalue("patched")
    model = engine.load(1, OLD)
    engine.reload(model, 2, NEW, scales_last=True)
    assert same(values(model), values(engine.load(2, NEW)))


@pytest.mark.parametrize("backend", ["FLASHINFER_CUTLASS"], indirect=True)
def test_what_it_leaves_to_others(engine: Engine, patched: None) -> None:
    """In 0.20.0 to 0.22.1 a worker's reload with FLASHINFER_CUTLASS raises before these scales are its matter.

    The experts are made anew and ask for the current configuration, which no worker has then.
    """
    model = engine.load(1, OLD)
    reload = engine.host.reload
    if Version(RELEASE) < Version("0.23"):
        with pytest.raises(AssertionError, match="Current vLLM config is not set"):
            reload(model, engine._stream(2, NEW))
    else:
        reload(model, engine._stream(2, NEW))


# The wrapped functions


def stand_in(monkeypatch: pytest.MonkeyPatch, result: Any) -> Any:
    """Call the wrapper around a function that returns this."""
    monkeypatch.setattr(RECORD, "counters", {})
    monkeypatch.setattr(RECORD, "save", lambda: None)
    return writable_scales.prepare(lambda *args, **kwargs: result, None, (), {})


def test_what_does_not_overlap_is_the_same_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tensors with a stride of 0 over several elements are copied; anything else is the object that stock made.

    A result with none of them, and one that is no tuple, is handed on as it is.
    """
    one = torch.ones(())
    kept = (
        torch.rand(3, 4).t(),  # not contiguous
        torch.rand(4, 6)[:, ::2],
        one.expand(1),  # stride 0, one element
        torch.rand(12).as_strided((1, 3, 4), (0, 1, 3)),  # the same, not contiguous
        torch.empty(0, 3).as_strided((0, 3), (3, 0)),  # no element at all
        nn.Parameter(torch.rand(2), requires_grad=False),
        None,
        3,
    )
    assert stand_in(monkeypatch, kept) is kept
    assert made_writable() == 0
    assert stand_in(monkeypatch, None) is None
    listed = [one.expand(4)]
    assert stand_in(monkeypatch, listed) is listed
    shared = (one.expand(4), torch.rand(3).expand(2, 3), torch.rand(3, 1).expand(3, 2))
    made = stand_in(monkeypatch, (*kept, *shared))
    assert all(new is old for new, old in zip(made, kept, strict=False))
    for new, old in zip(made[len(kept) :], shared, strict=True):
        assert new is not old
        assert new.is_contiguous()
        assert torch.equal(new, old)
        assert new.dtype == old.dtype
        new.copy_(torch.rand(new.shape))  # which stock's refuses
    assert one.item() == 1
    assert made_writable() == len(shared)


@pytest.mark.parametrize("backend", [*SHARING, "VLLM_CUTLASS"], indirect=True)
def test_only_shared_scales_are_copied(engine: Engine, patched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the real functions return, the shared input scales are copies, and all else is what they made.

    VLLM_CUTLASS has a scale for each expert: nothing is copied. From 0.27.0 on the wrapper is never called.
    """
    calls: list[tuple[Any, Any]] = []
    writable = writable_scales._writable

    def spy(result: Any) -> Any:
        calls.append((result, writable(result)))
        return calls[-1][1]

    monkeypatch.setattr(writable_scales, "_writable", spy)
    engine.load(1, OLD)
    if FIXED:
        assert calls == []
        return
    ((stock, made),) = calls
    copied = [index for index, (new, old) in enumerate(zip(made, stock, strict=True)) if new is not old]
    assert copied == ([] if engine.backend == "VLLM_CUTLASS" else [3, 7])  # a13_scale, a2_scale
    assert made_writable() == len(copied)


def test_an_error_is_one_warning_and_stock(engine: Engine, patched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the wrapper's own work raises, one warning says so and a load has what stock made; stock's errors pass."""

    def fail(*args: Any) -> Any:
        raise LookupError("injected")

    monkeypatch.setattr(writable_scales, "_overlaps", fail)
    with hearing() as heard:
        for _ in range(2):
            model = engine.load(1, OLD)
    assert {shared.stride() for shared in input_scales(model)} == {(1,) if FIXED else (0,)}
    assert len(heard) == (0 if FIXED else 1)
    assert all("writable_scales" in line and "LookupError: injected" in line for line in heard)
    assert made_writable() == 0

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("stock's own")

    with pytest.raises(ValueError, match="stock's own"):
        writable_scales.prepare(broken, None, (), {})


@pytest.mark.parametrize("backend", ["FLASHINFER_CUTLASS"], indirect=True)
def test_what_is_wrapped_and_given_back(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both functions are wrapped, in the oracle too, and `deactivate()` gives them back; from 0.27.0 on neither is.

    There the patch is not needed, and says since when. Without the gate nothing is wrapped anywhere.
    """
    places = [(module, name) for module in (flashinfer_fp4_moe, nvfp4) for name in FUNCTIONS]
    stock = [getattr(*place) for place in places]
    monkeypatch.setenv("VLLM_HOTFIX_STATE_DIR", str(tmp_path))
    assert state_of(NAME)[0] == "off"
    assert not any(hasattr(one, "__wrapped__") for one in stock)
    monkeypatch.setenv(GATE, "1")
    vllm_hotfix.activate()
    try:
        live = [getattr(*place) for place in places]
        state, reason = state_of(NAME)
        if FIXED:
            assert state == "not-needed"
            assert "0.27.0" in reason
            assert all(one is old for one, old in zip(live, stock, strict=True))
        else:
            assert state == "active", reason
            assert all(one is not old and one.__wrapped__ is old for one, old in zip(live, stock, strict=True))
    finally:
        vllm_hotfix.deactivate()
    assert all(getattr(*place) is old for place, old in zip(places, stock, strict=True))
    assert {shared.stride() for shared in input_scales(engine.load(1, OLD))} == {(1,) if FIXED else (0,)}

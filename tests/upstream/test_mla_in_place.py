"""mla_in_place on the real MLA attention of each release, beside stock vLLM, through the real layerwise reload.

`mla_layers` says what is stood in for; without CUDA, `graphs` stands for its graphs.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import layers
import mla_layers
import pytest
import torch
from layers import Host
from packaging.version import Version
from patching import counters, hearing, state_of, switched_on
from torch import nn
from vllm.config import VllmConfig

from vllm_hotfix._patch import HotfixError
from vllm_hotfix._patches import mla_in_place
from vllm_hotfix._record import RECORD, live

NAME = "mla_in_place"
RELEASE = Version(os.environ["HOTFIX_RELEASE"])
FIXED = Version("0.32") <= RELEASE
ROUNDS = 10
#: For each kind of derived weights, the first release that refreshes them in place; stock is right before where it is
#: None, for they are views of a parameter that vLLM copies.
FIXED_IN = {
    "unquantized": None,
    "of another dtype": Version("0.26"),
    "fp8": Version("0.26"),
    "aiter fp8": Version("0.32"),
    "aiter fp4": Version("0.32"),
    "replicated queries": Version("0.32"),
}
#: A kind of which stock sets all anew, in a release without the fix.
ANEW = "fp8" if Version("0.26") > RELEASE else "aiter fp8"
KINDS = [kind for kind in FIXED_IN if kind != "replicated queries" or Version("0.27") <= RELEASE]


def stock_fails(kind: str) -> bool:
    """Say whether this release sets tensors of this kind anew."""
    fixed_in = FIXED_IN[kind]
    return fixed_in is not None and fixed_in > RELEASE


needs_patch = pytest.mark.skipif(FIXED, reason="this release has the fix, and the patch wraps nothing")


@pytest.fixture
def engine(request: pytest.FixtureRequest, config: VllmConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What loads and reloads a model of one MLA layer of a kind; its dtype is bfloat16."""
    own = layers.make_config(tmp_path, dtype="bfloat16")
    return mla_layers.Engine(Host(own), request.param, monkeypatch)


@pytest.mark.parametrize("engine", KINDS, indirect=True)
def test_captured_graphs_after_reloads(engine: mla_layers.Engine, side: str, request: pytest.FixtureRequest) -> None:
    """A graph that was captured before computes what a cold load of the new weights computes, ten times in turn.

    Bit for bit, after what the load made was discarded; all that it reads stays where it was. Stock's does not where
    this release sets the layer's derived weights anew. Without a graph both sides are right.
    """
    kind = request.node.callspec.params["engine"]
    old, new = (engine.load(seed).run() for seed in (1, 2))
    assert old.isfinite().all()
    assert new.isfinite().all()
    assert not torch.equal(old, new)
    loaded = engine.load(1)
    graph = loaded.capture()
    places = loaded.places()
    assert torch.equal(graph.replay(), old)
    for number in range(1, ROUNDS + 1):
        seed, expected = ((1, old), (2, new))[number % 2]
        loaded.sleep(graph)
        engine.reload(loaded, seed)
        assert torch.equal(loaded.run(), expected)
        right = side == "patched" or not stock_fails(kind)
        assert torch.equal(graph.replay(), expected) == right
        assert (loaded.places() == places) == right
        if side == "patched" and not FIXED:
            anew = 0 if not stock_fails(kind) else 1 if kind == "replicated queries" else len(places)
            counted = {"tensors_refreshed": anew, "tensors_in_place": len(places) - anew}
            assert counters(NAME) == {name: one * number for name, one in counted.items() if one}


# What it does besides


@needs_patch
@pytest.mark.parametrize("engine", [ANEW], indirect=True)
def test_the_layer_keeps_its_first_tensors_and_no_others(
    engine: mla_layers.Engine, patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reload the layer holds the very tensors of its first load, and the fresh ones are freed."""
    loaded = engine.load(1)
    assert counters(NAME) == {}
    first = loaded.derived
    fresh: list[weakref.ref[torch.Tensor]] = []
    refresh = mla_in_place._refresh

    def spy(layer: Any, kept: Any) -> None:
        fresh.extend(weakref.ref(one) for one in loaded.derived.values())
        refresh(layer, kept)

    monkeypatch.setattr(mla_in_place, "_refresh", spy)
    engine.reload(loaded, 2)
    assert len(fresh) == len(first)
    assert [one() for one in fresh] == [None] * len(first)
    assert all(loaded.derived[name] is one for name, one in first.items())


@needs_patch
@pytest.mark.parametrize("engine", [ANEW], indirect=True)
def test_other_layers_are_let_be(engine: mla_layers.Engine, patched: None) -> None:
    """A second model in the process, such as a draft model, has tensors of its own, which a reload does not touch."""
    one, other = engine.load(1), engine.load(1)
    graph, expected, places = other.capture(), other.run(), other.places()
    engine.reload(one, 2)
    assert other.places() == places
    assert torch.equal(graph.replay(), expected)
    assert not torch.equal(one.run(), expected)


@pytest.mark.parametrize("engine", [ANEW], indirect=True)
def test_without_the_layerwise_reload(engine: mla_layers.Engine, side: str) -> None:
    """Who loads weights himself and calls the layer's function has them where graphs read them, however often.

    Stock's function sets others, unless this release has the fix.
    """
    loaded, new = engine.load(1), engine.load(2)
    graph, places, expected = loaded.capture(), loaded.places(), new.run()
    for name, param in loaded.model.kv_b_proj.named_parameters():
        param.data.copy_(new.model.kv_b_proj.get_parameter(name))
    for _ in range(2):
        loaded.layer.process_weights_after_loading(torch.bfloat16)
        right = side == "patched" or FIXED
        assert torch.equal(graph.replay(), expected) == right
        assert (loaded.places() == places) == right


@needs_patch
@pytest.mark.parametrize("engine", [ANEW], indirect=True)
@pytest.mark.parametrize("mode", ["of the reload", "of the first load"])
def test_inference_mode(engine: mla_layers.Engine, patched: None, mode: str) -> None:
    """Tensors that were made in inference mode, first or fresh, are refreshed like others."""
    loaded = engine.load(1)
    if mode == "of the first load":
        for name in loaded.derived:
            delattr(loaded.layer, name)
        with torch.inference_mode():
            loaded.layer.process_weights_after_loading(torch.bfloat16)
    assert all(one.is_inference() == (mode == "of the first load") for one in loaded.derived.values())
    graph, places = loaded.capture(), loaded.places()
    with torch.inference_mode(mode == "of the reload"):
        engine.reload(loaded, 2)
        assert torch.equal(graph.replay(), engine.load(2).run())
    assert loaded.places() == places


@needs_patch
@pytest.mark.parametrize("engine", [ANEW], indirect=True)
@pytest.mark.parametrize("error", [ValueError("stock's own"), KeyboardInterrupt()], ids=repr)
def test_an_error_of_stock(
    engine: mla_layers.Engine, patched: None, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stock raises passes, and the reload that is tried after it still finds what graphs read."""
    loaded = engine.load(1)
    graph, first = loaded.capture(), loaded.derived

    def fail(*args: Any) -> Any:
        raise error

    with monkeypatch.context() as patch, hearing() as heard, pytest.raises(type(error)) as raised:
        patch.setattr(mla_layers.mla_attention, "should_load_quant_weights", fail)  # called last
        loaded.layer.process_weights_after_loading(torch.bfloat16)
    assert raised.value is error
    assert heard == []
    assert all(loaded.derived[name] is one for name, one in first.items())
    engine.reload(loaded, 2)
    assert torch.equal(graph.replay(), engine.load(2).run())


# What cannot be refreshed


def other_dtype(one: torch.Tensor) -> torch.Tensor:
    """Return a tensor into which nothing of the reload's dtype is copied."""
    return one.double()


def other_shape(one: torch.Tensor) -> torch.Tensor:
    """Return a tensor of another shape, into which a copy would spread."""
    return torch.stack((one, one))


def one_place(one: torch.Tensor) -> torch.Tensor:
    """Return a tensor to which torch refuses to copy."""
    return one.flatten()[:1].reshape([1] * one.dim()).expand(one.shape)


CAUSES = {other_dtype: "float64", other_shape: " now and was 2x", one_place: "RuntimeError"}


@needs_patch
@pytest.mark.parametrize("engine", [ANEW], indirect=True)
@pytest.mark.parametrize("how", ["graphs", "strict", "eager"])
@pytest.mark.parametrize("change", CAUSES, ids=lambda change: change.__name__)
def test_what_cannot_be_refreshed(
    engine: mla_layers.Engine, patched: None, change: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the first tensor cannot take the fresh values, stock's stay, and it is said; without a graph all is right.

    One warning however many reloads, the state is `stale-graphs`, and under `STRICT` the reload raises. An engine that
    has no graphs has no stale ones: there it is the warning alone.
    """
    loaded = engine.load(1)
    name = next(iter(loaded.derived))
    expected = engine.load(2).run()
    setattr(loaded.layer, name, first := change(loaded.derived[name]))
    if how == "strict":
        monkeypatch.setenv("VLLM_HOTFIX_STRICT", "1")
    if how == "eager":
        monkeypatch.setattr(loaded.layer._vllm_config.model_config, "enforce_eager", True)
    with hearing() as heard:
        if how == "strict":
            with pytest.raises(HotfixError, match=rf"mla_in_place: mla: .*{name}|{CAUSES[change]}"):
                engine.reload(loaded, 2)
        else:
            engine.reload(loaded, 2)
        assert torch.equal(loaded.run(), expected)
        assert loaded.derived[name] is not first
        if how == "eager":
            setattr(loaded.layer, name, first)
            engine.reload(loaded, 2)
    (said,) = heard
    assert CAUSES[change] in said
    assert ("restart vLLM" in said) == (how != "eager")
    state, reason = state_of(NAME)
    if how == "eager":
        assert state == "active"
    else:
        assert state == "stale-graphs"
        assert reason.startswith("mla: ")
    assert counters(NAME)["layers_replaced"] == (2 if how == "eager" else 1)


def stand_in(layer: nn.Module, monkeypatch: pytest.MonkeyPatch, **made: torch.Tensor | None) -> dict[str, int]:
    """Call the wrapper around a function that sets these, and return what it counts."""
    monkeypatch.setattr(RECORD, "counters", {})
    monkeypatch.setattr(RECORD, "_warned", set())

    def stock(act_dtype: torch.dtype) -> str:
        for name, one in made.items():
            setattr(layer, name, one)
        return "stock's"

    assert mla_in_place.process_weights_after_loading(stock, layer, (torch.float32,), {}) == "stock's"
    return counters(NAME)


def test_what_was_no_tensor_of_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not there, was no tensor or a meta tensor cannot have been captured: stock's stay, without a word."""
    layer = nn.Module()
    layer.W_UV, layer.W_K, layer.W_K_scale = None, torch.empty(3, device="meta"), 1.0
    made = {name: torch.rand(3) for name in mla_layers.DERIVED}
    with hearing() as heard:
        assert stand_in(layer, monkeypatch, **made) == {}
    assert heard == []
    assert all(getattr(layer, name) is one for name, one in made.items())


def test_parameters_and_what_else_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter stays the first one as a plain tensor does; attributes that are not derived weights are stock's."""
    layer = nn.Module()
    layer.W_UV = first = nn.Parameter(torch.zeros(3), requires_grad=False)
    layer.q_range = torch.zeros(())
    fresh, other = nn.Parameter(torch.rand(3), requires_grad=False), torch.ones(())
    assert stand_in(layer, monkeypatch, W_UV=fresh, q_range=other) == {"tensors_refreshed": 1}
    assert layer.W_UV is first
    assert torch.equal(first, fresh)
    assert layer.q_range is other


def test_memory_of_the_first_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh view of the very memory, as an unquantized weight gives, is let be; one with another stride is copied."""
    memory = torch.arange(6.0)
    layer = nn.Module()
    layer.W_UV, layer.W_UK_T, layer.W_K = memory[:2], memory[2:4], memory[4:]
    apart = torch.tensor([[7.0, 0.0], [8.0, 0.0]])[:, 0]
    counted = stand_in(layer, monkeypatch, W_UV=memory[:2], W_UK_T=memory[2:3].expand(2), W_K=apart)
    assert counted == {"tensors_in_place": 1, "tensors_refreshed": 2}
    assert memory.tolist() == [0, 1, 2, 2, 7, 8]


@pytest.mark.parametrize(
    ("fresh", "why"),
    [
        (lambda first: None, "W_UV is no tensor any more"),
        (lambda first: first[:2], "W_UV is 2 float32 on cpu now and was 3 float32 on cpu"),
        (lambda first: first.view(torch.int32), "W_UV is 3 int32 on cpu now and was 3 float32 on cpu"),
        (lambda first: first.to("meta"), "W_UV is 3 float32 on meta now and was 3 float32 on cpu"),
    ],
    ids=["gone", "shorter", "other dtype", "other device"],
)
def test_what_another_tensor_is(fresh: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stock has set that is no new value of the first tensor stays, and is named, also in the same memory."""
    layer = nn.Module()
    layer._vllm_config = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=True))
    layer.W_UV = first = torch.zeros(3)
    other = fresh(first)
    with hearing() as heard:
        assert stand_in(layer, monkeypatch, W_UV=other) == {"layers_replaced": 1}
    assert [line.endswith(why) for line in heard] == [True]
    assert layer.W_UV is other


# What is said, and how it ends


@pytest.mark.parametrize("engine", [ANEW], indirect=True)
def test_what_is_wrapped_and_given_back(
    engine: mla_layers.Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The function is wrapped and `deactivate()` gives it back; from 0.32.0 on it is not, and the reason says why.

    Another process can read what was done. A reload after that is stock's.
    """
    place = vars(mla_layers.mla_attention.MLAAttention)
    stock = place["process_weights_after_loading"]
    assert state_of(NAME)[0] == "off"
    with switched_on(monkeypatch, tmp_path, NAME):
        state, reason = state_of(NAME)
        loaded = engine.load(1)
        places = loaded.places()
        engine.reload(loaded, 2)
        assert loaded.places() == places
        (process,) = live()
        assert isinstance(process, dict)
        assert process["patches"][NAME]["state"] == state
        if FIXED:
            assert (state, reason) == ("not-needed", f"vLLM {RELEASE} has the fix (since 0.32.0)")
            assert place["process_weights_after_loading"] is stock
        else:
            assert state == "active", reason
            assert place["process_weights_after_loading"].__wrapped__ is stock
            assert process["counters"][NAME] == {"tensors_refreshed": len(places)}
    assert place["process_weights_after_loading"] is stock
    engine.reload(loaded, 1)
    assert (loaded.places() == places) == FIXED

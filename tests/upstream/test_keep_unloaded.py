"""keep_unloaded on the releases' real layers and reload, beside stock vLLM.

Memory that a reload makes is filled with ones in every bit: NaN in floating point numbers, -1 in integers. On a GPU it
is what others have left there. The layers, their loaders and the reload are vLLM's; where no layer of vLLM shows a
case in all releases, plain modules do. Stood in for on the CPU: the layout of weights for its own matrix multiply, and
the choice of a kernel for the experts.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from layers import (
    Host,
    Layer,
    Online,
    Piece,
    Probe,
    Unwritten,
    add_moe,
    experts_of,
    load_prefix,
    moe_stream,
    pieces,
    same,
    values,
)
from packaging.version import Version
from patching import counters, hearing, state_of, switched_on, written_counters
from torch import nn
from transformers import CLIPVisionConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.model_loader import reload
from vllm.model_executor.model_loader import utils as loader_utils
from vllm.model_executor.model_loader.reload import layerwise, meta
from vllm.model_executor.models.clip import CLIPVisionEmbeddings
from vllm.model_executor.models.gemma4 import Gemma4Router

from vllm_hotfix._patches import keep_unloaded

RELEASE = Version(os.environ["HOTFIX_RELEASE"])
NAME, GATE = "keep_unloaded", "VLLM_HOTFIX_KEEP_UNLOADED"
#: Since when stock keeps views of parameters, and other buffers that are not persistent.
KEEPS_VIEWS = Version("0.22.0") <= RELEASE
KEEPS_BUFFERS = Version("0.26.0") <= RELEASE
Build = Callable[[Any, VllmConfig], None]


@pytest.fixture(autouse=True)
def garbage(zeroed: None) -> Iterator[None]:
    """Let memory that nobody has written hold ones in every bit."""
    with Unwritten(0xFF):
        yield


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the weights of linear layers as they are, as on a GPU."""
    monkeypatch.setattr(layer_utils, "dispatch_cpu_unquantized_gemm", lambda layer, remove_weight: None)


def random_stream(shapes: dict[str, torch.Size], seed: int) -> Iterator[Piece]:
    """Yield random values for parameters, the last first: the count of 0.20 to 0.23 is too high for Mamba's A."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in reversed(shapes.items()):
        yield Piece(name, torch.rand(shape, generator=generator))


class Engine:
    """A model of one layer, and random checkpoints for all of its parameters."""

    def __init__(self, host: Host, build: Build) -> None:
        self.host = host
        self._given = build
        self.shapes: dict[str, torch.Size] = {}

    def _build(self, model: Probe, config: VllmConfig) -> None:
        self._given(model, config)
        self.shapes = {name: one.shape for name, one in model.named_parameters()}

    def _stream(self, seed: int) -> Iterator[Piece]:
        # Not before the model is there.
        yield from random_stream(self.shapes, seed)

    def load(self, seed: int) -> Any:
        """Load cold."""
        return self.host.load(self._build, self._stream(seed))

    def reload(self, model: Any, seed: int) -> None:
        """Reload as the worker does."""
        self.host.reload(model, self._stream(seed))


def mamba(model: Any, config: VllmConfig) -> None:
    """Build a Mamba 2 mixer: its `conv_weights` are a view of its convolution's weight."""
    sizes = {"hidden_size": 64, "ssm_state_size": 16, "conv_kernel_size": 4, "intermediate_size": 128}
    options = {"use_conv_bias": True, "use_bias": False, "num_heads": 4, "head_dim": 32, "prefix": "mixer"}
    model.mixer = MambaMixer2(**sizes, **options, model_config=config.model_config, cache_config=config.cache_config)


def clip(model: Any, config: VllmConfig) -> None:
    """Build CLIP's embeddings: `position_ids` beside a parameter of their own."""
    options = {"hidden_size": 24, "image_size": 16, "patch_size": 8}
    model.vision = CLIPVisionEmbeddings(CLIPVisionConfig(**options))


def gemma(model: Any, config: VllmConfig) -> None:
    """Build Gemma 4's router: `root_size` beside a parameter of its own."""
    options = SimpleNamespace(hidden_size=64, rms_norm_eps=1e-6, num_experts=8)
    model.router = Gemma4Router(options, prefix="router")


# Buffers


@pytest.mark.parametrize(
    ("build", "buffer", "kept_by_stock"),
    [
        (mamba, "mixer.conv1d.weight", KEEPS_VIEWS),
        (clip, "vision.position_ids", KEEPS_BUFFERS),
        (gemma, "router.root_size", KEEPS_BUFFERS),
    ],
)
def test_buffers_of_real_layers(host: Host, build: Build, buffer: str, kept_by_stock: bool, side: str) -> None:
    """A reload of other weights is a cold load of them, in memory that stays where it is.

    With stock it is not in the releases in which one of the layer's tensors is garbage, and that is the only one.
    """
    engine = Engine(host, build)
    model = engine.load(1)
    places = {name: one.data_ptr() for name, one in [*model.named_parameters(), *model.named_buffers()]}
    engine.reload(model, 2)
    new = values(engine.load(2))
    found = values(model)
    if side == "stock" and not kept_by_stock:
        wrong = {name for name in new if not torch.equal(found[name], new[name])}
        assert wrong == {buffer, "mixer.conv_weights"} & new.keys() if build is mamba else {buffer}
        assert found[buffer].isnan().all() if found[buffer].is_floating_point() else (found[buffer] == -1).all()
        return
    assert same(found, new)
    engine.reload(model, 1)
    assert same(values(model), values(engine.load(1)))
    assert places == {name: one.data_ptr() for name, one in [*model.named_parameters(), *model.named_buffers()]}


def add_buffers(model: Any, config: VllmConfig) -> None:
    """Build a layer with a parameter and three buffers, a view of the parameter above it, and an empty buffer."""
    model.layer = Layer({"weight": (4,)})
    model.outer = nn.Module()
    model.outer.layer = model.layer
    model.outer.register_buffer("view", model.layer.weight.data[2:], persistent=False)
    model.layer.register_buffer("locks", torch.zeros(8, dtype=torch.int32))
    model.layer.register_buffer("scale", torch.tensor(0.5), persistent=False)
    model.layer.register_buffer("view", model.layer.weight.data[:2], persistent=False)
    model.empty = nn.Module()
    model.empty.register_buffer("nothing", torch.zeros(0))


def test_persistent_buffers_without_weights(host: Host, side: str) -> None:
    """A persistent buffer that the checkpoint does not have is garbage with stock in every release.

    One that it has is loaded, patched too; the rest keep what they held when the reload began.
    """
    model = host.load(add_buffers, pieces("layer.weight", [1, 2, 3, 4]))
    for value in (5.0, 9.0):
        model.layer.locks[3] = int(value)
        host.reload(model, pieces("layer.weight", [value, 6, 7, 8]))
        expected = [-1] * 8 if side == "stock" else [0, 0, 0, int(value), 0, 0, 0, 0]
        assert model.layer.locks.tolist() == expected
        if side == "patched":
            assert model.layer.weight.tolist() == [value, 6, 7, 8]
            assert model.layer.view.tolist() == [value, 6]
            assert model.layer.scale == 0.5
    both = [*pieces("layer.weight", [1, 2, 3, 4]), *pieces("layer.locks", range(8), dtype=torch.int32)]
    host.reload(model, both)
    assert model.layer.locks.tolist() == [*range(8)]


def test_a_view_of_the_layers_own_parameter(host: Host, side: str) -> None:
    """Stock writes garbage through such a view in 0.20.0 to 0.21.0; patched, the parameter is what was loaded."""
    model = host.load(add_buffers, pieces("layer.weight", [1, 2, 3, 4]))
    host.reload(model, pieces("layer.weight", [5, 6, 7, 8]))
    wrong = side == "stock" and not KEEPS_VIEWS
    assert model.layer.weight[:2].isnan().all() == wrong
    assert model.layer.weight[2:].tolist() == [7, 8]
    assert model.layer.view.data_ptr() == model.layer.weight.data_ptr()


def test_buffers_stay_persistent_or_not(host: Host, side: str) -> None:
    """Before 0.26.0 a reload makes every buffer persistent, so that the state dict grows; patched, it does not."""
    model = host.load(add_buffers, pieces("layer.weight", [1, 2, 3, 4]))
    before = {*model.state_dict()}
    for _ in range(2):
        host.reload(model, pieces("layer.weight", [5, 6, 7, 8]))
        grown = {"layer.scale", "layer.view"} <= model.state_dict().keys()
        assert grown == (side == "stock" and not KEEPS_BUFFERS)
        if side == "patched":
            assert model.state_dict().keys() == before


def test_tensors_that_a_reload_leaves_in_place(host: Host, side: str) -> None:
    """A parameter that vLLM loads where it is has what was loaded, and a table of experts what it had."""

    def build(model: Any, config: VllmConfig) -> None:
        model.layer = Layer({"weight": (2,), "e_score_correction_bias": (3,)})
        model.layer.register_buffer("_expert_map", torch.arange(3))

    def stream(value: float) -> list[Piece]:
        return pieces("layer.e_score_correction_bias", [value] * 3) + pieces("layer.weight", [value, 2])

    model = host.load(build, stream(1))
    host.reload(model, stream(5))
    assert model.layer.e_score_correction_bias.tolist() == [5, 5, 5]
    assert model.layer._expert_map.tolist() == [0, 1, 2]
    assert model.layer.weight.tolist() == [5, 2]


def test_a_buffer_that_is_processed(host: Host, side: str) -> None:
    """A buffer that a method replaces by one of another shape is made anew out of what it was at first."""

    def build(model: Any, config: VllmConfig) -> None:
        model.layer = Layer({"weight": (2,)}, formula=halve)
        model.layer.register_buffer("table", torch.tensor([3.0, 4, 5, 6]))

    def halve(layer: Any) -> torch.Tensor:
        layer.table = layer.table[:2] * layer.weight
        return layer.weight

    model = host.load(build, pieces("layer.weight", [1.0, 1]))
    for value in (2.0, 10.0):
        host.reload(model, pieces("layer.weight", [value, 1]))
        if side == "stock":
            assert model.layer.table.isnan().all()
        else:
            assert model.layer.table.tolist() == [3 * value, 4]


def test_layers_that_have_nothing_to_load(host: Host, side: str) -> None:
    """Before 0.26.0 a layer without elements to load is left with stock as the reload has made it.

    An empty buffer is on the meta device; from 0.22.0 on a buffer that is a view of a parameter below is not there.
    """
    model = host.load(add_buffers, pieces("layer.weight", [1, 2, 3, 4]))
    host.reload(model, pieces("layer.weight", [5, 6, 7, 8]))
    left = side == "stock" and not KEEPS_BUFFERS
    assert model.empty.nothing.is_meta == left
    assert hasattr(model.outer, "view") != (left and KEEPS_VIEWS)
    if side == "patched":
        assert model.outer.view.tolist() == [7, 8]
        assert model.outer.view.data_ptr() == model.layer.weight[2:].data_ptr()


# Parameters


def padded(values: torch.Tensor, number: int) -> Build:
    """Build a layer whose weight begins with these values, and of which loaders write only that many elements."""

    def build(model: Any, config: VllmConfig) -> None:
        model.layer = Layer({"weight": tuple(values.shape)}, {"weight": load_prefix})
        made = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype)
        model.layer.weight.data = made.copy_(values)

    return build


LARGE = keep_unloaded._SMALL


@pytest.mark.parametrize(
    ("initial", "restored"),
    [
        (torch.zeros(8), True),
        (torch.ones(8), True),
        (torch.arange(8.0), True),
        (torch.full((8,), -0.0), True),
        (torch.zeros(8, dtype=torch.bfloat16), True),
        (torch.full((8,), 0.5, dtype=torch.float8_e4m3fn), True),
        (torch.full((8, 4), 3, dtype=torch.uint8), True),
        (torch.arange(32.0).reshape(4, 8).t(), True),  # not contiguous
        (torch.arange(LARGE / 4), True),
        (torch.zeros(LARGE), True),
        (torch.full((LARGE + 1,), 0.25, dtype=torch.float16), True),
        (torch.ones(LARGE, 4).t(), True),
        (torch.arange(LARGE / 4 + 1), False),
        (torch.ones(LARGE, 2).cumsum(1).t().contiguous().view(-1), False),  # ones in front, twos behind
        (torch.arange(64.0).reshape(8, 8)[:, ::2], False),  # has gaps, and none when reloaded
    ],
    ids=str,
)
def test_padding_is_what_a_fresh_load_has(host: Host, initial: torch.Tensor, restored: bool, side: str) -> None:
    """What no loader writes of a parameter is garbage with stock, and patched what it held before the first load.

    A large parameter that did not hold one number throughout has zeros, and one that had gaps in its memory.
    """
    shape = (2, *initial.shape[1:])
    model = host.load(padded(initial, 2), [Piece("layer.weight", torch.ones(shape).to(initial.dtype))])
    fresh = values(model)["layer.weight"]
    assert torch.equal(bytes_of(fresh[2:]), bytes_of(initial[2:]))
    host.reload(model, [Piece("layer.weight", torch.full(shape, 2.0).to(initial.dtype))])
    found = model.layer.weight
    assert torch.equal(bytes_of(found[:2]), bytes_of(torch.full(shape, 2.0).to(initial.dtype)))
    if side == "stock":
        assert (bytes_of(found[2:]) == 0xFF).all()
    else:
        expected = initial if restored else torch.zeros_like(initial)
        assert torch.equal(bytes_of(found[2:]), bytes_of(expected[2:]))
        assert torch.equal(bytes_of(model.layer.derived), bytes_of(found).flatten())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes."""
    return tensor.detach().contiguous().view(torch.uint8)


@pytest.mark.parametrize("batch", [1, keep_unloaded._BATCH])
def test_what_is_saved_of_a_model(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """Bytes of small tensors, or of one element; nothing of tensors without memory, or with gaps, or large and mixed.

    A model that is recorded again is as it is then, and what was saved before is forgotten.
    """
    monkeypatch.setattr(keep_unloaded, "_BATCH", batch)
    monkeypatch.setattr(keep_unloaded, "_initial", WeakKeyDictionary())
    model = nn.Module()
    tensors = {
        "meta": torch.ones(3, device="meta"),
        "nothing": torch.ones(0),
        "gaps": torch.ones(8, 8)[:, ::2],
        "mixed": torch.arange(LARGE, dtype=torch.int32),
        "large": torch.full((LARGE,), 3, dtype=torch.int16),
        "small": torch.arange(3, dtype=torch.uint8),
        "scalar": torch.tensor(7, dtype=torch.uint8),
    }
    for name, tensor in tensors.items():
        model.register_buffer(name, tensor)
    model.lazy = nn.parameter.UninitializedParameter()
    model.none = None
    model.register_parameter("absent", None)
    keep_unloaded._save(model)
    expected = {"large": [[3, 0]], "small": [[0], [1], [2]], "scalar": [[7]]}
    assert {name: one.tolist() for name, one in keep_unloaded._initial[model].items()} == expected
    model.large[0] = 1
    keep_unloaded._save(model)
    del expected["large"]
    assert {name: one.tolist() for name, one in keep_unloaded._initial[model].items()} == expected


class Experts:
    """A model with ModelOpt's FP8 experts and CLIP's embeddings, and checkpoints that lack one expert's input scale."""

    def __init__(self, host: Host, lacking: int) -> None:
        self.host = host
        self.lacking = lacking
        self.model: Any = None

    def _build(self, model: Probe, config: VllmConfig) -> None:
        add_moe(model, "ModelOptFp8Config", experts=4)
        clip(model, config)
        self.model = model

    def _stream(self, seed: int, *, scales_last: bool) -> Iterator[Piece]:
        shapes = {name: one.shape for name, one in self.model.named_parameters() if name.startswith("vision.")}
        stream = [*random_stream(shapes, seed), *moe_stream(self.model, seed, torch.arange(1.0, 5) / 16 / seed)]
        for piece in stream if scales_last else reversed(stream):
            if "input_scale" not in piece.name or piece.args[2] != self.lacking:
                yield piece

    def load(self, seed: int) -> Any:
        """Load cold."""
        return self.host.load(self._build, self._stream(seed, scales_last=False))

    def reload(self, model: Any, seed: int, *, scales_last: bool = False) -> None:
        """Reload as the worker does."""
        self.host.reload(model, self._stream(seed, scales_last=scales_last))


@pytest.mark.parametrize("lacking", [0, 3])
def test_an_expert_without_a_scale(host: Host, lacking: int, side: str) -> None:
    """The largest input scale is taken for all experts; for the one that has none it is 1 in a fresh load.

    In a reload it is garbage with stock. Patched, every tensor is that of a fresh load.
    """
    engine = Experts(host, lacking)
    model = engine.load(1)
    assert experts_of(model)[1].w13_input_scale.max() == 1
    engine.reload(model, 2)
    found = values(model)
    new = values(engine.load(2))
    if side == "stock":
        wrong = {name for name in new if not same({name: found[name]}, {name: new[name]})}
        assert any("input_scale" in name for name in wrong)
        assert wrong <= {name for name in new if "input_scale" in name or name == "vision.position_ids"}
    else:
        assert same(found, new)


def test_with_every_patch_at_work(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Experts whose scales come last and lack one, with all patches on: every tensor is that of a fresh load."""
    monkeypatch.setenv("VLLM_HOTFIX_ENABLE", "all")
    with switched_on(monkeypatch, tmp_path, NAME):
        names = ("measured_totals", "keep_moe_kernel", NAME)
        assert {name: state_of(name)[0] for name in names} == dict.fromkeys(names, "active")
        engine = Experts(host, 2)
        model = engine.load(1)
        for seed in (2, 1, 2):
            engine.reload(model, seed, scales_last=True)
            found = values(model)
            assert same(found, values(engine.load(seed)))
        assert counters("keep_moe_kernel")["kernels_kept"] == 3
        assert counters(NAME)["reloads"] == 3


# What it leaves alone, and when it goes wrong


def test_a_first_load_is_stocks(host: Host, patched: None) -> None:
    """A layer that online quantization makes during the first load holds what stock gives it, patched too.

    Nothing is counted for a first load; in a reload it begins with what it held, which is no memory at all: zeros.
    """

    def build(model: Any, config: VllmConfig) -> None:
        model.layer = Layer({})
        model.layer.weight = nn.Parameter(torch.empty(8, device="meta"), requires_grad=False)
        model.layer.weight.weight_loader = load_prefix
        model.layer.quant_method = Online(lambda layer: layer.weight * 2)
        layerwise.initialize_online_processing(model.layer)

    with hearing() as heard:
        model = host.load(build, pieces("layer.weight", [1.0, 2]))
    assert model.layer.derived[2:].isnan().all()
    assert counters(NAME) == {}
    assert heard == []
    host.reload(model, pieces("layer.weight", [3.0, 4]))
    assert model.layer.derived.tolist() == [6, 8, 0, 0, 0, 0, 0, 0]


def test_a_reload_that_raised_and_is_tried_again(host: Host, patched: None) -> None:
    """Buffers are kept, and stay persistent or not, over a reload that raised, and the next one."""
    model = host.load(add_buffers, pieces("layer.weight", [1, 2, 3, 4]))
    before = model.state_dict().keys()
    host.begin(model)
    host.reload(model, pieces("layer.weight", [5, 6, 7, 8]))
    assert model.state_dict().keys() == before
    assert model.layer.weight.tolist() == [5, 6, 7, 8]
    assert model.layer.scale == 0.5
    assert model.layer.locks.tolist() == [0] * 8


def test_counters(host: Host, patched: None, tmp_path: Path) -> None:
    """They say how many buffers were kept, how many parameters began as in the first load, and the reloads."""
    model = host.load(add_buffers, pieces("layer.weight", [1, 2, 3, 4]))
    for number in (1, 2):
        host.reload(model, pieces("layer.weight", [5, 6, 7, 8]))
        kept = 2 if KEEPS_VIEWS else 3
        assert counters(NAME) == {"buffers_kept": kept * number, "parameters_begun": number, "reloads": number}
        assert written_counters(tmp_path, NAME) == counters(NAME)


@pytest.mark.parametrize("where", ["_keep", "_restore", "_tensors", "_not_persistent"])
def test_an_error_of_its_own_is_one_warning_and_stock(
    host: Host, patched: None, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Whatever raises in the patch's own work, a reload is stock's: what was loaded is there, and a warning."""

    class Broken(dict[Any, Any]):
        def setdefault(self, *args: Any) -> Any:
            raise LookupError("injected")

        pop = setdefault

    def fail(*args: Any) -> Any:
        raise LookupError("injected")

    monkeypatch.setattr(keep_unloaded, where, Broken() if where == "_not_persistent" else fail)
    with hearing() as heard:
        model = host.load(add_buffers, pieces("layer.weight", [1, 2, 3, 4]))
        for _ in range(2):
            host.reload(model, pieces("layer.weight", [5, 6, 7, 8]))
    # Where the view of it is garbage and copied over it, stock loses two elements.
    assert model.layer.weight[2:].tolist() == [7, 8]
    assert heard
    assert len({*heard}) == len(heard) <= 2
    assert all(NAME in line and "LookupError: injected" in line for line in heard)


@pytest.mark.parametrize("error", [ValueError("stock's own"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    "wrapper",
    ["record_metadata_for_reloading", "initialize_layerwise_reload", "materialize_layer", "finalize_layerwise_reload"],
)
def test_what_stock_raises_passes(wrapper: str, error: BaseException) -> None:
    """An exception of stock's is the caller's, as it is."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise error

    layer = nn.Module()
    info = SimpleNamespace(kernel_tensors=({}, {}))
    with pytest.raises(type(error)) as raised:
        getattr(keep_unloaded, wrapper)(broken, None, (layer, info), {})
    assert raised.value is error


def test_by_keyword(host: Host, patched: None) -> None:
    """The functions may be called by keyword."""
    model = host.load(add_buffers, pieces("layer.weight", [1, 2, 3, 4]))
    reload.record_metadata_for_reloading(model=model)
    reload.initialize_layerwise_reload(model=model)
    info = layerwise.get_layerwise_info(model.layer)
    meta.materialize_layer(layer=model.layer, info=info)
    assert model.layer.weight.tolist() == [1, 2, 3, 4]  # recorded a second time, after the load
    reload.finalize_layerwise_reload(model=model, model_config=host.config.model_config)
    assert counters(NAME)["reloads"] == 1


def test_what_is_wrapped_and_given_back(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The functions are wrapped where they are used, and given back; undone in a reload, it ends as stock's."""
    places = [
        (loader_utils, "record_metadata_for_reloading"),
        (layerwise, "materialize_layer"),
        (layerwise, "initialize_layerwise_reload"),
        (reload, "finalize_layerwise_reload"),
    ]
    stock = [getattr(*place) for place in places]
    assert state_of(NAME)[0] == "off"
    with switched_on(monkeypatch, tmp_path, NAME):
        live = [getattr(*place) for place in places]
        assert all(one is not old and one.__wrapped__ is old for one, old in zip(live, stock, strict=True))
        model = host.load(add_buffers, pieces("layer.weight", [1, 2, 3, 4]))
        host.begin(model)
    assert all(getattr(*place) is old for place, old in zip(places, stock, strict=True))
    model.load_weights(iter(pieces("layer.weight", [5, 6, 7, 8])))
    host.finish(model)
    assert model.layer.locks.tolist() == [-1] * 8


def test_what_it_remembers_is_freed_with_the_model(host: Host, patched: None) -> None:
    """A model that is gone leaves nothing; after a reload vLLM itself keeps its layers, and nothing is kept of that."""
    model = host.load(add_buffers, pieces("layer.weight", [1, 2, 3, 4]))
    assert {*keep_unloaded._initial} == {model.layer, model.outer}
    del model
    gc.collect()
    assert not keep_unloaded._initial
    model = host.load(add_buffers, pieces("layer.weight", [1, 2, 3, 4]))
    host.begin(model)
    assert {*keep_unloaded._not_persistent} == {*model.modules()}
    host.finish(model)
    assert not keep_unloaded._not_persistent

"""runai_buffers on a release's real loaders, with real streamers on real files, beside stock vLLM.

In 0.20.0 to 0.21.0 stock buffers tensors that a streamer before 0.17 overwrites. Later releases clone every tensor, and
the patch has nothing to do. For quantization="fp8" the compiled operator and the kernel's choice are stood in for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import frame
import pytest
import torch
from devices import Cuda, FakeDevice
from layers import Host, Layer, Online, Probe, add_attention, load_slice, own, same, values
from packaging.version import Version
from patching import counters, hearing, state_of, switched_on
from safetensors.torch import save_file
from test_pinned_staging import install_streamer
from torch import nn
from vllm.config import LoadConfig, VllmConfig
from vllm.model_executor.model_loader import get_model_loader, weight_utils
from vllm.model_executor.model_loader.reload import layerwise

import vllm_hotfix
from vllm_hotfix._patches import runai_buffers
from vllm_hotfix._patches.pinned_staging import _cuda
from vllm_hotfix._record import RECORD

sys.path.insert(0, str(Path(__file__).parents[1]))
import releases

VERSION = Version(os.environ["HOTFIX_RELEASE"])
FIXED = Version("0.22") <= VERSION
NAME, GATE = "runai_buffers", "VLLM_HOTFIX_RUNAI_BUFFERS"
PINNED = "pinned_staging"
needs_fault = pytest.mark.skipif(FIXED, reason="from 0.22 on the release clones every tensor and nothing is wrapped")
SIZE = 1024

Named = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def reused(monkeypatch: pytest.MonkeyPatch) -> type[Reusing]:
    """Let vLLM stream from memory, unless a test says otherwise: from a streamer that has one buffer."""
    monkeypatch.setattr(weight_utils, "SafetensorsStreamer", Reusing)
    monkeypatch.setattr(Reusing, "content", {})
    monkeypatch.setattr(Reusing, "left", 0)
    return Reusing


class Reusing:
    """A streamer with memory for one tensor, which it overwrites when it is asked for the next one, and at its end."""

    content: Named = {}
    left = 0

    def __enter__(self) -> Reusing:
        return self

    def __exit__(self, *error: object) -> None:
        type(self).left += 1

    def stream_files(self, paths: list[str], device: str = "cpu", is_distributed: bool = False) -> None:
        """Announce the tensors."""
        self.files_to_tensors_metadata = {0: list(self.content)}

    def get_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield them one by one, as views of the buffer."""
        buffer = bytearray(max((one.nbytes for one in self.content.values()), default=0))
        for name, tensor in self.content.items():
            if not tensor.nbytes:
                yield name, torch.empty(tensor.shape, dtype=tensor.dtype)  # which lies nowhere
                continue
            found = torch.frombuffer(buffer, dtype=torch.uint8)[: tensor.nbytes]
            found.copy_(tensor.reshape(-1).view(torch.uint8))
            yield name, found.view(tensor.dtype).view(tensor.shape)
            buffer[:] = b"\xdd" * len(buffer)


def checkpoint(seed: int) -> Named:
    """Two layers' tensors, those of one between those of the other, and a third layer that has only one."""
    generator = torch.Generator().manual_seed(seed)
    names = ("one.a", "two.a", "three.a", "one.b", "two.b")
    return {name: torch.rand(SIZE, generator=generator) for name in names}


def build(model: Probe, _: VllmConfig) -> None:
    """Two layers with two tensors each, and one with one."""
    for name in ("one", "two"):
        model.add_module(name, Layer({"a": (SIZE,), "b": (SIZE,)}))
    model.three = Layer({"a": (SIZE,)})


class OnlineLayer(Layer):
    """A layer that is quantized while the checkpoint is loaded."""

    def __init__(self, tensors: dict[str, tuple[int, ...]]) -> None:
        super().__init__({})
        for name, shape in tensors.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False))
        self.quant_method = Online(lambda layer: torch.cat([one.flatten() for one in own(layer)]))
        layerwise.initialize_online_processing(self)


def build_online(model: Probe, _: VllmConfig) -> None:
    """The same layers, quantized online."""
    for name in ("one", "two"):
        model.add_module(name, OnlineLayer({"a": (SIZE,), "b": (SIZE,)}))
    model.three = OnlineLayer({"a": (SIZE,)})


def build_fp8(model: Probe, _: VllmConfig) -> None:
    """The release's own linear layers under quantization="fp8"; projections of two of them come in turn."""
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear
    from vllm.model_executor.layers.quantization import fp8

    class Kernel:
        """Stands for the kernel that a GPU would be asked for."""

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            """Do nothing: the weight stays as it is."""

    fp8.init_fp8_linear_kernel = lambda **options: Kernel()
    if hasattr(fp8, "cutlass_fp8_supported"):
        fp8.cutlass_fp8_supported = lambda *args: True
    fp8.ops.scaled_fp8_quant = lambda tensor, scale: ((tensor / 2).to(torch.float8_e4m3fn), torch.tensor([2.0]))
    for name in ("one", "two"):
        config = fp8.Fp8Config(is_checkpoint_fp8_serialized=False)
        config.packed_modules_mapping = {}
        layer = MergedColumnParallelLinear(32, [16, 16], bias=False, quant_config=config, prefix=name)
        model.add_module(name, layer)
        model.routes |= {f"{name}.{part}": (f"{name}.weight", (number,)) for number, part in enumerate("ab")}


def checkpoint_fp8(seed: int) -> Named:
    """Four projections of the two layers, those of one between those of the other."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(16, 32, generator=generator) for name in ("one.a", "two.a", "one.b", "two.b")}


def streaming(host: Host, content: Named | str, extra: dict[str, Any] | None = None) -> Any:
    """Return the release's own iterator over tensors in memory, or over a folder's files."""
    folder = content if isinstance(content, str) else str(host.config.model_config.model)
    if not isinstance(content, str):
        Reusing.content = content
    config = LoadConfig(
        load_format="runai_streamer", use_tqdm_on_load=False, model_loader_extra_config=dict(extra or {})
    )
    loader: Any = get_model_loader(config)
    if not isinstance(content, str):
        loader._prepare_weights = lambda *args: ["one.safetensors"]
    return loader._get_weights_iterator(folder, None)


def load(host: Host, content: Named | str, build: Any = build) -> Any:
    """Load a model through the release's `load_model`, out of the streamer."""
    return host.load(build, streaming(host, content))


def reload(host: Host, model: Any, content: Named | str, extra: dict[str, Any] | None = None) -> None:
    """Reload as `reload_weights` does: the iterator is made before the layers are told."""
    host.reload(model, streaming(host, content, extra))


def cold(host: Host, content: Named, build: Any = build) -> Named:
    """Return a model's tensors after a load of the same content from memory that stays."""
    return values(host.load(build, [(name, tensor.clone()) for name, tensor in content.items()]))


# 1. The fault, with the real streamers.

CASES = {
    "reload": (build, checkpoint),
    "online first load": (build_online, checkpoint),
    "fp8 first load": (build_fp8, checkpoint_fp8),
}


def with_files(host: Host, case: str, folder: Path, limit: str) -> dict[str, Any]:
    """In a process of its own: is what a case leaves the same as from memory, with stock and patched."""
    make, content = CASES[case]
    os.environ |= {"RUNAI_STREAMER_MEMORY_LIMIT": limit, "RUNAI_STREAMER_CONCURRENCY": "1"}
    tensors = content(2)
    expected = cold(host, tensors, make)
    for number, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, folder / f"model-{number}.safetensors")
    result: dict[str, Any] = {}
    for side in ("stock", "patched"):
        if side == "patched":
            os.environ[GATE] = "1"
            vllm_hotfix.activate()
            result["state"] = state_of(NAME)[0]
        if case == "reload":
            model = host.load(make, [(name, tensor) for name, tensor in content(1).items()])
            reload(host, model, str(folder))
        else:
            model = load(host, str(folder), make)
        result[side] = same(values(model), expected)
    return result | {"counters": counters(NAME)}


@pytest.mark.parametrize("limit", ["smallest", "roomy"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("streamer", releases.STREAMERS)
def test_what_is_buffered_keeps_its_values(host: Host, streamer: str, case: str, limit: str, tmp_path: Path) -> None:
    """A reload, and a first load that quantizes online, end as from memory that nobody overwrites.

    Stock does so from 0.22 on, with a streamer from 0.17 on, and where the limit has room for the whole checkpoint.
    """
    if case == "fp8 first load" and FIXED:
        pytest.skip("fp8 layers are made otherwise in each later release, which the other online case stands for")
    home = releases.streamer(streamer)

    def child() -> dict[str, Any]:
        install_streamer(home)
        folder = tmp_path / "files"
        folder.mkdir()
        return with_files(host, case, folder, "0" if limit == "smallest" else str(1 << 30))

    result = frame.forked(tmp_path, child).ok()
    reuses = Version(streamer) < Version("0.17")
    assert result["state"] == ("not-needed" if FIXED else "active")
    assert result["stock"] is (FIXED or not reuses or limit == "roomy")
    assert result["patched"] is True
    copied = 2 if reuses and not FIXED else 0  # the first tensor of each of two layers
    assert result["counters"].get("tensors_copied", 0) == copied


# 2. What is copied.


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """For each loader call with real memory: where the loaded tensor lies, and the value that it begins with."""
    seen: list[tuple[int, int]] = []
    default = layerwise.default_weight_loader

    def loader(param: torch.Tensor, loaded: torch.Tensor) -> None:
        if not param.is_meta:
            seen.append((loaded.untyped_storage().data_ptr(), int(loaded.flatten()[0])))
        default(param, loaded)

    def make(model: Probe, _: VllmConfig) -> None:
        for name in ("one", "two", "three"):
            parts = ("a",) if name == "three" else ("a", "b")
            model.add_module(name, Layer(dict.fromkeys(parts, (SIZE,)), dict.fromkeys(parts, loader)))

    monkeypatch.setattr(sys.modules[__name__], "build", make)
    return seen


def numbered(start: int) -> Named:
    """A checkpoint of which each tensor is all one number: 0, 1, 2 and so on from the start."""
    return {name: torch.full((SIZE,), float(start + index)) for index, name in enumerate(checkpoint(0))}


@needs_fault
def test_a_plain_load_copies_and_watches_nothing(
    host: Host, used: list[tuple[int, int]], patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a layer that buffers, stock's own tensors are yielded, and none is looked at."""
    noted: list[Any] = []
    monkeypatch.setattr(runai_buffers, "_note", lambda *args: noted.append(args))
    # Other tests have left layers that wait for the rest of a load.
    layerwise.LAYERWISE_INFO.clear()
    content = numbered(10)
    model = load(host, content, build)
    assert same(values(model), cold(host, content, build))
    assert len({address for address, _ in used[: len(content)]}) == 1  # the streamer's
    assert noted == []
    assert counters(NAME) == {}
    reload(host, model, content)
    assert len(noted) == len(content)


@needs_fault
def test_only_what_waits_is_copied(host: Host, used: list[tuple[int, int]], patched: None) -> None:
    """The tensor that completes a layer, also a layer's only one, is loaded out of the streamer's memory."""
    model = load(host, numbered(10), build)
    used.clear()
    content = numbered(20)
    reload(host, model, content)
    copied = [value for address, value in used if address != used[0][0]]
    assert [value for _, value in used] == [22, 20, 23, 21, 24]  # three.a; one.a and one.b; two.a and two.b
    assert copied == [20, 21]
    assert same(values(model), cold(host, content, build))
    assert counters(NAME) == {"tensors_copied": 2, "bytes_copied": 2 * 4 * SIZE}
    assert runai_buffers._streams == []


@needs_fault
def test_each_tensor_is_looked_at_once(host: Host, patched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a tensor lies is asked once for what a call leaves behind, and not at all while no streamer is at work."""
    looked: list[torch.Tensor] = []
    copied = runai_buffers._copied
    monkeypatch.setattr(runai_buffers, "_copied", lambda tensor: looked.append(tensor) or copied(tensor))

    def make(model: Probe, _: VllmConfig) -> None:
        model.layer = Layer(dict.fromkeys("abc", (SIZE,)))

    content = {f"layer.{name}": torch.rand(SIZE) for name in "abc"}
    model = load(host, content, make)
    host.reload(model, list(content.items()))
    assert looked == []
    reload(host, model, content)
    assert [one.is_meta for one in looked] == [True, False] * 2  # a parameter and what is loaded into it


def buffered(model: Any, layer: str) -> list[Any]:
    """Return the tensors that a layer has buffered."""
    info = layerwise.get_layerwise_info(model.get_submodule(layer))
    return [call.arguments.get("loaded", call.arguments.get("loaded_weight")) for _, call in info.loaded_weights]


@needs_fault
@pytest.mark.parametrize("amid", [False, True], ids=["alone", "amid a stream"])
def test_tensors_of_others_are_buffered_as_they_are(host: Host, amid: bool, patched: None) -> None:
    """What did not come from the streamer is buffered itself, also while a streamer is at work."""
    model = load(host, checkpoint(1))
    host.begin(model)
    stream = streaming(host, checkpoint(1))
    if amid:
        next(stream)
        assert len(runai_buffers._streams) == 1
    mine = torch.rand(SIZE)
    model.load_weights([("one.a", mine)])
    assert buffered(model, "one")[0] is mine
    view = torch.rand(2 * SIZE)[SIZE:]
    model.load_weights([("two.a", view)])
    assert buffered(model, "two")[0] is view
    assert counters(NAME) == {}
    stream.close()
    model.load_weights([("one.b", mine), ("two.b", mine), ("three.a", mine)])
    host.finish(model)
    assert torch.equal(model.two.a, view)


@needs_fault
def test_a_part_is_copied_and_not_the_whole(host: Host, patched: None) -> None:
    """Of a tensor that is given to loaders in parts, what is buffered is copied, each part once."""

    def split(model: Probe, _: VllmConfig) -> None:
        model.layer = Layer({"a": (SIZE,), "b": (SIZE,)}, {"a": load_slice, "b": load_slice})

    content = {"a": torch.rand(4, SIZE // 2), "b": torch.rand(2, SIZE // 2)}
    half = SIZE // 2
    model: Any = host.load(split, [])
    host.begin(model)
    stream = streaming(host, content)
    _, tensor = next(stream)
    for _ in range(2):  # as for two replicas of an expert: the same once more
        model.layer.a.weight_loader(model.layer.a, tensor[1], start=0)
    model.layer.a.weight_loader(model.layer.a, tensor.t()[:, 2], half)
    kept = buffered(model, "layer")
    assert [one.untyped_storage().nbytes() for one in kept] == [4 * half] * 3
    assert kept[0] is kept[1]
    assert counters(NAME) == {"tensors_copied": 2, "bytes_copied": 2 * 4 * half}
    next(stream)
    assert torch.equal(kept[0], content["a"][1])
    assert torch.equal(kept[2], content["a"][2])
    stream.close()
    host.finish(model)


@needs_fault
def test_a_tensor_without_elements(host: Host, patched: None) -> None:
    """It lies nowhere, as the parameters do that a reload fills later on: neither is copied."""
    model = load(host, checkpoint(1))
    host.begin(model)
    stream = streaming(host, {"nothing": torch.empty(0), "one.a": torch.ones(SIZE)})
    next(stream)
    model.load_weights([next(stream)])
    ((_, call),) = layerwise.get_layerwise_info(model.one).loaded_weights
    assert call.arguments["param"] is model.one.a
    assert counters(NAME) == {"tensors_copied": 1, "bytes_copied": 4 * SIZE}
    stream.close()


@needs_fault
def test_tensors_within_other_arguments_are_copied(host: Host, patched: None) -> None:
    """What a loader takes as `*args` or `**kwargs`, or in a list, is buffered and copied as well; the rest stays."""

    def loader(param: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        param.data.copy_(args[0] + args[1][0] + kwargs["more"])

    def make(model: Probe, _: VllmConfig) -> None:
        model.layer = Layer({"a": (SIZE,), "b": (SIZE,)}, {"a": loader})

    model: Any = host.load(make, [])
    host.begin(model)
    stream = streaming(host, {"a": torch.full((SIZE,), 2.0), "b": torch.ones(SIZE)})
    _, tensor = next(stream)
    mark = object()
    model.layer.a.weight_loader(model.layer.a, tensor, [tensor, mark], more=tensor, mark=mark)
    _, tensor = next(stream)
    call = layerwise.get_layerwise_info(model.layer).loaded_weights[0][1]
    assert call.arguments["args"][1][1] is call.arguments["kwargs"]["mark"] is mark
    model.layer.b.weight_loader(model.layer.b, tensor)
    stream.close()
    host.finish(model)
    assert torch.equal(model.layer.a, torch.full((SIZE,), 6.0))
    assert counters(NAME)["tensors_copied"] == 1


def test_scales_that_attention_keeps_to_the_end(host: Host, side: str) -> None:
    """A real attention layer's scales wait until the reload ends, and are the streamer's all that time."""

    def scales(key: float, value: float) -> Named:
        return {"attention.k_scale": torch.tensor(key), "attention.v_scale": torch.tensor(value)}

    def make(model: Probe, config: VllmConfig) -> None:
        add_attention(model, config)

    model = load(host, scales(0.5, 0.25), make)
    assert (model.attention._k_scale.item(), model.attention._v_scale.item()) == (0.5, 0.25)
    reload(host, model, scales(0.125, 0.75))
    right = (model.attention._k_scale.item(), model.attention._v_scale.item()) == (0.125, 0.75)
    assert right is (FIXED or side == "patched")


# 3. Beside other patches.


def with_pinned(host: Host, folder: Path, order: list[str], pins: bool) -> dict[str, Any]:
    """In a process of its own: reload with pinned_staging at work, the patches turned on in an order."""
    os.environ |= {"RUNAI_STREAMER_MEMORY_LIMIT": str(4 * SIZE), "RUNAI_STREAMER_CONCURRENCY": "1"}
    fake = FakeDevice()
    if pins:
        _cuda.open_device = fake.open
        weight_utils.current_platform = Cuda()
    model = host.load(build, list(checkpoint(1).items()))
    expected = cold(host, checkpoint(2))
    for gates in order:
        os.environ["VLLM_HOTFIX_ENABLE"] = gates
        vllm_hotfix.activate()
    states = {name: state_of(name)[0] for name in (NAME, PINNED)}
    reload(host, model, str(folder), {PINNED: True})
    return {
        "states": states,
        "right": same(values(model), expected),
        "pinned": fake.copies > 0,
        "copied": counters(NAME).get("tensors_copied", 0),
    }


@needs_fault
@pytest.mark.parametrize("pins", [True, False], ids=["pinned", "fallen back"])
@pytest.mark.parametrize("order", ["together", "pinned first", "pinned last"])
def test_beside_pinned_staging(host: Host, order: str, pins: bool, tmp_path: Path) -> None:
    """A pinned reload copies nothing out, one that falls back to stock does; whichever was turned on first.

    With pinned_staging turned on earlier than this patch, in a process of its own accord, what waits is copied too.
    """
    both = f"{NAME},{PINNED}"
    orders = {"together": [both], "pinned first": [PINNED, both], "pinned last": [NAME, both]}
    home = releases.streamer("0.16.1")
    files = tmp_path / "files"
    files.mkdir()
    for number, (name, tensor) in enumerate(checkpoint(2).items()):
        save_file({name: tensor}, files / f"model-{number}.safetensors")

    def child() -> dict[str, Any]:
        install_streamer(home)
        return with_pinned(host, files, orders[order], pins)

    result = frame.forked(tmp_path, child).ok()
    assert result["states"] == {NAME: "active", PINNED: "active"}
    assert result["right"] is True
    assert result["pinned"] is pins
    assert result["copied"] == (0 if pins and order != "pinned first" else 2)


@pytest.mark.parametrize("order", ["together", "measured first", "measured last"])
def test_beside_measured_totals(host: Host, order: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A layer that measured_totals holds back keeps all its tensors, the one that stock thinks the last among them."""
    measured = "measured_totals"

    def twice(param: torch.Tensor, loaded: torch.Tensor, part: str = "") -> None:
        param.data.copy_(loaded)  # stock counts both

    def make(model: Probe, _: VllmConfig) -> None:
        for name in ("one", "two"):
            model.add_module(name, Layer({"a": (SIZE,), "b": (SIZE,)}, {"a": twice}))
            model.routes |= {f"{name}.a{part}": (f"{name}.a", (part,)) for part in "xy"}

    def content(seed: int) -> Named:
        generator = torch.Generator().manual_seed(seed)
        names = ("one.ax", "one.ay", "two.ax", "two.ay", "two.b", "one.b")
        return {name: torch.rand(SIZE, generator=generator) for name in names}

    both = f"{measured},{NAME}"
    monkeypatch.setenv("VLLM_HOTFIX_ENABLE", "")
    monkeypatch.setattr(RECORD, "counters", {})
    monkeypatch.setenv("VLLM_HOTFIX_STATE_DIR", str(tmp_path))
    try:
        for gates in {"together": [both], "measured first": [measured, both], "measured last": [NAME, both]}[order]:
            monkeypatch.setenv("VLLM_HOTFIX_ENABLE", gates)
            vllm_hotfix.activate()
        assert state_of(measured)[0] == "active"
        model = load(host, content(1), make)
        for seed in (2, 3):
            reload(host, model, content(seed))
            assert same(values(model), cold(host, content(seed), make))
    finally:
        vllm_hotfix.deactivate()
    # Of each layer all three: measured_totals takes what comes for a layer until one for another comes.
    assert counters(NAME).get("tensors_copied", 0) == (0 if FIXED else 12)


# 4. What goes wrong.


@needs_fault
@pytest.mark.parametrize("where", ["copying", "watching", "looking"])
def test_an_error_is_one_warning_and_stock(
    host: Host, where: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the patch's own work raises, reloads end as stock's do, and one warning says so."""

    def fail(*args: Any) -> Any:
        raise LookupError("injected")

    model = load(host, checkpoint(1))
    reload(host, model, checkpoint(2))
    stock = values(model)
    request.getfixturevalue("patched")
    model = load(host, checkpoint(1))  # stock keeps a layer's loaders from one reload to the next
    if where == "copying":
        monkeypatch.setattr(runai_buffers, "_copied", fail)
    elif where == "watching":
        stream = SimpleNamespace(addresses=set(), copies=SimpleNamespace(clear=fail))
        monkeypatch.setattr(runai_buffers, "_Stream", lambda: stream)
    else:
        monkeypatch.setattr(Reusing.stream_files, "__signature__", "nonsense", raising=False)
    with hearing() as heard:
        for _ in range(2):
            reload(host, model, checkpoint(2))
    assert same(values(model), stock)
    assert len(heard) == 1
    assert all(
        word in heard[0] for word in (NAME, "as in stock", "__signature__" if where == "looking" else "injected")
    )
    assert counters(NAME) == {}
    assert runai_buffers._streams == []


@needs_fault
@pytest.mark.parametrize("error", [ValueError("the consumer's"), KeyboardInterrupt()])
def test_a_load_that_ends_early_leaves_the_streamer(host: Host, patched: None, error: BaseException) -> None:
    """Closed, dropped or left by any error, the streamer is left as with stock, and is not watched any longer."""
    model = load(host, checkpoint(1))
    host.begin(model)
    Reusing.left = 0
    stream = streaming(host, checkpoint(2))
    with pytest.raises(type(error)) as caught:
        for _ in stream:
            raise error
    assert caught.value is error
    assert len(runai_buffers._streams) == 1
    stream.close()
    assert Reusing.left == 1
    assert runai_buffers._streams == []
    stream = streaming(host, checkpoint(2))
    next(stream)
    del stream, caught
    assert Reusing.left == 2
    assert runai_buffers._streams == []
    inner = (item for item in checkpoint(2).items())
    stream = runai_buffers.weights_iterator(lambda: inner, None, (), {})
    next(stream)
    stream.close()
    assert inner.gi_frame is None  # closed, whoever still has it


@needs_fault
def test_stocks_errors_pass(host: Host, patched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the streamer or a loader raises comes out as it is, at the same place, and wrong arguments at the call."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("stock's own")

    model = load(host, checkpoint(1))
    host.begin(model)
    with pytest.raises(TypeError, match="hf_weights_files"):
        weight_utils.runai_safetensors_weights_iterator()
    stream = streaming(host, checkpoint(2))
    monkeypatch.setattr(Reusing, "get_tensors", fail)
    with pytest.raises(ZeroDivisionError, match="stock's own"):
        next(stream)
    assert runai_buffers._streams == []
    monkeypatch.undo()


@needs_fault
def test_a_loaders_error_passes(host: Host, patched: None) -> None:
    """A loader that refuses a streamed tensor raises as with stock, and its answer is handed on."""

    def refuse(param: torch.Tensor, loaded: torch.Tensor) -> bool:
        if loaded[0] < 0:
            raise ZeroDivisionError("the loader's own")
        return False

    def make(model: Probe, _: VllmConfig) -> None:
        model.layer = Layer({"a": (SIZE,), "b": (SIZE,)}, {"a": refuse})

    model: Any = host.load(make, [])
    host.begin(model)
    stream = streaming(host, {"a": torch.ones(SIZE), "b": -torch.ones(SIZE)})
    assert model.layer.a.weight_loader(model.layer.a, next(stream)[1]) is False
    with pytest.raises(ZeroDivisionError, match="the loader's own"):
        model.layer.a.weight_loader(model.layer.a, next(stream)[1])
    stream.close()


# 5. On and off.


def test_what_is_wrapped_and_given_back(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Active, both functions are wrapped under every name; afterwards each is the identical object again.

    From 0.22 on nothing is wrapped: the patch is not needed, and says since when.
    """
    from vllm.model_executor.model_loader import runai_streamer_loader, sharded_state_loader

    places = [
        *((module, "runai_safetensors_weights_iterator") for module in (weight_utils, runai_streamer_loader)),
        (sharded_state_loader, "runai_safetensors_weights_iterator"),
        (layerwise, "make_online_process_loader"),
    ]
    stock = [getattr(*place) for place in places]
    with switched_on(monkeypatch, tmp_path, NAME):
        live = [getattr(*place) for place in places]
        state, reason = state_of(NAME)
        if FIXED:
            assert state == "not-needed"
            assert "0.22.0" in reason
            assert all(one is old for one, old in zip(live, stock, strict=True))
        else:
            assert (state, reason) == ("active", "2 functions wrapped")
            assert all(one is not old and one.__wrapped__ is old for one, old in zip(live, stock, strict=True))
    assert all(getattr(*place) is old for place, old in zip(places, stock, strict=True))
    assert state_of(NAME)[0] == "off"


@needs_fault
def test_deactivate_amid_a_reload_lets_it_go_on(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A reload that is half way ends right; the next one is stock's, with the loaders that were made before."""
    with switched_on(monkeypatch, tmp_path, NAME):
        model = load(host, checkpoint(1))
        host.begin(model)
        stream = streaming(host, checkpoint(2))
        model.load_weights([next(stream)])
    model.load_weights(stream)
    host.finish(model)
    expected = cold(host, checkpoint(2))
    assert same(values(model), expected)
    assert counters(NAME)["tensors_copied"] == 2
    reload(host, model, checkpoint(2))
    assert not same(values(model), expected)


@needs_fault
@pytest.mark.parametrize("owned", [True, False])
def test_a_streamer_that_gives_its_tensors_away(
    host: Host, owned: bool, patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the streamer gives tensors away unless it is asked not to, nothing is copied."""
    stock = Reusing.stream_files

    def stream_files(self: Any, paths: list[str], owned: bool = owned, **options: Any) -> None:
        stock(self, paths)

    monkeypatch.setattr(Reusing, "stream_files", stream_files)
    model = load(host, checkpoint(1))
    reload(host, model, checkpoint(2))
    assert counters(NAME).get("tensors_copied", 0) == (0 if owned else 2)

"""keep_moe_kernel on a release's real NVFP4 MoE layers: load, capture, sleep, reload and replay, beside stock vLLM.

The quantization methods, the choice and conversion of weights, the experts with their `apply`, the kernel around them
and the layerwise reload are the release's own. On the CPU `nvfp4_kernels.py` stands in for the compiled kernels and for
FlashInfer, and `graphs.Graph` for a CUDA graph.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import nvfp4_kernels
import pytest
import torch
from graphs import Graph, discard
from layers import DEVICE, Host, Piece, Probe, accepted, choose, experts_of, put_moe
from packaging.version import Version
from patching import counters, hearing, state_of, switched_on
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.worker import workspace

import vllm_hotfix
from vllm_hotfix._patches import keep_moe_kernel

RELEASE = Version(os.environ["HOTFIX_RELEASE"])
NAME = "keep_moe_kernel"
EXPERTS, HIDDEN, BETWEEN, TOKENS = 4, 256, 64, 5
#: Two checkpoints, by the seed of their numbers.
A, B = 1, 2
#: The tensors that experts make of a limit of the activation function.
OWN_NAMES = {"limit": "gemm1_clamp_limit", "alpha": "gemm1_alpha", "beta": "gemm1_beta"}
METHODS = {"modelopt": "ModelOptNvFp4FusedMoE", "compressed-tensors": "CompressedTensorsW4A4Nvfp4MoEMethod"}


def quant_config(method: str) -> Any:
    """Return the real configuration of a checkpoint in NVFP4."""
    if method == "modelopt":
        from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config as Config

        return Config(
            **accepted(
                Config,
                quant_method="NVFP4",
                is_checkpoint_nvfp4_serialized=True,
                kv_cache_quant_algo=None,
                exclude_modules=[],
                group_size=16,
            )
        )
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors

    number = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    group = {"targets": ["Linear"], "weights": number, "input_activations": number | {"dynamic": "local"}}
    return compressed_tensors.CompressedTensorsConfig.from_config(
        {"format": "nvfp4-pack-quantized", "config_groups": {"group_0": group}, "ignore": []}
    )


def limits(backend: str) -> dict[str, Any]:
    """Return the limits of the activation function of which this release's experts make tensors."""
    since = {"FLASHINFER_TRTLLM": ("0.22", "0.25"), "FLASHINFER_CUTLASS": ("0.24", "0.28")}
    backend = backend.split()[0]
    limit, others = map(Version, since.get(backend, ("9", "9")))
    found: dict[str, Any] = {"swiglu_limit": 7.0} if limit <= RELEASE else {}
    if others <= RELEASE:
        found |= {"swiglu_alpha": 1.7, "swiglu_beta": 1.5}
        # The only activation function with which these experts use them.
        found |= {"activation": "swigluoai_uninterleave"} if backend == "FLASHINFER_CUTLASS" else {}
    return found


def stale(method: str, backend: str) -> bool:
    """Say whether this release's kernels hold tensors that are no parameters; Marlin has no scales of activations."""
    return backend != "MARLIN" or (method == "compressed-tensors" and Version("0.28") > RELEASE)


def held(*roots: Any) -> dict[int, Tensor]:
    """Return every tensor that vLLM's objects hold, by its identity; modules of the model are left out."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    stack = list(roots)
    while stack:
        one = stack.pop()
        if id(one) in seen or isinstance(one, (nn.Module, type)):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            found[id(one)] = one
        elif isinstance(one, dict):
            stack.extend(one.values())
        elif isinstance(one, (list, tuple)):
            stack.extend(one)
        elif type(one).__module__.startswith("vllm."):
            stack.extend(vars(one).values())
    return found


def storage(one: Tensor) -> int:
    """Return where the memory of a tensor begins."""
    return one.untyped_storage().data_ptr()


class Engine:
    """Models of one real MoE layer in NVFP4, checkpoints for them, and a batch of tokens."""

    def __init__(self, host: Host, method: str, backend: str, *, brings_config: bool) -> None:
        self.host = host
        self.method = method
        self.backend = backend
        host.config.compilation_config.max_cudagraph_capture_size = TOKENS  # a worker has it by then
        #: In 0.20.0 to 0.22.1 FlashInfer's experts want a current configuration, which no worker has in a reload.
        #: A stock reload fails there for want of it, which is not the fault at hand.
        self.brings_config = brings_config
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(DEVICE, torch.bfloat16)
        self.logits = torch.randn(TOKENS, EXPERTS, generator=generator).to(DEVICE)
        weights, ids = self.logits.softmax(-1).topk(2)
        self.topk_weights, self.topk_ids = weights.contiguous(), ids.to(torch.int32)
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._layer = ""

    def _build(self, model: Probe, config: VllmConfig) -> None:
        sizes = {"size": HIDDEN, "intermediate_size": BETWEEN}
        put_moe(model, quant_config(self.method), EXPERTS, **sizes, **limits(self.backend))
        self._layer, layer = experts_of(model)
        self._shapes = {name: (one.shape, one.dtype) for name, one in layer.named_parameters(recurse=False)}

    def stream(self, seed: int, experts: int = EXPERTS) -> Iterator[Piece]:
        """Yield a checkpoint in which no two scales are the same.

        Input scales come first and weights last: stock's trigger counts the former twice in 0.20.0 to 0.22.1.
        """
        generator = torch.Generator().manual_seed(seed)
        order = sorted(self._shapes, key=lambda name: ("input" not in name, self._shapes[name][0].numel()))
        for name in order:
            shape, dtype = self._shapes[name]
            rows = shape[1:] if name.startswith("w2") else (shape[1] // 2, *shape[2:])
            for expert in range(experts):
                for shard in ("w2",) if name.startswith("w2") else ("w1", "w3"):
                    value = torch.rand(rows if len(shape) == 3 else (), generator=generator) + 0.5
                    if dtype is torch.uint8:
                        value = (value - 0.5) * 256
                    if name.endswith("input_scale"):
                        value /= 32
                    if name.endswith("input_global_scale"):
                        value *= 32
                    weight_name = f"{self._layer}.{expert}.{name}"
                    yield Piece(f"{self._layer}.{name}", value.to(dtype), (weight_name, shard, expert))

    def load(self, seed: int) -> Any:
        """Load cold."""
        model = self.host.load(self._build, self.stream(seed))
        method = self.quant_method(model)
        assert type(method).__name__ == METHODS[self.method]
        assert method.experts_cls is nvfp4_kernels.experts_class(self.backend)
        return model

    def reload(self, model: Any, seed: int, experts: int = EXPERTS) -> None:
        """Reload as the worker does, or what no checkpoint can do to a layer: with another number of experts."""
        with set_current_vllm_config(self.host.config) if self.brings_config else contextlib.nullcontext():
            self.host.begin(model)
            layer = experts_of(model)[1]
            for one in layer.parameters(recurse=False):
                one.data = one.data.new_empty((experts, *one.shape[1:]))
            model.load_weights(self.stream(seed, experts))
            self.host.finish(model)

    def quant_method(self, model: Any) -> Any:
        """Return what holds the kernel."""
        return experts_of(model)[1].quant_method

    def apply(self, model: Any) -> Tensor:
        """Compute the layer's output for the batch."""
        layer, method = experts_of(model)[1], self.quant_method(model)
        if method.is_monolithic:
            return method.apply_monolithic(layer, self.hidden, self.logits)
        others = accepted(method.apply, shared_experts=None, shared_experts_input=None)
        return method.apply(layer, self.hidden, self.topk_weights, self.topk_ids, **others)

    def capture(self, model: Any) -> Graph:
        """Capture that computation."""
        return Graph(lambda: self.apply(model))

    def read(self, graph: Graph) -> list[Tensor]:
        """Return what a graph reads and did not make, the batch and vLLM's scratch memory left out."""
        given = {id(one) for one in (self.hidden, self.logits, self.topk_weights, self.topk_ids)}
        scratch = {storage(one) for one in workspace.current_workspace_manager()._current_workspaces if one is not None}
        return [one for one in graph.inputs if id(one) not in given and storage(one) not in scratch]

    def owned(self, model: Any) -> list[Tensor]:
        """Return the tensors that the kernel holds and that are not memory of a parameter, which vLLM refreshes."""
        method = self.quant_method(model)
        others = {storage(one) for one in (*model.parameters(), *model.buffers())}
        everything = held(method.moe_kernel, method.moe_quant_config).values()
        return list({storage(one): one for one in everything if storage(one) not in others}.values())

    def sleep(self, model: Any, graph: Graph) -> None:
        """Discard all that was made with the weights: what the graph reads, the model's tensors, the kernel's."""
        method = self.quant_method(model)
        discard(self.read(graph))
        discard([*model.parameters(), *model.buffers()])
        discard(held(method.moe_kernel, method.moe_quant_config).values())


@pytest.fixture(params=nvfp4_kernels.COMPUTING)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let vLLM choose this backend, and its kernels run here."""
    nvfp4_kernels.stand_in(monkeypatch)
    choose(monkeypatch, nvfp4_kernels.BACKENDS, request.param)
    return request.param


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    """Test each of the methods that have NVFP4 experts."""
    return request.param


@pytest.fixture
def stock(backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Stock, with the one patch without which it raises in 0.20.0 to 0.26.0 before it gets to the fault at hand."""
    if Version("0.27") <= RELEASE or not backend.startswith("FLASHINFER"):
        yield
        return
    with switched_on(monkeypatch, tmp_path, "writable_scales"):
        yield


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Apply the patch for one test."""
    with switched_on(monkeypatch, tmp_path, NAME):
        functions()  # imports their modules, which no model has asked for yet
        state, reason = state_of(NAME)
        assert state == "active", reason
        yield


@pytest.fixture(params=["stock", "patched"])
def side(request: pytest.FixtureRequest) -> str:
    """Run a test with vLLM as it is and with the patch applied."""
    request.getfixturevalue(request.param)
    return request.param


@pytest.fixture
def engine(host: Host, method: str, backend: str, request: pytest.FixtureRequest) -> Engine:
    """What loads, reloads and runs a model with that method and backend."""
    needs_config = backend == "FLASHINFER_CUTLASS" and Version("0.23") > RELEASE
    is_stock = request.node.callspec.params.get("side") == "stock"
    return Engine(host, method, backend, brings_config=needs_config and is_stock)


# The fault


def test_a_replay_after_a_reload_is_a_cold_load(engine: Engine, side: str) -> None:
    """Stock's replay reads the memory of the first kernel, which nothing fills again; patched, it computes what B does.

    Bit for bit, after all that the weights' memory held was discarded, and the same for A once more. What runs eagerly
    is right on both sides. Patched, everything stays where the graph reads it. With Marlin stock is right too, but for
    compressed-tensors before 0.28.0: nothing but parameters is read.
    """
    model = engine.load(A)
    old = engine.apply(model)
    new = engine.apply(engine.load(B))
    graph = engine.capture(model)
    read = engine.read(graph)
    addresses = [one.data_ptr() for one in read]
    layer, method = experts_of(model)[1], engine.quant_method(model)
    kernel, config = method.moe_kernel, method.moe_quant_config
    plain = engine.owned(model)
    # Where a fused scale is no parameter, the layer has it as well, for whoever moves experts around.
    shared = {name: one for name, one in vars(layer).items() if any(one is other for other in plain)}
    is_stale = stale(engine.method, engine.backend)
    assert bool(plain) == is_stale
    assert torch.equal(graph.replay(), old)
    for seed, right, wrong in ((B, new, old), (A, old, new)):
        assert right.isfinite().all()
        assert not torch.equal(right, wrong)
        engine.sleep(model, graph)
        engine.reload(model, seed)
        assert torch.equal(engine.apply(model), right)
        assert torch.equal(graph.replay(), right) == (side == "patched" or not is_stale)
    if side == "patched":
        assert method.moe_kernel is kernel
        assert method.moe_quant_config is config
        assert all(vars(layer)[name] is one for name, one in shared.items())
        assert [one.data_ptr() for one in read] == addresses
        assert [one.data_ptr() for one in engine.read(engine.capture(model))] == addresses
        refreshed = {"tensors_refreshed": 2 * len(plain)} if plain else {}
        assert counters(NAME) == {"kernels_kept": 2} | refreshed


@pytest.mark.parametrize("method", ["modelopt"], indirect=True)
def test_the_result_depends_on_all_that_is_read(engine: Engine) -> None:
    """If any one tensor that the graph reads is discarded, the replay is another: none could be stale unseen."""
    model = engine.load(A)
    old = engine.apply(model)
    graph = engine.capture(model)
    read = {storage(one): one for one in engine.read(graph)}
    for one in read.values():
        memory = one.untyped_storage()
        kept = memory.clone()
        discard([one])
        assert not torch.equal(graph.replay(), old)
        memory.copy_(kept)
    assert torch.equal(graph.replay(), old)
    experts = engine.quant_method(model).moe_kernel.fused_experts
    for name in ("limit", "alpha", "beta"):
        assert f"swiglu_{name}" not in limits(engine.backend) or held(getattr(experts, OWN_NAMES[name]))
    unread = {storage(one) for one in held(experts).values()} - read.keys()
    # TRTLLM's hook makes other tensors of these, which the kernel gets in their stead.
    sources = (experts.quant_config.a2_gscale, *(one for name, one in vars(experts).items() if "unfolded" in name))
    trtllm = engine.backend.startswith("FLASHINFER_TRTLLM")
    assert unread <= ({storage(one) for one in sources if one is not None} if trtllm else set())


@pytest.mark.parametrize(("method", "backend"), [("compressed-tensors", "EMULATION")], indirect=True)
def test_what_emulated_experts_hold_after_a_reload(engine: Engine, side: str) -> None:
    """Patched, the first kernel holds what one of a cold load of B holds, where it was; stock fills nothing again.

    They are not run here. With ModelOpt all that they hold are parameters.
    """
    model = engine.load(A)
    owned = engine.owned(model)
    addresses = [one.data_ptr() for one in owned]
    new = engine.owned(engine.load(B))
    assert len(owned) == len(new) == (4 if Version("0.28") > RELEASE else 2)
    discard(owned)
    engine.reload(model, B)
    assert all(map(torch.equal, owned, new)) == (side == "patched")
    assert ([one.data_ptr() for one in engine.owned(model)] == addresses) == (side == "patched")


@pytest.mark.skipif(Version("0.26") > RELEASE, reason="from 0.26.0 on NVFP4 can be made while a model is loaded")
@pytest.mark.parametrize("side", ["stock", "patched"], indirect=True)
@pytest.mark.parametrize(("method", "backend"), [("online", "FLASHINFER_TRTLLM monolithic")], indirect=True)
def test_what_online_nvfp4_holds_after_a_reload(
    host: Host, method: str, backend: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor of the first kernel has the values of a cold load of the new weights, and stays where it was.

    Stock builds another kernel up to 0.27.1; from 0.28.0 on it keeps the first one and fuses with its old scales, which
    a sleep has discarded. The quantization of the weights is stood in for; no forward pass is run.
    """
    from vllm.config.quantization import QuantizationConfigArgs, QuantSpec
    from vllm.model_executor.layers.quantization.online import nvfp4
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
    from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Static

    def quantize(weight: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        blocks = weight.float().unflatten(-1, (-1, 16))
        packed = (weight[..., ::2].float() * 50).to(torch.uint8)
        return packed, blocks.amax(-1).to(torch.float8_e4m3fn), weight.float().flatten(1).amax(1)

    def build(model: Probe, config: VllmConfig) -> None:
        arguments = QuantizationConfigArgs(moe=QuantSpec(weight=kNvfp4Static))
        put_moe(model, OnlineQuantizationConfig(arguments), EXPERTS, size=HIDDEN, intermediate_size=BETWEEN)

    def stream(seed: int) -> Iterator[Piece]:
        generator = torch.Generator().manual_seed(seed)
        for shard, shape in (("w1", (BETWEEN, HIDDEN)), ("w3", (BETWEEN, HIDDEN)), ("w2", (HIDDEN, BETWEEN))):
            name = f"{'w2' if shard == 'w2' else 'w13'}_weight"
            for expert in range(EXPERTS):
                value = ((torch.rand(shape, generator=generator) + expert) * seed).to(torch.bfloat16)
                yield Piece(f"{prefix}.{name}", value, (f"{prefix}.{expert}.{name}", shard, expert))

    def tensors(quant_method: Any) -> list[Tensor]:
        config, experts = quant_method.moe_quant_config, quant_method.moe_kernel.fused_experts
        return [config.a1_gscale, config.a2_gscale, config.g1_alphas, config.g2_alphas, experts.g1_scale_c]

    prefix = "moe.routed_experts"
    monkeypatch.setattr(nvfp4, "_quantize_moe_weight_to_nvfp4", quantize)
    monkeypatch.setattr(type(current_platform), "is_device_capability_family", lambda *args: True, raising=False)
    model, new = host.load(build, stream(A)), host.load(build, stream(B))
    (quant_method,) = (one.quant_method for one in model.modules() if hasattr(one, "w13_weight"))
    (expected,) = (tensors(one.quant_method) for one in new.modules() if hasattr(one, "w13_weight"))
    assert type(quant_method).__name__ == "Nvfp4OnlineMoEMethod"
    first = tensors(quant_method)
    assert not all(map(torch.equal, first, expected))
    discard([*model.parameters(), *held(quant_method.moe_kernel, quant_method.moe_quant_config).values()])
    with set_current_vllm_config(host.config):
        host.reload(model, stream(B))
    assert all(map(torch.equal, first, expected)) == (side == "patched")
    assert all(map(torch.equal, tensors(quant_method), expected)) == (side == "patched" or Version("0.28") > RELEASE)
    if side == "patched":
        assert [one.data_ptr() for one in tensors(quant_method)] == [one.data_ptr() for one in first]
        assert counters(NAME)["kernels_kept"] == 1


# Outside a reload

one_kind = pytest.mark.parametrize(("method", "backend"), [("modelopt", "FLASHINFER_CUTLASS")], indirect=True)


@pytest.mark.parametrize("backend", ["FLASHINFER_TRTLLM", "VLLM_CUTLASS"], indirect=True)
def test_a_first_load_that_is_tried_again_is_stocks(engine: Engine, patched: None) -> None:
    """Where no reload runs, the weights are processed as by stock: a new kernel, and the old one is left alone."""
    model = engine.load(A)
    layer, method = experts_of(model)[1], engine.quant_method(model)
    first, owned = method.moe_kernel, engine.owned(model)
    before = [one.clone() for one in owned]
    with DEVICE:
        method.create_weights(
            layer,
            EXPERTS,
            HIDDEN,
            BETWEEN,
            torch.bfloat16,
            weight_loader=layer.weight_loader,
            global_num_experts=EXPERTS,
        )
    model.load_weights(engine.stream(B))
    with set_current_vllm_config(engine.host.config):  # as a first load has it
        method.process_weights_after_loading(layer)
    assert method.moe_kernel is not first
    assert all(map(torch.equal, owned, before))
    assert torch.equal(engine.apply(model), engine.apply(engine.load(B)))
    assert counters(NAME) == {}


@pytest.mark.skipif(Version("0.30") > RELEASE, reason="from 0.30.0 on weights may have been processed before")
@pytest.mark.parametrize(("method", "backend"), [("modelopt", "FLASHINFER_TRTLLM")], indirect=True)
def test_weights_that_were_processed_before_are_stocks(engine: Engine, patched: None) -> None:
    """A load of such weights builds a kernel for them as they are, and nothing is written to an earlier one."""
    from vllm.model_executor.utils import weights_already_processed

    model = engine.load(A)
    method = engine.quant_method(model)
    first, owned = method.moe_kernel, engine.owned(model)
    before = [one.clone() for one in owned]
    with set_current_vllm_config(engine.host.config), weights_already_processed():
        method.process_weights_after_loading(experts_of(model)[1])
    assert method.moe_kernel is not first
    assert all(map(torch.equal, owned, before))
    assert counters(NAME) == {}


@one_kind
def test_models_of_one_process_are_apart(engine: Engine, patched: None) -> None:
    """A reload of one model leaves the kernel of another, its tensors and where they are, as they were."""
    one, other = engine.load(A), engine.load(A)
    old = engine.apply(other)
    graph = engine.capture(other)
    kernel = engine.quant_method(other).moe_kernel
    read = engine.read(graph)
    before = [(tensor.data_ptr(), tensor.clone()) for tensor in read]
    engine.reload(one, B)
    assert engine.quant_method(other).moe_kernel is kernel
    assert all(
        now.data_ptr() == place and torch.equal(now, was) for now, (place, was) in zip(read, before, strict=True)
    )
    assert torch.equal(graph.replay(), old)
    assert torch.equal(engine.apply(other), old)
    assert counters(NAME)["kernels_kept"] == 1


# A new kernel that is not the first one with other values


@pytest.fixture
def errors() -> Iterator[list[str]]:
    """The errors that this package logs."""
    with hearing(logging.ERROR) as heard:
        yield heard


def check_stale(errors: list[str], words: str) -> None:
    """Check that the patch says once, and in its state, why captured graphs are stale."""
    state, reason = state_of(NAME)
    assert state == "stale-graphs"
    assert words in reason
    (line,) = errors
    assert words in line


@one_kind
def test_experts_of_another_class(
    engine: Engine, patched: None, errors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written to what the first kernel owns, and the new one serves.

    Under STRICT the reload raises, once it is done, and that of another model does not.
    """
    model, other = engine.load(A), engine.load(A)
    method = engine.quant_method(model)
    first, owned = method.moe_kernel, engine.owned(model)
    before = [one.clone() for one in owned]
    method.experts_cls = type("Other", (method.experts_cls,), {})
    engine.reload(model, B)
    assert method.moe_kernel is not first
    assert type(method.moe_kernel.fused_experts) is method.experts_cls
    assert all(map(torch.equal, owned, before))
    assert torch.equal(engine.apply(model), engine.apply(engine.load(B)))
    assert counters(NAME) == {"kernels_replaced": 1}
    check_stale(errors, "Other")
    monkeypatch.setenv("VLLM_HOTFIX_STRICT", "1")
    with pytest.raises(vllm_hotfix.HotfixError, match=r"keep_moe_kernel: .* is of class Other"):
        engine.reload(model, A)
    assert torch.equal(engine.apply(model), engine.apply(engine.load(A)))
    engine.reload(other, B)
    assert len(errors) == 1


@one_kind
def test_another_number_of_experts(
    engine: Engine, patched: None, errors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written to what the first kernel reads, not even by vLLM; under STRICT the reload raises."""
    model = engine.load(A)
    method = engine.quant_method(model)
    first = method.moe_kernel
    read = held(first, method.moe_quant_config).values()
    before = [one.clone() for one in read]
    engine.reload(model, B, experts=EXPERTS + 2)
    assert method.moe_kernel is not first
    assert len(method.moe_quant_config.a1_gscale) == EXPERTS + 2
    assert experts_of(model)[1].w13_weight.shape[0] == EXPERTS + 2
    assert all(map(torch.equal, read, before))
    assert counters(NAME) == {"kernels_replaced": 1}
    check_stale(errors, "w13_weight")
    monkeypatch.setenv("VLLM_HOTFIX_STRICT", "1")
    with pytest.raises(vllm_hotfix.HotfixError, match="keep_moe_kernel"):
        engine.reload(model, A)


@one_kind
@pytest.mark.parametrize(
    "change",
    [lambda one: one.double(), lambda one: one[:1].clone(), lambda one: one.repeat_interleave(2)[::2]],
    ids=["dtype", "shape", "stride"],
)
def test_a_tensor_of_another_form_is_rebound(
    engine: Engine, patched: None, errors: list[str], monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    """The first kernel reads the new tensor from then on, all others are refreshed in place, and an error names it."""
    model = engine.load(A)
    method = engine.quant_method(model)
    kernel, gscale = method.moe_kernel, method.moe_quant_config.a1_gscale
    others = [one for one in engine.owned(model) if one is not gscale]
    assert others
    before, places = gscale.clone(), [one.data_ptr() for one in others]
    stock = method.get_fused_moe_quant_config

    def changed(layer: nn.Module) -> Any:
        config = stock(layer)
        config._a1.alpha_or_gscale = change(config._a1.alpha_or_gscale)
        return config

    monkeypatch.setattr(method, "get_fused_moe_quant_config", changed)
    engine.reload(model, B)
    assert method.moe_kernel is kernel
    assert kernel.fused_experts.quant_config is method.moe_quant_config
    now = method.moe_quant_config.a1_gscale
    assert (now.dtype, now.shape, now.stride()) != (gscale.dtype, gscale.shape, gscale.stride())
    assert torch.equal(gscale, before)
    assert [one.data_ptr() for one in engine.owned(model) if one is not now] == places
    assert torch.equal(engine.apply(model), engine.apply(engine.load(B)))
    assert counters(NAME) == {"kernels_kept": 1, "tensors_refreshed": len(others), "tensors_rebound": 1}
    check_stale(errors, "_a1.alpha_or_gscale")


# The wrapped functions


def functions() -> dict[str, Any]:
    """Return the functions of this release that the patch may wrap, by name."""
    found = {}
    for target in keep_moe_kernel.PATCH.targets:
        module, _, path = target.name.partition(":")
        with contextlib.suppress(ImportError):
            imported = importlib.import_module(module)
            holder = getattr(imported, path.split(".")[0], None) if "." in path else imported
            name = path.split(".")[-1]
            if holder is not None and name in vars(holder):
                found[path] = vars(holder)[name]
    return found


def test_what_is_wrapped_and_given_back(host: Host, request: pytest.FixtureRequest) -> None:
    """One function of each method is wrapped, and the end of a reload; `deactivate()` gives all of them back.

    Without the gate nothing is wrapped.
    """
    stock = functions()
    assert all(type(one) is FunctionType for one in stock.values())
    request.getfixturevalue("patched")
    wrapped = [name for name, one in functions().items() if one is not stock[name]]
    classes = [name.split(".")[0] for name in wrapped]
    assert sorted(classes) == sorted({name.split(".")[0] for name in stock})
    assert {*METHODS.values(), "finalize_layerwise_reload"} <= {*classes}
    # Where a release has a function for just that, it is the one.
    assert ("ModelOptNvFp4FusedMoE._build_moe_kernel" in wrapped) == (Version("0.30") <= RELEASE)
    vllm_hotfix.deactivate()
    assert all(one is stock[name] for name, one in functions().items())

"""keep_moe_kernel on a release's real NVFP4 MoE layers: load, capture, sleep, reload and replay, beside stock vLLM.

The quantization methods, the choice and conversion of weights, the experts with their `apply`, the kernel around them
and the layerwise reload are the release's own. On the CPU `kernels.py` stands in for the compiled kernels and for
FlashInfer, and `graphs.Graph` for a CUDA graph.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernels
import pytest
import torch
from graphs import Graph, discard
from layers import Host, Piece, Probe, accepted, experts_of, put_moe
from packaging.version import Version
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.worker import workspace

import vllm_hotfix
from vllm_hotfix._record import RECORD

RELEASE = Version(os.environ["HOTFIX_RELEASE"])
GATE = "VLLM_HOTFIX_KEEP_MOE_KERNEL"
EXPERTS, HIDDEN, BETWEEN, TOKENS = 4, 256, 64, 5
#: Two checkpoints, by the seed of their numbers.
A, B = 1, 2
COMPRESSED = "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe"
TARGETS = ("modelopt", "fp8", f"{COMPRESSED}_w8a8_fp8", f"{COMPRESSED}_w4a4_nvfp4")
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
    """Return the limits of the activation function, where this release's experts keep a tensor of each."""
    trtllm = backend.startswith("FLASHINFER_TRTLLM")
    if RELEASE < Version("0.22") or not (trtllm or backend == "FLASHINFER_CUTLASS"):
        return {}
    if RELEASE < Version("0.25" if trtllm else "0.28"):
        return {"swiglu_limit": 7.0}
    everything = {"swiglu_limit": 7.0, "swiglu_alpha": 1.7, "swiglu_beta": 1.5}
    return everything if trtllm else everything | {"activation": "swigluoai_uninterleave"}


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
        self.experts = EXPERTS
        host.config.compilation_config.max_cudagraph_capture_size = TOKENS  # a worker has it by then
        #: In 0.20.0 to 0.22.1 FlashInfer's experts want a current configuration, which no worker has in a reload.
        #: A stock reload fails there for want of it, which is not the fault at hand.
        self.brings_config = brings_config
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
        self.logits = torch.randn(TOKENS, EXPERTS, generator=generator)
        weights, ids = self.logits.softmax(-1).topk(2)
        self.topk_weights, self.topk_ids = weights.contiguous(), ids.to(torch.int32)
        self._shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._layer = ""

    def _build(self, model: Probe, config: VllmConfig) -> None:
        sizes = {"size": HIDDEN, "intermediate_size": BETWEEN}
        put_moe(model, quant_config(self.method), self.experts, **sizes, **limits(self.backend))
        self._layer, layer = experts_of(model)
        self._shapes = {name: (one.shape, one.dtype) for name, one in layer.named_parameters(recurse=False)}

    def _stream(self, seed: int) -> Iterator[Piece]:
        """Yield a checkpoint in which no two scales are the same.

        Input scales come first and weights last: stock's trigger counts too few of the former in 0.20.0 to 0.22.1.
        """
        generator = torch.Generator().manual_seed(seed)
        order = sorted(self._shapes, key=lambda name: ("input" not in name, self._shapes[name][0].numel()))
        for name in order:
            shape, dtype = self._shapes[name]
            rows = shape[1:] if name.startswith("w2") else (shape[1] // 2, *shape[2:])
            for expert in range(shape[0]):
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
        model = self.host.load(self._build, self._stream(seed))
        method = self.quant_method(model)
        assert type(method).__name__ == METHODS[self.method]
        assert method.experts_cls is kernels.experts_class(self.backend)
        return model

    def reload(self, model: Any, seed: int) -> None:
        """Reload as the worker does."""
        with set_current_vllm_config(self.host.config) if self.brings_config else contextlib.nullcontext():
            self.host.reload(model, self._stream(seed))

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

    def sleep(self, model: Any, graph: Graph) -> None:
        """Discard all that was made with the weights: what the graph reads, the model's tensors, the kernel's."""
        method = self.quant_method(model)
        discard(self.read(graph))
        discard([*model.parameters(), *model.buffers()])
        discard(held(method.moe_kernel, method.moe_quant_config).values())


@pytest.fixture(params=kernels.BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let vLLM choose this backend, and its kernels run here."""
    kernels.stand_in(monkeypatch)
    kernels.choose(monkeypatch, request.param)
    return request.param


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    """Test each of the methods that have NVFP4 experts."""
    return request.param


@contextlib.contextmanager
def switched_on(monkeypatch: pytest.MonkeyPatch, folder: Path, gate: str) -> Iterator[None]:
    """Apply a patch and undo it afterwards; counters begin at nothing."""
    monkeypatch.setenv(gate, "1")
    monkeypatch.setenv("VLLM_HOTFIX_STATE_DIR", str(folder))
    monkeypatch.setattr(RECORD, "counters", {})
    monkeypatch.setattr(RECORD, "_warned", set())
    vllm_hotfix.activate()
    try:
        yield
    finally:
        vllm_hotfix.deactivate()


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Stock, with the one patch without which it raises in 0.20.0 to 0.26.0 before it gets to the fault at hand."""
    with switched_on(monkeypatch, tmp_path / "state", "VLLM_HOTFIX_WRITABLE_SCALES"):
        yield


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Apply the patch for one test."""
    with switched_on(monkeypatch, tmp_path / "state", GATE):
        for module in TARGETS:  # none of them is imported before a model asks for it
            importlib.import_module(f"vllm.model_executor.layers.quantization.{module}")
        state, reason = state_of_patch()
        assert state == "active", reason
        yield


def state_of_patch() -> tuple[str, str]:
    """Return the patch's state in this process, and the reason."""
    (one,) = (one for one in vllm_hotfix.patches() if one["name"] == "keep_moe_kernel")
    return one["state"], one["reason"]


@pytest.fixture(params=["stock", "patched"])
def side(request: pytest.FixtureRequest) -> str:
    """Run a test with vLLM as it is and with the patch applied."""
    request.getfixturevalue(request.param)
    return request.param


@pytest.fixture
def engine(host: Host, method: str, backend: str, request: pytest.FixtureRequest) -> Engine:
    """What loads, reloads and runs a model with that method and backend."""
    needs_config = backend == "FLASHINFER_CUTLASS" and Version("0.23") > RELEASE
    is_stock = "stock" in (request.node.callspec.params.get("side"), *request.fixturenames)
    return Engine(host, method, backend, brings_config=needs_config and is_stock)


# The fault


def test_a_replay_after_a_reload_is_a_cold_load(engine: Engine, side: str) -> None:
    """Stock's replay reads the memory of the first kernel, which nothing fills again; patched, it computes what B does.

    Bit for bit, after all that the weights' memory held was discarded, and the same for A once more. What runs eagerly
    is right on both sides. Patched, everything stays where the graph reads it.
    """
    model = engine.load(A)
    old = engine.apply(model)
    new = engine.apply(engine.load(B))
    graph = engine.capture(model)
    read = engine.read(graph)
    addresses = [one.data_ptr() for one in read]
    assert torch.equal(graph.replay(), old)
    for seed, right, wrong in ((B, new, old), (A, old, new)):
        assert right.isfinite().all()
        assert not torch.equal(right, wrong)
        engine.sleep(model, graph)
        engine.reload(model, seed)
        assert torch.equal(engine.apply(model), right)
        assert torch.equal(graph.replay(), right) == (side == "patched")
    if side == "patched":
        assert [one.data_ptr() for one in read] == addresses
        assert [one.data_ptr() for one in engine.read(engine.capture(model))] == addresses


def test_the_result_depends_on_all_that_is_read(engine: Engine, stock: None) -> None:
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
    unread = {storage(one) for one in held(experts).values()} - read.keys()
    # TRTLLM's hook makes other tensors of these, which the kernel gets in their stead.
    sources = (experts.quant_config.a2_gscale, *(one for name, one in vars(experts).items() if "unfolded" in name))
    trtllm = engine.backend.startswith("FLASHINFER_TRTLLM")
    assert unread <= ({storage(one) for one in sources if one is not None} if trtllm else set())

"""keep_moe_kernel on the FP8 MoE methods of each release, beside stock vLLM. See `fp8_kernels` for what is stood in for."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import fp8_kernels
import graphs
import pytest
import torch
from layers import Host, Piece, Probe, Unwritten, accepted, experts_of
from packaging.version import Version
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import layer as fused_moe
from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

RELEASE = Version(os.environ["HOTFIX_RELEASE"])
EXPERTS, HIDDEN, INNER, TOKENS, TOP_K = 4, 64, 48, 6, 2  # two dimensions of which no multiples are equal


def compressed(weights: dict[str, Any], activations: dict[str, Any]) -> Any:
    """Return compressed-tensors' configuration with these two schemes for every layer."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {"targets": ["Linear"], "weights": common | weights, "input_activations": common | activations}
    everything = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": []}
    return CompressedTensorsConfig.from_config(everything | {"config_groups": {"group_0": group}})


def compressed_per_tensor() -> Any:
    """Return the configuration of a checkpoint with one scale for each tensor, those of the inputs included."""
    return compressed({"strategy": "tensor", "dynamic": False}, {"strategy": "tensor", "dynamic": False})


def compressed_per_channel() -> Any:
    """Return the configuration of a checkpoint with one scale for each channel and inputs scaled as they come."""
    return compressed({"strategy": "channel", "dynamic": False}, {"strategy": "token", "dynamic": True})


def fp8() -> Any:
    """Return the configuration of vLLM's own FP8 checkpoints."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    return Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="static")


def modelopt() -> Any:
    """Return the configuration of ModelOpt's FP8 checkpoints."""
    from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config

    options = {"quant_method": "FP8", "is_checkpoint_fp8_serialized": True, "exclude_modules": []}
    return ModelOptFp8Config(
        **accepted(ModelOptFp8Config, kv_cache_quant_method=None, kv_cache_quant_algo=None, **options)
    )


#: The method that each configuration leads to.
METHODS: dict[Callable[[], Any], str] = {
    compressed_per_tensor: "CompressedTensorsW8A8Fp8MoEMethod",
    compressed_per_channel: "CompressedTensorsW8A8Fp8MoEMethod",
    fp8: "Fp8MoEMethod",
    modelopt: "ModelOptFp8MoEMethod",
}
#: Kernels that hold tensors of their own.
STALE = [
    (compressed_per_channel, "VLLM_CUTLASS"),
    *((make, backend) for make in (compressed_per_tensor, fp8, modelopt) for backend in
      ("FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM")),
]
#: Kernels that hold parameters and nothing else.
FRESH = [(make, "TRITON") for make in METHODS]


class Engine:
    """A model of one real FP8 MoE layer."""

    def __init__(self, host: Host, make: Callable[[], Any], backend: str) -> None:
        self.host = host
        self.make = make
        self.backend = backend
        self.shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}

    def _build(self, model: Probe, config: VllmConfig) -> None:
        make = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
        sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "intermediate_size": INNER}
        model.moe = make(**sizes, params_dtype=torch.bfloat16, quant_config=self.make(), prefix="moe")
        self.layer, module = experts_of(model)
        self.shapes = {name: (one.shape, one.dtype) for name, one in module.named_parameters(recurse=False)}

    def checkpoint(self, seed: int) -> Iterator[Piece]:
        """Yield every tensor of a checkpoint, scales first: stock counts scales twice, and weights are more than those.

        No two scales are the same, but for the input scales of an expert's w1 and w3, which must be.
        """
        generator = torch.Generator().manual_seed(seed)
        for name in sorted(self.shapes, key=lambda name: (name.endswith("weight"), name)):
            (experts, *shape), dtype = self.shapes[name]
            for expert in range(experts):
                for shard in ("w1", "w3") if name.startswith("w13") else ("w2",):
                    if shard == "w2":
                        part = shape
                    else:
                        part = [shape[0] // 2, *shape[1:]] if len(shape) > 1 else []
                    if not (name == "w13_input_scale" and shard == "w3"):
                        value = torch.rand(part, generator=generator) + 0.25
                        value = ((value - 0.75) * 8).to(dtype) if name.endswith("weight") else value / 16
                    yield Piece(f"{self.layer}.{name}", value, (f"{self.layer}.{expert}.{name}", shard, expert))

    def load(self, seed: int) -> Model:
        """Load cold."""
        with alive() as made:
            model = self.host.load(self._build, self.checkpoint(seed))
        loaded = Model(model, made)
        assert type(loaded.method).__name__ == METHODS[self.make]
        assert loaded.method.fp8_backend.value == self.backend
        return loaded

    def reload(self, loaded: Model, seed: int, current: bool) -> None:
        """Reload as the worker does, perhaps with a current configuration, which a worker has from 0.27.0 on."""
        current = current or Version("0.27") <= RELEASE
        with set_current_vllm_config(self.host.config) if current else contextlib.nullcontext(), Unwritten(255):
            self.host.reload(loaded.model, self.checkpoint(seed))


@contextlib.contextmanager
def alive() -> Iterator[list[torch.Tensor]]:
    """Collect every tensor that was made inside and lives at the end: all that is in the pool of the weights."""

    def tensors() -> list[torch.Tensor]:
        gc.collect()
        return [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]

    before = tensors()
    known = set(map(id, before))
    made: list[torch.Tensor] = []
    yield made
    made += (one for one in tensors() if id(one) not in known)


class Model:
    """A loaded model, and what was made while it was loaded."""

    def __init__(self, model: Any, made: list[torch.Tensor]) -> None:
        self.model = model
        # vLLM keeps buffers over a sleep.
        buffers = [one.data_ptr() for one in model.buffers()]
        self.made = [one for one in made if one.data_ptr() not in buffers]
        self.module = experts_of(model)[1]
        self.method = self.module.quant_method
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
        self.logits = torch.randn(TOKENS, EXPERTS, generator=generator)
        self.weights, self.ids = self.logits.softmax(-1).topk(TOP_K)

    def run(self) -> torch.Tensor:
        """Do the layer's work for a few tokens, as its runner does."""
        given = {"layer": self.module, "x": self.tokens.clone()}  # which some releases write to
        if self.method.is_monolithic:
            return self.method.apply_monolithic(**given, router_logits=self.logits)
        none = accepted(self.method.apply, shared_experts=None, shared_experts_input=None)
        return self.method.apply(**given, topk_weights=self.weights, topk_ids=self.ids, **none)

    def capture(self) -> graphs.Graph:
        """Capture the work, after a first run in which vLLM takes the memory to work in."""
        self.run()
        return graphs.Graph(self.run)

    def sleep(self, graph: graphs.Graph) -> None:
        """Discard what the load made and what a graph reads, as `sleep(level=2)` and `wake_up` do."""
        given = [one.data_ptr() for one in (self.tokens, self.logits, self.weights, self.ids)]
        graphs.discard([*self.made, *(one for one in graph.inputs if one.data_ptr() not in given)])


def addresses(graph: graphs.Graph) -> list[int]:
    """Return where the tensors lie that a graph reads."""
    return sorted({one.data_ptr() for one in graph.inputs})


@pytest.fixture(autouse=True)
def workspace() -> Iterator[None]:
    """Provide the memory that kernels work in, which a worker has before it loads."""
    init_workspace_manager(torch.device("cpu"))
    yield
    reset_workspace_manager()


@pytest.fixture
def engine(request: pytest.FixtureRequest, host: Host, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """What loads and reloads a model of this method whose experts have that backend."""
    make, backend = request.param
    fp8_kernels.install(monkeypatch, backend)
    # FlashInfer's experts tune for it; without CUDA there is none.
    monkeypatch.setattr(host.config.compilation_config, "max_cudagraph_capture_size", 8)
    return Engine(host, make, backend)


def named(case: tuple[Callable[[], Any], str]) -> str:
    """Return a test's name."""
    return f"{case[0].__name__}-{case[1]}"


@pytest.fixture(params=["stock"])
def side(request: pytest.FixtureRequest) -> str:
    """Run a test with vLLM as it is and with the patch applied."""
    return request.param


@pytest.mark.parametrize("engine", STALE, ids=named, indirect=True)
def test_a_captured_graph_after_a_reload(engine: Engine, side: str) -> None:
    """A graph that was captured before a sleep and a reload computes what a cold load of the new weights computes.

    Bit for bit, and the same when the old weights are reloaded; all that it reads stays where it was. With stock it
    does not: the new kernel's tensors lie elsewhere. Outside graphs both sides are right.
    """
    loaded = engine.load(1)
    graph = loaded.capture()
    before = addresses(graph)
    for seed in (2, 1):
        expected = engine.load(seed).run()
        assert expected.isfinite().all()
        loaded.sleep(graph)
        engine.reload(loaded, seed, current=side == "stock")
        assert torch.equal(loaded.run(), expected)
        assert torch.equal(graph.replay(), expected) == (side == "patched")
        assert (addresses(loaded.capture()) == before) == (side == "patched")


@pytest.mark.parametrize("engine", FRESH, ids=named, indirect=True)
def test_kernels_that_hold_parameters_only(engine: Engine, side: str) -> None:
    """Triton's experts read the layer's parameters: a captured graph is right after a reload, on both sides."""
    loaded = engine.load(1)
    graph = loaded.capture()
    before = addresses(graph)
    for seed in (2, 1):
        expected = engine.load(seed).run()
        loaded.sleep(graph)
        engine.reload(loaded, seed, current=side == "stock")
        assert torch.equal(loaded.run(), expected)
        assert torch.equal(graph.replay(), expected)
        if side == "patched":
            assert addresses(loaded.capture()) == before

"""keep_moe_kernel on the FP8 MoE methods of each release, beside stock vLLM.

`fp8_kernels` says what is stood in for; without CUDA, `graphs` stands for its graphs.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fp8_kernels
import graphs
import pytest
import torch
from layers import DEVICE, Host, Piece, Probe, Unwritten, accepted, experts_of, put_moe
from packaging.version import Version
from patching import counters
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.worker.workspace import init_workspace_manager, reset_workspace_manager

NAME = "keep_moe_kernel"
RELEASE = Version(os.environ["HOTFIX_RELEASE"])
EXPERTS, TOKENS, TOP_K = 4, 4, 2
#: Hidden and inner size where not any will do; none is the other's double, so that no stride is another one's.
SIZES = {"W4A8_CUTLASS": (768, 256)}


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


def compressed_4_bit() -> Any:
    """Return the configuration of a checkpoint with 4-bit weights, for inputs that become FP8."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "dynamic": False}
    return compressed(weights, {"strategy": "token", "dynamic": True})


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


def quark() -> Any:
    """Return the configuration of Quark's FP8 checkpoints with one scale for each tensor."""
    from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig

    scheme = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}
    both = {"weight": scheme, "input_tensors": scheme, "output_tensors": None, "bias": None}
    layers = {"global_quant_config": both, "layer_quant_config": {}, "layer_type_quant_config": {}, "exclude": []}
    return QuarkConfig.from_config(layers | {"export": {"kv_cache_group": [], "pack_method": "order"}})


def online() -> Any:
    """Return the configuration that makes FP8 of a checkpoint while it is loaded, with one scale for each channel."""
    from vllm.config.quantization import QuantizationConfigArgs, QuantSpec
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticChannelSym

    return OnlineQuantizationConfig(QuantizationConfigArgs(moe=QuantSpec(weight=kFp8StaticChannelSym)))


#: The method that each configuration leads to.
METHODS: dict[Callable[[], Any], str] = {
    compressed_per_tensor: "CompressedTensorsW8A8Fp8MoEMethod",
    compressed_per_channel: "CompressedTensorsW8A8Fp8MoEMethod",
    compressed_4_bit: "CompressedTensorsW4A8Fp8MoEMethod",
    fp8: "Fp8MoEMethod",
    modelopt: "ModelOptFp8MoEMethod",
    quark: "QuarkW8A8Fp8MoEMethod",
    online: "Fp8PtpcOnlineMoEMethod",
}
#: Methods that stock can reload, with the backends that they allow and of which a kernel holds tensors of its own.
STALE = [
    (compressed_per_channel, "VLLM_CUTLASS"),
    (compressed_4_bit, "W4A8_CUTLASS"),
    *((make, f"FLASHINFER_{kernel}") for make in (fp8, modelopt) for kernel in ("CUTLASS", "TRTLLM")),
]
if Version("0.24") <= RELEASE:  # these two come with kernels, or at all, from then on
    STALE += [(quark, "FLASHINFER_CUTLASS"), (online, "VLLM_CUTLASS")]  # Quark calls no kernel that routes
#: Methods with the backend of which the kernel holds the layer's parameters and nothing else.
FRESH = [(make, "TRITON") for make in (compressed_per_channel, fp8, modelopt)]
#: How many tensors a kernel has that are no parameters: strides; fused scales; inverse scales, and fused ones up to
#: 0.27, which are parameters from then on.
OWNED = {
    "VLLM_CUTLASS": 3,
    "W4A8_CUTLASS": 7,
    "FLASHINFER_TRTLLM": 3,
    "FLASHINFER_CUTLASS": 4 if Version("0.28") > RELEASE else 2,
    "TRITON": 0,
}


class Engine:
    """A model of one real FP8 MoE layer."""

    def __init__(self, host: Host, make: Callable[[], Any], backend: str) -> None:
        self.host = host
        self.make = make
        self.backend = backend
        # Quark does not let its layer have the fused ones.
        self.owned = 4 if (make, backend) == (quark, "FLASHINFER_CUTLASS") else OWNED[backend]
        self.shapes: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._strides_of_the_method = backend == "W4A8_CUTLASS" and Version("0.22") > RELEASE

    def _build(self, model: Probe, config: VllmConfig) -> None:
        hidden, inner = SIZES.get(self.backend, (64, 48))
        put_moe(model, self.make(), EXPERTS, size=hidden, intermediate_size=inner)
        self.layer, module = experts_of(model)
        self.shapes = {
            name: (one.shape, one.dtype)
            for name, one in module.named_parameters(recurse=False)
            if name.endswith(("weight", "weight_packed", "weight_scale", "input_scale"))
        }

    def checkpoint(self, seed: int) -> Iterator[Piece]:
        """Yield every tensor of a checkpoint, scales first: stock counts scales twice, and weights are more than those.

        No two scales are the same, but for the input scales of an expert's w1 and w3, which must be.
        """
        generator = torch.Generator().manual_seed(seed)
        for name in sorted(self.shapes, key=lambda name: (not name.endswith("scale"), name)):
            (experts, *shape), dtype = self.shapes[name]
            for expert in range(experts):
                for shard in ("w1", "w3") if name.startswith("w13") else ("w2",):
                    # w1 and w3 lie behind each other, or are one value.
                    part = shape if shard == "w2" else [shape[0] // 2, *shape[1:]] if shape[1:] else []
                    if not (name == "w13_input_scale" and shard == "w3"):
                        value = self._value(name, part, dtype, generator)
                    yield Piece(f"{self.layer}.{name}", value, (f"{self.layer}.{expert}.{name}", shard, expert))

    @staticmethod
    def _value(name: str, shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        if dtype == torch.int32:
            return torch.randint(-(2**31), 2**31, shape, generator=generator).int()
        one = torch.rand(shape, generator=generator)
        return ((one + 0.25) / 16 if name.endswith("scale") else (one - 0.5) * 8).to(dtype)

    def load(self, seed: int) -> Model:
        """Load cold."""
        with alive() as made:
            model = self.host.load(self._build, self.checkpoint(seed))
        loaded = Model(model, made)
        assert type(loaded.method).__name__ == METHODS[self.make]
        # Before 0.22.0 the method for 4-bit weights has its strides itself, and makes the experts when they are used.
        experts = getattr(loaded.method, "experts_cls", None)
        assert experts is (None if self._strides_of_the_method else fp8_kernels.experts_class(self.backend))
        return loaded

    def reload(self, loaded: Model, seed: int, side: str) -> None:
        """Reload as the worker does; memory that nobody loads reads as NaN.

        A worker has a current configuration then from 0.27.0 on. Stock has it here before, too: for want of it some
        reloads raise, with FlashInfer's experts in 0.20.0 to 0.22.1, with 4-bit weights in 0.22.0 to 0.26.0.
        """
        current = side == "stock" or Version("0.27") <= RELEASE
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
        self.tokens = torch.randn(TOKENS, self.module.hidden_size, generator=generator).to(DEVICE, torch.bfloat16)
        self.logits = torch.randn(TOKENS, EXPERTS, generator=generator).to(DEVICE)
        self.weights, self.ids = self.logits.softmax(-1).topk(TOP_K)

    def run(self) -> torch.Tensor:
        """Do the layer's work for a few tokens, as its runner does."""
        if hasattr(self.module, "ensure_moe_quant_config_init"):
            self.module.ensure_moe_quant_config_init()  # for methods that have made none after loading
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
    init_workspace_manager(DEVICE)
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


def named(case: Any) -> str:
    """Return the name of a method's configuration and of a backend."""
    return "-".join(getattr(part, "__name__", part) for part in case)


@pytest.mark.parametrize("engine", [*STALE, *FRESH], ids=named, indirect=True)
def test_a_captured_graph_after_a_reload(engine: Engine, side: str) -> None:
    """A graph that was captured before a sleep and a reload computes what a cold load of the new weights computes.

    Bit for bit, also when the old weights are reloaded then; all that it reads stays where it was. Stock's does not
    where the experts or their quant config hold tensors of their own: those of the new kernel lie elsewhere. Triton's
    hold parameters only: stock's graph is right, though the new kernel reads copies. Without a graph both sides are
    right.
    """
    loaded = engine.load(1)
    graph = loaded.capture()
    before = addresses(graph)
    new, old = (engine.load(seed).run() for seed in (2, 1))
    assert not torch.equal(new, old)
    for number, (seed, expected) in enumerate(((2, new), (1, old)), 1):
        assert expected.isfinite().all()
        loaded.sleep(graph)
        engine.reload(loaded, seed, side)
        assert torch.equal(loaded.run(), expected)
        assert torch.equal(graph.replay(), expected) == (side == "patched" or engine.owned == 0)
        assert (addresses(loaded.capture()) == before) == (side == "patched")
        if side == "patched":
            counted = {"kernels_kept": number, "tensors_refreshed": number * engine.owned}
            assert counters(NAME) == {name: one for name, one in counted.items() if one}


@pytest.mark.parametrize("engine", [(compressed_per_tensor, "TRITON")], ids=named, indirect=True)
def test_what_it_leaves_to_others(engine: Engine, side: str) -> None:
    """compressed-tensors with one scale for each tensor cannot be reloaded: its loader looks at a meta tensor's value.

    So the kernels of FlashInfer, which want such scales, are never captured and reloaded with that method.
    """
    loaded = engine.load(1)
    with pytest.raises(RuntimeError, match="cannot be called on meta tensors"):
        engine.reload(loaded, 2, side)

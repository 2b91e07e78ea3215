"""Small models on vLLM's real loading and reloading functions, the same on every release.

A test builds a model from plain modules, loads it through the release's own `BaseModelLoader.load_model` and
reloads it through its own `initialize_layerwise_reload` and `finalize_layerwise_reload`, in the order in which
`GPUModelRunner.reload_weights` calls them. Only configuration and modules are made here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import vllm.platforms
from torch import nn
from torch.overrides import TorchFunctionMode
from vllm.platforms.cpu import CpuPlatform

#: Where models are; another one than the CPU for tests with real CUDA graphs.
DEVICE = torch.device(os.environ.get("HOTFIX_DEVICE", "cpu"))
if DEVICE.type == "cpu":
    # Before vLLM asks: a CPU build is told by its distribution's version, and unpacked sources have no distribution.
    vllm.platforms._current_platform = CpuPlatform()

from vllm.config import DeviceConfig, LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import reload
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models import ModelRegistry

if DEVICE.type == "cpu":
    # vLLM's CPU worker does the same: torch raises where there is no accelerator.
    torch.accelerator.empty_cache = lambda: None
ARCHITECTURE = "ProbeForCausalLM"


class Piece(NamedTuple):
    """One tensor of a stream: the parameter it is for, its value, what else that parameter's loader takes."""

    name: str
    value: torch.Tensor
    args: tuple[Any, ...] = ()


Stream = Iterable[Piece]


def pieces(name: str, *values: Any, dtype: torch.dtype = torch.float32) -> list[Piece]:
    """Return one piece per value for a parameter whose loader takes nothing else."""
    return [Piece(name, torch.as_tensor(value, dtype=dtype)) for value in values]


class Probe(nn.Module):
    """A model that vLLM's registry accepts; `build` fills it in while `load_model` initializes it."""

    build: Callable[[Probe, VllmConfig], None]
    #: Checkpoint names that are not a tensor's own: the tensor's name and what else its loader takes.
    routes: dict[str, tuple[str, tuple[Any, ...]]]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.routes = {}
        type(self).build(self, vllm_config)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def load_weights(self, weights: Iterable[tuple[Any, ...]]) -> None:
        """Hand each piece to its tensor's loader, looked up once before the first piece as vLLM's models do."""
        tensors = dict(self.named_parameters()) | dict(self.named_buffers())
        for name, value, *rest in weights:
            name, args = self.routes.get(name, (name, rest[0] if rest else ()))
            target = tensors[name]
            loader = getattr(target, "weight_loader", default_weight_loader)
            loader(target, value, *args)


class StreamLoader(BaseModelLoader):
    """The release's base loader with pieces from memory where a real loader reads files."""

    def __init__(self, load_config: LoadConfig, stream: Stream) -> None:
        super().__init__(load_config)
        self.stream = stream

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing: there is nothing to download."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Let the model take the stream."""
        model.load_weights(iter(self.stream))


def make_config(folder: Path, **model_options: Any) -> VllmConfig:
    """Return the release's own `VllmConfig` for a tiny float32 model."""
    config = {
        "model_type": "llama",
        "architectures": [ARCHITECTURE],
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 128,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    ModelRegistry.register_model(ARCHITECTURE, Probe)
    options = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 128} | model_options
    return VllmConfig(
        model_config=ModelConfig(model=str(folder), **options),
        device_config=DeviceConfig(device=DEVICE.type),
        load_config=LoadConfig(device=DEVICE.type),
    )


@contextlib.contextmanager
def single_rank(config: VllmConfig, folder: Path) -> Iterator[None]:
    """Provide the distributed groups that vLLM's layers ask for, with one rank."""
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=f"file://{folder}/group"
        )
        parallel_state.initialize_model_parallel()
    # Later releases collect garbage in every load: let it not walk all that has been imported.
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def release() -> str:
    """Return the version of the sources that were imported."""
    namespace: dict[str, str] = {}
    exec((Path(vllm.platforms.__file__).parents[1] / "_version.py").read_text(), namespace)
    return namespace["__version__"]


class Host:
    """Loads and reloads models the way an engine does, with one configuration."""

    def __init__(self, config: VllmConfig) -> None:
        self.config = config

    def load(
        self,
        build: Callable[[Probe, VllmConfig], None],
        stream: Stream,
        loader: Callable[[LoadConfig, Stream], BaseModelLoader] = StreamLoader,
    ) -> Any:
        """Build a model and load a stream into it: an engine's first load."""
        Probe.build = staticmethod(build)
        # Real layers register themselves by name here; each engine has a configuration of its own.
        self.config.compilation_config.static_forward_context.clear()
        model_loader = loader(self.config.load_config, stream)
        with set_current_vllm_config(self.config):  # as the worker does
            return model_loader.load_model(vllm_config=self.config, model_config=self.config.model_config)

    def begin(self, model: nn.Module) -> None:
        """Start a reload."""
        reload.initialize_layerwise_reload(model)

    def finish(self, model: nn.Module) -> None:
        """End a reload."""
        reload.finalize_layerwise_reload(model, self.config.model_config)

    def reload(self, model: Any, stream: Stream) -> None:
        """Reload a whole stream as `reload_weights` does."""
        self.begin(model)
        model.load_weights(iter(stream))
        self.finish(model)


class Unwritten(TorchFunctionMode):
    """Gives `torch.empty_strided` memory a known byte, so that what nobody loaded has an exact value."""

    def __init__(self, byte: int) -> None:
        super().__init__()
        self.byte = byte

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.empty_strided and not result.is_meta:
            result.untyped_storage().fill_(self.byte)
        return result


class Derive(QuantizeMethodBase):
    """A quantization method whose processing computes one tensor, `derived`, from a layer's parameters."""

    def __init__(self, formula: Callable[[Any], torch.Tensor]) -> None:
        self.formula = formula
        self.calls = 0

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the layer makes its own parameters."""

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: Any) -> None:
        """Register `derived`; at a reload vLLM copies it into the storage that the first load's has."""
        self.calls += 1
        self.last = self.formula(layer).clone()
        layer.register_parameter("derived", nn.Parameter(self.last, requires_grad=False))


Loader = Callable[..., None]


class Layer(nn.Module):
    """Parameters with loaders of their own, and a `derived` tensor made after loading."""

    def __init__(
        self,
        tensors: dict[str, tuple[int, ...]],
        loaders: dict[str, Loader] | None = None,
        formula: Callable[[Any], torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        for name, shape in tensors.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=False))
        for name, loader in (loaders or {}).items():
            getattr(self, name).weight_loader = loader
        self.quant_method = Derive(formula or (lambda layer: torch.cat([p.flatten() for p in own(layer)])))


def own(layer: nn.Module) -> Iterator[torch.Tensor]:
    """Yield a layer's own parameters as the checkpoint has them, `derived` left out."""
    for name, tensor in layer.named_parameters(recurse=False):
        if name != "derived":
            yield tensor


def load_row(param: torch.Tensor, loaded: torch.Tensor, expert: int | slice, shard: str = "") -> None:
    """Fill everything that an expert has in a parameter, as `_load_single_value` does for both of w1 and w3."""
    # Expanded: an assignment fills instead of copying, and vLLM counts only what is copied.
    row = param.data[expert]
    row.copy_(loaded.expand_as(row))


def load_prefix(param: torch.Tensor, loaded: torch.Tensor) -> None:
    """Fill the front of a parameter; what is behind it is padding that no checkpoint has."""
    param.data[: loaded.shape[0]].copy_(loaded)


def load_slice(param: torch.Tensor, loaded: torch.Tensor, start: int) -> None:
    """Fill a part of a parameter."""
    param.data[start : start + loaded.shape[0]].copy_(loaded)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of every parameter and buffer by name."""
    return {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Say whether two states are the same bit for bit."""
    return left.keys() == right.keys() and all(
        left[name].shape == right[name].shape
        and torch.equal(left[name].reshape(-1).view(torch.uint8), right[name].reshape(-1).view(torch.uint8))
        for name in left
    )


def accepted(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Keep the arguments that this release's function has: later releases add and drop some."""
    return {name: value for name, value in arguments.items() if name in inspect.signature(function).parameters}


class Online(Derive):
    """A method that quantizes while the checkpoint is loaded, wrapped by vLLM's `initialize_online_processing`."""

    uses_meta_device = True


def add_moe(model: nn.Module, quant_config: str, experts: int, size: int = 64, prefix: str = "moe") -> None:
    """Add the release's real MoE layer: ModelOpt's parameters, the real expert loader, the real processing."""
    from vllm import _custom_ops as custom_ops
    from vllm.model_executor.layers.quantization import modelopt

    triton_experts().is_supported_config = staticmethod(lambda *args: (True, None))
    # The compiled operator that requantizes FP8 weights is not there either.
    custom_ops.scaled_fp8_quant = lambda tensor, scale: ((tensor / scale).to(torch.float8_e4m3fn), scale)
    config_class = getattr(modelopt, quant_config)
    config = config_class(
        **accepted(
            config_class,
            quant_method={"ModelOptNvFp4Config": "NVFP4", "ModelOptFp8Config": "FP8"}[quant_config],
            is_checkpoint_nvfp4_serialized=True,
            is_checkpoint_fp8_serialized=True,
            kv_cache_quant_algo=None,
            kv_cache_quant_method=None,
            exclude_modules=[],
            group_size=16,
        )
    )
    put_moe(model, config, experts, size, prefix)


def put_moe(
    model: nn.Module, quant_config: Any, experts: int, size: int = 64, prefix: str = "moe", **options: Any
) -> None:
    """Add a MoE layer with a quantization of the caller's; options that this release's layer has not are left out."""
    from vllm.model_executor.layers.fused_moe import layer as fused_moe

    # A class at first, then a function that puts a `RoutedExperts` into a runner.
    make = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
    options = {"hidden_size": size, "intermediate_size": size, "params_dtype": torch.bfloat16} | options
    options |= {"num_experts": experts, "top_k": 2, "quant_config": quant_config, "prefix": prefix}
    model.add_module(prefix, make(**accepted(make, **options)))


def experts_module(name: str, *places: str) -> ModuleType:
    """Return the module that has the release's own experts of this name: one of these, in one release or another."""
    for place in places:
        try:
            module = importlib.import_module(f"vllm.model_executor.layers.fused_moe.{place}")
        except ImportError:
            continue
        if hasattr(module, name):
            return module
    raise LookupError(name)


def choose(patch: pytest.MonkeyPatch, backends: Mapping[str, tuple[str, ...]], backend: str) -> None:
    """Let vLLM's own choice of a backend fall on this one: of these experts only its say that they run here."""
    for other, (name, *places) in backends.items():
        answer = (True, None) if other == backend else (False, "another backend is tested")
        experts = getattr(experts_module(name, *places), name)
        patch.setattr(experts, "is_supported_config", staticmethod(lambda *args, a=answer: a), raising=False)


def triton_experts() -> Any:
    """Return the experts that process ModelOpt weights on any device; only their forward pass needs a GPU.

    No experts for these formats say that they run on a CPU, so a test answers that one question for this class.
    """
    return experts_module("TritonExperts", "experts.triton_moe", "fused_moe").TritonExperts


def experts_of(model: nn.Module, prefix: str = "moe") -> tuple[str, Any]:
    """Return the name of the module in `prefix` that holds expert parameters, and the module."""
    named = model.get_submodule(prefix).named_modules(prefix=prefix)
    return next((name, one) for name, one in named if any(key.startswith("w13_") for key in one._parameters))


def moe_stream(model: nn.Module, seed: int, input_scales: torch.Tensor, prefix: str = "moe") -> list[Piece]:
    """Return a checkpoint for `add_moe`, `w13_input_scale` last: an order that a streamer can deliver."""
    layer, module = experts_of(model, prefix)
    experts, size = module.global_num_experts, module.hidden_size
    generator = torch.Generator().manual_seed(seed)
    packed = module.quant_config.get_name() == "modelopt_fp4"
    kinds = ("weight", "weight_scale", *(("weight_scale_2",) if packed else ()), "input_scale")

    def value(kind: str) -> torch.Tensor:
        if kind == "weight" and packed:
            return torch.randint(0, 256, (size, size // 2), dtype=torch.uint8, generator=generator)
        if kind == "weight":
            return torch.rand(size, size, generator=generator).to(torch.float8_e4m3fn)
        if kind == "weight_scale" and packed:
            return torch.rand(size, size // 16, generator=generator).to(torch.float8_e4m3fn)
        return torch.rand((), generator=generator)

    def piece(kind: str, expert: int, shard: str, tensor: torch.Tensor) -> Piece:
        param = f"{'w2' if shard == 'w2' else 'w13'}_{kind}"
        return Piece(f"{layer}.{param}", tensor, (f"{layer}.{expert}.{param}", shard, expert))

    everything = [(kind, expert, shard) for kind in kinds for expert in range(experts) for shard in ("w1", "w2", "w3")]
    last = [key for key in everything if key[0] == "input_scale" and key[2] != "w2"]
    stream = [piece(*key, value(key[0])) for key in everything if key not in last]
    return stream + [piece(*key, input_scales[key[1]]) for key in last]


def add_attention(model: nn.Module, config: VllmConfig) -> None:
    """Add a real attention layer whose `k_scale` and `v_scale` come with the checkpoint."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    quant_config = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="static")
    attention = Attention(
        2, 32, 1.0, num_kv_heads=2, cache_config=config.cache_config, quant_config=quant_config, prefix="attention"
    )
    # CPU attention has no fp8 cache to offer; the layer's own processing of its scales needs none.
    attention.kv_cache_dtype = "fp8"
    model.attention = attention

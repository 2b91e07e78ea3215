"""A model of one real MLA layer of each release, with its real `kv_b_proj`, on any device.

The layer is the release's `MLAAttention`, of which a test runs the real `forward_impl` with decode tokens. Stood in for
are the attention over the KV cache, whose backend gives the queries back, the choice of a kernel for FP8 and the
operator `scaled_fp8_quant`; on ROCm's aiter paths, which a test turns on by their two flags, aiter's batched products
and its quantization to 4 bits. Compiling those kernels ahead is left out.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import fp8_kernels
import graphs
import pytest
import torch
from layers import DEVICE, Host, Piece, Probe
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.linear import ColumnParallelLinear

HEADS, NOPE, ROPE, V, RANK, TOKENS = 2, 32, 8, 48, 64, 3
#: The plain attributes and parameters that the layer derives from `kv_b_proj`.
DERIVED = ("W_UV", "W_UK_T", "W_UK_T_dcp_qrep", "W_K", "W_K_scale", "W_V", "W_V_scale")


class Attention:
    """Stands for the implementation of a backend: what the cache would give back is the query itself."""

    dcp_world_size = pcp_world_size = 1
    supports_quant_query_input = is_sparse = False

    def __init__(self, **options: Any) -> None:
        pass

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Do nothing, as most backends."""

    def forward_mqa(self, query: Any, *args: Any) -> tuple[torch.Tensor, None]:
        """Return the query's latent part."""
        return query[0].contiguous(), None


class Backend:
    """Stands for the backend that vLLM would choose on a GPU."""

    get_name = staticmethod(lambda: "STAND_IN")
    is_mla = staticmethod(lambda: True)
    get_impl_cls = staticmethod(lambda: Attention)


class Kernel:
    """Stands for the kernel of an FP8 linear layer, which only the prefill calls."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave the weights as they are."""


def product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Multiply (N, B, K) by (N, M, K) and return (B, N, M), in `out` if there is one."""
    result = torch.bmm(x.float(), weight.transpose(1, 2)).transpose(0, 1).to(torch.bfloat16)
    return result if out is None else out.copy_(result)


def product_fp8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, YQ: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """Stand for `rocm_aiter_ops.triton_fp8_bmm`."""
    return product(x, weight.float() * scale, YQ)


def product_fp4(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, y: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """Stand for aiter's `batched_gemm_a16wfp4`."""
    values = torch.stack((weight & 15, weight >> 4), -1).flatten(-2).float() - 8
    return product(x, values * (scale.float() - 130).exp2().repeat_interleave(32, -1), y)


def quantize_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand for aiter's `dynamic_mxfp4_quant`: two values in a byte, and for 32 of them a power of two."""
    groups = weight.float().unflatten(-1, (-1, 32))
    power = groups.abs().amax(-1, keepdim=True).clamp(min=1e-9).log2().ceil()
    values = (groups * (8 / power.exp2())).round().clamp(-8, 7).flatten(-2).to(torch.int16) + 8
    return (values[..., ::2] | values[..., 1::2] << 4).to(torch.uint8), (power.squeeze(-1) + 127).to(torch.uint8)


def fp8_config() -> Any:
    """Return what `quantization="fp8"` is for a checkpoint that is not quantized."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    config = Fp8Config()
    if not config.is_checkpoint_fp8_serialized:
        return config
    # Later releases have another one for that.
    from vllm.config.quantization import QuantizationConfigArgs, QuantSpec
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

    return OnlineQuantizationConfig(QuantizationConfigArgs(linear=QuantSpec(weight=kFp8StaticTensorSym)))


class Engine:
    """A model of one MLA layer, bfloat16, whose derived weights are of one kind."""

    def __init__(self, host: Host, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = host
        self.kind = kind
        self.patch = monkeypatch
        monkeypatch.setattr(mla_attention, "get_attn_backend", lambda *args, **options: Backend)
        prefill = lambda config: lambda **options: None  # noqa: E731
        monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", prefill, raising=False)
        if kind == "fp8":
            self._stand_in_fp8()
        elif kind.startswith("aiter"):
            self._stand_in_aiter()

    def _stand_in_fp8(self) -> None:
        from vllm import _custom_ops

        self.patch.setattr(_custom_ops, "scaled_fp8_quant", fp8_kernels.quantize)
        for name in ("fp8", "online.fp8"):
            module = importlib.import_module(f"vllm.model_executor.layers.quantization.{name}")
            self.patch.setattr(module, "init_fp8_linear_kernel", lambda **options: Kernel())

    def _stand_in_aiter(self) -> None:
        aiter = mla_attention.rocm_aiter_ops
        self.patch.setattr(aiter, "is_fp8bmm_enabled", lambda: self.kind == "aiter fp8")
        self.patch.setattr(aiter, "is_fp4bmm_enabled", lambda: self.kind == "aiter fp4")
        self.patch.setattr(aiter, "triton_fp8_bmm", staticmethod(product_fp8))
        self.patch.setattr(mla_attention, "tqdm", lambda sizes, **options: [])  # the sizes to compile for
        names = ["aiter"]
        for part in ("ops", "triton", "quant"):
            names.append(f"{names[-1]}.{part}")
        for name in (*names, "aiter.ops.triton.batched_gemm_a16wfp4"):
            self.patch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["aiter.ops.triton.quant"].dynamic_mxfp4_quant = quantize_fp4  # type: ignore[attr-defined]
        sys.modules["aiter.ops.triton.batched_gemm_a16wfp4"].batched_gemm_a16wfp4 = (  # type: ignore[attr-defined]
            product_fp4
        )

    def _build(self, model: Probe, config: VllmConfig) -> None:
        quant_config = fp8_config() if self.kind == "fp8" else None
        dtype = torch.float32 if self.kind == "of another dtype" else torch.bfloat16
        model.kv_b_proj = ColumnParallelLinear(
            RANK, HEADS * (NOPE + V), bias=False, params_dtype=dtype, quant_config=quant_config, prefix="kv_b_proj"
        )
        sizes = {"qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": V, "kv_lora_rank": RANK}
        options = {"dcp_q_replicate": True} if self.kind == "replicated queries" else {}
        model.mla = mla_attention.MLAAttention(
            HEADS,
            1.0,
            q_lora_rank=None,
            kv_b_proj=model.kv_b_proj,
            quant_config=quant_config,
            prefix="mla",
            **sizes,
            **options,
        )

    def checkpoint(self, seed: int) -> Iterator[Piece]:
        """Yield the one tensor of a checkpoint."""
        generator = torch.Generator().manual_seed(seed)
        yield Piece("kv_b_proj.weight", torch.randn(HEADS * (NOPE + V), RANK, generator=generator).bfloat16())

    def load(self, seed: int) -> Model:
        """Load cold."""
        return Model(self.host.load(self._build, self.checkpoint(seed)), self.kind)

    def reload(self, loaded: Model, seed: int) -> None:
        """Reload as the worker does."""
        self.host.reload(loaded.model, self.checkpoint(seed))


class Model:
    """A loaded model."""

    def __init__(self, model: Any, kind: str) -> None:
        self.model = model
        self.layer = model.mla
        self.kind = kind
        generator = torch.Generator().manual_seed(0)
        self.given = [
            torch.randn(TOKENS, *shape, generator=generator).to(DEVICE, torch.bfloat16)
            for shape in ((HEADS, NOPE + ROPE), (RANK,), (1, ROPE))
        ]
        self.cache = torch.zeros(1, device=DEVICE)

    @property
    def derived(self) -> dict[str, torch.Tensor]:
        """The layer's derived tensors."""
        return {name: one for name in DERIVED if isinstance(one := getattr(self.layer, name, None), torch.Tensor)}

    def places(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return where the derived tensors lie, and how."""
        return {name: (one.data_ptr(), one.stride()) for name, one in self.derived.items()}

    def run(self) -> torch.Tensor:
        """Do the layer's work for a few decode tokens."""
        output = self.given[0].new_zeros(TOKENS, HEADS * V)
        tokens = {"num_actual_tokens": TOKENS, "num_decode_tokens": TOKENS, "num_decodes": TOKENS, "num_prefills": 0}
        metadata = SimpleNamespace(**tokens, decode=self, prefill=None)
        options = {"q_dcp_replicated": self.given[0]} if self.kind == "replicated queries" else {}
        return self.layer.forward_impl(*self.given, self.cache, metadata, output=output, **options)

    def capture(self) -> graphs.Graph:
        """Capture the work."""
        self.run()
        return graphs.Graph(self.run)

    def sleep(self, graph: graphs.Graph) -> None:
        """Discard what the load made and what a graph reads, as `sleep(level=2)` and `wake_up` do; buffers are kept."""
        kept = [one.data_ptr() for one in (*self.given, self.cache, *self.model.buffers())]
        made = [*self.model.parameters(), *self.derived.values(), *graph.inputs]
        graphs.discard(one for one in made if one.data_ptr() not in kept)

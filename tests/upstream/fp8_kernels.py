"""The compiled kernels that the FP8 experts of each release call, in plain torch, on any device.

The experts themselves are the release's own, their `apply` included, except for Triton's: what an `apply` hands to its
kernel is what is read here, and each tensor matters to the result. Stood in for are `run_cutlass_moe_fp8` (three
compiled operators and two permutations), FlashInfer's `cutlass_fused_moe` and `trtllm_fp8_per_tensor_scale_moe`,
`TritonExperts.apply` and the operator `scaled_fp8_quant`. FlashInfer's two changes of the weights' layout are left out.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

FUSED_MOE = "vllm.model_executor.layers.fused_moe"
FP8 = torch.float8_e4m3fn
#: For each backend: the experts that the oracle asks about, in the module of one release or another.
BACKENDS = {
    "VLLM_CUTLASS": ("TritonOrCutlassExperts", "experts.triton_cutlass_moe", "triton_cutlass_moe"),
    "FLASHINFER_CUTLASS": ("FlashInferExperts", "experts.flashinfer_cutlass_moe", "flashinfer_cutlass_moe"),
    "FLASHINFER_TRTLLM": ("TrtLlmFp8ExpertsMonolithic", "experts.trtllm_fp8_moe"),
    "TRITON": ("TritonExperts", "experts.triton_moe", "fused_moe"),
}


def experts_module(backend: str) -> ModuleType:
    """Return the module that has the release's own experts of a backend."""
    name, *places = BACKENDS[backend]
    for place in places:
        try:
            module = importlib.import_module(f"{FUSED_MOE}.{place}")
        except ImportError:
            continue
        if hasattr(module, name):
            return module
    raise LookupError(name)


def experts_class(backend: str) -> Any:
    """Return the release's own experts of a backend."""
    return getattr(experts_module(backend), BACKENDS[backend][0])


def quantize(
    tensor: torch.Tensor, scale: torch.Tensor | None = None, use_per_token_if_dynamic: bool = False, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `scaled_fp8_quant` does: without a scale, one is made for the tensor or for each of its rows."""
    limit = torch.finfo(FP8).max
    if scale is None:
        peak = tensor.float().abs()
        scale = (peak.amax(-1, keepdim=True) if use_per_token_if_dynamic else peak.max().reshape(1)) / limit
    return (tensor.float() / scale).clamp(-limit, limit).to(FP8), scale


def spread(tensor: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return one row for each choice of each token; a single scale is every token's."""
    return (
        tensor.float()
        .reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
        .expand(ids.shape[0], -1)
        .repeat_interleave(ids.shape[1], 0)
    )


def combine(output: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> None:
    """Write the weighted sum over the choices of each token."""
    output.copy_((rows.unflatten(0, weights.shape) * weights[..., None]).sum(1))


def product(rows: torch.Tensor, weight: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """Multiply each row by the weight of the expert that owns it."""
    return (rows.float()[:, None] * weight.float()[owner]).sum(-1)


def of_owner(scale: torch.Tensor, experts: int, owner: torch.Tensor) -> torch.Tensor:
    """Return the scales of each row's expert: one, or one for each channel."""
    return scale.reshape(experts, -1)[owner]


def strided_product(
    rows: torch.Tensor, weight: torch.Tensor, owner: torch.Tensor, ab_strides: torch.Tensor, c_strides: torch.Tensor
) -> torch.Tensor:
    """Multiply as `product` does, by the strides that each expert is said to have for both operands and the result."""
    (count, width), (_, channels, _) = rows.shape, weight.shape
    line = torch.arange(count, device=rows.device)
    channel = torch.arange(channels, device=rows.device)
    within = torch.arange(width, device=rows.device)
    step = ab_strides[owner]
    left = rows.float().flatten()[(line * step)[:, None] + within]
    starts = (owner * channels * width)[:, None] + channel * step[:, None]
    right = weight.float().flatten()[starts[..., None] + within]
    places = (line * c_strides[owner])[:, None] + channel
    result = torch.zeros(count * channels, device=rows.device)
    return result.index_put((places,), (left[:, None] * right).sum(-1)).view(count, channels)


def cutlass(given: dict[str, Any]) -> None:
    """Stand for `run_cutlass_moe_fp8`."""
    ids, w1, w2 = given["topk_ids"], given["w1"], given["w2"]
    owner, experts = ids.flatten().long(), len(w1)
    rows = spread(given["hidden_states"], ids)
    both = strided_product(rows, w1, owner, given["ab_strides1"], given["c_strides1"])
    both = both * spread(given["a1q_scale"], ids) * of_owner(given["w1_scale"], experts, owner)
    gate, up = both.chunk(2, -1)
    inner, scale = quantize(functional.silu(gate) * up, given["a2_scale"], given["per_act_token"])
    rows = strided_product(inner, w2, owner, given["ab_strides2"], given["c_strides2"])
    combine(given["output"], rows * scale * of_owner(given["w2_scale"], experts, owner), given["topk_weights"])


def triton(self: Any, **given: Any) -> None:
    """Stand for `TritonExperts.apply`."""
    ids, w1, w2 = given["topk_ids"], given["w1"], given["w2"]
    owner, experts = ids.flatten().long(), len(w1)
    both = product(spread(given["hidden_states"], ids), w1, owner)
    gate, up = (both * spread(given["a1q_scale"], ids) * of_owner(self.w1_scale, experts, owner)).chunk(2, -1)
    inner, scale = quantize(functional.silu(gate) * up, given["a2_scale"], self.per_act_token_quant)
    rows = product(inner, w2, owner) * scale * of_owner(self.w2_scale, experts, owner)
    combine(given["output"], rows, given["topk_weights"])


def flashinfer_cutlass(**given: Any) -> None:
    """Stand for `cutlass_fused_moe` with one FP8 scale for each tensor."""
    ids = given["token_selected_experts"]
    owner = ids.flatten().long()
    alphas1, inverse2, alphas2, scale1 = given["quant_scales"]
    # The kernel needs the input's scale in few of its ways; here the result depends on it.
    both = product(spread(given["input"], ids), given["fc1_expert_weights"], owner) * (1 + scale1)
    up, gate = (both * alphas1.flatten()[owner, None]).chunk(2, -1)
    inner = (functional.silu(gate) * up * inverse2).to(FP8)
    rows = product(inner, given["fc2_expert_weights"], owner) * alphas2.flatten()[owner, None]
    combine(given["output"], rows, given["token_final_scales"])


def flashinfer_trtllm(**given: Any) -> torch.Tensor:
    """Stand for `trtllm_fp8_per_tensor_scale_moe`, which chooses the experts itself."""
    weights, ids = given["routing_logits"].float().softmax(-1).topk(given["top_k"])
    owner = ids.flatten()
    up, gate = product(spread(given["hidden_states"], ids), given["gemm1_weights"], owner).chunk(2, -1)
    gate = functional.silu(gate * given["output1_scales_gate_scalar"][owner, None])
    inner = (gate * up * given["output1_scales_scalar"][owner, None]).to(FP8)
    rows = product(inner, given["gemm2_weights"], owner) * given["output2_scales_scalar"][owner, None]
    output = torch.empty(given["hidden_states"].shape, dtype=torch.bfloat16, device=rows.device)
    combine(output, rows, weights)
    return output


def install(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Let vLLM's own choice fall on a backend, and put the kernels where its experts call them."""
    from vllm import _custom_ops

    chosen = experts_class(backend)
    monkeypatch.setattr(chosen, "is_supported_config", staticmethod(lambda *args: (True, None)), raising=False)
    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", quantize)
    module = importlib.import_module(f"{FUSED_MOE}.experts.cutlass_moe")
    signature = inspect.signature(module.run_cutlass_moe_fp8)
    monkeypatch.setattr(
        module, "run_cutlass_moe_fp8", lambda *args, **options: cutlass(signature.bind(*args, **options).arguments)
    )
    # The permutation's scratch memory, in the releases that keep it, is sized by a compiled operator.
    monkeypatch.setattr(module.CutlassExpertsFp8Base, "_get_permute_scratch", lambda self: None, raising=False)
    monkeypatch.setattr(experts_class("TRITON"), "apply", triton)
    monkeypatch.setattr(experts_module("FLASHINFER_CUTLASS"), "flashinfer_cutlass_fused_moe", flashinfer_cutlass)
    library = {name: ModuleType(name) for name in ("flashinfer", "flashinfer.fused_moe", "flashinfer.fused_moe.core")}
    for name, one in library.items():
        monkeypatch.setitem(sys.modules, name, one)
    flashinfer, fused_moe, core = library.values()
    flashinfer.fused_moe = fused_moe
    flashinfer.reorder_rows_for_gated_act_gemm = lambda weight: weight
    flashinfer.shuffle_matrix_a = lambda weight, rows: weight
    fused_moe.core = core
    fused_moe.trtllm_fp8_per_tensor_scale_moe = flashinfer_trtllm
    if not torch.accelerator.is_available():
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: torch.device("cpu"))
    core.ActivationType = fused_moe.ActivationType = enum.IntEnum("ActivationType", "Swiglu Relu2 Geglu Gelu Silu")

"""The compiled kernels that the FP8 experts of each release call, in plain torch, on any device.

The experts themselves are the release's own, their `apply` included, except for Triton's: what an `apply` hands to its
kernel is what is read here, and each tensor matters to the result. Stood in for are `run_cutlass_moe_fp8` and
`run_cutlass_moe_w4a8_fp8` (compiled operators and permutations), FlashInfer's `cutlass_fused_moe` and
`trtllm_fp8_per_tensor_scale_moe`, `TritonExperts.apply`, the operator `scaled_fp8_quant`, and two functions that want
4-bit weights and their scales to be on CUDA. Changes of layout are left out: FlashInfer's two of the weights, and those
of 4-bit weights and their scales.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from layers import DEVICE, choose, experts_module
from torch.nn import functional

FUSED_MOE = "vllm.model_executor.layers.fused_moe"
FP8 = torch.float8_e4m3fn
W4A8 = "compressed_tensors_moe.compressed_tensors_moe_w4a8_fp8"
SIGNS = -0x77777778  # the highest bit of each four
#: For each backend: the experts that the oracle asks about, in the module of one release or another.
BACKENDS = {
    "VLLM_CUTLASS": ("TritonOrCutlassExperts", "experts.triton_cutlass_moe", "triton_cutlass_moe"),
    "FLASHINFER_CUTLASS": ("FlashInferExperts", "experts.flashinfer_cutlass_moe", "flashinfer_cutlass_moe"),
    "FLASHINFER_TRTLLM": ("TrtLlmFp8ExpertsMonolithic", "experts.trtllm_fp8_moe"),
    "W4A8_CUTLASS": ("CutlassExpertsW4A8Fp8", "experts.cutlass_moe"),
    "TRITON": ("TritonExperts", "experts.triton_moe", "fused_moe"),
}


def experts_class(backend: str) -> Any:
    """Return the release's own experts of a backend."""
    return getattr(experts_module(*BACKENDS[backend]), BACKENDS[backend][0])


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
    rows: torch.Tensor,
    weight: torch.Tensor,
    owner: torch.Tensor,
    a_strides: torch.Tensor,
    b_strides: torch.Tensor,
    c_strides: torch.Tensor,
) -> torch.Tensor:
    """Multiply as `product` does, by the strides that each expert is said to have for both operands and the result."""
    (count, width), (_, channels, _) = rows.shape, weight.shape
    line = torch.arange(count, device=rows.device)
    channel = torch.arange(channels, device=rows.device)
    within = torch.arange(width, device=rows.device)
    left = rows.float().flatten()[(line * a_strides[owner])[:, None] + within]
    starts = (owner * channels * width)[:, None] + channel * b_strides[owner, None]
    right = weight.float().flatten()[starts[..., None] + within]
    places = (line * c_strides[owner])[:, None] + channel
    result = torch.zeros(count * channels, device=rows.device)
    return result.index_put((places,), (left[:, None] * right).sum(-1)).view(count, channels)


def cutlass(given: dict[str, Any]) -> None:
    """Stand for `run_cutlass_moe_fp8`, and for the function for 4-bit weights, which has more strides."""
    ids = given["topk_ids"]
    owner, experts = ids.flatten().long(), len(given["w1"])

    def multiply(rows: torch.Tensor, number: int, c_strides: torch.Tensor) -> torch.Tensor:
        weight, scale = given[f"w{number}"], given[f"w{number}_scale"]
        if "ab_strides1" in given:
            a_strides = b_strides = given[f"ab_strides{number}"]
        else:
            a_strides, b_strides = given[f"a_strides{number}"], given[f"b_strides{number}"][:, 0]
            weight = unpack(weight, scale, given[f"s_strides{number}"][:, 0], given["group_size"])
            scale = given[f"w{number}_chan_scale"]
        return strided_product(rows, weight, owner, a_strides, b_strides, c_strides) * of_owner(scale, experts, owner)

    both = multiply(spread(given["hidden_states"], ids), 1, given["c_strides1"]) * spread(given["a1q_scale"], ids)
    gate, up = both.chunk(2, -1)
    inner, scale = quantize(functional.silu(gate) * up, given["a2_scale"], given["per_act_token"])
    combine(given["output"], multiply(inner, 2, given["c_strides2"]) * scale, given["topk_weights"])


def unpack(weight: torch.Tensor, scale: torch.Tensor, strides: torch.Tensor, group: int) -> torch.Tensor:
    """Return signed 4-bit weights, eight of them in each element, times the scales of their groups.

    The scales of an expert's groups lie as far apart as its stride says.
    """
    shifts = torch.arange(0, 32, 4, device=weight.device)
    values = (((weight[..., None] >> shifts) & 15 ^ 8) - 8).flatten(2)
    experts, channels, width = values.shape
    groups = torch.arange(width, device=weight.device) // group
    starts = torch.arange(experts, device=weight.device)[:, None] * (scale[0].numel()) + groups * strides[:, None]
    places = starts[:, None] + torch.arange(channels, device=weight.device)[:, None]
    return values * scale.float().flatten()[places]


def split_scales(quantizer: Any, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand for `convert_bf16_scales_to_fp8`: FP8 scales of the groups, and what to multiply each channel with."""
    groups, channels = quantize(scales, use_per_token_if_dynamic=True)
    return (groups.float() / 8).to(FP8), channels * 8


def with_strides(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand for `cutlass_encode_and_reorder_int4b_grouped`: the weights, and for each expert the length of a row."""
    return weight, torch.full((len(weight), 2), weight.shape[-1] * 8, dtype=torch.int64, device=weight.device)


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


def by_name(function: Any) -> Callable[..., None]:
    """Return `cutlass` for the arguments of one of the functions that it stands for."""
    signature = inspect.signature(function)
    return lambda *args, **options: cutlass(signature.bind(*args, **options).arguments)


def install(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Let vLLM's own choice fall on a backend, and put the kernels where its experts call them."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.quantization.utils import quant_utils

    choose(monkeypatch, BACKENDS, backend)
    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", quantize)
    module = importlib.import_module(f"{FUSED_MOE}.experts.cutlass_moe")
    for name in ("run_cutlass_moe_fp8", "run_cutlass_moe_w4a8_fp8"):
        monkeypatch.setattr(module, name, by_name(getattr(module, name)))
    for name in ("CutlassExpertsFp8Base", "CutlassExpertsW4A8Fp8"):
        # The permutation's scratch memory, in the releases that keep it, is sized by a compiled operator.
        monkeypatch.setattr(getattr(module, name), "_get_permute_scratch", lambda self: None, raising=False)
    monkeypatch.setattr(_custom_ops, "cutlass_encode_and_reorder_int4b_grouped", with_strides)
    monkeypatch.setattr(_custom_ops, "cutlass_pack_scale_fp8", lambda scales: scales)
    # Taken by name, by modules that an earlier test may have imported.
    importlib.import_module(f"{CompressedTensorsConfig.__module__.rpartition('.')[0]}.{W4A8}")
    for name, stand_in in (
        ("convert_bf16_scales_to_fp8", split_scales),
        ("convert_packed_uint4b8_to_signed_int4_inplace", lambda one: one.bitwise_xor_(SIGNS)),
    ):
        stock = getattr(quant_utils, name)
        for module in [one for one in list(sys.modules.values()) if getattr(one, "__dict__", {}).get(name) is stock]:
            monkeypatch.setattr(module, name, stand_in)
    # 4-bit weights are for one generation of GPUs in some releases.
    monkeypatch.setattr(
        CompressedTensorsConfig, "_is_fp8_w4a8_sm90", staticmethod(CompressedTensorsConfig._is_fp8_w4a8)
    )
    monkeypatch.setattr(experts_class("TRITON"), "apply", triton)
    monkeypatch.setattr(
        experts_module(*BACKENDS["FLASHINFER_CUTLASS"]), "flashinfer_cutlass_fused_moe", flashinfer_cutlass
    )
    library = {name: ModuleType(name) for name in ("flashinfer", "flashinfer.fused_moe", "flashinfer.fused_moe.core")}
    for name, one in library.items():
        monkeypatch.setitem(sys.modules, name, one)
    flashinfer, fused_moe, core = library.values()
    flashinfer.fused_moe = fused_moe
    flashinfer.reorder_rows_for_gated_act_gemm = lambda weight: weight
    flashinfer.shuffle_matrix_a = lambda weight, rows: weight
    fused_moe.core = core
    fused_moe.trtllm_fp8_per_tensor_scale_moe = flashinfer_trtllm
    if DEVICE.type == "cpu":
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: torch.device("cpu"))
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    core.ActivationType = fused_moe.ActivationType = enum.IntEnum("ActivationType", "Swiglu Relu2 Geglu Gelu Silu")

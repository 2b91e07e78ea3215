"""NVFP4 experts that compute on any device: a release's own classes, with their kernels stood in for by plain torch.

The experts, their `apply`, the kernel object around them and its prepare and finalize are vLLM's own, and run as they
are. What they call is not there without a Blackwell GPU. Stood in for are the fused kernel of each backend, the
quantization of activations (`scaled_fp4_quant`), the packing of routing weights, and the functions of FlashInfer and of
Marlin (`gptq_marlin_repack`) that change the layout of weights. A stand-in reads every tensor that it is given, each in
such a way that another value gives another result, but computes no real activation function: those are flat where a
wrong scale could hide.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from types import ModuleType
from typing import Any

import pytest
import torch
from layers import DEVICE, experts_module
from torch import Tensor

#: The experts of each backend, in the module of one release or another.
BACKENDS = {
    "FLASHINFER_TRTLLM": ("TrtLlmNvFp4ExpertsModular", "experts.trtllm_nvfp4_moe"),
    "FLASHINFER_TRTLLM monolithic": ("TrtLlmNvFp4ExpertsMonolithic", "experts.trtllm_nvfp4_moe"),
    "FLASHINFER_CUTLASS": ("FlashInferExperts", "experts.flashinfer_cutlass_moe", "flashinfer_cutlass_moe"),
    "FLASHINFER_CUTEDSL": ("FlashInferCuteDSLExperts", "experts.flashinfer_cutedsl_moe"),
    "VLLM_CUTLASS": ("CutlassExpertsFp4", "experts.cutlass_moe", "cutlass_moe"),
    "MARLIN": ("MarlinExperts", "experts.marlin_moe", "fused_marlin_moe"),
    "EMULATION": ("Nvfp4QuantizationEmulationTritonExperts", "experts.nvfp4_emulation_moe"),
}
#: Those that compute here; the programs that emulated experts run are Triton's, and many.
COMPUTING = [backend for backend in BACKENDS if backend != "EMULATION"]


def experts_class(backend: str) -> Any:
    """Return the release's own experts of a backend."""
    return getattr(experts_module(*BACKENDS[backend]), BACKENDS[backend][0])


class ActivationType(IntEnum):
    """FlashInfer's names of the activation functions that vLLM knows."""

    Silu = 0
    Gelu = 1
    Swiglu = 2
    Geglu = 3
    Relu2 = 4


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Put the stand-ins where vLLM finds the kernels, and give it a workspace as its model runner does."""
    from vllm import _custom_ops as custom_ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.v1.worker import workspace

    patch.setattr(custom_ops, "scaled_fp4_quant", quantize)
    patch.setattr(custom_ops, "gptq_marlin_repack", repack)
    for name in ("", ".fused_moe", ".fused_moe.core", ".cute_dsl", ".cute_dsl.utils"):
        patch.setitem(sys.modules, f"flashinfer{name}", ModuleType(f"flashinfer{name}"))
    flashinfer = sys.modules["flashinfer"]
    flashinfer.fused_moe = sys.modules["flashinfer.fused_moe"]
    flashinfer.nvfp4_block_scale_interleave = lambda scales: scales.flatten()
    flashinfer.fused_moe.trtllm_fp4_block_scale_routed_moe = trtllm_routed
    flashinfer.fused_moe.trtllm_fp4_block_scale_moe = trtllm_monolithic
    core = sys.modules["flashinfer.fused_moe.core"]
    core.ActivationType = ActivationType
    core._maybe_get_cached_w3_w1_permute_indices = core.get_w2_permute_indices_with_cache = upside_down
    sys.modules["flashinfer.cute_dsl.utils"].convert_sf_to_mma_layout = lambda scales, **options: scales
    for backend, name, function in (
        ("FLASHINFER_CUTLASS", "flashinfer_cutlass_fused_moe", flashinfer_cutlass),
        ("FLASHINFER_CUTEDSL", "flashinfer_cute_dsl_fused_moe_nvfp4", cutedsl),
        ("VLLM_CUTLASS", "run_cutlass_moe_fp4", cutlass),
        ("MARLIN", "fused_marlin_moe", marlin),
    ):
        patch.setattr(experts_module(*BACKENDS[backend]), name, function)
    # A kernel of its own in 0.20.0 to 0.29.0; later releases hand both on as they are.
    trtllm_module = experts_module(*BACKENDS["FLASHINFER_TRTLLM"])
    patch.setattr(trtllm_module, "trtllm_moe_pack_topk_ids_weights", lambda *both: both, raising=False)
    if DEVICE.type == "cpu":
        patch.setattr(Tensor, "cuda", lambda self, *args, **options: self)
        patch.setattr(torch.accelerator, "current_device_index", lambda: "cpu")
        patch.setattr(marlin_utils, "num_compute_units", lambda *args: 1)
    patch.setattr(workspace, "_manager", workspace.WorkspaceManager(DEVICE))


def upside_down(cache: Any, rows: Tensor, *args: Any, **options: Any) -> Tensor:
    """Return the order of rows that a layout has: here the last comes first."""
    return torch.arange(rows.shape[0], device=rows.device).flip(0)


def numbers(packed: Tensor) -> Tensor:
    """Return a number for every four bits."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2).float() - 8


def scaled(packed: Tensor, scales: Tensor, kind: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Return the numbers of a matrix, or of each expert's, times the scale of their block of 16."""
    blocks = numbers(packed).unflatten(-1, (-1, 16))
    return (blocks * scales.view(kind).float().reshape(*blocks.shape[:-1], 1)).flatten(-2)


def quantize(values: Tensor, gscale: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Pack activations into four bits, with a scale for each block of 16; their products are `values` x `gscale`."""
    blocks = (values.float() * gscale.flatten()[0].float()).unflatten(-1, (-1, 16))
    scales = (blocks.abs().amax(-1) / 7).clamp(2**-6, 448).to(torch.float8_e4m3fn)
    digits = (blocks / scales.float().unsqueeze(-1)).round().add(8).clamp(0, 15).to(torch.uint8).flatten(-2)
    return digits[..., ::2] | digits[..., 1::2] << 4, scales


def routed(topk_ids: Tensor, topk_weights: Tensor, experts: int) -> Tensor:
    """Return what each expert counts for each token."""
    everyone = torch.zeros(len(topk_ids), experts, dtype=torch.float, device=topk_ids.device)
    return everyone.scatter_add(1, topk_ids.long(), topk_weights.float())


def moe(
    inputs: Tensor,
    routing: Tensor,
    first: Tensor,
    second: Tensor,
    gate: Tensor,
    up: Tensor,
    out: Tensor,
    limit: Tensor | None = None,
    alpha: Tensor | None = None,
    beta: Tensor | None = None,
) -> Tensor:
    """Compute what each token's experts make of it; all but the matrices are one number for each expert."""
    gate, up, out = gate.float(), up.float(), out.float()
    left, right = torch.einsum("tk,erk->ter", inputs, first).chunk(2, -1)
    if limit is not None:
        left, right = left.minimum(limit[:, None]), right.minimum(limit[:, None]).maximum(-limit[:, None])
    if alpha is not None:
        left = left * alpha[:, None]
    if beta is not None:
        right = right + beta[:, None]
    between = (left * gate[:, None]) * (right * up[:, None])
    each = torch.einsum("ter,ekr->tek", between, second) * out[:, None]
    return torch.einsum("tek,te->tk", each, routing)


def trtllm(routing: Tensor, **given: Any) -> Tensor:
    """Stand in for the computation of both of TRTLLM's kernels."""
    return moe(
        scaled(given["hidden_states"], given["hidden_states_scale"]),
        routing,
        scaled(given["gemm1_weights"], given["gemm1_weights_scale"]),
        scaled(given["gemm2_weights"], given["gemm2_weights_scale"]),
        gate=given["output1_scale_gate_scalar"],
        up=given["output1_scale_scalar"],
        out=given["output2_scale_scalar"],
        limit=given["gemm1_clamp_limit"],
        alpha=given["gemm1_alpha"],
        beta=given["gemm1_beta"],
    )


def trtllm_routed(*, topk_ids: tuple[Tensor, Tensor], output: Tensor, num_experts: int, **given: Any) -> None:
    """Stand in for TRTLLM's kernel that is told the experts of each token, and what each counts."""
    output.copy_(trtllm(routed(*topk_ids, num_experts), **given))


def trtllm_monolithic(*, routing_logits: Tensor, hidden_states: Tensor, **given: Any) -> Any:
    """Stand in for TRTLLM's kernel that finds the experts itself."""
    result = trtllm(routing_logits.float().softmax(-1), hidden_states=hidden_states, **given).to(torch.bfloat16)
    return (result,)


def flashinfer_cutlass(
    *,
    input: Tensor,
    input_sf: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor,
    quant_scales: list[Tensor],
    swiglu_limit: Tensor | None,
    swiglu_alpha: Tensor | None,
    swiglu_beta: Tensor | None,
    output: Tensor,
    **options: Any,
) -> list[Tensor]:
    """Stand in for FlashInfer's CUTLASS kernel."""
    a1_gscale, w1_scale, g1_alphas, a2_gscale, w2_scale, g2_alphas = quant_scales
    result = moe(
        scaled(input, input_sf),
        routed(token_selected_experts, token_final_scales, len(g1_alphas)),
        scaled(fc1_expert_weights, w1_scale),
        scaled(fc2_expert_weights, w2_scale),
        gate=g1_alphas * a1_gscale,
        up=g1_alphas * a2_gscale,
        out=g2_alphas,
        limit=swiglu_limit,
        alpha=swiglu_alpha,
        beta=swiglu_beta,
    )
    return [output.copy_(result)]


def cutedsl(
    *,
    x: Tensor,
    x_sf: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    w1_weight: Tensor,
    w1_weight_sf: Tensor,
    w1_alpha: Tensor,
    fc2_input_scale: Tensor,
    w2_weight: Tensor,
    w2_weight_sf: Tensor,
    w2_alpha: Tensor,
    moe_output: Tensor,
    **options: Any,
) -> None:
    """Stand in for FlashInfer's CuteDSL kernel; its limits are plain numbers, which a graph keeps."""
    result = moe(
        scaled(x, x_sf),
        routed(token_selected_experts, token_final_scales, len(w1_alpha)),
        scaled(w1_weight, w1_weight_sf),
        scaled(w2_weight, w2_weight_sf),
        gate=w1_alpha,
        up=w1_alpha * fc2_input_scale,
        out=w2_alpha,
    )
    moe_output.copy_(result)


def cutlass(
    *,
    output: Tensor,
    a: Tensor,
    a1_gscale: Tensor,
    w1_fp4: Tensor,
    w1_blockscale: Tensor,
    w1_alphas: Tensor,
    a2_gscale: Tensor,
    w2_fp4: Tensor,
    w2_blockscale: Tensor,
    w2_alphas: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    **options: Any,
) -> None:
    """Stand in for vLLM's CUTLASS kernels, which quantize the activations themselves, for each expert."""
    result = moe(
        a.float(),
        routed(topk_ids, topk_weights, len(w1_alphas)),
        scaled(w1_fp4, w1_blockscale),
        scaled(w2_fp4, w2_blockscale),
        gate=w1_alphas * a1_gscale,
        up=w1_alphas * a2_gscale,
        out=w2_alphas,
    )
    output.copy_(result)


def repack(b_q_weight: Tensor, *, size_k: int, size_n: int, **options: Any) -> Tensor:
    """Return weights in the shape that they have for Marlin, but in no other order."""
    return b_q_weight.reshape(size_k // 16, size_n * 2)


def marlin(
    *,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    w1_scale: Tensor,
    w2_scale: Tensor,
    global_scale1: Tensor,
    global_scale2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    output: Tensor,
    **options: Any,
) -> Tensor:
    """Stand in for Marlin's kernel, which takes the activations as they are."""

    def repacked(weights: Tensor, scales: Tensor) -> Tensor:
        lines = weights.reshape(len(weights), -1, scales.shape[-1]).transpose(1, 2).contiguous()
        # Marlin has its own kind of eight bits, some of which would read as no number.
        return scaled(lines, scales, torch.uint8)

    # They have the exponent's bias of the activations' dtype in them.
    first, second = (scale.float() * 2.0**-119 for scale in (global_scale1, global_scale2))
    result = moe(
        hidden_states.float(),
        routed(topk_ids, topk_weights, len(first)),
        repacked(w1, w1_scale),
        repacked(w2, w2_scale),
        gate=first,
        up=first,
        out=second,
    )
    return output.copy_(result)

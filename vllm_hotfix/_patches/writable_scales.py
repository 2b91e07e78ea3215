"""The input scales that all experts of an NVFP4 fused-MoE layer share are tensors that a reload can write to.

What is wrong upstream: for the backends whose experts share their activation scales (FlashInfer's), the weights'
conversion makes them as ``a13_scale.max().to(torch.float32).expand(num_experts)``. All elements of such a tensor are
one float in memory (its stride is 0), and it becomes the layer's parameter (``w13_input_scale``, ``w2_input_scale``).
A reload ends each layer with ``param.data.copy_(...)`` into the parameters of the first load, and into this one torch
refuses to copy: ``RuntimeError: unsupported operation: more than one element of the written-to tensor refers to a
single memory location``. Upstream: vllm-project/vllm#49489, released with 0.27.0, which makes them with ``repeat``.

How it is fixed: the two functions that make them are wrapped, and what overlaps in their result gets storage of its
own, with the same values. They serve every NVFP4 MoE method: ModelOpt's, Quark's (from 0.22.0 on), the online one
(from 0.26.0 on), and compressed-tensors', which keeps these scales as plain attributes that no reload copies to.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from _vllm_hotfix import describe

from .._patch import Patch, Target
from .._record import RECORD

if TYPE_CHECKING:
    from torch import Tensor

_PREPARE = "vllm.model_executor.layers.quantization.utils.flashinfer_fp4_moe"

PATCH = Patch(
    name="writable_scales",
    env="VLLM_HOTFIX_WRITABLE_SCALES",
    fault="a reload cannot write to the scales that the experts of an NVFP4 MoE share, and raises",
    upstream="vllm-project/vllm#49489",
    targets=(
        Target(f"{_PREPARE}:prepare_nvfp4_moe_layer_for_fi_or_cutlass", "prepare"),
        Target(f"{_PREPARE}:prepare_nvfp4_moe_layer_for_flashinfer_cutedsl", "prepare"),
    ),
    fixed_in="0.27.0",
    symptoms=("more than one element of the written-to tensor",),
)


def prepare(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convert a layer's weights, and return tensors that can be written to.

    Returns:
        Stock's tuple of weights and scales, each of them the very object that stock made, if none overlaps. Else a
        tuple in which every tensor that overlaps is a contiguous copy of it: same values, shape, dtype and device.
    """
    result = wrapped(*args, **kwargs)
    try:
        return _writable(result)
    except Exception as error:
        RECORD.warn(f"{PATCH.name}: input scales stay as stock makes them, a reload will raise: {describe(error)}")
        return result


def _writable(result: Any) -> Any:
    if type(result) is not tuple:
        return result
    made = tuple(one.contiguous() if _overlaps(one) else one for one in result)
    number = sum(new is not old for new, old in zip(made, result, strict=True))
    if not number:
        return result
    RECORD.count(PATCH.name, "scales_made_writable", number)
    # No seam says when the load ends; a state file for each MoE layer costs less than a millisecond.
    RECORD.save()
    return made


def _overlaps(one: Any) -> bool:
    """Whether several elements of a tensor are one place in memory, as ``expand`` makes them."""
    if not isinstance(one, sys.modules["torch"].Tensor):
        return False
    tensor: Tensor = one
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))

"""What Marlin's kernels of a layer keep beside its parameters stays where CUDA graphs captured it.

What is wrong upstream: a Marlin kernel locks with a workspace, which must read as zeros between its calls. Processing
a layer's weights makes a new one each time, as a plain attribute of the layer (``workspace``) or of its kernel. A
reload ends each layer by copying its new parameters and buffers into the first load's; of plain attributes it knows
nothing. So the first workspace is freed, and graphs captured with it lock in memory that others use by then. The same
goes for ``g_idx_sort_indices`` of weights with an activation order, which say how the input is permuted.
Upstream: vllm-project/vllm#48438, released with 0.27.0.

How it is fixed: after a layer of a reload was processed, the new values are copied into the first tensors, and those
are put back.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from _vllm_hotfix import describe

from .._patch import Patch, Target
from .._record import RECORD

if TYPE_CHECKING:
    from torch import Tensor

_LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"
_MARLIN = "vllm.model_executor.kernels.linear.mixed_precision.marlin"
_NAMES = ("workspace", "g_idx_sort_indices")

PATCH = Patch(
    name="marlin_workspace",
    env="VLLM_HOTFIX_MARLIN_WORKSPACE",
    fault="after a reload, CUDA graphs lock in a Marlin workspace that was freed",
    upstream="vllm-project/vllm#48438",
    targets=(
        Target(f"{_LAYERWISE}:_layerwise_process", "layerwise_process"),
        Target(f"{_MARLIN}:MarlinLinearKernel.process_weights_after_loading", "process_weights", optional=True),
    ),
    relies=("vllm.model_executor.layers.quantization.utils.marlin_utils:marlin_make_workspace_new",),
    fixed_in="0.27.0",
    symptoms=(r"\.(workspace|g_idx_sort_indices)$",),
)


def layerwise_process(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Process a layer; what it has beside its parameters is where it was before."""
    layer = args[0] if args else kwargs["layer"]
    before = _plain(layer)
    result = wrapped(*args, **kwargs)
    _put_back(layer, before)
    return result


def process_weights(wrapped: Any, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Process a layer's weights; the kernel's own workspace is where it was before."""
    before = _plain(kernel)
    result = wrapped(*args, **kwargs)
    _put_back(kernel, before)
    return result


def _plain(holder: Any) -> dict[str, Tensor]:
    """The tensors that a layer or a kernel has as plain attributes; a layer's parameters are not among them."""
    tensor = sys.modules["torch"].Tensor
    return {name: one for name in _NAMES if isinstance(one := vars(holder).get(name), tensor)}


def _put_back(holder: Any, before: dict[str, Tensor]) -> None:
    try:
        after = _plain(holder)
        for name, old in before.items():
            new = after.get(name, old)
            if new is old:
                continue
            if (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
                reason = f"{name} of a {type(holder).__name__} has another shape, type or device after a reload"
                RECORD.stale(
                    PATCH.name, f"{reason}; CUDA graphs that were captured before no longer match, restart vLLM"
                )
                continue
            old.copy_(new)
            setattr(holder, name, old)
            RECORD.count(PATCH.name, "tensors_kept")
    except Exception as error:
        RECORD.warn(f"{PATCH.name}: CUDA graphs may lock in memory of others, as in stock: {describe(error)}")

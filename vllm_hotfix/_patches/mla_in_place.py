"""A reload writes MLA's derived weights to where the CUDA graphs read them.

What is wrong upstream: ``MLAAttention.process_weights_after_loading`` makes the weights of the decode path out of
``kv_b_proj`` (``W_UV`` and ``W_UK_T``, or ``W_K``, ``W_V`` and their scales on ROCm's aiter paths) and sets them as
attributes. At a reload it does so again, with other tensors; captured graphs go on reading the first ones, which hold
the values of the first load, or zeros after ``sleep(level=2)``. Upstream: vllm-project/vllm#48251. 0.26.0 copies
``W_UV`` and ``W_UK_T`` in place. Those of the aiter paths are set anew until 0.31.0, and so is ``W_UK_T_dcp_qrep`` of
0.27.0 to 0.31.0, which is there with decode context parallelism and replicated queries; 0.32.0 copies them all.

An unquantized ``kv_b_proj`` shows the fault only where its dtype is not the model's: else ``W_UV`` and ``W_UK_T`` are
views of its weight, and vLLM copies that in place.

How it is fixed: stock makes the fresh tensors. Then the layer gets the first ones back, with the fresh values copied
into them, and the fresh ones are dropped. That is done whenever the function has run on the layer before, not only in
vLLM's own reload: trainers call it after they have loaded weights themselves. What else the function sets (``q_range``,
``k_range``, ``v_range``) are constants that no graph reads.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from _vllm_hotfix import describe, strict

from .._patch import STRICT, HotfixError, Patch, Target
from .._record import RECORD

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

PATCH = Patch(
    name="mla_in_place",
    env="VLLM_HOTFIX_MLA_IN_PLACE",
    fault="after a reload, CUDA graphs read MLA's derived weights of the first load (from 0.26.0 on only on ROCm's"
    " aiter paths, and with replicated queries under decode context parallelism)",
    upstream="vllm-project/vllm#48251",
    targets=(
        Target(
            "vllm.model_executor.layers.attention.mla_attention:MLAAttention.process_weights_after_loading",
            "process_weights_after_loading",
        ),
    ),
    fixed_in="0.32.0",
    symptoms=(r"\.(W_UV|W_UK_T|W_K|W_V)(_scale)?$",),
)

#: What the function derives from ``kv_b_proj``, in one release or another.
_DERIVED: Final = ("W_UV", "W_UK_T", "W_UK_T_dcp_qrep", "W_K", "W_K_scale", "W_V", "W_V_scale")


class _Other(Exception):
    """A fresh tensor cannot be copied into the first one."""


def process_weights_after_loading(wrapped: Any, layer: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Derive a layer's weights as stock does, and have them in the tensors that the layer had before.

    Args:
        wrapped: stock's function.
        layer: the ``MLAAttention``.
        args: the model's dtype.
        kwargs: the same by name.

    Raises:
        HotfixError: under ``VLLM_HOTFIX_STRICT``, if captured graphs of this layer read what is gone.
        Exception: what stock raises; the layer has its first tensors then.
    """
    try:
        first = _derived(layer)
    except Exception as error:
        first = {}
        RECORD.warn(f"{PATCH.name}: derived weights have other memory after a reload, as in stock: {describe(error)}")
    try:
        result = wrapped(*args, **kwargs)
    except BaseException:
        # A reload that is tried again must find those that the graphs read.
        vars(layer).update({name: one for name, one in first.items() if name in vars(layer)})
        raise
    if first:
        try:
            _refresh(layer, first)
        except Exception as error:
            _give_up(layer, str(error) if isinstance(error, _Other) else describe(error))
        # No seam says when the load ends; a state file for each layer costs less than a millisecond.
        RECORD.save()
    return result


def _derived(layer: Module) -> dict[str, Tensor]:
    """A layer's derived tensors that have memory, by name."""
    found = {name: getattr(layer, name, None) for name in _DERIVED}
    return {name: one for name, one in found.items() if isinstance(one, _tensor()) and not one.is_meta}


def _tensor() -> type[Tensor]:
    return sys.modules["torch"].Tensor  # type: ignore[no-any-return]


def _refresh(layer: Module, first: dict[str, Tensor]) -> None:
    """Copy what stock has made into the first tensors, and put them back; leave what lies there already.

    Raises:
        _Other: a tensor is gone, or has another shape, dtype or device. It and those after it stay as stock set them.
    """
    for name, kept in first.items():
        fresh = getattr(layer, name, None)
        if not isinstance(fresh, _tensor()):
            raise _Other(f"{name} is no tensor any more")
        if _place(fresh) == _place(kept):
            RECORD.count(PATCH.name, "tensors_in_place")
        elif _form(fresh) != _form(kept):
            raise _Other(f"{name} is {_form(fresh)} now and was {_form(kept)}")
        else:
            # Either kind of tensor can be written to in inference mode; those that it made, only there.
            with sys.modules["torch"].inference_mode():
                kept.copy_(fresh)
            setattr(layer, name, kept)
            RECORD.count(PATCH.name, "tensors_refreshed")


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Which memory a tensor is, and how it looks at it."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _form(tensor: Tensor) -> str:
    """What must be the same to copy; strides need not, a graph reads by those of the first tensor."""
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _give_up(layer: Module, why: str) -> None:
    """Say that a layer's tensors are elsewhere now, and that its graphs, if it can have some, are stale.

    Raises:
        HotfixError: it can have some, and ``VLLM_HOTFIX_STRICT`` is set.
    """
    RECORD.count(PATCH.name, "layers_replaced")
    config = getattr(getattr(layer, "_vllm_config", None), "model_config", None)
    if getattr(config, "enforce_eager", False):
        RECORD.warn(f"{PATCH.name}: derived weights have other memory after a reload, as in stock vLLM: {why}")
        return
    name = getattr(layer, "layer_name", "MLAAttention")
    reason = f"{name}: {why}; CUDA graphs that were captured before no longer match, restart vLLM"
    RECORD.stale(PATCH.name, reason)
    if strict():
        raise HotfixError(f"vllm-hotfix: {STRICT} is set and {PATCH.name}: {reason}")

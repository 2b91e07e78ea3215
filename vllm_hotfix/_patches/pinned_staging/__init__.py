"""Weights reach the GPU by DMA from a page-locked staging buffer.

What is wrong upstream: the Run:ai streamer reads tensors into pageable host memory that it uses again, and the weight
loaders copy out of it tensor by tensor with ``param.copy_()``. Such a copy is staged by the driver: 7 GB/s where the
link does 55, and every tensor waits for its own.
Upstream: vllm-project/vllm#61303; no release has it.

How it is done: the streamer's C library reads extents of many consecutive tensors into staging blocks of this package's
own, which are page-locked one by one while the first are already being read. An extent goes to the device in one
asynchronous copy, and the loaders get views of it there. A block is read into again when the copies out of it are
done; the memory is unlocked and freed when the load ends, however it ends. With ``distributed`` the streamer keeps
its own way of sharing, and only the memory that a rank reads its share into is page-locked.

The pull request pins the whole buffer of up to 16 GB before anything is read. Pinning costs more than it brings: see
patches.md.
"""

from __future__ import annotations

import contextvars
import copy
import os
import sys
from typing import Any

from ..._patch import Patch, Target

KEY = "pinned_staging"
_FORCE = "force"
_LOADER = "vllm.model_executor.model_loader.runai_streamer_loader:RunaiModelStreamerLoader"
_WEIGHTS = "vllm.model_executor.model_loader.weight_utils"
_STREAMER = "runai_model_streamer"

PATCH = Patch(
    name="pinned_staging",
    env="VLLM_HOTFIX_PINNED_STAGING",
    values=(_FORCE,),
    fault="the Run:ai streamer's tensors are copied to the GPU out of pageable memory, one by one",
    upstream="vllm-project/vllm#61303",
    targets=(
        Target(f"{_LOADER}.__init__", "init", always=True),
        Target(f"{_LOADER}._get_weights_iterator", "get_weights_iterator"),
        Target(f"{_WEIGHTS}:runai_safetensors_weights_iterator", "weights_iterator"),
    ),
    relies=(
        f"{_WEIGHTS}:enable_tqdm",
        f"{_STREAMER}.file_streamer.file_streamer:FileStreamer",
        f"{_STREAMER}.file_streamer.requests_iterator:FileChunks",
        f"{_STREAMER}.distributed_streamer.distributed_streamer:DistributedStreamer",
        f"{_STREAMER}.distributed_streamer.distributed_streamer:_distributedStreamer",
        f"{_STREAMER}.safetensors_streamer.safetensors_streamer:SafetensorsStreamer",
        f"{_STREAMER}.safetensors_streamer.safetensors_pytorch:get_safetensors_dtype_map",
        f"{_STREAMER}.libstreamer.libstreamer:runai_request",
        f"{_STREAMER}.libstreamer.libstreamer:runai_response",
        f"{_STREAMER}.libstreamer.libstreamer:runai_probe_direct_block_size",
    ),
)

#: The loader whose iterator is being made, if it pins.
_loader: contextvars.ContextVar[Any] = contextvars.ContextVar("vllm_hotfix_pinned_staging", default=None)


def init(wrapped: Any, loader: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Take the key out of what stock sees, and keep it with the loader.

    Raises:
        ValueError: the key is not a bool.
    """
    config: Any = args[0] if args else kwargs.get("load_config")
    extra = getattr(config, "model_loader_extra_config", None)
    pins = os.environ.get(PATCH.env, "").strip().lower() == _FORCE
    if not isinstance(extra, dict) or KEY not in extra:
        wrapped(*args, **kwargs)
    else:
        pins = extra[KEY]
        if not isinstance(pins, bool):
            raise ValueError(f"{KEY} must be a bool, got {pins!r}")
        # A copy: the next loader is made from the same configuration.
        seen = copy.copy(config)
        seen.model_loader_extra_config = {key: value for key, value in extra.items() if key != KEY}
        wrapped(seen)
        loader.load_config = config
    loader.vllm_hotfix_pins = pins


def get_weights_iterator(wrapped: Any, loader: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let the iterator that is made within this call know its loader."""
    if not getattr(loader, "vllm_hotfix_pins", False):
        return wrapped(*args, **kwargs)
    token = _loader.set(loader)
    try:
        return wrapped(*args, **kwargs)
    finally:
        _loader.reset(token)


def weights_iterator(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The pinned iterator for a loader that asks for it; stock's for all others."""
    loader = _loader.get()
    if loader is None:
        return wrapped(*args, **kwargs)
    from . import _load

    def bind(
        hf_weights_files: list[str], use_tqdm_on_load: bool, is_distributed: bool = False
    ) -> tuple[list[str], bool, bool]:
        return hf_weights_files, use_tqdm_on_load, is_distributed

    files, use_tqdm, distributed = bind(*args, **kwargs)
    return _load.tensors(
        sys.modules[_WEIGHTS],
        lambda: wrapped(*args, **kwargs),
        files,
        use_tqdm=use_tqdm,
        distributed=distributed,
        device=loader.load_config.device,
    )

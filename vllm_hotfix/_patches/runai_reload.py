"""A reload reads its weights through the Run:ai streamer, as the first load did.

What is wrong upstream: ``reload_weights`` asks the loader of the configured format for ``get_all_weights``, and
``RunaiModelStreamerLoader`` has none: with ``load_format="runai_streamer"`` it raises NotImplementedError before it
touches anything. Upstream: vllm-project/vllm#58124, released with 0.32.0, which also has a reload from another path
let go of the object storage address and the revision that belong to the model it leaves; before, ``reload_weights``
changes ``model_config.model`` alone (from 0.28.0 on the revision too), and a loader that honours ``model_weights``
would read the old weights once more.

How it is fixed: every loader that is made gets the method, as an attribute of its own; the class stays stock's. It
reads what the first load reads: ``model_weights`` if that is set, else the model, in the configured revision.
``reload_weights`` is wrapped to tell it that there is another path.
"""

from __future__ import annotations

import contextvars
from types import MethodType
from typing import TYPE_CHECKING, Any

from .._patch import Patch, Target
from .._record import RECORD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.nn import Module

_LOADER = "vllm.model_executor.model_loader.runai_streamer_loader:RunaiModelStreamerLoader"

PATCH = Patch(
    name="runai_reload",
    env="VLLM_HOTFIX_RUNAI_RELOAD",
    fault="a reload with load_format=runai_streamer raises NotImplementedError",
    upstream="vllm-project/vllm#58124",
    targets=(
        Target(f"{_LOADER}.__init__", "init"),
        # Every worker imports it, the API process does not.
        Target("vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights", "reload_weights", optional=True),
    ),
    relies=(f"{_LOADER}.get_all_weights", f"{_LOADER}._get_weights_iterator", f"{_LOADER}.load_weights"),
    requires=("runai_buffers",),
    fixed_in="0.32.0",
    symptoms=("^runai_streamer: .*Model reloading with",),
)

#: Whether the reload that is going on is one from another path.
_elsewhere: contextvars.ContextVar[bool] = contextvars.ContextVar("vllm_hotfix_runai_reload", default=False)


def init(wrapped: Any, loader: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make a loader that can be asked for all weights."""
    wrapped(*args, **kwargs)
    if not hasattr(loader, "get_all_weights"):  # a class derived from stock's may have one
        loader.get_all_weights = MethodType(get_all_weights, loader)


def reload_weights(wrapped: Any, runner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reload, from another path than that of the first load or from the same."""
    path = args[1] if len(args) > 1 else kwargs.get("weights_path")
    token = _elsewhere.set(path is not None)
    try:
        return wrapped(*args, **kwargs)
    finally:
        _elsewhere.reset(token)


def get_all_weights(loader: Any, model_config: Any, model: Module) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over the name and the tensor of everything in the checkpoint, as the first load has it.

    The files are looked for, or fetched, here and now: what is wrong with them is raised before the reload has taken
    the layers apart. A tensor is to be used before the next one is asked for.

    Args:
        loader: the loader that is asked.
        model_config: says where the weights are. From another path, its ``model_weights`` and ``revision`` are let go.
        model: what is reloaded.

    Raises:
        RuntimeError: there are no safetensors files; as stock says it.
    """
    if _elsewhere.get():
        model_config.model_weights = ""
        model_config.revision = None
    weights = loader._get_weights_iterator(model_config.model_weights or model_config.model, model_config.revision)
    RECORD.count(PATCH.name, "reloads")
    RECORD.save()
    result: Iterator[tuple[str, Tensor]] = weights
    return result

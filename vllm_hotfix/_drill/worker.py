"""What the drill asks of a worker: vLLM mixes `Extension` into its worker class (``--worker-extension-cls``)."""

from __future__ import annotations

import json
import re
import time
from typing import Any, Final

import torch

import vllm_hotfix

from .. import _tensors as tensors

#: Tensors of which a fresh load cannot tell what is right, by path, and why.
SCRATCH: Final = {
    r"(^|[.\]])kv_cache(\[|\.|$)": "the KV cache: a sleep discards it, requests fill it",
    r"\._permute_scratch\.(?!token_expert_indices)": "scratch of the experts' permutation: written before it is read",
    r"\.topk_indices_buffer$": "scratch of sparse attention: written before it is read",
    r"\.(per_layer_embeddings|per_layer_inputs)$": "Gemma's inputs of the layers: written by each forward pass",
    r"\.punica_wrapper\.": "LoRA's indices of the tokens: written for each forward pass",
    r"\.impl\._workspace(_buffer)?$": "an attention kernel's scratch: written before it is read",
    r"\.handler_tensor$": "the address of weights that oneDNN keeps for itself: each load makes them anew",
}
#: Where all memory is the host's: what would be there on a GPU machine too, and no sleep discards.
_HOST: Final = re.compile(r"_cpu$")


class Extension:
    """Methods of a worker that ``collective_rpc`` calls by name; they return JSON, which any serializer carries."""

    def hotfix_digests(self, scratch: list[str]) -> str:
        """Digest every tensor that the model holds, where it is.

        Args:
            scratch: regular expressions of more paths that are scratch.

        Returns:
            ``tensors``: by path, digest, address and layout as `tensors.digests` gives them. ``scratch``: by path,
            why it is left out. ``seconds``: the time it took.
        """
        known = {**SCRATCH, **dict.fromkeys(scratch, "named by --scratch")}
        _synchronize()
        start = time.perf_counter()
        left_out: dict[str, str] = {}
        found = []
        for path, tensor in tensors.walk(_roots(self)):
            reason = next((why for pattern, why in known.items() if re.search(pattern, path)), None)
            if reason is None and not tensors.is_plain(tensor):
                reason = "no memory of its own: what it consists of is compared"
            if reason is None:
                found.append((path, tensor))
            else:
                left_out[path] = reason
        digests = tensors.digests(found)
        seconds = time.perf_counter() - start
        del found
        _give_back()
        return json.dumps({"tensors": digests, "scratch": left_out, "seconds": seconds})

    def hotfix_poison(self) -> int:
        """Overwrite what a sleep at level 2 would discard and not bring back: all but vLLM's buffers and scratch.

        Returns:
            The number of tensors.
        """
        roots = _roots(self)
        # vLLM saves and restores the buffers of the model itself.
        saved = {one.untyped_storage().data_ptr() for one in roots[0][1].buffers() if not one.is_meta}
        number = tensors.poison(
            (path, one)
            for path, one in tensors.walk(roots)
            if not any(re.search(pattern, path) for pattern in SCRATCH)
            and tensors.is_plain(one)
            and one.device.type == _device(self).type
            and not (one.device.type == "cpu" and _HOST.search(path))
            and (one.is_meta or one.untyped_storage().data_ptr() not in saved)
        )
        _synchronize()
        return number

    def hotfix_describe(self, paths: list[str]) -> str:
        """Say what is to be seen of the values of some tensors: by path, as `tensors.describe` says it."""
        wanted = set(paths)
        return json.dumps({path: tensors.describe(one) for path, one in tensors.walk(_roots(self)) if path in wanted})

    def hotfix_state(self) -> str:
        """Say what this worker is: device, the memory that is used, and the patches with state and gate."""
        device = _device(self)
        names = ("name", "state", "gate", "reason", "env", "symptoms")
        patches = [{name: patch.get(name) for name in names} for patch in vllm_hotfix.patches()]
        return json.dumps({"device": str(device.type), "used": _used(device), "patches": patches})


def _roots(worker: Any) -> list[tuple[str, Any]]:
    """The objects whose tensors are looked at: the model, and a draft model."""
    runner = worker.model_runner
    roots = [("", runner.get_model())]
    if (draft := tensors.draft_model(runner)) is not None:
        roots.append(("draft", draft))
    return roots


def _device(worker: Any) -> torch.device:
    device: torch.device = worker.model_runner.device
    return device


def _used(device: torch.device) -> int:
    """Bytes of the device that are used, by all processes; on a CPU, those of this process."""
    if device.type == "cpu":
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _give_back() -> None:
    """Give the digests' memory back to the device, so that the drill does not count its own."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

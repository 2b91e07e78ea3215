"""What the measuring processes of `pinned_staging.py` share: digests of tensors, and what a process holds of the host.

Nothing here imports torch before it is called: the process that only starts others does without it.
"""

from __future__ import annotations

import bisect
import itertools
import json
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_ALIGN = 512  # bytes, as CUDA's caching allocator places tensors
_CHUNK = 1 << 25  # words of 8 bytes that are digested at once
_MASK = (1 << 64) - 1
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}

#: A tensor of a checkpoint: name, safetensors' name of the dtype, shape, bytes.
Header = tuple[str, str, list[int], int]


def shards(folder: str) -> list[Path]:
    """The safetensors files of a checkpoint, sorted."""
    return sorted(Path(folder).glob("*.safetensors"))


def headers(folder: str) -> Iterator[Header]:
    """Every tensor of a checkpoint, by its files' headers."""
    for shard in shards(folder):
        with shard.open("rb") as file:
            table = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in table.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                yield name, entry["dtype"], entry["shape"], last - first


def _mixed(words: Any, start: int) -> Any:
    """Scramble words by value and position: what moves, changes or is missing changes their sum.

    For a given position each step has an inverse, so that no two values of a word come out alike.
    """
    import torch

    mixed = torch.arange(start, start + words.numel(), dtype=torch.int64, device=words.device)
    mixed.mul_(-7046029254386353131).bitwise_xor_(words).mul_(-4417276706812531889)
    mixed.bitwise_xor_(mixed >> 31).mul_(-8796714831421723037)
    return mixed.bitwise_xor_(mixed >> 29)


def digest(tensor: Any) -> str:
    """A tensor's dtype, shape and a 64-bit digest of its bytes, computed on the tensor's device."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = 0
    for start in range(0, flat.numel(), 8 * _CHUNK):
        piece = flat[start : start + 8 * _CHUNK]
        # Padding a copy also aligns it, wherever the tensor lies in its storage.
        piece = torch.nn.functional.pad(piece, (0, -piece.numel() % 8)) if piece.numel() % 8 else piece.clone()
        total += int(_mixed(piece.view(torch.int64), start // 8).sum())
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}:{total & _MASK:016x}"


class Parameters:
    """Parameters for every tensor of a checkpoint, side by side in one allocation on the device.

    One allocation, so that 40,000 digests cost a pass over its bytes, and not 40,000 times a few kernels.
    """

    def __init__(self, tensors: Iterable[Header], device: str) -> None:
        import torch

        self.offsets, end, known = [0], 0, list(tensors)
        for *_, size in known:
            end += size + -size % _ALIGN
            self.offsets.append(end)
        self.memory = torch.empty(end, dtype=torch.uint8, device=device)
        self.by_name = {
            name: self.memory[offset : offset + size].view(getattr(torch, _DTYPES[dtype])).view(shape)
            for (name, dtype, shape, size), offset in zip(known, self.offsets, strict=False)
        }
        self.bytes = sum(size for *_, size in known)
        if len(self.by_name) != len(known):
            raise ValueError("a tensor is in two files")

    def clear(self) -> None:
        """Fill everything with a byte that no load left there."""
        self.memory.fill_(0xA5)

    def digests(self) -> dict[str, str]:
        """A digest of each parameter and the gap behind it, by name."""
        import torch

        words, ends = self.memory.view(torch.int64), [offset // 8 for offset in self.offsets]
        sums, running, done = [0] * len(ends), 0, bisect.bisect_right(ends, 0)
        for start in range(0, words.numel(), _CHUNK):
            piece = words[start : start + _CHUNK]
            # Prefix sums, modulo 2**64: a parameter's own sum is the difference of two of them.
            prefix = _mixed(piece, start).cumsum(0)
            last = bisect.bisect_right(ends, start + piece.numel())
            index = torch.tensor([end - start - 1 for end in ends[done:last]], dtype=torch.int64, device=words.device)
            for number, value in enumerate(prefix[index].tolist(), done):
                sums[number] = running + value
            running, done = running + int(prefix[-1]), last
        return {
            name: f"{(last - first) & _MASK:016x}"
            for name, (first, last) in zip(self.by_name, itertools.pairwise(sums), strict=True)
        }


def status(field: str) -> int | None:
    """A field of `/proc/self/status` in bytes; None where this kernel does not give it."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return 1024 * int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None


class HostPeak:
    """By how much a process's resident memory rises between `start` and `end`, at its peak."""

    def __init__(self) -> None:
        self.exact = False
        self.before = 0

    def start(self) -> None:
        """Take the resident memory of now, and have the kernel forget the peak so far."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self.exact = status("VmHWM") is not None
        except OSError:
            self.exact = False
        self.before = status("VmRSS") or 0

    def end(self) -> int:
        """The rise in bytes; where the peak could not be forgotten, that since the process began."""
        peak = status("VmHWM") if self.exact else None
        return (1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if peak is None else peak) - self.before


def locked() -> list[int | None]:
    """Locked and pinned memory of this process, in bytes."""
    return [status("VmLck"), status("VmPin")]


def hotfix() -> dict[str, Any]:
    """What vllm-hotfix says of itself in this process: the patch's state and what was counted."""
    import vllm_hotfix

    states = {patch["name"]: patch["state"] for patch in vllm_hotfix.patches()}
    counters = vllm_hotfix.counters()
    return {"state": states.get("pinned_staging"), "counters": counters.get("pinned_staging", {})}


def __getattr__(name: str) -> Any:
    """`Worker`, for vLLM's `worker_cls`: the release's own worker, which measures its load.

    Made when vLLM asks for it, in each worker's process: nothing else here needs vLLM's workers imported.
    """
    if name != "Worker":
        raise AttributeError(name)
    import time

    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker as Base
    else:
        from vllm.v1.worker.gpu_worker import Worker as Base

    class Worker(Base):  # type: ignore[misc, valid-type]
        """The release's worker, which measures its load."""

        def load_model(self, *arguments: Any, **options: Any) -> None:
            """Load the model as ever; note seconds and host memory."""
            peak, before = HostPeak(), locked()
            peak.start()
            begin = time.perf_counter()
            super().load_model(*arguments, **options)
            self.measured_seconds = time.perf_counter() - begin
            self.measured_peak = peak.end()
            self.measured_locked = [before, locked()]

        def load_again(self) -> None:
            """Load the model anew, in place of the one there is."""
            import gc

            import torch

            self.model_runner.model = None
            config = self.vllm_config.compilation_config
            config.static_forward_context.clear()
            getattr(config, "static_all_moe_layers", []).clear()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.load_model()

        def measured(self, patched: bool) -> dict[str, Any]:
            """What was measured, and a digest of everything that the model holds."""
            model = self.get_model()
            tensors = dict(model.named_parameters()) | dict(model.named_buffers())
            return {
                "rank": self.rank,
                "seconds": self.measured_seconds,
                "peak": self.measured_peak,
                "locked": self.measured_locked,
                "gib": self.model_runner.model_memory_usage / 2**30
                if hasattr(self.model_runner, "model_memory_usage")
                else None,
                "digests": {name: digest(tensor) for name, tensor in tensors.items()},
                "hotfix": hotfix() if patched else None,
            }

    globals()["Worker"] = Worker
    return Worker

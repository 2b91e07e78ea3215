"""Show measured_totals on a GPU, in one real engine.

    python tests/gpu/measured_totals.py MODEL [ROUNDS]

MODEL is a ModelOpt NVFP4 fused-MoE checkpoint. The engine loads it with the gate set, every parameter and buffer is
kept, then it is reloaded through `reload_weights` in three orders, with the patch and without: the order of the
files; `weight_scale_2` of all experts last; all the experts' scales last. Weights of a reload that drops tensors
differ from the kept ones. Then first loads are timed, with the patch and without in turn.

Exits 1 unless every patched reload equals the first load, and stock's does not.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_HOTFIX_MEASURED_TOTALS"] = "1"

import torch
import vllm
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader import get_model_loader

import vllm_hotfix

Weights = Iterator[tuple[str, torch.Tensor]]


def files(model: Path, wanted: Callable[[str], bool]) -> Weights:
    """The tensors of a checkpoint whose names are wanted, in the order of its files."""
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118  no mapping
                if wanted(name):
                    yield name, shard.get_tensor(name)


def last(model: Path, late: Callable[[str], bool]) -> Weights:
    """The whole checkpoint, what is late after all the rest."""
    yield from files(model, lambda name: not late(name))
    yield from files(model, late)


ORDERS: dict[str, Callable[[str], bool]] = {
    "files": lambda name: False,
    "weight_scale_2 last": lambda name: ".experts." in name and name.endswith("weight_scale_2"),
    "all scales last": lambda name: ".experts." in name and "scale" in name,
}


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by its path."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def difference(model: torch.nn.Module, kept: dict[str, torch.Tensor]) -> list[str]:
    """The paths whose bytes are not the kept ones."""
    found = tensors(model)
    assert found.keys() == kept.keys()
    return [
        path
        for path, value in found.items()
        if not torch.equal(value.detach().reshape(-1).view(torch.uint8), kept[path].reshape(-1).view(torch.uint8))
    ]


def main(path: Path, rounds: int) -> int:
    """Print the tables."""
    llm = vllm.LLM(
        model=str(path),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        gpu_memory_utilization=0.3,
        max_num_seqs=4,
    )
    executor = llm.llm_engine.model_executor
    runner = executor.driver_worker.worker.model_runner
    model = runner.get_model()
    kept = {name: value.detach().clone() for name, value in tensors(model).items()}
    print(f"vLLM {vllm.__version__}, {torch.cuda.get_device_name()}, {len(kept)} tensors kept")
    print(f"first load: {vllm_hotfix.counters()['measured_totals']}")
    failed = False
    print(f"{'order of the stream':<24} {'patch':<8} {'tensors wrong':>13} {'seconds':>8}  first of them")
    for patch in ("on", "off"):
        if patch == "off":
            vllm_hotfix.deactivate()
        for order, late in ORDERS.items():
            begin = time.perf_counter()
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": last(path, late)})
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
            wrong = difference(model, kept)
            print(f"{order:<24} {patch:<8} {len(wrong):>13} {seconds:>8.2f}  {wrong[0] if wrong else '-'}", flush=True)
            failed |= bool(wrong) if patch == "on" else bool(wrong) != (order == "weight_scale_2 last")
        if patch == "on":
            print(f"counters: {vllm_hotfix.counters()['measured_totals']}")
    times: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(2 * rounds + 1):
        patch = "on" if number % 2 else "off"
        vllm_hotfix.activate() if patch == "on" else vllm_hotfix.deactivate()
        begin = time.perf_counter()
        config = runner.vllm_config
        config.compilation_config.static_forward_context.clear()
        config.compilation_config.static_all_moe_layers.clear()
        with set_current_vllm_config(config):
            other = get_model_loader(config.load_config).load_model(
                vllm_config=config, model_config=config.model_config
            )
        torch.cuda.synchronize()
        if number:  # the first one warms up
            times[patch].append(time.perf_counter() - begin)
        del other
        gc.collect()
        torch.cuda.empty_cache()
    ratios = [on / off for on, off in zip(times["on"], times["off"], strict=True)]
    for patch, seconds in times.items():
        print(f"first load, patch {patch:<4} {' '.join(f'{one:.2f}' for one in seconds)} s")
    print(f"ratio on/off: median {statistics.median(ratios):.4f}, {min(ratios):.4f} to {max(ratios):.4f}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 5))

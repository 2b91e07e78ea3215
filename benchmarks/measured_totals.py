"""What recording the loader calls adds to a first load: at most 3 % is what measured_totals promises.

Real safetensors files of 20,000 small tensors are loaded by vLLM's own `DefaultModelLoader`, stock and patched in
turn, into two kinds of modules:

- `experts`: NVFP4 MoE layers with the release's expert loader, the layers that the patch is for. The model does no
  more per tensor than look its loader up, so a real one has more to do and the share is smaller;
- `norms`: 20,000 RMSNorm layers, one tensor each, with vLLM's default loader, the cheapest there is. No model is like
  that: it shows the worst case, and has no bound.

The time runs from the built model to the end of `load_model`. Run it with a release's sources in front, or with vLLM
installed:

    PYTHONPATH=<sources>:. python benchmarks/measured_totals.py [--tensors 20000] [--pairs 9]
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "upstream"))

import torch
from layers import Host, Probe, add_moe, make_config, moe_stream, release, single_rank
from safetensors.torch import save_file
from vllm.config import LoadConfig, VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

import vllm_hotfix

GATE = "VLLM_HOTFIX_MEASURED_TOTALS"
LIMIT = 1.03
EXPERTS = 128
SHARD = 5000  # tensors a file

Fill = Callable[[Probe, int], None]


def fill_norms(model: Probe, tensors: int) -> None:
    """Add as many RMSNorm layers as there are tensors."""
    model.norms = torch.nn.ModuleList(RMSNorm(16) for _ in range(tensors))


def fill_experts(model: Probe, tensors: int) -> None:
    """Add NVFP4 MoE layers with about as many checkpoint tensors: 12 an expert."""
    for index in range(max(1, round(tensors / EXPERTS / 12))):
        add_moe(model, "ModelOptNvFp4Config", EXPERTS, size=32, prefix=f"moe{index}")


def checkpoint(model: Probe) -> dict[str, torch.Tensor]:
    """Return a checkpoint for either kind of model, and let the model know what its names mean."""
    if hasattr(model, "norms"):
        return {name: torch.rand_like(tensor) for name, tensor in model.named_parameters()}
    state = {}
    for prefix, _ in model.named_children():
        for param, value, args in moe_stream(model, 0, torch.ones(EXPERTS), prefix):
            _, shard, expert = args
            name = f"{prefix}.{expert}.{shard}.{param}"
            state[name] = value
            model.routes[name] = (param, args)
    return state


def write(fill: Fill, tensors: int, folder: Path, config: VllmConfig) -> tuple[int, dict[str, Any]]:
    """Write a model's checkpoint in files of `SHARD` tensors; return how many tensors, and their routes."""
    written: list[Any] = []

    def build(model: Probe, config: VllmConfig) -> None:
        fill(model, tensors)
        written.extend((checkpoint(model), model.routes))

    Host(config).load(build, [])
    state, routes = written
    names = list(state)
    for start in range(0, len(names), SHARD):
        part = {name: state[name].clone() for name in names[start : start + SHARD]}
        save_file(part, folder / f"model-{start // SHARD:05}.safetensors")
    return len(names), routes


def measure(host: Host, fill: Fill, tensors: int, routes: dict[str, Any]) -> float:
    """Return the seconds from the built model to the end of `load_model`."""
    started = 0.0

    def build(model: Probe, config: VllmConfig) -> None:
        nonlocal started
        fill(model, tensors)
        model.routes = routes
        gc.collect()
        gc.freeze()
        started = time.perf_counter()

    def loader(load_config: LoadConfig, stream: object) -> DefaultModelLoader:
        return DefaultModelLoader(LoadConfig(load_format="safetensors", device="cpu", use_tqdm_on_load=False))

    host.load(build, [], loader)
    seconds = time.perf_counter() - started
    gc.unfreeze()
    return seconds


def compare(host: Host, fill: Fill, tensors: int, routes: dict[str, Any], pairs: int) -> list[tuple[float, float]]:
    """Return (stock, patched) seconds, pair by pair, the order within a pair in turn."""
    result = []
    for turn in range(pairs + 1):
        seconds = {}
        for patched in (turn % 2 == 0, turn % 2 == 1):
            if patched:
                os.environ[GATE] = "1"
                vllm_hotfix.activate()
            seconds[patched] = measure(host, fill, tensors, routes)
            if patched:
                measured = vllm_hotfix.counters().get("measured_totals", {})
                assert measured.get("layers_measured"), "the patch did not measure anything"
                vllm_hotfix.deactivate()
                del os.environ[GATE]
        # The first pair warms the page cache.
        if turn:
            result.append((seconds[False], seconds[True]))
    return result


def main() -> int:
    """Print one line per kind of module; exit 1 if recording costs more than it may."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    print(f"vLLM {release()}, {options.pairs} pairs, first load of a safetensors checkpoint, medians")
    print(f"{'layers':8} {'tensors':>8} {'stock':>9} {'patched':>9} {'ratio':>7} {'a tensor':>10}")
    missed = False
    for label, fill in (("experts", fill_experts), ("norms", fill_norms)):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            config = make_config(folder)
            with single_rank(config, folder):
                tensors, routes = write(fill, options.tensors, folder, config)
                pairs = compare(Host(config), fill, options.tensors, routes, options.pairs)
        stock = statistics.median(pair[0] for pair in pairs)
        ratio = statistics.median(patched / stock for stock, patched in pairs)
        added = statistics.median(patched - stock for stock, patched in pairs) / tensors
        missed |= label == "experts" and ratio > LIMIT
        line = f"{label:8} {tensors:8} {stock:8.3f}s {stock * ratio:8.3f}s {ratio:7.3f} {added * 1e6:+8.2f}us"
        print(line, flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

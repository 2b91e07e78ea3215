"""Show on which CUDA stream a layer that was held back is processed.

    python tests/gpu/streams.py

A packed weight transfer receives each chunk on a stream of its own and loads it there; vLLM 0.20 ends the reload on
the default stream with no synchronization before it. Stock processes a layer behind its chunk, on the chunk's stream. A
layer that is held back must be processed there too, or it reads its buffer before the bytes have arrived.

vLLM's real loading and reloading functions run on a model of two layers; a delay on the stream stands for a slow
sender. Three runs: stock, the patch, and the patch with `_on` taken out, which must be wrong: else this shows nothing.
Exits 1 if any run is not as it should be.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

os.environ["VLLM_HOTFIX_MEASURED_TOTALS"] = "1"

import torch
from torch import nn
from vllm.config import LoadConfig
from vllm.model_executor.model_loader import base_loader
from vllm.model_executor.model_loader.reload import layerwise

import vllm_hotfix
from vllm_hotfix._patches import measured_totals

SIZE = 1 << 20
DELAY = 1_000_000_000  # clock cycles, about half a second
CONFIG: Any = SimpleNamespace(dtype=torch.float32, quantization=None)


class Layer(nn.Module):
    """One parameter with a loader of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE), requires_grad=False)
        self.weight.weight_loader = lambda param, loaded: param.data.copy_(loaded)


class Model(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Layer(), Layer()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Hand each tensor to its parameter's loader."""
        for name, value in weights:
            param = self.get_parameter(name)
            param.weight_loader(param, value)


class Loader(base_loader.BaseModelLoader):
    """Loads ones."""

    def download_model(self, model_config: Any) -> None:
        """Do nothing: there is nothing to download."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load ones."""
        model.load_weights((name, torch.ones(SIZE, device="cuda")) for name in ("first.weight", "last.weight"))


def make(**options: Any) -> Model:
    """Stand in for vLLM's `initialize_model`, which needs a real model's configuration."""
    model = Model()
    layerwise.record_metadata_for_reloading(model)
    return model


def run() -> list[float]:
    """Load ones, reload twos and threes through slow streams; return what is in the two layers."""
    config: Any = SimpleNamespace(
        device_config=SimpleNamespace(device="cuda"), load_config=LoadConfig(), quant_config=None
    )
    model: Any = Loader(config.load_config).load_model(vllm_config=config, model_config=CONFIG)
    buffers = [torch.zeros(SIZE, device="cuda") for _ in range(2)]
    sources = [torch.full((SIZE,), float(value), device="cuda") for value in (2, 3)]
    torch.cuda.synchronize()
    with torch.device("cuda"):
        layerwise.initialize_layerwise_reload(model)
        for name, buffer, source in zip(("first.weight", "last.weight"), buffers, sources, strict=True):
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(DELAY)
                buffer.copy_(source)
                model.load_weights([(name, buffer)])
        layerwise.finalize_layerwise_reload(model, CONFIG)
    torch.cuda.synchronize()
    return [float(layer.weight.float().mean()) for layer in (model.first, model.last)]


def main() -> int:
    """Print what each run has loaded."""
    base_loader.initialize_model = make
    patched = run()
    stream = measured_totals._on
    measured_totals._on = lambda stream: contextlib.nullcontext()
    without = run()
    measured_totals._on = stream
    vllm_hotfix.deactivate()
    stock = run()
    print(f"stock {stock}, patched {patched}, patched without the stream {without}")
    return int(not (stock == patched == [2.0, 3.0]) or without == [2.0, 3.0])


if __name__ == "__main__":
    sys.exit(main())

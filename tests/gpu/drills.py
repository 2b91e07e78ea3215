"""The drill on several checkpoints, stock and patched: ``drills.py FOLDER [NAME ...] [key=value ...]`` prints a table.

FOLDER holds the checkpoints ``bf16``, ``fp8``, ``mla`` and ``nvfp4``; those named are taken, or all.
  rounds=N    rounds with the patches (10)         stock=N   rounds without (2)
  at_once=N   engines at a time on the one GPU (8): times mean nothing then, and memory is everybody's
  json=DIR    keep what each drill found
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MODELS = ("bf16", "fp8", "mla", "nvfp4")
LOADERS = ("safetensors", "runai_streamer")
CONFIG = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
ENGINE = {
    "compilation-config": json.dumps(CONFIG),
    "gpu-memory-utilization": "0.05",  # others are at work beside it
    "kv-cache-memory-bytes": str(4 << 30),
    "max-model-len": "512",
    "max-num-batched-tokens": "512",
    "max-num-seqs": "4",
    "seed": "0",
}
PATCHED = {"VLLM_HOTFIX_ENABLE": "all", "VLLM_HOTFIX_PINNED_STAGING": "force"}


def drill(folder: Path, model: str, loader: str, rounds: int, gates: dict[str, str], keep: Path) -> dict[str, Any]:
    """Run one drill; returns its JSON, with ``said`` for what it said last, and ``status``."""
    name = f"{model}-{loader}-{'patched' if gates else 'stock'}"
    file = keep / f"{name}.json"
    options = {**ENGINE, "load-format": loader, "rounds": str(rounds), "json": str(file)}
    if model == "mla":
        options["quantization"] = "fp8"
    words = [word for option, value in options.items() for word in (f"--{option}", value)]
    command = [sys.executable, "-m", "vllm_hotfix.drill", str(folder / model), *words]
    env = {**os.environ, "VLLM_USE_FLASHINFER_SAMPLER": "0", **gates}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    (keep / f"{name}.txt").write_text(done.stderr + done.stdout)
    found = json.loads(file.read_text()) if done.returncode in (0, 1) else {"rounds": []}
    return {**found, "status": done.returncode, "said": (done.stdout or done.stderr).splitlines()[-1]}


def result(found: dict[str, Any]) -> str:
    """What a drill found, for a table."""
    if found["status"] == 2:
        return str(found["said"])
    rounds = found["rounds"]
    if rounds[-1]["error"]:
        return f"the reload raises: {rounds[-1]['error'].partition(';')[0].rpartition(': ')[2]}"
    wrong = [one for one in rounds if one["differing"] or one["moved"] or one["tokens"] == "differ"]
    last = rounds[-1]
    what = f"; {last['differing']} tensors wrong, {last['moved']} moved, tokens {last['tokens']}" if wrong else ""
    return f"right {len(rounds) - len(wrong)} of {len(rounds)}{what}"


def main(folder: Path, models: list[str], options: dict[str, str]) -> int:
    """Run all drills and print the table; 0 if every patched round was right."""
    keep = Path(options.get("json") or tempfile.mkdtemp())
    keep.mkdir(parents=True, exist_ok=True)
    sides = ((int(options.get("stock", 2)), {}), (int(options.get("rounds", 10)), PATCHED))
    with ThreadPoolExecutor(int(options.get("at_once", 8))) as pool:
        drills = {
            (model, loader): [pool.submit(drill, folder, model, loader, rounds, gates, keep) for rounds, gates in sides]
            for loader in LOADERS
            for model in models
        }
        right = True
        print("| checkpoint | load format | stock | patched | tensors |\n| --- | --- | --- | --- | --- |")
        for (model, loader), both in drills.items():
            stock, patched = (one.result() for one in both)
            tensors = patched["rounds"][-1]["tensors"] if patched["rounds"] else ""
            print(f"| {model} | {loader} | {result(stock)} | {result(patched)} | {tensors} |", flush=True)
            right &= patched["status"] == 0
    return int(not right)


if __name__ == "__main__":
    chosen = dict(argument.split("=", 1) for argument in sys.argv[2:] if "=" in argument)
    names = [argument for argument in sys.argv[2:] if "=" not in argument]
    sys.exit(main(Path(sys.argv[1]), names or list(MODELS), chosen))

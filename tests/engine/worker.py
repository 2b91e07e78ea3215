"""One vLLM engine in this process, driven by a plan: ``worker.py PLAN RESULT``, both JSON files.

The plan
    ``load``           checkpoint folder of the first load
    ``load_format``    of the first load, ``runai_streamer`` by default
    ``extra_config``   ``model_loader_extra_config`` of all loads, nothing by default
    ``one_at_a_time``  whether the streamer asks for one tensor after another, so that two runs see the same order
    ``reloads``        checkpoint folders to reload in turn, always through the streamer
    ``keep_kernels``   for the last reload, leave out what `forget_cpu_kernels` does before each of the others
    ``inspect``        whether to hash the model's tensors after each step, which needs the engine in this process;
                       without it no kernels are forgotten either

The result
    ``vllm``    its version
    ``steps``   for each load: ``checkpoint``, ``seconds``, ``tokens``, ``digests`` (path -> dtype, shape and SHA-256)
                and ``trigger``, what the layerwise reload logged; or ``error`` if the reload raised, and no more steps
    ``pid``     of this process
    ``live``    what ``python -m vllm_hotfix.status --live --json`` says, run beside the live engine

Which gates are on is the environment's business: the worker neither sets one nor imports the package.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import logging
import os
import subprocess
import sys
import time
import traceback
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

PROMPTS = [[1, 5, 9, 13, 17 + number] for number in range(3)]
NEW_TOKENS = 16

# Not state of the weights: what requests left behind, an address, and the loaders that filled the tensors.
NOT_WEIGHTS = {"kv_cache", "handler_tensor", "weight_loader", "_weight_loader"}


def tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor that the model's modules reach, with its path.

    Parameters and buffers first, then what hangs on modules and tensors as plain attributes, in containers, in
    closures and in vLLM's helper objects: quantization methods and configs, kernels, routers.
    """
    modules = dict(model.named_modules())
    seen = {id(module) for module in modules.values()}

    def walk(path: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            yield path, value
        elif value is None or isinstance(
            value, str | bytes | int | float | complex | type | types.ModuleType | enum.Enum
        ):
            return
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, dict):
            children = {f"[{key}]": item for key, item in value.items()}
        elif isinstance(value, list | tuple | set | frozenset):
            children = {f"[{number}]": item for number, item in enumerate(value)}
        elif isinstance(value, types.FunctionType):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            children = {f"<{name}>": cell.cell_contents for name, cell in cells}
        elif isinstance(value, types.MethodType):
            children = {".__self__": value.__self__, ".__func__": value.__func__}
        elif isinstance(value, functools.partial):
            children = {"<func>": value.func, "<args>": value.args, "<keywords>": value.keywords}
        elif isinstance(value, torch.Tensor | torch.nn.Module) or (
            type(value).__module__.startswith("vllm.") and not type(value).__module__.startswith("vllm.config")
        ):
            children = {f".{name}": item for name, item in attributes(value).items()}
        else:
            return
        for name, item in children.items():
            yield from walk(path + name, item)

    for name, module in modules.items():
        for kind in (module._parameters, module._buffers):
            for key, tensor in kind.items():
                yield from walk(f"{name}.{key}", tensor)
        for key, value in attributes(module).items():
            yield from walk(f"{name}.{key}", value)
        if hasattr(module, "cpu_linear"):
            yield f"{name}.cpu_linear(probe)", cpu_linear_probe(module)


def attributes(value: object) -> dict[str, Any]:
    """Return the instance attributes of an object, those in slots included, that can hold derived tensors."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    found |= getattr(value, "__dict__", {})
    skipped = NOT_WEIGHTS | {"_parameters", "_buffers", "_modules", "__dict__", "__weakref__"}
    return {name: item for name, item in found.items() if name not in skipped}


def cpu_linear_probe(module: torch.nn.Module) -> torch.Tensor:
    """Return the output of a linear layer whose weights oneDNN keeps out of sight, for a fixed input."""
    width = getattr(module, "input_size_per_partition", None) or getattr(module, "input_size", None)
    width = width or module.embedding_dim
    probe = torch.linspace(-1, 1, 3 * width, dtype=torch.float32).reshape(3, width).bfloat16()
    return module.cpu_linear(probe, module.weight, getattr(module, "bias", None))


@torch.inference_mode()
def digests(model: torch.nn.Module) -> dict[str, str]:
    """Return dtype, shape and SHA-256 of every tensor that the model reaches, by path."""
    found = {}
    for path, tensor in tensors_of(model):
        data = (
            b"meta"
            if tensor.is_meta
            else bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        )
        found[path] = f"{str(tensor.dtype)[6:]}{list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"
    return found


def forget_cpu_kernels(model: torch.nn.Module) -> int:
    """Make the next reload build the experts' CPU kernels again; return how many layers that concerns.

    vLLM 0.32's `UnquantizedFusedMoEMethod._setup_kernel` lays the experts' weights out for the CPU kernel when it
    makes that kernel, and on a reload it keeps the kernel: the reloaded weights then stay in checkpoint layout and
    the tokens are wrong, whatever this package does. Without its kernel the method does the whole setup.
    """
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    kept = [method for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method in kept:
        method.moe_kernel = None
    return len(kept)


class TriggerLog(logging.Filter):
    """Counts what vLLM's layerwise reload logs, and keeps its debug lines out of the engine's log."""

    MESSAGES: ClassVar = {
        "%s: %d / %d": "loads",
        "%s: Excessive loading": "dropped",
        "%s: Delayed processing": "finalized",
    }

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
        logger.setLevel(logging.DEBUG)
        logger.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        if name := self.MESSAGES.get(record.msg):
            self.counts[name] += 1
        return record.levelno > logging.DEBUG

    def take(self) -> dict[str, int]:
        """Return the counts since the last call."""
        taken, self.counts = {name: self.counts[name] for name in self.MESSAGES.values()}, Counter()
        return taken


def live_processes() -> list[dict[str, Any]]:
    """Return the processes that the package's status lists, asked from another process."""
    command = [sys.executable, "-m", "vllm_hotfix.status", "--live", "--json"]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout
    return json.loads(found)["processes"]


def run(plan: dict[str, Any]) -> dict[str, Any]:
    """Carry the plan out and return its result."""
    import vllm

    sampling = vllm.SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    inspect = plan.get("inspect", False)
    reloads = plan.get("reloads", [])
    steps: list[dict[str, Any]] = []

    def record(checkpoint: str, start: float) -> None:
        seconds = round(time.perf_counter() - start, 3)
        step = {"checkpoint": checkpoint, "seconds": seconds, "trigger": trigger.take()}
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        step["tokens"] = [list(output.outputs[0].token_ids) for output in outputs]
        if inspect:
            step["digests"] = llm.apply_model(digests)[0]
        steps.append(step)

    options: dict[str, Any] = {"load_format": plan.get("load_format", "runai_streamer")}
    extra = dict(plan.get("extra_config", {}))
    if plan.get("one_at_a_time"):
        extra |= {"concurrency": 1, "memory_limit": 0}
    if extra:
        options["model_loader_extra_config"] = extra
    start = time.perf_counter()
    llm = vllm.LLM(
        model=plan["load"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,  # a prefix cached under one checkpoint is wrong under the next
        kv_cache_memory_bytes=16 << 20,
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        seed=0,
        **options,
    )
    trigger = TriggerLog()  # not before: creating an engine resets the levels of vLLM's loggers
    record(plan["load"], start)
    if options["load_format"] != "runai_streamer":
        llm.collective_rpc("update_config", args=({"load_config": {"load_format": "runai_streamer"}},))
    for number, checkpoint in enumerate(reloads, start=1):
        if inspect and not (plan.get("keep_kernels") and number == len(reloads)):
            llm.apply_model(forget_cpu_kernels)
        start = time.perf_counter()
        try:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})
        except Exception as error:
            steps.append({"checkpoint": checkpoint, "error": f"{type(error).__name__}: {error}"})
            traceback.print_exc()
            break
        record(checkpoint, start)
    return {"vllm": vllm.__version__, "steps": steps, "pid": os.getpid(), "live": live_processes()}


if __name__ == "__main__":
    result = run(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))

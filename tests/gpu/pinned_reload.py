"""Show that pinned_staging leaves device memory as stock does: KV blocks, and ten reloads of a sleeping engine.

    python tests/gpu/pinned_reload.py MODEL [key=value ...]

Two engines, one after the other, with and without the patch: each loads MODEL through the Run:ai streamer, says how
many KV blocks it has, then sleeps at level 2, wakes and reloads ten times through the same loader's iterator. Releases
before 0.22 need a copy of each of stock's tensors for that: the streamer writes into them again. Other arguments are
the engine's, such as quantization=fp8.

Exits 1 unless both have the same KV blocks, every reload's parameters equal the first load's, no less device memory is
free after the reloads than with stock, none is lost from reload to reload, and no memory stays locked.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import sides

ROUNDS = 10


def child(side: str, models: list[str], options: dict[str, str]) -> dict[str, Any]:
    """One engine, from its start to its tenth reload."""
    import torch
    from vllm import LLM
    from vllm.model_executor.model_loader import get_model_loader

    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from _streaming import digest, locked

    patched, (model,) = side == "patched", models
    begin = locked()
    llm = LLM(
        model=model,
        load_format="runai_streamer",
        model_loader_extra_config={"pinned_staging": True} if patched else {},
        skip_tokenizer_init=True,
        enable_sleep_mode=True,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        gpu_memory_utilization=0.5,
        seed=0,
        **options,
    )
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def digests() -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in runner.get_model().named_parameters()}

    def free() -> int:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    def weights() -> Any:
        loader = get_model_loader(runner.load_config)
        for name, tensor in loader._get_weights_iterator(model, None):
            yield name, tensor if patched else tensor.clone()

    first, memory, differ = digests(), [free()], []
    for _ in range(ROUNDS):
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights()})
        llm.wake_up(tags=["kv_cache"])
        memory.append(free())
        again = digests()
        differ.append(sum(again[name] != first[name] for name in first))
    import vllm_hotfix

    return {
        "blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
        "memory": memory,
        "differ": differ,
        "locked": [begin, locked()],
        "parameters": first,
        "counters": vllm_hotfix.counters().get("pinned_staging"),
    }


def main(models: list[str], arguments: list[str]) -> int:
    """Run both and compare them."""
    found: dict[str, dict[str, Any]] = {}
    for side in ("stock", "patched"):
        found[side] = one = sides.run(__file__, "VLLM_HOTFIX_PINNED_STAGING", side, [*models, *arguments])
        memory = [round(value / 2**20) for value in one["memory"]]
        print(f"{side}: {one['blocks']} KV blocks; free MiB after the start and each reload: {memory}")
        print(f"{side}: parameters that differ after each reload: {one['differ']}; VmLck, VmPin {one['locked']}")
    stock, patched = found["stock"], found["patched"]
    print(f"counters: {patched['counters']}")
    checks = {
        "KV blocks are stock's": stock["blocks"] == patched["blocks"],
        "first loads are equal": stock["parameters"] == patched["parameters"],
        "reloads equal the first load": not any(patched["differ"]),
        "free memory is stock's, or more": patched["memory"][-1] >= stock["memory"][-1],
        "reloads lose nothing": patched["memory"][1] == patched["memory"][-1],
        "nothing stays locked": patched["locked"][0] == patched["locked"][1],
        "loads were pinned": patched["counters"]["loads"] == ROUNDS + 1 and not patched["counters"]["host_bytes"],
    }
    return sides.show(checks)


if __name__ == "__main__":
    sides.start(child, main, models=1)

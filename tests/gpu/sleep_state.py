"""A sleep on a GPU with the second model runner, stock and with sleep_state: ``sleep_state.py MODEL [rounds=N]``.

Level 1 brings the weights back by itself: what is wrong then is what vLLM made beside the KV cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import sides

GATE = "VLLM_HOTFIX_SLEEP_STATE"


def child(side: str, models: list[str], options: dict[str, str]) -> dict[str, Any]:
    """Generate twice, then sleep, wake and generate again, a number of times.

    Returns:
        For each time but the first, whether the tokens are the first ones; why it could go no further; the counters.
    """
    from vllm import LLM, SamplingParams

    import vllm_hotfix

    llm = LLM(
        model=models[0],
        skip_tokenizer_init=True,
        enable_sleep_mode=True,
        enable_prefix_caching=False,
        max_model_len=512,
        kv_cache_memory_bytes=4 << 30,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]},
    )
    sampling = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": list(range(1, 40))}

    def generate() -> list[int]:
        return list(llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids)

    first = generate()
    rounds = [generate() == first]
    error = ""
    for _ in range(int(options.get("rounds", 3))):
        llm.sleep(level=1)
        llm.wake_up()
        try:
            rounds.append(generate() == first)
        except Exception as failure:
            error = f"{type(failure).__name__}: {str(failure).splitlines()[0]}"
            break
    return {"rounds": rounds, "error": error, "counters": vllm_hotfix.counters()}


def main(models: list[str], options: list[str]) -> int:
    """Run both sides and compare."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    found: dict[str, Any] = {}
    for side in ("stock", "patched"):
        try:
            found[side] = sides.run(__file__, GATE, side, [*models, *options])
        except subprocess.CalledProcessError as error:
            if error.returncode >= 0:
                raise  # not a death: it could not start, say
            found[side] = {"rounds": [True], "error": f"signal {-error.returncode}", "counters": {}}
        print(side, found[side])
    stock, patched = found["stock"], found["patched"]
    return sides.show(
        {
            "tokens are deterministic": stock["rounds"][0] and patched["rounds"][0],
            "stock talks garbage after a sleep, or dies": bool(stock["error"]) or not all(stock["rounds"]),
            "patched is right after every sleep": not patched["error"] and all(patched["rounds"]),
            "the pool was narrowed": patched["counters"].get("sleep_state", {}).get("pools_narrowed", 0) > 0,
        }
    )


if __name__ == "__main__":
    sides.start(child, main, models=1)
